"""The model made of pieces: stitched by the split module, or walked to the end and laid flat.

Letters: ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from pcg_ref.compilers import COMPILERS
from pcg_ref.effects import effects
from pcg_ref.explain import source_line
from pcg_ref.graphs import gc_held_off
from pcg_ref.pieces import ConcreteSizeEntry, EagerPiece, Event, PiecewiseBackend, Shared, operators
from pcg_ref.pools import GraphPool, weak_ref
from pcg_ref.segments import SegmentSequence
from pcg_ref.splitting import SplitItem, split_graph
from pcg_ref.tracing import Trace


class PiecewiseModel:
    """A traced model, cut and captured piece by piece.

    Calling it runs the *stitched* path, which is SGLang's: Dynamo's guards, the split module, each piece's own dispatch. ``capture``
    returns the flat sequence of the same graphs.

    Args:
        trace: The traced model.
        ops: Split operators as for ``split_graph``; the registry by default.
        compiler: ``"eager"`` or ``"inductor"``: what runs inside a piece.
        capture_sizes: Sizes of the dynamic dimension, each at least 2, at which pieces are captured.
        on_fresh_output: ``"bridge"`` copies a split operator's fresh result to a buffer that stays; ``"error"`` refuses it here.
        pool: Memory for the graphs; one of its own by default.
        allow_none: Accept a model without a split operator, as one piece.
        debug: At every stitched replay poison the pool first, and compare the address of every tensor input of every piece with that at
            capture. Slow.

    Attributes:
        split_module: The FX graph whose submodules are the pieces.
        items: The pieces, as ``split_graph`` returns them.
        entries: ``entries[piece][size]``, a ``ConcreteSizeEntry``, for each piece (``graph_id``) that is captured.
        events: The walk so far, in order.
        sequences: The flat sequence of each captured size.

    Raises:
        ValueError: An unknown compiler, a size below 2, no dynamic dimension, no split operator, a fresh output under ``"error"``, or an
            operator like ``t_()`` on a tensor that crosses a cut.
    """

    def __init__(
        self,
        trace: Trace,
        ops: Iterable[object] | None = None,
        compiler: str = "eager",
        capture_sizes: Iterable[int] = (),
        on_fresh_output: str = "bridge",
        pool: GraphPool | None = None,
        allow_none: bool = False,
        debug: bool = False,
    ) -> None:
        if compiler not in COMPILERS:
            raise ValueError(f"compiler={compiler!r}; choose one of {sorted(COMPILERS)}")
        sizes = frozenset(capture_sizes)
        if any(size < 2 for size in sizes):
            raise ValueError(f"capture_sizes {sorted(sizes)}: sizes 0 and 1 need a trace of their own; use sizes from 2 on")
        self.trace = trace
        self._dynamic = _find_dynamic_dim(trace)
        self.split_module, self.items = split_graph(trace.graph_module, ops, allow_none=allow_none)
        _refuse_changed_objects(self.items)
        if on_fresh_output == "error":
            _refuse_fresh_outputs(self.items)
        elif on_fresh_output != "bridge":
            raise ValueError(f"on_fresh_output={on_fresh_output!r}; choose 'bridge' or 'error'")
        device = next(value.device for value in trace.example_inputs if isinstance(value, torch.Tensor))
        self._shared = Shared(sizes, COMPILERS[compiler](), pool or GraphPool(device), debug)
        self.entries: dict[int, dict[int, ConcreteSizeEntry]] = {}
        self.sequences: dict[int, SegmentSequence] = {}
        self._inputs: dict[int, list] = {}  # size -> flat inputs at capture, kept alive because the graphs read them
        self._places: dict[int, list] = {}
        for item in self.items:
            piece = (EagerPiece if item.is_splitting_graph else PiecewiseBackend)(item, self._shared)
            setattr(self.split_module, item.submod_name, piece)
            if not item.is_splitting_graph:
                self.entries[item.graph_id] = piece.entries

    @property
    def events(self) -> list[Event]:
        return self._shared.events

    @property
    def pool(self) -> GraphPool:
        return self._shared.pool

    def __call__(self, *args):
        """One step of the walk, or once captured a replay. Equals the model either way.

        Once a size is captured its graphs read the tensors that were passed then: pass the same ones again, with new contents.
        What it then returns is graph memory, which the next call of any size overwrites.

        Raises:
            RuntimeError: A captured size is called with tensors, or a model with parameters, at other addresses or of other shapes than
                at capture.
            RecompileError: A guard of the frozen trace failed.
        """
        return self.trace.call(self._run, *args)

    def _run(self, *flat):
        shared = self._shared
        shared.size = int(flat[self._dynamic[0]].shape[self._dynamic[1]])
        if shared.size in self._inputs:
            self._check_inputs(flat)
            if shared.debug:
                self.pool.poison()
            return self.split_module(*flat)
        if not self._ready_to_capture():
            return self.split_module(*flat)
        shared.capturing, shared.segments[shared.size] = True, []
        try:
            with gc_held_off():
                result = self.split_module(*flat)
            self._inputs[shared.size], self._places[shared.size] = list(flat), _places(flat)
            if self._inputs.keys() == shared.capture_sizes:
                self.trace.freeze()  # from here on a second trace could only be a mistake
            return result
        except BaseException:
            self._forget(shared.size)  # nothing half-captured is ever replayed
            raise
        finally:
            shared.capturing = False

    def _ready_to_capture(self) -> bool:
        entries = [by_size.get(self._shared.size) for by_size in self.entries.values()]
        return self._shared.size in self._shared.capture_sizes and all(entry.num_finished_warmup for entry in entries)

    def _forget(self, size: int) -> None:
        for by_size in self.entries.values():
            by_size[size].__init__(size)
        self._shared.segments.pop(size, None)
        self.sequences.pop(size, None)

    def _check_inputs(self, flat: Sequence) -> None:
        captured, now = self._places[self._shared.size], _places(flat)
        if captured == now:
            return
        i = next(i for i, (old, new) in enumerate(zip(captured, now)) if old != new)
        name, size = self.trace.input_names[i], self._shared.size
        where = source_line(self.trace.graph_module.graph.find_nodes(op="placeholder")[i])
        if not isinstance(flat[i], torch.Tensor):
            raise RuntimeError(f"{name} is {now[i]}, and was {captured[i]} when size {size} was captured; it is frozen into the graphs")
        if captured[i][0] == now[i][0]:
            raise RuntimeError(
                f"{name} has shape and strides {now[i][1:]}, and had {captured[i][1:]} when size {size} was captured; one dimension is a "
                f"size, all others are frozen"
            )
        raise RuntimeError(
            f"{name} is at {now[i][0]:#x}, and was at {captured[i][0]:#x} when size {size} was captured; the graphs read the old "
            f"address. Copy into the captured tensor ({name}.copy_), or build and capture anew\n  first read at {where}"
        )

    @cached_property
    def written(self) -> list[torch.Tensor]:
        """What the traced program writes to beside its arguments: buffers, and tensors that any other object keeps."""
        found = effects(self.trace.graph_module)
        placeholders = self.trace.graph_module.graph.find_nodes(op="placeholder")
        own = [i for i in (found.mutated if found else ()) if placeholders[i].meta.get("owner") != "static input"]
        return [self.trace.example_inputs[i] for i in own]

    def capture(self, *args) -> SegmentSequence:
        """Walk one size to the end and return its flat sequence.

        Args:
            args: The static inputs of this size; their memory is read at every replay.

        Returns:
            The sequence, also kept in ``sequences``. Replaying it takes no guard, no split module and no dispatch.

        Raises:
            ValueError: The size is not in ``capture_sizes``.
            RecompileError: The trace's guards refuse this size, or what the model reads beside its inputs has changed.

        Side effects: the model runs up to three times on ``args``.
        """
        self.trace.freeze()  # a second trace would run whole, uncut, and never be captured
        result = self(*args)
        size = self._shared.size
        if size not in self._shared.capture_sizes:
            raise ValueError(f"size {size} is not one of the capture_sizes {sorted(self._shared.capture_sizes)}")
        while size not in self._inputs:
            result = self(*args)
        if size not in self.sequences:
            allocated = [by_size[size].output for by_size in self.entries.values()]  # what pieces without a graph allocated
            keeps = (self._inputs[size], allocated)
            self.sequences[size] = SegmentSequence(self._shared.segments[size], weak_ref(result, self.pool), keeps)
        return self.sequences[size]


def _find_dynamic_dim(trace: Trace) -> tuple[int, int]:
    """The first flat input, and its dimension, that has a symbolic size."""
    for i, node in enumerate(trace.graph_module.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    return i, dim
    raise ValueError("the trace has no dynamic dimension; trace with dynamic_dims={argument: dimension}")


def _refuse_changed_objects(items: Sequence[SplitItem]) -> None:
    """A graph replays what is done to memory. ``t_()`` is done to the tensor object, and other pieces have the one of before."""
    for item in items:
        for node in item.graph.graph.nodes:
            name = node.target._schema.name.split("::")[-1] if isinstance(node.target, torch._ops.OpOverload) else node.target
            tensor = node.args[0] if node.op.startswith("call_") and node.args and name in _CHANGES_THE_OBJECT else None
            if isinstance(tensor, fx.Node) and tensor.op == "placeholder":
                raise ValueError(
                    f"{name}() changes the tensor object {tensor.name!r}, which another piece or the caller has made, and no graph can "
                    f"hold that; write y = x.{name.removesuffix('_')}(...)\n  at {source_line(node)}"
                )


_CHANGES_THE_OBJECT = frozenset("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ resize_ resize_as_ set_".split())


def _refuse_fresh_outputs(items: Sequence[SplitItem]) -> None:
    for item in items:
        found = effects(item.graph) if item.is_splitting_graph else None
        outputs = tree_leaves(item.graph.graph.find_nodes(op="output")[0].args)
        for node, source in zip(outputs, found.sources if found else ()):
            if source is None and isinstance(node.meta.get("example_value"), torch.Tensor):
                raise ValueError(
                    f"{operators(item.graph)} returns {node.name!r} in fresh memory, and the next graph would read the old address: "
                    f"let the operator write into an argument (mutates_args), or allow on_fresh_output='bridge'"
                )


def _places(flat: Sequence) -> list:
    """What of each input is frozen at capture: a tensor's address, shape and strides, any other value itself."""
    return [(v.data_ptr(), tuple(v.shape), v.stride()) if isinstance(v, torch.Tensor) else v for v in flat]
