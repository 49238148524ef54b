"""Faults that once gave wrong numbers without an error; each is now right, or refused by name."""

import gc
import weakref

import pytest
import torch
from torch import nn

import pcg_ref as pcg
from pcg_ref.ops import register_custom_op, register_split_op
from pcg_ref.strategies.breakable import capture_breakable


class Mode:
    value = 0


@register_split_op()
@register_custom_op(mutates_args=["output"])
def sf_copy(x: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(x * 3)


@pcg.eager_on_graph
def by_mode(x):
    return x if Mode.value == 0 else x[:3].clone() if Mode.value == 1 else x[Mode.value :]


@pytest.mark.parametrize("first, then", [(0, 1), (1, 0), (2, 3)])
def test_a_result_that_changes_between_argument_and_fresh_memory(first, then, device):
    Mode.value = first
    x = torch.randn(6, device=device)
    sequence = capture_breakable(lambda x: by_mode(x + 1) + 1, x, pool=pcg.GraphPool(device))
    Mode.value = then
    with pytest.raises(RuntimeError, match="result 0 of by_mode"):
        sequence.replay()
    Mode.value = first
    x.normal_()
    torch.testing.assert_close(sequence.replay(), by_mode(x + 1) + 1)


def test_results_that_share_fresh_memory_are_refused(device):
    @pcg.eager_on_graph
    def whole_and_part(x):
        y = x * 2
        return y, y[:2]

    with pytest.raises(RuntimeError, match="whole_and_part returns several tensors in the same fresh memory"):
        capture_breakable(lambda x: whole_and_part(x + 1)[0], torch.randn(4, device=device), pool=pcg.GraphPool(device))


def test_an_expanded_result_is_bridged(device):
    total = pcg.eager_on_graph(lambda x: x.sum().expand(4))
    x = torch.randn(4, device=device)
    sequence = capture_breakable(lambda x: total(x + 1) * x, x, pool=pcg.GraphPool(device))
    x.normal_()
    torch.testing.assert_close(sequence.replay(), (x + 1).sum() * x)


def view_is_written(x):
    out = torch.zeros(x.shape[0], 3, 4, device=x.device) + x[:, None, :1]
    sf_copy(x, out[:, 0])
    return out + 1


def view_of_another_dtype(x):
    bits, y = x.view(torch.int32), x + 1
    out = torch.empty_like(y)
    sf_copy(y, out)
    return (bits & 0x7FFFFFFF).view(torch.float32) + out


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("function", [view_is_written, view_of_another_dtype])
def test_views_across_a_cut(function, compiler, device):
    piecewise = pcg.PiecewiseModel(pcg.trace(function, torch.randn(67, 4, device=device)), [sf_copy], compiler, [8])
    x = torch.randn(8, 4, device=device)
    sequence = piecewise.capture(x)
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(sequence.replay(), function(x))


@pytest.mark.parametrize(
    "region",
    [lambda a, b: (a * 1) @ (b * 1).conj(), lambda a, b: (b * 1).mH @ a, lambda a, b: (b * 1).conj().imag.clone() + a.real],
    ids=["conj", "mH", "imag"],
)
def test_lazy_conjugates_inside_a_region(region, device):
    a, b = (torch.randn(3, 3, dtype=torch.complex64, device=device) for _ in range(2))
    region(a, b)
    graph = pcg.capture(region, a, b)
    for _ in range(2):
        a.normal_(), b.normal_()
        graph.replay()
        torch.testing.assert_close(graph.output, region(a, b))


def test_a_second_dynamic_dimension_is_frozen(device):
    trace = pcg.trace(lambda x, y: (x * 2, y + 1), torch.zeros(13, device=device), torch.zeros(17, device=device))
    piecewise = pcg.PiecewiseModel(trace, (), capture_sizes=[8], allow_none=True)
    x, y = torch.randn(8, device=device), torch.randn(9, device=device)
    piecewise.capture(x, y[:5])
    with pytest.raises(RuntimeError, match="frozen"):
        piecewise(x, y[:7])


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_bias_that_was_none_at_capture_is_noticed(strategy, device):
    runner = pcg.PrefillRunner(pcg.TinyDecoder().to(device), strategy, [8])
    runner.capture(progress=False)
    qkv = runner.model.layers[0].qkv
    qkv.bias = nn.Parameter(torch.ones(qkv.out_features, device=device), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"layers\.0\.qkv\.bias"):
        runner.run(pcg.PackedBatch(torch.arange(8, device=device), [8]))


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_model_is_freed_with_its_runner(strategy, device):
    model = pcg.TinyDecoder().to(device)
    weak = weakref.ref(model)
    runner = pcg.PrefillRunner(model, strategy, [8])
    runner.capture(progress=False)
    runner.run(pcg.PackedBatch(torch.arange(8, device=device), [3, 5]))
    gc.unfreeze()
    del model, runner
    gc.collect()
    assert weak() is None


class ReplacesItsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, tokens, positions):
        hidden = tokens[:, None] + self.count
        output = torch.empty_like(hidden)
        sf_copy(hidden, output)
        self.count = self.count + 1
        return output


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_forward_that_replaces_its_buffer_is_refused_at_capture(strategy, device):
    model = ReplacesItsBuffer().to(device)
    count = model.count
    runner = pcg.PrefillRunner(model, strategy, [8])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^count is at "):
            runner.capture(progress=False)
        assert model.count is count and count == 0


