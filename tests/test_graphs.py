"""Capture and replay of one region, the pool, and weak references: the same tests on the CPU tape and on CUDA graphs."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import pcg_ref as pcg
from pcg_ref import graphs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_replay_equals_eager_on_new_contents(device):
    weight = torch.randn(6, 5, device=device)
    region = lambda x: torch.softmax(x * 2 + 1, -1).sum(0) * weight[0]  # noqa: E731
    x = torch.randn(4, 5, device=device)
    graph = pcg.capture(region, x)
    assert type(graph) is (pcg.TapeGraph if device == "cpu" else pcg.CudaGraph)
    for _ in range(4):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(graph.output, region(x), rtol=0, atol=0)


def test_nothing_is_computed_at_capture(device):
    calls = []
    x, counter = torch.full((3,), 5.0, device=device), torch.zeros((), device=device)

    def region(x):
        calls.append(1)
        counter.add_(1)
        x.mul_(2)
        return x + 1

    graph = pcg.capture(region, x)
    assert x.tolist() == [5, 5, 5] and counter.item() == 0
    for i in range(1, 4):
        graph.replay()
        assert x.tolist() == [5 * 2**i] * 3 and counter.item() == i
        assert graph.output.tolist() == [5 * 2**i + 1] * 3
    assert calls == [1]  # the Python of a region runs at capture, and never again


def test_output_is_overwritten_by_the_next_replay(device):
    x = torch.ones(2, device=device)
    graph = pcg.capture(lambda x: x * 10, x)
    graph.replay()
    kept, copied = graph.output, graph.output.clone()
    x.fill_(2)
    graph.replay()
    assert kept.tolist() == [20, 20] and copied.tolist() == [10, 10]
    assert graph.output.data_ptr() == kept.data_ptr()


@pytest.mark.parametrize("nesting", ["input", "view of input", "dict", "nested", "none", "number"])
def test_what_a_region_may_return(device, nesting):
    regions = {
        "input": lambda x: x,
        "view of input": lambda x: (x + 1, x[1:])[1],
        "dict": lambda x: {"a": x + 1, "b": x},
        "nested": lambda x: [(x + 1, {"a": [x * 2]}), 7],
        "none": lambda x: (x.add_(1), None)[1],
        "number": lambda x: (x.add_(1), 7)[1],
    }
    x = torch.zeros(3, device=device)
    graph = pcg.capture(regions[nesting], x)
    for _ in range(2):
        x.normal_()
        expected = regions[nesting](x.clone())
        graph.replay()
        torch.testing.assert_close(graph.output, expected)
    if nesting == "input":
        assert graph.output is x


def test_memory_of_dead_references_is_reused(device):
    x = torch.randn(1000, device=device)
    addresses = []

    def region(x):
        for i in range(5):
            y = x + i
            addresses.append(y.data_ptr())
            x = y * 1
            del y
        return x

    pool = pcg.GraphPool(device)
    pcg.capture(region, x, pool=pool)
    assert len(set(addresses)) <= 3  # x, y and the result take turns
    before = pool.bytes
    for _ in range(20):
        pcg.capture(region, x, pool=pool).output = None
    assert pool.bytes == before


def test_a_stale_read_after_the_pool_has_reused_the_memory(device):
    """Two regions share a pool and the first one's output has died: its weak alias shows the second one's numbers."""
    x, pool = torch.zeros(100, device=device), pcg.GraphPool(device)
    first = pcg.capture(lambda x: x + 1, x, pool=pool)
    alias = pcg.weak_ref(first.output)
    first.output = None
    second = pcg.capture(lambda x: x + 2, x, pool=pool)
    assert second.output.data_ptr() == alias.data_ptr()
    first.replay()
    assert alias.unique().tolist() == [1]
    second.replay()
    assert alias.unique().tolist() == [2]
    first.replay()
    assert second.output.unique().tolist() == [1]  # replayed out of order: the other way round


def test_a_kept_output_is_not_reused(device):
    x, pool = torch.zeros(100, device=device), pcg.GraphPool(device)
    first = pcg.capture(lambda x: x + 1, x, pool=pool)
    second = pcg.capture(lambda x: first.output + x + 2, x, pool=pool)
    assert first.output.data_ptr() != second.output.data_ptr()
    for _ in range(2):
        x.normal_()
        first.replay()
        second.replay()
        torch.testing.assert_close(second.output, x + 1 + x + 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_weak_ref_is_the_same_memory_and_does_not_own_it(device, dtype):
    x = torch.ones(6, 8, device=device)
    base = (x * 3).to(dtype)
    for tensor in (base, base.t(), base[1::2, 3:], base[0, 0], base[:0]):
        alias = pcg.weak_ref({"a": [tensor]})["a"][0]
        assert (alias.shape, alias.stride(), alias.dtype, alias.device) == (tensor.shape, tensor.stride(), dtype, tensor.device)
        assert torch.equal(alias, tensor) and (not tensor.numel() or alias.data_ptr() == tensor.data_ptr())
    alias = pcg.weak_ref(base)
    base.zero_()
    assert not alias.any()
    alias.fill_(1)
    assert base.all()
    pool = graphs.GraphPool(device)
    owner = pcg.capture(lambda x: x + 1, x, pool=pool)
    alias, address = pcg.weak_ref(owner.output), owner.output.data_ptr()
    owner.output = None
    assert pcg.capture(lambda x: x + 1, x, pool=pool).output.data_ptr() == address == alias.data_ptr()


def test_weak_ref_of_one_pool_leaves_the_rest(device):
    x, pool = torch.ones(4, device=device), pcg.GraphPool(device)
    graph = pcg.capture(lambda x: x + 1, x, pool=pool)
    other = pcg.capture(lambda x: x + 1, x)
    kept, alias, foreign = pcg.weak_ref((x, graph.output, other.output), pool)
    assert kept is x and foreign is other.output and alias is not graph.output and alias.data_ptr() == graph.output.data_ptr()


def test_a_moved_weight_is_not_followed(device):
    """``module.half()`` puts other memory behind the same Parameter objects; a graph goes on reading the old memory."""
    layer = nn.Linear(3, 3, bias=False).to(device).requires_grad_(False)
    x, kept = torch.eye(3, device=device), layer.weight.data
    graph = pcg.capture(lambda x: x * layer.weight, x)
    layer.weight.data = torch.full((3, 3), 5.0, device=device)
    graph.replay()
    torch.testing.assert_close(graph.output, x * kept)


def test_random_numbers_are_fresh_at_every_replay(device):
    x = torch.zeros(1000, device=device)
    region = lambda x: x + torch.rand_like(x) + nn.functional.dropout(x + 1, 0.5)  # noqa: E731
    graph = pcg.capture(region, x)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(graph.output.clone())
    assert not any(torch.equal(a, b) for a, b in zip(results, results[1:]))
    # Close to uniform on [0, 1) plus 0 or 2: neither stale nor uninitialised numbers.
    assert all(1.3 < r.mean() < 1.7 and 0 <= r.min() and r.max() < 3 for r in results)
    torch.manual_seed(3)
    graph.replay()
    again = graph.output.clone()
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(graph.output, again)


def test_an_index_of_integers_is_allowed(device):
    index = torch.tensor([2, 0], device=device)
    x = torch.randn(4, 3, device=device)
    region = lambda x: x[index] + x[:, index].sum(1, keepdim=True)[:2]  # noqa: E731
    graph = pcg.capture(region, x)
    x.normal_()
    index.copy_(torch.tensor([3, 1]) % 3)
    graph.replay()
    torch.testing.assert_close(graph.output, region(x))


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "print": lambda x: str(x),
    "nonzero": lambda x: x.nonzero(),
    "boolean mask": lambda x: x[x > 0],
    "boolean assignment": lambda x: x.__setitem__(x > 0, x[:2].clone()),
    "equal": lambda x: torch.equal(x, x + 1),
    "python error": lambda x: 1 / 0,
}


@pytest.mark.parametrize("read", READS)
def test_a_refused_region_leaves_everything_usable(device, read):
    x, pool = torch.ones(4, device=device), pcg.GraphPool(device)
    good = pcg.capture(lambda x: x + torch.rand_like(x), x, pool=pool)
    gc_before = gc.isenabled()

    def region(x):
        y = x + 1
        READS[read](y)
        return y

    for _ in range(2):
        with pytest.raises(ZeroDivisionError if read == "python error" else RuntimeError):
            pcg.capture(region, x, pool=pool)
        assert (x + 1).tolist() == [2, 2, 2, 2] and torch.rand(3, device=device).max() < 1  # eager work, random numbers
        later = pcg.capture(lambda x: x * 3, x, pool=pool)
        x.fill_(2)
        later.replay()
        assert later.output.tolist() == [6, 6, 6, 6]
        good.replay()
        assert 2 <= good.output.min() and good.output.max() < 3
        x.fill_(1)
    assert gc.isenabled() == gc_before


def test_captures_do_not_nest(device):
    x = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="nest"):
        pcg.capture(lambda x: pcg.capture(lambda y: y + 1, x).output, x)
    graph = pcg.capture(lambda x: x + 1, x)
    graph.replay()
    assert graph.output.tolist() == [2, 2]


def test_a_graph_replays_on_another_thread(device):
    x = torch.ones(2, device=device)
    graph = pcg.capture(lambda x: x + 1, x)
    thread = threading.Thread(target=lambda: (x.fill_(7), graph.replay()))
    thread.start()
    thread.join()
    assert graph.output.tolist() == [8, 8]


def test_a_deleted_graph_gives_its_memory_to_the_pool_again(device):
    pool, x = pcg.GraphPool(device), torch.zeros(1 << 20, device=device)
    keeper = pcg.capture(lambda x: x[:8] + 1, x, pool=pool)
    reserved = set()
    for _ in range(5):
        graph = pcg.capture(lambda x: x + 1, x, pool=pool)
        reserved.add(pool.bytes)
        del graph
    assert len(reserved) == 1
    keeper.replay()
    assert keeper.output.tolist() == [1] * 8


def test_a_dropped_pool_is_freed(device):
    graph = pcg.capture(lambda x: x + 1, torch.zeros(4, device=device))
    pool = weakref.ref(graph.pool)
    del graph
    gc.collect()
    assert pool() is None


def test_capture_asks_for_a_device_it_knows(device):
    with pytest.raises(ValueError, match="device"):
        pcg.capture(lambda: torch.ones(3))
    with pytest.raises(ValueError, match="meta"):
        pcg.GraphPool("meta")
    graph = pcg.capture(lambda: torch.ones(3, device=device) * 2, pool=pcg.GraphPool(device))
    graph.replay()
    assert graph.output.tolist() == [2, 2, 2]


@pytest.mark.gpu
def test_tensors_of_two_kinds_are_refused(device):
    with pytest.raises(pcg.CaptureError, match="one device"):
        pcg.capture(lambda x, y: x, torch.ones(3), torch.ones(3, device="cuda"))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_gc_is_held_off_and_put_back(device, enabled, fails):
    class Cycle:
        pass

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError) if fails else pcg.gc_held_off():
            with pcg.gc_held_off():
                with pcg.gc_held_off():  # nested: the inner end is not the end
                    assert not gc.isenabled()
                assert not gc.isenabled()
                cycle = Cycle()
                cycle.myself, cycle.graph = cycle, pcg.capture(lambda x: x + 1, torch.zeros(3, device=device))
                alive = weakref.ref(cycle)
                del cycle
                graph = pcg.capture(lambda x: [x + [[] for _ in range(2000)].__len__()], torch.zeros(3, device=device))
                assert alive() is not None  # the dead cycle, and the graph in it, were not collected during a capture
                1 / (0 if fails else 1)
        assert gc.isenabled() == enabled
        gc.collect()
        assert alive() is None
        graph.replay()
        assert graph.output[0].tolist() == [2000] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("view", [torch.conj, lambda t: t.conj().imag, torch.Tensor.t], ids=["conj", "neg", "t"])
def test_a_weak_reference_to_a_lazy_view(view, device):
    tensor = view(torch.randn(3, 4, dtype=torch.complex64, device=device))
    assert torch.equal(pcg.weak_ref(tensor), tensor)
