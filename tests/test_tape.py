"""The arena and the tape, the CPU simulation alone; what CUDA graphs share is in test_graphs.py. The oracle is eager torch."""

from __future__ import annotations

import gc
import threading

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from torch import nn

import pcg_ref as pcg
from pcg_ref import arena as arena_module
from pcg_ref.arena import Arena
from pcg_ref.ops import register_custom_op


def check(region, *inputs, replays: int = 3) -> pcg.TapeGraph:
    """Capture, then compare bitwise with eager on fresh contents of the same inputs, what is written to the inputs included."""
    graph = pcg.capture(region, *inputs)
    for _ in range(replays):
        for x in inputs:
            x.copy_(torch.randn(x.shape).mul(3).to(x.dtype))
        before = [x.clone() for x in inputs]
        with torch.no_grad():
            expected = [out.clone() for out in as_list(region(*inputs))]
        expected += [x.clone() for x in inputs]
        for x, value in zip(inputs, before):
            x.copy_(value)
        graph.replay()
        torch.testing.assert_close([*as_list(graph.output), *inputs], expected, rtol=0, atol=0, equal_nan=True)
    return graph


def as_list(value) -> list:
    return list(value) if isinstance(value, (tuple, list)) else [value]


# --- arena


def block(arena: Arena, nbytes: int) -> torch.Tensor:
    return arena.empty_strided(torch.empty(nbytes, dtype=torch.uint8))


def test_a_block_is_reused_when_its_last_view_dies():
    arena = Arena()
    first = block(arena, 1000)
    address, view = first.data_ptr(), first[10:].view(-1)[::2]
    del first
    assert block(arena, 1000).data_ptr() != address  # the view keeps it
    del view
    assert block(arena, 1000).data_ptr() == address


def test_neighbours_merge_and_segments_do_not():
    arena = Arena()
    size = arena_module._SEGMENT_BYTES // 4
    quarters = [block(arena, size) for _ in range(4)]
    assert arena.bytes == 4 * size
    start = min(q.data_ptr() for q in quarters)
    del quarters[1], quarters[2], quarters[0], quarters[0]
    assert block(arena, 4 * size).data_ptr() == start and arena.bytes == 4 * size
    two = [block(arena, 4 * size) for _ in range(2)]
    assert arena.bytes == 8 * size
    del two
    block(arena, 8 * size)
    assert arena.bytes == 16 * size  # two segments are not one piece of memory, even if their addresses touch


def test_a_block_freed_in_the_middle_of_an_allocation(monkeypatch):
    """The garbage collector may run between any two lines; a block that it frees must not pull the found one away."""
    arena = Arena()

    class Cycle:
        pass

    def make_garbage():
        cycle = Cycle()
        cycle.myself, cycle.tensor = cycle, block(arena, 512)

    def min_with_collection(values):
        found = min(values)
        gc.collect()
        return found

    with pcg.gc_held_off():
        make_garbage()
        monkeypatch.setattr(arena_module, "min", min_with_collection, raising=False)
        kept = [block(arena, 512) for _ in range(3)]
    assert len({t.data_ptr() for t in kept}) == 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 << 20)), max_size=40))
@settings(max_examples=60)
def test_live_blocks_never_overlap_and_everything_comes_back(steps):
    arena, live = Arena(), []
    for allocate, number in steps:
        if allocate or not live:
            live.append(block(arena, number))
        else:
            live.pop(number % len(live))
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in live if t.numel())
        assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:]))
        assert all(arena.owns(t) for t in live if t.numel())
        assert all(t.data_ptr() % 512 == 0 for t in live if t.numel())
    reserved = arena.bytes
    live.clear()
    for _, memory in list(arena._segments):
        live.append(block(arena, memory.nbytes))
    assert arena.bytes == reserved


def test_memory_outlives_its_arena_while_a_tensor_uses_it():
    tensor = block(Arena(), 5000)
    gc.collect()
    tensor.fill_(7)
    assert int(tensor.sum()) == 35000


# --- what can be recorded

TABLE = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
INDEX = torch.tensor([3, 0, 2, 2, 1])


def _inplace_view(a):
    fresh = a * 1
    return fresh.unsqueeze_(0).squeeze_(0).add_(1)


def _scatter(a):
    flat = a.reshape(-1)
    return flat.new_zeros(7).index_add_(0, torch.arange(flat.numel()) % 7, flat)


