"""Breakable capture: the model's own Python cuts the graph. Oracle: the same Python, run eagerly on new input."""

import gc
import threading

import pytest
import torch
from torch import nn

import pcg_ref as pcg
from pcg_ref.strategies.breakable import capture_breakable


class Host:
    """What a break read on the host, and whether it fails."""

    seen: list[float] = []
    fails = False


@pytest.fixture(autouse=True)
def healthy_host():
    Host.seen, Host.fails = [], False


@pcg.eager_on_graph
def scaled_by_sum(x, *, factor=1.0):
    """Needs a number on the host, which no graph can hold; returns fresh memory."""
    if Host.fails:
        raise ZeroDivisionError("the break failed")
    Host.seen.append(x.sum().item())
    return x * (factor if Host.seen[-1] > 0 else -factor)


@pcg.eager_on_graph
def into(x, out):
    out.copy_(x.sort().values)


@pcg.eager_on_graph
def pair(x):
    low, high = x.aminmax()
    return {"low": low, "list": [high, int(x.dim())]}


def new_output(x):
    out = torch.empty_like(x)
    into(x, out)
    return out


REGIONS = {
    "no break": (lambda x: x * 2 + 1, 1, 0),
    "in the middle": (lambda x: scaled_by_sum(x + 1) * 3, 2, 1),
    "first": (lambda x: scaled_by_sum(x) + 1, 1, 1),
    "last": (lambda x: scaled_by_sum(x + 1), 1, 1),
    "nothing else": (scaled_by_sum, 0, 1),
    "two in a row": (lambda x: scaled_by_sum(scaled_by_sum(x - 1), factor=2.0) + 1, 2, 2),
    "views between two": (lambda x: scaled_by_sum(scaled_by_sum(x + 1).view(-1).view(x.shape)) - 1, 2, 2),
    "writes an argument": (lambda x: new_output(x + 1) * 2, 2, 1),
    "nested results": (lambda x: (lambda d: x * d["low"] + d["list"][0] * d["list"][1])(pair(x.exp())), 2, 1),
    "returns its argument": (lambda x: pcg.eager_on_graph(lambda y: y.mul_(2))(x + 1) + 1, 2, 1),
    "a break in a break": (lambda x: pcg.eager_on_graph(lambda y: scaled_by_sum(y) + 1)(x + 1) * 2, 2, 1),
}


@pytest.mark.parametrize("name", REGIONS)
def test_replay_equals_eager(name, device):
    region, graphs, breaks = REGIONS[name]
    x = torch.randn(4, 6, device=device)
    sequence = capture_breakable(region, x, pool=pcg.GraphPool(device))
    assert (sequence.num_graphs, sequence.num_eager) == (graphs, breaks)
    for _ in range(4):
        x.normal_()
        torch.testing.assert_close(sequence.replay(), region(x.clone()))


def test_outside_a_capture_a_marked_function_is_the_plain_one():
    x = torch.ones(3)
    assert scaled_by_sum.__name__ == "scaled_by_sum" and torch.equal(scaled_by_sum(x, factor=3.0), x * 3)


def test_layers_share_memory(device):
    """Arguments of a break are held by address: ten layers need no more memory than two."""

    def layers(n):
        def region(x):
            for _ in range(n):
                x = new_output(x * 1.5)
            return x

        pool = pcg.GraphPool(device)
        x = torch.randn(1 << 20, device=device)
        sequence = capture_breakable(region, x, pool=pool)
        x.normal_()
        assert torch.equal(sequence.replay(), region(x))
        return pool.bytes

    assert layers(10) == layers(2)


class Untraceable(nn.Module):
    """Branches on a value of its input, calls itself, prints to a list: no compiler traces this whole."""

    vocab_size = 50

    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.requires_grad_(False)

    @pcg.eager_on_graph
    def flip(self, hidden):
        Host.seen.append(float(hidden[0, 0]))
        return hidden.flip(1) if Host.seen[-1] > 0 else hidden * 2

    def forward(self, tokens, positions):
        hidden = self.embed(tokens) + positions[:, None]
        for _ in range(3):
            hidden = self.linear(self.flip(hidden)).tanh()
        return hidden


