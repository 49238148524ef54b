"""Pieces and the model made of them, stitched and flat. The oracle is the function itself, run eagerly on the same rows."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch
from torch import nn

import pcg_ref as pcg
from pcg_ref import pieces, segments
from pcg_ref.ops import register_custom_op, register_split_op

WIDTH = 4
SIZES = [16, 8, 4, 2]  # 4 is also the width: sizes that agree by chance must not be taken for one


class Body:
    """What the bodies of the split operators do on demand, and what they saw."""

    fails = False
    addresses: list[int] = []
    decoys: list[torch.Tensor] = []
    holds_decoys = False

    @classmethod
    def enter(cls, x):
        if cls.fails:
            raise ZeroDivisionError("the body of a split operator failed")
        if cls.holds_decoys:  # takes the block that the result would have got
            cls.decoys.append(torch.empty_like(x))


@pytest.fixture(autouse=True)
def fresh_body():
    Body.fails, Body.holds_decoys, Body.addresses, Body.decoys = False, False, [], []


@register_split_op()
@register_custom_op(mutates_args=["output"])
def pw_into(x: torch.Tensor, output: torch.Tensor) -> None:
    Body.enter(x)
    output.copy_(x.sin())


@register_split_op()
@register_custom_op(fake=lambda x: torch.empty_like(x))
def pw_fresh(x: torch.Tensor) -> torch.Tensor:
    Body.enter(x)
    result = x.sin()
    Body.addresses.append(result.data_ptr())
    return result


@register_split_op()
@register_custom_op(fake=lambda x: (torch.empty_like(x), x.new_empty(x.shape[0])))
def pw_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    Body.enter(x)
    return x.sin(), x.sum(1)


@register_split_op()
@register_custom_op(mutates_args=["x"])
def pw_in_place(x: torch.Tensor) -> None:
    x.add_(1)


def into(x):
    output = torch.empty_like(x)
    pw_into(x, output)
    return output


WEIGHT = {"cpu": torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)}
if torch.cuda.is_available():
    WEIGHT["cuda"] = WEIGHT["cpu"].cuda()


def weight(x):
    return WEIGHT[x.device.type]


def size_crosses(x):
    shape = x.shape
    y = pw_fresh(x)
    return y.view(shape[0] * shape[1]).view(shape) * 2 + x.size(0)


def several_cuts(x):
    for _ in range(3):
        x = x + into((x * 2).relu()) * pw_fresh(x + 1)
    return x


def input_mutated(x):
    x.mul_(0.5)
    y = into(x)
    x.add_(y)
    pw_in_place(x)
    return x * 2


MODELS = {
    "writes into its argument": lambda x: into(x * 2) + 1,
    "fresh": lambda x: pw_fresh(x * 2) + 1,
    "first operator": lambda x: into(x) * 2,
    "last operator": lambda x: into(x * 2),
    "fresh is the output": lambda x: pw_fresh(x * 2),
    "only split operators": lambda x: pw_fresh(pw_fresh(x)),
    "two in a row": lambda x: (a := pw_fresh(x * 2)) + pw_fresh(a),
    "two fresh results": lambda x: (pair := pw_two(x * 2))[0] * pair[1][:, None],
    "two results are the output": lambda x: pw_two(x * 2),
    "one of two results": lambda x: pw_two(x * 2)[1] + 1,
    "torch.Size crosses": size_crosses,
    "views between": lambda x: pw_fresh(pw_fresh(x).t()[1:]).t() * 2,
    "allocation between": lambda x: into(into(x)) + 1,
    "view of the pool crosses": lambda x: pw_fresh((x * 2).t()[1:]).t() + 1,
    "several cuts": several_cuts,
    "input aliased by the output": lambda x: (pw_fresh(x) * 2, x.t()),
    "input mutated": input_mutated,
    "written by two operators": lambda x: (y := into(x * 2), pw_in_place(y), y * 2)[2],
    "matmul": lambda x: pw_fresh(x @ weight(x)) @ weight(x).t(),
    "rows mixed": lambda x: pw_fresh(x.cumsum(0)) + x.flip(0) + x.shape[0],
}


def build(model, device, sizes=SIZES, compiler="eager", **options):
    """The model with every size captured, and its static inputs."""
    example = torch.zeros(67, WIDTH, device=device)
    piecewise = pcg.PiecewiseModel(pcg.trace(model, example), compiler=compiler, capture_sizes=sizes, **options)
    piecewise(example)
    static = {size: torch.zeros(size, WIDTH, device=device) for size in sizes}
    for size in sizes:
        piecewise.capture(static[size])
    return piecewise, static


def as_list(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def close(actual, expected, tolerance=0.0):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def compare(model, piecewise, static, tolerance=0.0, rounds=3):
    """Flat and stitched replay against eager, on new input, sizes mixed."""
    order = [size for i in range(rounds) for size in (sorted(static) if i % 2 else [max(static), min(static), *static])]
    for size in order:
        x = static[size]
        for replay in (piecewise.sequences[size].replay, lambda: piecewise(x)):
            x.copy_(torch.randn(size, WIDTH))  # anew for each of the two: both leave their results in the same memory
            eager_x = x.clone()
            expected = model(eager_x)
            close(as_list(replay()), as_list(expected), tolerance)
            close(x, eager_x, tolerance)


def exact_on_cpu(device):
    return 0.0 if device == "cpu" else 1e-5  # the same kernels, but matrix products may choose another algorithm in a graph


@pytest.mark.parametrize("name", MODELS)
def test_flat_and_stitched_equal_eager(name, device):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*graph is empty.*")
        piecewise, static = build(MODELS[name], device)
    compare(MODELS[name], piecewise, static, exact_on_cpu(device))
    assert piecewise.trace.compile_count == 1
    for sequence in piecewise.sequences.values():
        assert not any(s.graph.empty for s in sequence.segments if isinstance(s, pcg.GraphSegment))


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
def test_any_order_of_capture(order, device):
    sizes = {"ascending": SIZES[::-1], "descending": SIZES, "mixed": [4, 16, 2, 8]}[order]
    compare(several_cuts, *build(several_cuts, device, sizes))


def test_the_walk_of_one_entry(device):
    model = MODELS["writes into its argument"]
    trace = pcg.trace(model, torch.zeros(67, WIDTH, device=device))
    piecewise = pcg.PiecewiseModel(trace, capture_sizes=[8, 4])
    x = torch.zeros(8, WIDTH, device=device)
    entry, seen = piecewise.entries[0][8], []

    def step():
        x.normal_()
        before = len(piecewise.events)
        close(piecewise(x).clone(), model(x))
        seen.append((entry.state, [(e.piece, e.size, e.what) for e in piecewise.events[before:]]))

    assert entry.state == "new" and entry.runnable is None and not entry.compiled
    for _ in range(5):
        step()
    both = lambda what: [("submod_0", 8, what), ("submod_2", 8, what)]  # noqa: E731
    assert seen == [
        ("new", both("general")),
        ("warm", both("warm-up")),
        ("captured", both("capture")),
        ("captured", []),
        ("captured", []),
    ]
    assert (entry.num_finished_warmup, entry.replays, entry.compiled) == (1, 2, True)
    assert entry.input_addresses == [x.data_ptr()] and isinstance(entry.cudagraph, pcg.CapturedGraph)
    assert {e.state for by_size in piecewise.entries.values() for size, e in by_size.items() if size == 4} == {"new"}
    assert all(e.duration_ms >= 0 for e in piecewise.events)
    # A size that is not to be captured runs for ever in general; two tensors, because no address may be remembered.
    for _ in range(3):
        other = torch.randn(5, WIDTH, device=device)
        close(piecewise(other), model(other))
    sequence = piecewise.capture(x)  # already walked to the end: only laid flat
    x.normal_()
    close(sequence.replay(), model(x))


def test_a_piece_that_only_allocates_is_no_graph(device):
    piecewise, _ = build(MODELS["allocation between"], device, sizes=[8])
    graphs = {piece: by_size[8].cudagraph for piece, by_size in piecewise.entries.items()}
    assert [graph is not None for graph in graphs.values()] == [False, False, True]
    sequence = piecewise.sequences[8]
    assert (sequence.num_graphs, sequence.num_eager) == (1, 2)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = into(x * 2)
        self.count.add_(1)
        return y + 1 + 0 * self.count


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_every_call_computes_the_piece_once(compiler, device):
    model = Counting().to(device)
    trace = pcg.trace(model, torch.zeros(67, WIDTH, device=device))
    assert model.count == 0
    piecewise = pcg.PiecewiseModel(trace, compiler=compiler, capture_sizes=[8, 4])
    static = {size: torch.zeros(size, WIDTH, device=device) for size in (8, 4)}
    for n, size in enumerate([8, 8, 4, 8, 8, 4, 4, 4, 8], start=1):
        piecewise(static[size])
        assert model.count == n, piecewise.events
    piecewise.capture(static[8])  # captured already: one call to see the result
    n = int(model.count)
    for _ in range(3):
        piecewise.sequences[8].replay()
    assert n == 10 and model.count == 13


# --- fresh outputs (H1)


@pytest.mark.parametrize("name", ["fresh", "two fresh results", "fresh is the output", "several cuts"])
def test_a_fresh_result_that_moves_is_bridged(name, device):
    piecewise, static = build(MODELS[name], device)
    Body.addresses.clear()
    Body.holds_decoys = True
    compare(MODELS[name], piecewise, static, rounds=2)
    if name == "fresh":
        assert len(set(Body.addresses)) > len(static)
    assert all(sequence.bridged_bytes() for sequence in piecewise.sequences.values())


def test_without_the_bridge_the_next_piece_reads_the_old_address(device, monkeypatch):
    piecewise, static = build(MODELS["fresh"], device)
    monkeypatch.setattr(segments.Bridge, "_keep", lambda self, i, result: result)
    Body.holds_decoys = True
    with pytest.raises(AssertionError):
        compare(MODELS["fresh"], piecewise, static)


def test_fresh_results_can_be_refused(device):
    with pytest.raises(ValueError, match=r"pcg_ref\.pw_fresh.*'(pw_)?fresh\w*'"):
        build(MODELS["fresh"], device, on_fresh_output="error")
    build(MODELS["writes into its argument"], device, on_fresh_output="error")
    with pytest.raises(ValueError, match="bridge"):
        build(MODELS["fresh"], device, on_fresh_output="?")


# --- memory (H15)


def layers(x):
    for _ in range(4):
        x = into((x * 2).relu() + 1) + x * 3
    return x


def test_descending_and_weak_takes_the_least_memory(monkeypatch, device):
    sizes = [1 << 14, 1 << 15, 1 << 16]  # rows of 16 bytes: 0.25, 0.5 and 1 MiB a tensor

    def pool_bytes(order):
        return build(layers, device, order)[0].pool.bytes

    descending, ascending = pool_bytes(sizes[::-1]), pool_bytes(sizes)
    monkeypatch.setattr(pieces, "weak_ref", lambda value, *pool: value)
    strong = pool_bytes(sizes[::-1])
    assert descending <= ascending < strong and 2 * descending < strong
    monkeypatch.undo()
    assert pool_bytes(sizes[-1:]) == descending  # the smaller sizes live in the memory of the largest


def test_a_sequence_keeps_all_it_needs(device):
    """Also the memory that a piece without a graph allocated, which belongs to no graph's pool."""
    model = MODELS["allocation between"]
    piecewise, static = build(model, device, sizes=[8])
    sequence, x = piecewise.sequences[8], static[8]
    del piecewise, static
    gc.collect()
    x.normal_()
    churn = [torch.full((8, WIDTH), float("nan"), device=device) for _ in range(300)]
    close(sequence.replay().clone(), model(x))
    assert all(t.isnan().all() for t in churn)


