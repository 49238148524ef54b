"""Capture and replay of one region, on CUDA and on CPU.

A captured region is device work with frozen addresses and shapes. ``capture`` records one; ``CapturedGraph.replay`` submits it again.
This module knows nothing of FX graphs, pieces or buckets.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, suppress

import torch
from torch.utils._pytree import tree_leaves

from pcg_ref.compilers import CompiledPiece
from pcg_ref.pools import GraphPool, capture_lock
from pcg_ref.tape import CaptureError, Tape, TapeRecorder


class CapturedGraph:
    """One captured region.

    Attributes:
        pool: Its ``GraphPool``.
        replay: Call it to submit the region again: it reads its inputs and writes ``output`` where they were at capture, and checks
            nothing. The recording's own bound method, because a call more would be paid at every replay.
        output: What the region returned, at its fixed addresses; uncomputed until the first replay, overwritten by every one.
        empty: Whether the region launched nothing.
    """

    def __init__(self, pool: GraphPool, replay: Callable[[], None], empty: bool) -> None:
        self.pool, self.replay, self.empty = pool, replay, empty
        self.output: object = None


class CudaGraph(CapturedGraph):
    """A region captured by ``torch.cuda.CUDAGraph``, which is ``graph``."""

    def __init__(self, pool: GraphPool, graph: torch.cuda.CUDAGraph, empty: bool) -> None:
        super().__init__(pool, graph.replay, empty)
        self.graph = graph


class TapeGraph(CapturedGraph):
    """A region recorded on a ``Tape``, which is ``tape``: the CPU simulation of a CUDA graph."""

    def __init__(self, pool: GraphPool, tape: Tape) -> None:
        super().__init__(pool, tape.replay, empty=not tape.calls)
        self.tape = tape


class _CudaRecorder:
    """Captures what a ``with`` block launches, into one graph after the other, on the pool's side stream."""

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stack = ExitStack()

    def __enter__(self) -> _CudaRecorder:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("a capture is already running; captures do not nest")
        self._stack.enter_context(self.pool.on_stream())
        return self

    def begin(self) -> None:
        capture_lock.acquire()
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")

    def end(self) -> CudaGraph:
        graph, self._graph = self._graph, None
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                graph.capture_end()
        except RuntimeError as error:
            self._repair()
            raise CaptureError(
                f"CUDA ended the capture with an error: {str(error).splitlines()[0]}\nEither something in the region was not permitted, "
                f"or it forked a side stream and did not join it (current_stream.wait_stream(side_stream)) before its end"
            ) from error
        finally:
            capture_lock.release()
        # An empty graph is known by torch's warning alone; a graph's nodes can be counted only through the driver's own interface.
        return CudaGraph(self.pool, graph, empty=any("graph is empty" in str(w.message).lower() for w in caught))

    def suspended(self):
        return nullcontext()  # between two captures, work runs by itself

    def __exit__(self, kind, error, trace) -> None:
        try:
            if self._graph is not None:  # an exception left the region
                with suppress(CaptureError):
                    self.end()
        finally:
            self._stack.close()
        if isinstance(error, torch.AcceleratorError):
            raise CaptureError(
                f"{str(error).splitlines()[0]}: the region needs a value on the host, or waits for the device, while it is captured. "
                f"Move that out of the region, or into an eager segment"
            ) from error

    def _repair(self) -> None:
        # subtle: a capture that CUDA itself has invalidated ends with an error before torch has told its allocators and its random
        # generator, which would fail later and far from here. The device's allocator is told here (private: nothing public does it), the
        # generator by the next capture that succeeds, and the pinned-memory allocator cannot be: it refuses this pool's name for good.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.pool.device.index, self.pool.handle)
        self.pool.renew()


class _TapeGraphRecorder(TapeRecorder):
    """The same on a tape."""

    def __init__(self, pool: GraphPool) -> None:
        super().__init__(pool.arena)
        self.pool = pool

    def end(self) -> TapeGraph:
        return TapeGraph(self.pool, super().end())


def recorder(pool: GraphPool) -> _CudaRecorder | _TapeGraphRecorder:
    """A context manager in which ``begin()`` starts a region and ``end()`` returns it captured; ``suspended()`` is for work between."""
    return _CudaRecorder(pool) if pool.stream is not None else _TapeGraphRecorder(pool)


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
        RuntimeError: CUDA refused an operation during capture. Further captures and random numbers work as before.
        ValueError: Neither ``args`` nor ``pool`` says on which device.
    """
    devices = {a.device for a in tree_leaves(args) if isinstance(a, torch.Tensor)} | ({pool.device} if pool else set())
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise CaptureError(f"a region runs on one device, but its arguments and pool are on {sorted(map(str, devices))}")
    if not kinds:
        raise ValueError("capture needs to know the device: pass the static input tensors as arguments, or pool=GraphPool(device)")
    pool = pool or GraphPool(next(iter(devices)))
    if isinstance(region, CompiledPiece) and pool.stream is None:
        tape = Tape(pool.arena)  # dispatch cannot look into generated code: one entry, with the shapes of its graph
        output = tape.append_compiled(region, args)
        graph = TapeGraph(pool, tape)
    else:
        with recorder(pool) as recording:
            recording.begin()
            output = region(*args)
            graph = recording.end()
    graph.output = output
    return graph


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