# One step of a random program: a function of two float tensors of at most three dimensions, never empty of results.
STEPS = {
    "add": lambda a, b: a + b if a.shape == b.shape else a + 2.5,
    "scalar": lambda a, b: 1 - a / 2,
    "reshape": lambda a, b: a.reshape(-1),
    "transpose": lambda a, b: a.t() if a.dim() == 2 else a.transpose(0, -1) if a.dim() else a,
    "unsqueeze": lambda a, b: a.unsqueeze(-1) if a.dim() < 3 else a.flatten(1),
    "views of views": lambda a, b: a.reshape(-1)[1:][::2].unsqueeze(0)[0],
    "narrow": lambda a, b: a[..., : a.shape[-1] // 2] if a.dim() else a,
    "zero size": lambda a, b: a[:0] if a.dim() else a,
    "mul_": lambda a, b: a.mul_(0.5),
    "add_ to a view": lambda a, b: (a[..., :1].add_(1), a)[1] if a.dim() else a.add_(1),
    "copy_": lambda a, b: a.copy_(b) if a.shape == b.shape else a.zero_(),
    "setitem": lambda a, b: (a.__setitem__(slice(0, 1), 7.0), a)[1] if a.dim() else a,
    "sum": lambda a, b: a.sum(0) if a.dim() else a.sum(),
    "mean": lambda a, b: a.mean(-1, keepdim=True) if a.dim() else a,
    "cumsum": lambda a, b: a.cumsum(0) if a.dim() else a,
    "cat": lambda a, b: torch.cat([a, b]) if a.dim() and a.shape[1:] == b.shape[1:] and b.dim() else a,
    "stack": lambda a, b: torch.stack([a, a]) if a.dim() < 3 else a,
    "chunk": lambda a, b: a.chunk(2, dim=-1)[-1] if a.dim() else a,
    "split": lambda a, b: sum(part.sum() for part in a.split(3)) if a.dim() else a,
    "index": lambda a, b: a[INDEX % a.shape[0]] if a.dim() and a.shape[0] else a,
    "index two": lambda a, b: a[:, INDEX % a.shape[1]] if a.dim() > 1 and a.shape[1] else a,
    "gather": lambda a, b: a.gather(0, a.argsort(0)) if a.dim() else a,
    "scatter": lambda a, b: _scatter(a),
    "where": lambda a, b: torch.where(a > 0, a, b) if a.shape == b.shape else torch.where(a > 0, a, 0.0),
    "masked_fill": lambda a, b: a.masked_fill(a < 0, 0.25),
    "masked assign": lambda a, b: (a.__setitem__(a > 1, 1.0), a)[1] if a.dim() else a,
    "embedding": lambda a, b: F.embedding((a * 3).long().abs() % 5, TABLE).sum(-1),
    "matmul": lambda a, b: a @ a.t() if a.dim() == 2 else a,
    "linear": lambda a, b: F.linear(a, TABLE) if a.dim() and a.shape[-1] == 4 else a,
    "out": lambda a, b: torch.add(a, 1, alpha=2, out=torch.empty_like(a)),
    "out two": lambda a, b: torch.max(a, 0, out=(a.new_empty(a.shape[1:]), INDEX.new_empty(a.shape[1:])))[0]
    if a.dim() and a.shape[0]
    else a,
    "max": lambda a, b: sum(a.max(dim=-1)) if a.dim() and a.shape[-1] else a,
    "sort": lambda a, b: a.sort(0, descending=True).values if a.dim() else a,
    "aminmax": lambda a, b: sum(torch.aminmax(a)) if a.numel() else a,
    "foreach": lambda a, b: torch._foreach_add(torch._foreach_mul([a, b], 2.0), 1.0)[0],
    "bool": lambda a, b: ((a > -1) & ~(a > 1)).to(a.dtype),
    "int": lambda a, b: ((a * 10).clamp(-99, 99).to(torch.int32) // 3).to(a.dtype),
    "kwargs": lambda a, b: torch.clamp(a, min=-1, max=1),
    "layer_norm": lambda a, b: F.layer_norm(a, a.shape[-1:], eps=1e-3) if a.dim() and a.shape[-1] else a,
    "softmax": lambda a, b: a.softmax(-1) if a.dim() else a,
    "half": lambda a, b: a.bfloat16().mul(2).float(),
    "flip": lambda a, b: a.flip(0) if a.dim() else a,
    "contiguous": lambda a, b: a.contiguous(),
    "inplace view": lambda a, b: _inplace_view(a),
    "factory": lambda a, b: a + torch.arange(a.shape[-1]).float() if a.dim() else a + torch.ones(()),
}  # fmt: skip


def program(steps):
    """A region of two tensors. Values fall out of a window of four, so that the arena reuses their memory within the region."""

    def region(*inputs):
        values = list(inputs)
        for name, i, j in steps:
            result = STEPS[name](values[i % len(values)], values[j % len(values)])
            if result.numel() < 500:
                values = [*values, result][-4:]
        return tuple(values)

    return region


LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "strided": lambda: torch.randn(8, 12)[1:5, ::2],
    "one row": lambda: torch.randn(1, 4),
    "no rows": lambda: torch.randn(0, 4),
    "scalar": lambda: torch.randn(()),
}
small = st.integers(0, 3)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), small, small), min_size=1, max_size=14),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(sorted(LAYOUTS)),
)
@example([(name, 0, 1) for name in STEPS if name not in ("zero size", "setitem")], "contiguous", "transposed")
@settings(max_examples=300)
def test_random_programs(steps, first, second):
    torch.manual_seed(0)
    check(program(steps), LAYOUTS[first](), LAYOUTS[second]())


