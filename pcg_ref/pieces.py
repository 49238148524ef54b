"""The life of one piece at one size.

A piece that is not a split operator walks, for each capture size, through the same stations: a general-shape run, compilation, a
warm-up, capture, and from then on replay. Every call computes the piece exactly once, whatever its station, so a walk by calls leaves
the same state behind as eager calls would. This module does not know the order of the pieces; that is the split module's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx, nn

from pcg_ref.compilers import EagerCompiler
from pcg_ref.effects import Effects, effects
from pcg_ref.explain import source_line
from pcg_ref.graphs import CapturedGraph, capture
from pcg_ref.ops import python_body
from pcg_ref.pools import GraphPool, weak_ref
from pcg_ref.segments import Bridge, EagerSegment, GraphSegment
from pcg_ref.splitting import SplitItem


@dataclass
class ConcreteSizeEntry:
    """One piece at one size. The field names are SGLang's (``compilation/cuda_piecewise_backend.py``).

    Attributes:
        runtime_shape: The size, in tokens.
        runnable: What runs before capture: the compiled piece for the general shape.
        compiled: Whether ``runnable`` is there.
        num_finished_warmup: Uncaptured runs at this size.
        cudagraph: The captured piece; stays ``None`` for a piece that launches nothing.
        output: Its result at fixed addresses, as weak references once captured.
        input_addresses: Addresses of its tensor inputs at capture, in order.
        replays: Replays so far, by calls of the piece.
    """

    runtime_shape: int
    runnable: Callable | None = None
    compiled: bool = False
    num_finished_warmup: int = 0
    cudagraph: CapturedGraph | None = None
    output: object = None
    input_addresses: list[int] | None = None
    replays: int = 0

    @property
    def state(self) -> str:
        """``"new"``, ``"compiled"``, ``"warm"`` or ``"captured"``."""
        if self.input_addresses is not None:
            return "captured"
        return "warm" if self.num_finished_warmup else "compiled" if self.compiled else "new"


@dataclass(frozen=True)
class Event:
    """One step of a walk, for the timeline: when (seconds, ``time.perf_counter``), which piece, which size, what, how long (ms)."""

    start: float
    piece: str
    size: int
    what: str
    duration_ms: float


@dataclass
class Shared:
    """What all pieces of one model share."""

    capture_sizes: frozenset[int]
    compiler: object
    pool: GraphPool
    debug: bool = False
    events: list[Event] = field(default_factory=list)
    segments: dict[int, list] = field(default_factory=dict)  # size -> segments, in the order in which their capture ended
    size: int = 0  # of the call in progress
    capturing: bool = False  # whether the call in progress is the one that captures this size

    def timed(self, piece: str, what: str, run: Callable):
        start = time.perf_counter()
        result = run()
        self.events.append(Event(start, piece, self.size, what, (time.perf_counter() - start) * 1e3))
        return result


class PiecewiseBackend(nn.Module):
    """A piece that becomes a graph: stands in the split module in place of the piece's FX graph."""

    def __init__(self, item: SplitItem, shared: Shared) -> None:
        super().__init__()
        self.name, self.shared = item.submod_name, shared
        self.graph: fx.GraphModule = item.graph
        self.effects: Effects = effects(item.graph) or Effects(("unknown",), frozenset(), ())
        self.entries = {size: ConcreteSizeEntry(size) for size in sorted(shared.capture_sizes)}
        self._general: Callable | None = None

    def forward(self, *args):
        shared = self.shared
        if self._general is None:
            # A piece that launches nothing gives a compiler nothing to do.
            compiler = shared.compiler if self.effects.launches else EagerCompiler()
            self._general = compiler.compile(self.graph)
            return shared.timed(self.name, "general", lambda: self._general(*args))
        entry = self.entries.get(shared.size)
        if entry is None:
            return self._general(*args)
        if not entry.compiled:
            entry.runnable, entry.compiled = self._general, True
        if entry.state == "captured":
            if shared.debug:
                self._compare_addresses(entry, args)
            if entry.cudagraph is not None:
                entry.cudagraph.replay()
            entry.replays += 1
            return entry.output
        if not shared.capturing:
            entry.num_finished_warmup += 1
            with shared.pool.on_stream():  # on the capture's stream: its library workspaces then lie outside the pool
                return shared.timed(self.name, "warm-up", lambda: entry.runnable(*args))
        return shared.timed(self.name, "capture", lambda: self._capture(entry, args))

    def _capture(self, entry: ConcreteSizeEntry, args: tuple):
        """Capture, then replay once: what follows, eager segments above all, must see real numbers and not uninitialised memory."""
        if self.effects.launches:
            graph = capture(entry.runnable, *args, pool=self.shared.pool)
            graph.replay()
            output, graph.output = graph.output, None
            entry.cudagraph = graph
            self.shared.segments[entry.runtime_shape].append(GraphSegment(self.name, graph))
        else:
            # Views, sizes and allocations: their results are constants of this size, and an empty graph would be launched for nothing.
            output = entry.runnable(*args)
        # subtle: the caller gets the owning tensors, so that the pool keeps them until their last reader is captured; the entry keeps
        # weak ones, so that afterwards their memory serves the next piece and the next size. What is not the pool's stays owned.
        entry.output = weak_ref(output, self.shared.pool)
        entry.input_addresses = [a.data_ptr() for a in args if isinstance(a, torch.Tensor)]
        return output

    def _compare_addresses(self, entry: ConcreteSizeEntry, args: tuple) -> None:
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        tensors = [(node, a.data_ptr()) for node, a in zip(placeholders, args) if isinstance(a, torch.Tensor)]
        for (node, address), captured in zip(tensors, entry.input_addresses):
            if address != captured:
                reader = next((str(user.target) for user in node.users), "nothing")
                raise RuntimeError(
                    f"input {node.name} of {self.name}, first read by {reader}, is at {address:#x}, and was at {captured:#x} when size "
                    f"{entry.runtime_shape} was captured; its graph reads the old address\n  at {source_line(node)}"
                )


