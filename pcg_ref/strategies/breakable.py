"""``breakable``: the capture itself finds the boundaries. No compiler, no FX graph: a marked function ends the graph and starts the next.

Mirrors SGLang's ``BreakableCudaGraphBackend``, vLLM's ``BreakableCUDAGraphCapture`` and meta-pytorch's piecewise-cuda-graphs. Unlike
there, each segment is replayed as soon as it is captured, so that the eager code after it sees real numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pcg_ref.breaks import break_handler
from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.explain import RecompileError
from pcg_ref.graphs import gc_held_off, recorder
from pcg_ref.ops import python_body, split_ops
from pcg_ref.pools import GraphPool, weak_ref
from pcg_ref.segments import Bridge, EagerSegment, GraphSegment, SegmentSequence
from pcg_ref.state import Reads
from pcg_ref.strategies import stand_in
from pcg_ref.tape import CaptureError


def capture_breakable(region: Callable, *args, pool: GraphPool, on_fresh_output: str = "bridge") -> SegmentSequence:
    """Record one call of ``region(*args)`` as graph segments around its eager breaks.

    Args:
        region: A function of tensors; marked functions (``eager_on_graph``) and split operators break the graph. An operator that
            torch takes apart before it dispatches (``CompositeImplicitAutograd``) is never seen, and needs a marked function around it.
        args: Its static inputs.
        pool: Memory for the graphs.
        on_fresh_output: ``"bridge"`` copies what a break returns in fresh memory to a buffer that stays; ``"error"`` refuses it.

    Returns:
        The sequence. Segments that launch nothing are left out.

    Raises:
        CaptureError: A nested capture, a side stream that was not joined before a break, or a graph that reads a tensor which a break has
            made and not returned.
        RuntimeError: See ``Bridge.call``; a fresh result under ``"error"`` among others.
        Exception: Whatever the region raises. Nothing is kept of a capture that failed.

    Side effects: the region's work, graphs and breaks, is done once, on ``args``.
    """
    capture = _BreakableCapture(pool, on_fresh_output)
    token = break_handler.set(capture.run_break)
    try:
        with recorder(pool) as capture.recording, torch.no_grad(), _SplitOps(capture.hidden):
            capture.recording.begin()
            output = region(*args)
            capture.end_graph()
    finally:
        break_handler.reset(token)
    return SegmentSequence(capture.segments, weak_ref(output, pool), keeps=(args, region))


class _SplitOps(TorchDispatchMode):
    """Makes every call of a split operator a break, whoever has defined it, and looks at what graphs read.

    A break may leave a tensor somewhere else than among its results, in a list or in an attribute; a graph would read the first one for
    ever.
    """

    def __init__(self, hidden: dict[int, str]) -> None:
        super().__init__()
        self.hidden = hidden  # memory that breaks have made and not returned: its address, and which break

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        handler = break_handler.get()
        if handler is not None and func in split_ops():
            return handler(python_body(func) or func, args, kwargs or {})
        if handler is not None and self.hidden:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and (name := self.hidden.get(leaf.untyped_storage().data_ptr())):
                    raise CaptureError(
                        f"{func._schema.name} reads a tensor that {name} has made and left somewhere else than among its results; replay "
                        f"would read this very one for ever. Return it"
                    )
        return func(*args, **(kwargs or {}))


class _Made(TorchDispatchMode):
    """Notes the memory that operators return in a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, torch.Tensor] = {}  # kept meanwhile, so that no address is given twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (address := leaf.untyped_storage().data_ptr()) not in given:
                self.tensors[address] = leaf
        return result


class _BreakableCapture:
    """The segments so far, and the handler that adds to them."""

    def __init__(self, pool: GraphPool, on_fresh_output: str) -> None:
        self.pool, self.on_fresh_output = pool, on_fresh_output
        self.segments: list[GraphSegment | EagerSegment] = []
        self.hidden: dict[int, str] = {}

    def end_graph(self) -> None:
        graph = self.recording.end()
        if graph.empty:  # a break as the first thing, the last, or right after another
            return
        with self.recording.suspended():
            graph.replay()
        self.segments.append(GraphSegment(f"graph {len(self.segments)}", graph))

    def run_break(self, function: Callable, args: tuple, kwargs: dict) -> object:
        self.end_graph()
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
        operator = isinstance(function, torch._ops.OpOverload)
        name = str(function).removesuffix(".default") if operator else getattr(function, "__name__", str(function))
        bridge = Bridge(name, self.on_fresh_output, where)
        token = break_handler.set(None)  # a break inside a break is part of it
        try:
            with self.recording.suspended():
                with _Made() as made:
                    result = bridge.call(function, args, kwargs, made.tensors)
                returned = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
                self.hidden.update((address, bridge.name) for address in made.tensors)
                for address in returned:  # also where an earlier break's memory, free by now, has become this one's
                    self.hidden.pop(address, None)
                # subtle: held by address, or the arguments would keep this layer's memory from serving the next.
                args, kwargs = weak_ref((args, kwargs), self.pool)
        finally:
            break_handler.reset(token)
        self.segments.append(EagerSegment(bridge.name, partial(bridge.call, function, args, kwargs), bridge))
        self.recording.begin()
        return result


class BreakableStrategy:
    """Graphs between the eager breaks of the model's own Python.

    Args:
        model: Called as ``model(tokens[T], positions[T])``; need not be traceable.
        pool: Memory for the graphs.
        on_fresh_output: See ``capture_breakable``.
    """

    def __init__(self, model: Callable, pool: GraphPool, on_fresh_output: str = "bridge") -> None:
        self.model, self.pool, self.on_fresh_output = model, pool, on_fresh_output
        self.setup_s: dict[str, float] = {}  # nothing is traced or compiled
        self._reads = Reads()

    def capture(self, bucket: int, tokens: torch.Tensor, positions: torch.Tensor) -> SegmentSequence:
        """Capture one bucket; see ``Strategy.capture``."""
        with self.context(stand_in(self.model, tokens), bucket), gc_held_off(), torch.no_grad():
            with self.pool.on_stream(), self._reads:
                self.model(tokens, positions)  # warm-up
            return capture_breakable(self.model, tokens, positions, pool=self.pool, on_fresh_output=self.on_fresh_output)

    def refuses(self, batch: PackedBatch) -> str | None:
        """Nothing: eager segments read whatever the batch is."""
        return None

    def reads(self, tensor: torch.Tensor) -> bool:
        """See ``Strategy.reads``."""
        return tensor in self._reads

    def guarded_names(self) -> frozenset[str] | None:
        """Any: nobody has seen what the forward reads."""
        return None

    def check_guards(self, change: str, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """See ``Strategy.check_guards``."""
        raise RecompileError(change)

    def context(self, batch: PackedBatch, bucket: int) -> AbstractContextManager:
        """See ``Strategy.context``."""
        return forward_context(batch, bucket)