# --- what is refused


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.tied = self.linear
        self.requires_grad_(False)

    def forward(self, x):
        return self.tied(pw_fresh(self.linear(x) * self.scale))


def test_a_changed_attribute_is_no_second_trace(device):
    model = Scaled().to(device)
    piecewise, static = build(model, device, [8, 4])
    compare(model, piecewise, static, 1e-6)
    model.scale = 3
    with pytest.raises(pcg.RecompileError, match="scale"):
        piecewise(static[8])
    assert piecewise.trace.compile_count == 1
    model.scale = 2
    compare(model, piecewise, static, 1e-6)


def test_moved_tensors_are_named(device):
    model = Scaled().to(device)
    piecewise, static = build(model, device, [8, 4])
    with pytest.raises(RuntimeError, match=r"\bx is at"):
        piecewise(static[8].clone())
    old = model.linear.weight
    model.linear.weight = nn.Parameter(old.clone(), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"(linear|tied)\.weight is at"):
        piecewise(static[8])
    model.linear.weight = old
    with torch.no_grad():
        old.mul_(2)  # in place is how weights change
    compare(model, piecewise, static, 1e-6)


def test_a_size_that_the_guards_refuse_is_an_error_and_no_endless_walk(device):
    model = lambda x: pw_fresh(x) * (2 if x.shape[0] > 32 else 3)  # noqa: E731
    with pytest.raises(pcg.RecompileError, match="32|33"):
        build(model, device, [8])