@pytest.mark.parametrize("name", STEPS)
def test_every_step_alone(name):
    for layout in LAYOUTS.values():
        check(program([(name, 0, 1)]), layout(), layout())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool, torch.uint8])
def test_dtypes(dtype):
    check(lambda x: (x[1:].clone(), torch.cat([x, x]), x.to(torch.float32) * 2, x == x[0]), torch.ones(5, 3).to(dtype))


def test_layers_of_torch():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False)
    convolution = nn.Conv1d(4, 8, 3, padding=1).requires_grad_(False)

    def region(x):
        mixed = convolution(x[None])[0].t()  # [6, 8]
        q = mixed.reshape(1, 6, 2, 4).transpose(1, 2)
        return attention(mixed[None], mixed[None], mixed[None])[0], F.scaled_dot_product_attention(q, q, q, is_causal=True)

    check(region, torch.randn(4, 6))


def test_buffers_that_a_layer_updates_are_written_by_replay_alone():
    norm, eager = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    graph = pcg.capture(norm, x)
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any()
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected = eager(x)
    torch.testing.assert_close(norm.state_dict(), eager.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(graph.output, expected.detach(), rtol=0, atol=0)


def test_an_in_place_view_of_an_input_does_not_change_what_was_recorded():
    x = torch.randn(4, 3)

    def region(x):
        y = x * 2
        x.t_()
        return y + 0, x * 3

    graph = pcg.capture(region, x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(graph.output, (x.t() * 2, x * 3))


@pytest.mark.parametrize("replay_in_inference_mode", [False, True])
@pytest.mark.parametrize("capture_in_inference_mode", [False, True])
@pytest.mark.parametrize("tensor_in_inference_mode", [False, True])
def test_inference_mode(tensor_in_inference_mode, capture_in_inference_mode, replay_in_inference_mode):
    with torch.inference_mode(tensor_in_inference_mode):
        x = torch.randn(4, 3)
    region = lambda x: F.linear(x.t().reshape(2, 6), torch.ones(2, 6)) * 2  # reshape copies  # noqa: E731
    with torch.inference_mode(capture_in_inference_mode):
        graph = pcg.capture(region, x)
    with torch.inference_mode():
        x.normal_()
    with torch.inference_mode(replay_in_inference_mode):
        graph.replay()
    assert torch.equal(graph.output, region(x))


def test_the_body_of_an_operator_is_recorded_and_not_run_again():
    calls = []

    @register_custom_op(mutates_args=["output"])
    def tape_double(x: torch.Tensor, output: torch.Tensor) -> None:
        calls.append(1)
        output.copy_(x * 2)

    graph = check(lambda x: (out := torch.empty_like(x), tape_double(x, out))[0] + 1, torch.randn(5))
    names = [str(function) for function, *_ in graph.tape.calls]
    assert names == ["aten.mul.Tensor", "aten.copy_.default", "aten.add.Tensor"]
    assert len(calls) == 1 + 3  # once at capture; the others are check()'s own eager calls


def test_views_and_allocations_leave_no_entry():
    graph = pcg.capture(lambda x: (x.t()[1:].unsqueeze(0), torch.empty_like(x)), torch.randn(4, 3))
    assert graph.tape.calls == [] and graph.empty
    assert not pcg.capture(lambda x: x + 1, torch.randn(4, 3)).empty


# --- what CUDA would refuse


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.item, float, int, bool, torch.Tensor.tolist, torch.Tensor.numpy, str, repr, "{}".format,
        list(range(9)).__getitem__, torch.Tensor.cpu, lambda x: x.__array__(), lambda x: [y.tolist() for y in x[None]],
    ],
)  # fmt: skip
def test_reads_of_one_value_are_refused(read):
    def region(x):
        read(x.sum().long())
        return x

    with pytest.raises(pcg.CaptureError, match="host"):
        pcg.capture(region, torch.ones(3))