def test_a_model_that_cannot_be_traced(device):
    model = Untraceable().to(device)
    zeros = torch.zeros(8, dtype=torch.int64, device=device)
    with pytest.raises(pcg.TraceError, match="breakable"):
        pcg.trace(model, zeros, zeros.clone())
    runner = pcg.PrefillRunner(model, "breakable", [4, 8, 16])
    runner.capture(progress=False)
    branches = set()
    for i, n in enumerate([8, 4, 16, 8, 16, 4, 8]):
        batch = pcg.PackedBatch(torch.randint(50, (n,), generator=torch.Generator().manual_seed(i)).to(device), [n])
        Host.seen = []
        hidden = runner.run(batch)
        replayed, Host.seen = Host.seen, []
        torch.testing.assert_close(hidden, model(batch.tokens, batch.positions))
        assert replayed == pytest.approx(Host.seen)  # the Python of a break does run, on the numbers of this batch
        branches.add(tuple(value > 0 for value in replayed))
    assert len(branches) > 1  # both ways through the break were taken


def test_fresh_results_are_refused_where_asked(device):
    x = torch.randn(4, device=device)
    with pytest.raises(RuntimeError, match="scaled_by_sum returns fresh memory"):
        capture_breakable(lambda x: scaled_by_sum(x + 1) * 2, x, pool=pcg.GraphPool(device), on_fresh_output="error")
    sequence = capture_breakable(lambda x: new_output(x + 1) * 2, x, pool=pcg.GraphPool(device), on_fresh_output="error")
    x.normal_()
    assert torch.equal(sequence.replay(), new_output(x + 1) * 2)


def test_a_result_that_is_no_tensor_must_not_change(device):
    @pcg.eager_on_graph
    def count(x):
        return int((x > 0).sum())

    x = torch.ones(4, device=device)
    sequence = capture_breakable(lambda x: x * count(x + 1), x, pool=pcg.GraphPool(device))
    with pytest.raises(RuntimeError, match=r"count returned \{0: 0\}, and \{0: 4\} when the graphs were captured"):
        x.fill_(-2)
        sequence.replay()
    x.fill_(3)
    assert torch.equal(sequence.replay(), x * 4)


@pytest.mark.parametrize("at", ["capture", "replay"])
def test_an_exception_in_a_break(at, device):
    x, pool = torch.randn(4, device=device), pcg.GraphPool(device)
    region = lambda x: scaled_by_sum(x + 1) * 3  # noqa: E731
    if at == "capture":
        Host.fails = True
        with pytest.raises(ZeroDivisionError):
            capture_breakable(region, x, pool=pool)
        Host.fails = False
    sequence = capture_breakable(region, x, pool=pool)
    if at == "replay":
        Host.fails = True
        with pytest.raises(ZeroDivisionError):
            sequence.replay()
        Host.fails = False
    for _ in range(2):
        x.normal_()
        torch.testing.assert_close(sequence.replay(), region(x))
    assert torch.equal(scaled_by_sum(x), x if x.sum() > 0 else -x) and gc.isenabled()


def test_an_exception_between_breaks(device):
    def region(x):
        y = scaled_by_sum(x + 1)
        if not Host.fails:
            return y + 1
        raise KeyError("after the break")

    def failing(x):
        y = scaled_by_sum(x + 1) + 1
        raise KeyError(y.shape)

    x, pool = torch.randn(4, device=device), pcg.GraphPool(device)
    with pytest.raises(KeyError):
        capture_breakable(failing, x, pool=pool)
    sequence = capture_breakable(region, x, pool=pool)
    x.normal_()
    torch.testing.assert_close(sequence.replay(), region(x))