def test_bad_arguments(device):
    trace = pcg.trace(MODELS["fresh"], torch.zeros(67, WIDTH, device=device))
    for wrong in (dict(compiler="?"), dict(capture_sizes=[8, 1]), dict(ops=["pcg_ref::pw_frseh"])):
        with pytest.raises(ValueError):
            pcg.PiecewiseModel(trace, **wrong)
    with pytest.raises(ValueError, match="capture_sizes"):
        pcg.PiecewiseModel(trace, capture_sizes=[8]).capture(torch.zeros(5, WIDTH, device=device))
    fixed = pcg.trace(MODELS["fresh"], torch.zeros(67, WIDTH, device=device), dynamic_dims={})
    with pytest.raises(ValueError, match="dynamic"):
        pcg.PiecewiseModel(fixed, capture_sizes=[8])


def test_a_model_without_a_split_operator(device):
    model = lambda x: (x @ weight(x)).relu() + 1  # noqa: E731
    with pytest.raises(ValueError, match="no split operator"):
        build(model, device)
    piecewise, static = build(model, device, allow_none=True)
    compare(model, piecewise, static, exact_on_cpu(device))
    assert all((s.num_graphs, s.num_eager) == (1, 0) for s in piecewise.sequences.values())


# --- exceptions


def test_a_failing_body_at_replay(device):
    piecewise, static = build(several_cuts, device)
    for replay in (piecewise.sequences[8].replay, lambda: piecewise(static[8])):
        Body.fails = True
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                replay()
        Body.fails = False
        compare(several_cuts, piecewise, static)