@pytest.mark.parametrize(
    "read",
    {
        "nonzero": lambda x: x.nonzero(),
        "boolean index": lambda x: x[x > 0],
        "boolean assignment": lambda x: x.__setitem__(x > 0, torch.arange(2.0)),
        "masked_select": lambda x: x.masked_select(x > 0),
        "where": lambda x: torch.where(x > 0),
        "unique": lambda x: x.unique(),
        "repeat": lambda x: x.repeat_interleave(x.long()),
        "equal": lambda x: torch.equal(x, x + 1),
        "allclose": lambda x: torch.allclose(x, x + 1),
        "index by a tensor of one": lambda x: x[torch.ones((), dtype=torch.int64)],
        "if": lambda x: 1 if (x > 0).any() else 0,
        "print": lambda x: print(x),
        "format": lambda x: f"{x}",
        "tensor of numbers": lambda x: torch.tensor([1.0, x[0]]),
        "as_tensor of numbers": lambda x: torch.as_tensor((x[0], [x[1]])),
        "inverse": lambda x: torch.linalg.inv(torch.outer(x, x) + torch.eye(4)),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_depends_on_values_is_refused(read, capsys):
    with pytest.raises(pcg.CaptureError, match="host"):
        pcg.capture(lambda x: (read[1](x), x)[1], torch.randn(4))


@pytest.mark.parametrize(
    "change", [lambda x: x.resize_(9), lambda x: x.set_(torch.ones(2)), lambda x: torch.add(x, 1, out=torch.empty(0))]
)
def test_changes_of_memory_are_refused(change):
    with pytest.raises(pcg.CaptureError):
        pcg.capture(lambda x: (change(x * 1), x)[1], torch.randn(4))


@pytest.mark.parametrize("wrong", [lambda x: x @ x, lambda x: x.add_(torch.ones(9)), lambda x: x[:2].copy_(x)])
def test_wrong_shapes_are_refused_at_capture(wrong):
    with pytest.raises(RuntimeError):
        pcg.capture(wrong, torch.randn(3, 4))


def test_no_error_is_raised_for_what_replaces_a_read():
    check(lambda x: (x[INDEX % 4], torch.where(x > 0, x, 0), x.index_select(0, INDEX[:2])), torch.randn(4, 3))


def test_another_thread_computes_while_this_one_records():
    results = []

    def region(x):
        thread = threading.Thread(target=lambda: results.append((torch.ones(3) * 2).tolist()))
        thread.start()
        thread.join()
        return x + 1

    graph = pcg.capture(region, torch.zeros(2))
    graph.replay()
    assert results == [[2.0, 2.0, 2.0]] and graph.output.tolist() == [1.0, 1.0]


def test_memory_that_is_not_the_arenas_is_kept():
    """Where the simulation is kinder than CUDA: a freed input reads as its last contents."""
    graph = pcg.capture(lambda x: x + torch.tensor([1.0, 2.0]), torch.zeros(2))
    gc.collect()
    graph.replay()
    assert graph.output.tolist() == [1.0, 2.0]


def test_an_alias_that_outlives_its_arena_reads_stale_numbers_and_does_not_crash():
    x = torch.ones(1000)
    graph = pcg.capture(lambda x: x * 2, x)
    graph.replay()
    output = pcg.weak_ref(graph.output, graph.pool)
    del graph
    gc.collect()
    assert output.sum().item() == 2000