class EagerPiece(nn.Module):
    """A piece of split operators: runs as Python at every call, and keeps its results where the next graph reads them."""

    def __init__(self, item: SplitItem, shared: Shared) -> None:
        super().__init__()
        self.name, self.shared, self.graph = item.submod_name, shared, item.graph
        nodes = item.graph.graph.nodes
        where = next((source_line(node) for node in nodes if node.op == "call_function"), "")
        tensors = [n.name for n in nodes if n.op == "placeholder" and isinstance(n.meta.get("example_value"), torch.Tensor)]
        name = f"{self.name} ({operators(item.graph)})"
        self.bridges = {size: Bridge(name, where=where, arguments=tensors) for size in shared.capture_sizes}

    def forward(self, *args):
        bridge = self.bridges.get(self.shared.size)
        if bridge is None:
            return self.graph(*args)
        result = bridge.call(self.graph, args, {})
        if self.shared.capturing:
            segment = EagerSegment(self.name, self._flat(bridge, weak_ref(args, self.shared.pool)), bridge)
            self.shared.segments[self.shared.size].append(segment)
        return result

    def _flat(self, bridge: Bridge, args: Sequence) -> Callable:
        """The cheapest callable that does the same: operators that return nothing are called by their Python bodies, directly."""
        values = dict(zip(self.graph.graph.find_nodes(op="placeholder"), args))
        calls = []
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and (body := python_body(operator := _overload(node.target))) and not node.users:
                positional, named = _as_declared(operator, *fx.map_arg((node.args, node.kwargs), values.__getitem__))
                calls.append(partial(body, *positional, **named))
            elif node.op not in ("placeholder", "output"):
                return partial(bridge.call, self.graph, args, {})
        return calls[0] if len(calls) == 1 else partial(_each, calls)


def _each(calls: list[Callable]) -> None:
    for call in calls:
        call()


def _as_declared(operator: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[list, dict]:
    """What the dispatcher would hand to the body: an integer where the schema says float is a float there."""
    floats = [argument.name for argument in operator._schema.arguments if isinstance(argument.type, torch.FloatType)]
    names = [argument.name for argument in operator._schema.arguments]
    declared = lambda name, value: float(value) if name in floats and isinstance(value, int) else value  # noqa: E731
    return [declared(name, value) for name, value in zip(names, args)], {name: declared(name, value) for name, value in kwargs.items()}


def _overload(target: object) -> object:
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) and "default" in target.overloads() else target


def operators(graph: fx.GraphModule) -> str:
    """The operators that a piece calls, for messages."""
    return ", ".join(str(n.target).removesuffix(".default") for n in graph.graph.nodes if isinstance(n.target, _OPERATORS))


_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