@pytest.mark.parametrize("at", ["general", "warm-up", "capture"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_failing_body_before_replay(at, enabled, device):
    piecewise = pcg.PiecewiseModel(pcg.trace(several_cuts, torch.zeros(67, WIDTH, device=device)), capture_sizes=[8, 4])
    x = torch.randn(8, WIDTH, device=device)
    for _ in range(["general", "warm-up", "capture"].index(at)):
        close(piecewise(x), several_cuts(x))
    (gc.enable if enabled else gc.disable)()
    try:
        Body.fails = True
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                piecewise(x)
            assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert not any(entry.state == "captured" for by_size in piecewise.entries.values() for entry in by_size.values())
    assert piecewise.sequences == {}
    Body.fails = False
    static = {8: x, 4: torch.zeros(4, WIDTH, device=device)}
    for size in (4, 8):
        piecewise.capture(static[size])
    compare(several_cuts, piecewise, static)


def test_a_capture_that_cuda_would_refuse(device):
    trace = pcg.trace(MODELS["fresh"], torch.zeros(67, WIDTH, device=device))
    piecewise = pcg.PiecewiseModel(trace, capture_sizes=[8])
    x = torch.zeros(8, WIDTH, device=device)
    piecewise(x), piecewise(x)
    entry = piecewise.entries[0][8]
    good = entry.runnable
    entry.runnable = lambda *args: (good(*args), x.sum().item())[0]
    with pytest.raises(RuntimeError):
        piecewise(x)
    piecewise.capture(x)  # the entry starts anew, from the compiled piece
    compare(MODELS["fresh"], piecewise, {8: x})


def test_shapes_of_a_bridged_result_are_frozen(device):
    @register_split_op()
    @register_custom_op(fake=lambda x: torch.empty_like(x))
    def pw_shrinks(x: torch.Tensor) -> torch.Tensor:
        return x.clone() if not Body.fails else x[1:].clone()

    piecewise, static = build(lambda x: pw_shrinks(x * 2) + 1, device, [8])
    Body.fails = True
    with pytest.raises(RuntimeError, match=r"pw_shrinks.*\[7, 4\].*\[8, 4\]"):
        piecewise.sequences[8].replay()


# --- several of them


def test_several_models_of_one_function_do_not_disturb_each_other(device):
    built = [build(several_cuts, device, sizes) for sizes in ([8, 4], [16, 8], [4])]
    for piecewise, static in built * 2:
        compare(several_cuts, piecewise, static, rounds=1)


def test_flat_replay_on_another_thread(device):
    piecewise, static = build(several_cuts, device, [8])
    static[8].normal_()
    thread = threading.Thread(target=piecewise.sequences[8].replay)
    thread.start()
    thread.join()
    close(piecewise.sequences[8].output, several_cuts(static[8]))


# --- inductor


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["several cuts", "torch.Size crosses", "input mutated"])
def test_inductor_pieces_equal_eager(name, device):
    piecewise, static = build(MODELS[name], device, compiler="inductor")
    compare(MODELS[name], piecewise, static, 1e-5, rounds=2)  # fused float32 arithmetic rounds differently
    assert piecewise.trace.compile_count == 1