def test_captures_do_not_nest(device):
    x, pool = torch.randn(4, device=device), pcg.GraphPool(device)
    nested = lambda x: capture_breakable(lambda y: y + 1, x, pool=pool).output  # noqa: E731
    with pytest.raises(pcg.CaptureError, match="nest"):
        capture_breakable(nested, x, pool=pool)
    sequence = capture_breakable(lambda x: x + 1, x, pool=pool)
    sequence.replay()
    assert torch.equal(sequence.output, x + 1)


def test_a_plain_capture_inside_a_break_is_a_capture_of_its_own(device):
    """Between two segments nothing is captured, so a break may capture for itself."""

    @pcg.eager_on_graph
    def captures(x):
        graph = pcg.capture(lambda y: y * 2, x)
        graph.replay()
        return graph.output

    x = torch.randn(4, device=device)
    sequence = capture_breakable(lambda x: captures(x + 1) + 1, x, pool=pcg.GraphPool(device))
    assert torch.equal(sequence.output, (x + 1) * 2 + 1)


def test_two_threads_do_not_break_each_others_graphs():
    barrier, found = threading.Barrier(2), {}

    def work(name):
        x = torch.full((4,), float(len(name)))
        barrier.wait()
        sequence = capture_breakable(lambda x: scaled_by_sum(x + 1) * 2, x, pool=pcg.GraphPool("cpu"))
        x.fill_(5)
        found[name] = sequence.num_graphs, sequence.replay().tolist()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "bb")]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == {"a": (2, [12.0] * 4), "bb": (2, [12.0] * 4)}


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [True, False])
def test_side_streams_must_be_joined_before_a_break(joined):
    side = torch.cuda.Stream()

    def region(x):
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y * 2
        if joined:
            torch.cuda.current_stream().wait_stream(side)
        return scaled_by_sum(y) + (z if joined else y)

    x, pool = torch.randn(1000, device="cuda"), pcg.GraphPool("cuda")
    if joined:
        sequence = capture_breakable(region, x, pool=pool)
        x.normal_()
        torch.testing.assert_close(sequence.replay(), (x + 1) * (1 if (x + 1).sum() > 0 else -1) + (x + 1) * 2)
    else:
        with pytest.raises(pcg.CaptureError, match="join"):
            capture_breakable(region, x, pool=pool)
    sequence = capture_breakable(lambda x: scaled_by_sum(x) + torch.rand_like(x), x, pool=pool)
    assert not torch.equal(sequence.replay().clone(), sequence.replay())


@torch.library.custom_op("foreign::scale", mutates_args=("out",))
def foreign_scale(x: torch.Tensor, out: torch.Tensor, factors: list[float]) -> None:
    Host.seen.append(float(x.sum()))
    out.copy_(x * factors[0])


foreign_scale.register_fake(lambda x, out, factors: None)


@torch.library.custom_op("foreign::halves", mutates_args=())
def foreign_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:2] * 2, x[2:] * 3


foreign_halves.register_fake(lambda x: (torch.empty_like(x[:2]), torch.empty_like(x[2:])))
pcg.register_split_op()(torch.ops.foreign.scale)
pcg.register_split_op()(torch.ops.foreign.halves.default)


def test_a_split_operator_of_another_library_is_a_break(device):
    def region(x):
        out = torch.empty_like(x)
        foreign_scale(x + 1, out, [2.0])
        first, second = foreign_halves(out - 1)
        return torch.cat([first, second]) + x

    x = torch.randn(5, device=device)
    sequence = capture_breakable(region, x, pool=pcg.GraphPool(device))
    assert [type(s) for s in sequence.segments] == [pcg.GraphSegment, pcg.EagerSegment] * 2 + [pcg.GraphSegment]
    assert [s.name for s in sequence.segments if isinstance(s, pcg.EagerSegment)] == ["foreign.scale", "foreign.halves"]
    Host.seen = []
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(sequence.replay(), region(x))
    assert len(Host.seen) == 6 and len(set(Host.seen)) == 3
