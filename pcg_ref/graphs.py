"""Capture and replay of one region, on CUDA and on CPU, and the memory that captured regions share.

A captured region is device work with frozen addresses and shapes. ``capture`` records one; ``CapturedGraph.replay`` submits it again.
This module knows nothing of FX graphs, pieces or buckets.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from pcg_ref.compilers import CompiledPiece
from pcg_ref.tape import Arena, CaptureError, Tape, alias_of_host_memory


class GraphPool:
    """Memory shared by captured regions that are never replayed at the same time.

    Args:
        device: Where the regions run.

    Attributes:
        device: The device.
        stream: The side stream of every capture on CUDA, ``None`` on CPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
            self.handle = torch.cuda.graph_pool_handle()
        elif self.device.type == "cpu":
            self.stream = None
            self.arena = Arena()
        else:
            raise ValueError(f"no capture on device {str(device)!r}: use 'cuda', or 'cpu' for the simulation")

    @property
    def bytes(self) -> int:
        """Device memory reserved by the pool, in bytes."""
        if self.stream is None:
            return self.arena.bytes
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(self.handle))

    @contextmanager
    def on_stream(self):
        """Run the block on the side stream, ordered after what came before and before what comes after."""
        if self.stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)


class CapturedGraph:
    """One captured region.

    Attributes:
        pool: Its ``GraphPool``.
        output: What the region returned, at its fixed addresses; uncomputed until the first replay, overwritten by every one.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self.output: object = None

    def replay(self) -> None:
        """Submit the region again. It reads its inputs and writes ``output`` where they were at capture; nothing is checked."""
        raise NotImplementedError


class CudaGraph(CapturedGraph):
    """A region captured by ``torch.cuda.CUDAGraph`` on the pool's side stream."""

    def __init__(self, pool: GraphPool, region: Callable, args: tuple) -> None:
        super().__init__(pool)
        self.graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda._utils._get_device_index(pool.device, optional=True)]
        before = generator.clone_state()
        with pool.on_stream():
            self.graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                self.output = region(*args)
            except BaseException:
                self._abandon(generator, before)
                raise
            self.graph.capture_end()
        self.replay = self.graph.replay  # the bound method itself: a call less for each replay

    def _abandon(self, generator: torch.Generator, before: torch.Generator) -> None:
        try:
            self.graph.capture_end()
        except RuntimeError:
            # subtle: a capture that CUDA itself has invalidated ends with an error before torch has put back the allocator and the
            # generator; left so, the next allocation or random number fails far from here.
            torch._C._cuda_endAllocateToPool(self.pool.device.index or 0, self.pool.handle)  # private: nothing public ends it
            generator.graphsafe_set_state(before)


class TapeGraph(CapturedGraph):
    """A region recorded on a ``Tape``: the CPU simulation of a CUDA graph."""

    def __init__(self, pool: GraphPool, region: Callable, args: tuple) -> None:
        super().__init__(pool)
        self.tape = Tape(pool.arena)
        if isinstance(region, CompiledPiece):
            self.output = self.tape.append_compiled(region, args)
        else:
            with self.tape.record():
                self.output = region(*args)
        self.replay = self.tape.replay


def capture(region: Callable, *args, pool: GraphPool | None = None) -> CapturedGraph:
    """Record one call of ``region(*args)`` without running it.

    ``region`` is called once. Call it once before, uncaptured, so that libraries set themselves up outside the graph.

    Args:
        region: A function of tensors that launches device work and never waits for it.
        args: Its arguments; the tensors among them are the static inputs, whose addresses are frozen.
        pool: Memory to share with other regions; one of its own by default.

    Returns:
        A ``CudaGraph`` for CUDA tensors, a ``TapeGraph`` for CPU tensors.

    Raises:
        CaptureError: The region needs the host (CPU simulation), or tensors of both kinds were given.
        RuntimeError: CUDA refused an operation during capture.
        ValueError: Neither ``args`` nor ``pool`` says on which device.
    """
    devices = {a.device for a in tree_leaves(args) if isinstance(a, torch.Tensor)} | ({pool.device} if pool else set())
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise CaptureError(f"a region runs on one device, but its arguments and pool are on {sorted(map(str, devices))}")
    if not kinds:
        raise ValueError("capture needs to know the device: pass the static input tensors as arguments, or pool=GraphPool(device)")
    kind = CudaGraph if kinds == {"cuda"} else TapeGraph
    return kind(pool or GraphPool(next(iter(devices))), region, args)


def weak_ref(value: object) -> object:
    """Every tensor in ``value`` replaced by an alias on the same memory that does not keep it alive.

    Capture keeps its results this way, so that one region's memory can serve the next; a captured graph holds its pool, and so the
    alias stays valid for as long as the graph lives. Mirrors ``weak_ref_tensors`` of SGLang and vLLM, which is a compiled extension.
    """
    return tree_map_only(torch.Tensor, lambda t: _alias_of_device_memory(t) if t.is_cuda else alias_of_host_memory(t), value)


class _DeviceMemory:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def _alias_of_device_memory(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    usable = storage.nbytes() // tensor.element_size() * tensor.element_size()
    flat = torch.as_tensor(_DeviceMemory(storage.data_ptr(), usable), device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def gc_held_off():
    """Collect garbage once, then hold the collector off until the block ends, also by an exception.

    A collection during capture may free a CUDA graph or a tensor of another stream, which is not permitted there, and one per piece
    makes capture slow.
    """
    enabled = gc.isenabled()
    if enabled:  # and not inside another such block
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
