"""The one artifact that every strategy ends in: a flat sequence of graph segments and eager segments over fixed addresses.

Replay is a loop. Whatever found the boundaries (a compiler, the capture itself, nobody) is gone by then, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pcg_ref.graphs import CapturedGraph


@dataclass(frozen=True, eq=False)
class GraphSegment:
    """Device work that is submitted as one graph.

    Attributes:
        name: The piece it came from.
        graph: The captured region; the segment keeps it, and with it its memory, alive.
    """

    name: str
    graph: CapturedGraph

    @property
    def replay(self) -> Callable[[], None]:
        return self.graph.replay


class Bridge:
    """Calls the function of an eager segment, and keeps its results where the next graph reads them.

    The next graph reads where the results were at capture. What the function writes into its arguments is there again by itself; what
    it returns in fresh memory is somewhere else each time, and is copied to a buffer that stays.

    Args:
        name: What is called, for messages.
        on_fresh_output: ``"bridge"``, or ``"error"`` to refuse fresh results.
        where: The user's line, for messages.
        arguments: Names of the tensor arguments, for messages.

    Attributes:
        buffers: The buffers, by the result's place among the results.
    """

    def __init__(self, name: str, on_fresh_output: str = "bridge", where: str = "", arguments: Sequence[str] = ()) -> None:
        self.name, self.on_fresh_output, self.where, self.arguments = name, on_fresh_output, where, arguments
        self.buffers: dict[int, torch.Tensor] = {}
        self._constants: dict[int, object] | None = None
        self._places: dict[int, tuple | None] = {}
        self._state: dict[int, int] = {}  # results that are neither an argument nor new, and where they are

    def call(self, function: Callable, args: tuple, kwargs: Mapping, made: Container[int] | None = None) -> object:
        """``function(*args, **kwargs)``, with its fresh tensors replaced by the buffers.

        Args:
            function: What is called.
            args: Its arguments.
            kwargs: Its keyword arguments.
            made: At the first call: addresses of the memory that the function allocates. Results elsewhere are state that was there before
                and stay what they are. By default every result that is in no argument is taken for fresh.

        Raises:
            RuntimeError: Fresh memory under ``"error"``; a tensor of another shape or dtype, or in another argument's memory, than at the
                first call; an argument that the function gave other memory; or a result that is no tensor and has changed, because the
                graphs have its first value in them.
        """
        tensors = [(i, leaf) for i, leaf in enumerate(tree_leaves((args, kwargs))) if isinstance(leaf, torch.Tensor)]
        before = [_place(tensor) for _, tensor in tensors]
        leaves, spec = tree_flatten(function(*args, **kwargs))
        if (after := [_place(tensor) for _, tensor in tensors]) != before:
            self._refuse_moved(before, after)
        memory = {address: i for (address, _, _), (i, _) in zip(before, tensors)}
        constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        if self._constants is not None and constants != self._constants:
            raise self._error(
                f"{self.name} returned {constants}, and {self._constants} when the graphs were captured; a value that changes must be "
                f"a tensor"
            )
        self._constants = constants
        fresh = [_address(leaf) for i, leaf in enumerate(leaves) if i not in constants and _address(leaf) not in memory and leaf.numel()]
        if len(set(fresh)) < len(fresh):
            raise self._error(f"{self.name} returns several tensors in the same fresh memory, which buffers would part; return copies")
        for i, leaf in enumerate(leaves):
            if made is not None and i not in constants and leaf.numel() and _address(leaf) not in made and _address(leaf) not in memory:
                self._state[i] = _address(leaf)
            if i in self._state:
                memory[self._state[i]] = f"state at {self._state[i]:#x}"
        kept = [leaf if i in constants else self._settle(i, leaf, memory.get(_address(leaf))) for i, leaf in enumerate(leaves)]
        return tree_unflatten(kept, spec)

    def _refuse_moved(self, before: list[tuple], after: list[tuple]) -> None:
        i = next(i for i, (old, new) in enumerate(zip(before, after)) if old != new)
        name = self.arguments[i] if i < len(self.arguments) else f"tensor argument {i}"
        (old, _, shape), (new, _, new_shape) = before[i], after[i]
        raise self._error(
            f"{self.name} gave {name} other memory: it is at {new:#x} with shape {list(new_shape)}, and was at {old:#x} with "
            f"{list(shape)}; the graphs read the old address. Write into it (copy_) instead of set_, resize_ or .data"
        )

    def _settle(self, i: int, result: torch.Tensor, argument: int | str | None) -> torch.Tensor:
        # subtle: a function may return its argument for one batch and something new for the next; the graph reads one place.
        view = (argument, result.storage_offset(), result.shape, result.stride(), result.dtype)
        place = None if argument is None else view
        if self._places.setdefault(i, place) != place:
            raise self._error(
                f"result {i} of {self.name} is {'in other memory' if place is None else 'a view of what it was given'} now, and was "
                f"elsewhere when the graphs were captured; return fresh memory always, or always the same view"
            )
        return self._keep(i, result) if argument is None else result

    def _keep(self, i: int, result: torch.Tensor) -> torch.Tensor:
        if self.on_fresh_output == "error":
            raise self._error(
                f"{self.name} returns fresh memory, and the next graph would read the old address: let it write into an argument, or "
                f"allow on_fresh_output='bridge'"
            )
        buffer = self.buffers.get(i)
        if buffer is None:
            # A real allocation outside every pool: no captured segment produces it, so nothing may reuse it.
            buffer = self.buffers[i] = torch.empty_like(result)  # keeps the strides unless they overlap, as an expanded tensor's do
        if (buffer.shape, buffer.dtype) != (result.shape, result.dtype):
            raise self._error(
                f"result {i} of {self.name} is {result.dtype} {list(result.shape)}, and was {buffer.dtype} {list(buffer.shape)} when "
                f"the graphs were captured; shapes are frozen"
            )
        # subtle: an object of the caller's own on the buffer's memory; its t_() or unsqueeze_() would give ours another shape.
        return buffer.copy_(result).detach()

    def _error(self, message: str) -> RuntimeError:
        return RuntimeError(f"{message}\n  at {self.where}" if self.where else message)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    return _address(tensor), tensor.storage_offset(), tensor.shape


@dataclass(frozen=True, eq=False)
class EagerSegment:
    """Work that runs as Python at every replay, between two graphs.

    Attributes:
        name: The piece it came from.
        replay: Runs it.
        bridge: The buffers of its fresh results, if it has any.
    """

    name: str
    replay: Callable[[], object]
    bridge: Bridge | None = None


@dataclass(eq=False)
class SegmentSequence:
    """What is left of a model at one bucket: segments in order, over fixed addresses.

    Attributes:
        segments: ``GraphSegment`` and ``EagerSegment`` objects in the order of execution.
        output: What the model returned at capture, as weak references; every replay overwrites it.
        keeps: Whatever must stay alive and is owned by no segment (static inputs, parameters).
    """

    segments: list[GraphSegment | EagerSegment]
    output: object
    keeps: object = None
    _steps: list[Callable] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = [segment.replay for segment in self.segments]

    @torch.no_grad()
    def replay(self) -> object:
        """Run every segment. Reads the static inputs; returns ``output``, valid until the next replay of any sequence of the pool.

        Raises:
            Exception: Whatever the body of an eager segment raises; the sequence can be replayed again.
        """
        for step in self._steps:
            step()
        return self.output

    @property
    def num_graphs(self) -> int:
        return sum(isinstance(segment, GraphSegment) for segment in self.segments)

    @property
    def num_eager(self) -> int:
        return len(self.segments) - self.num_graphs

    def bridged(self) -> dict[str, int]:
        """The bytes of the buffers behind each function that returns fresh memory, by the function's name."""
        found: dict[str, int] = {}
        for segment in self.segments:
            if isinstance(segment, EagerSegment) and segment.bridge and segment.bridge.buffers:
                name = segment.bridge.name
                found[name] = found.get(name, 0) + sum(t.nbytes for t in segment.bridge.buffers.values())
        return found

    def bridged_bytes(self) -> int:
        """Memory of all bridge buffers."""
        return sum(self.bridged().values())