def a_size_from_the_host(x):
    scale = x.sum().long().item()
    output = torch.empty_like(x)
    sf_copy(x, output)
    return output * scale


def a_number_from_the_host(x):
    x = x + x.sum().item()
    output = torch.empty_like(x)
    sf_copy(x, output)
    return output


@pytest.mark.parametrize("function", [a_size_from_the_host, a_number_from_the_host])
def test_a_traced_number_of_the_host_is_refused_by_name(function):
    """Dynamo may trace ``item()``; what a piece of it does cannot be asked of fake tensors."""
    try:
        trace = pcg.trace(function, torch.ones(13, 4))
    except pcg.TraceError:
        return  # older ones do not
    piecewise = pcg.PiecewiseModel(trace, [sf_copy], capture_sizes=[8])
    with pytest.raises(pcg.CaptureError, match="needs a value on the host"):
        piecewise.capture(torch.ones(8, 4))


@pytest.mark.parametrize("in_place", [lambda t: t.t_(), lambda t: t.unsqueeze_(-1)], ids=["t_", "unsqueeze_"])
def test_a_bridged_result_that_becomes_its_own_view(in_place, device):
    fresh = pcg.eager_on_graph(lambda x: x * 2)

    def function(x):
        y = fresh(x + 1)
        in_place(y)
        return y + 1

    x = torch.randn(3, 4, device=device)
    sequence = capture_breakable(function, x, pool=pcg.GraphPool(device))
    for _ in range(2):
        x.normal_()
        torch.testing.assert_close(sequence.replay(), function(x))


def counts_in_a_constant(x):
    total = torch.tensor(0.0)
    total.add_(2)
    return x * total


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_constant_that_is_written_starts_anew_at_every_replay(strategy):
    """On CUDA the host's tensor is written once, at capture, and its value is an argument of the kernel."""
    x = torch.randn(8, 4)
    if strategy == "tc_piecewise":
        trace = pcg.trace(counts_in_a_constant, torch.randn(13, 4))
        replay = pcg.PiecewiseModel(trace, (), capture_sizes=[8], allow_none=True).capture(x).replay
    elif strategy == "breakable":
        replay = capture_breakable(counts_in_a_constant, x, pool=pcg.GraphPool("cpu")).replay
    else:
        graph = pcg.capture(counts_in_a_constant, x)
        replay = lambda: graph.replay() or graph.output  # noqa: E731
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(replay(), x * 2)
