"""What a piece does to memory, found by running its FX graph on fake tensors: nothing is computed.

Three answers that capture needs and the graph alone does not give: whether a device kernel is launched at all, which inputs are
written to, and whether an output is fresh memory or shares an input's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import (  # private: no public way to ask for shapes
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MEMORY_CHANGES = ("aten::resize_", "aten::resize_as_", "aten::set_")  # the tensor gets other memory
_ALLOCATIONS = ("aten::empty", "aten::new_empty")


def is_view(op: torch._ops.OpOverload) -> bool:
    """Whether the operator returns its argument's memory and neither reads nor writes it."""
    aliases = [r.alias_info for r in op._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def changes_the_object(op: torch._ops.OpOverload) -> bool:
    """Whether the operator changes its argument's sizes and strides and no memory, as ``t_()`` and ``unsqueeze_()`` do."""
    return torch.Tag.inplace_view in op.tags and op._schema.name not in MEMORY_CHANGES


def is_allocation(op: torch._ops.OpOverload) -> bool:
    """Whether the operator only reserves memory."""
    return op._schema.name.startswith(_ALLOCATIONS)


def written_arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that a call of the operator writes to, by its schema."""
    written = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for two tensors exactly when they share a storage; works for fake tensors, which have no address."""
    return tensor.untyped_storage()._cdata  # private: the address of the StorageImpl, the only identity a fake storage has


@dataclass(frozen=True)
class Effects:
    """What a piece does to memory.

    Attributes:
        launches: Names of the operators that launch device work, in order; empty for views, sizes and allocations alone.
        mutated: Indices of the inputs whose memory is written to.
        owners: For each output whose memory it is: ``("input", i)``, else ``("output", i)`` for the first output with that memory; or
            ``None`` for what is no tensor.
    """

    launches: tuple[str, ...]
    mutated: frozenset[int]
    owners: tuple[tuple[str, int] | None, ...]

    @property
    def sources(self) -> tuple[int | None, ...]:
        """For each output the index of the input whose memory it shares, or ``None`` when it is fresh memory (or no tensor)."""
        return tuple(owner[1] if owner and owner[0] == "input" else None for owner in self.owners)


def effects(piece: fx.GraphModule) -> Effects | None:
    """The effects of a piece, or ``None`` when its placeholders carry no shapes to run it on (a graph not made by ``trace``), or when it
    needs values on the host, which capture will refuse."""
    values = [node.meta.get("example_value") for node in piece.graph.find_nodes(op="placeholder")]
    if any(value is None for value in values) or not any(isinstance(value, torch.Tensor) for value in values):
        return None
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
    if any(isinstance(size, (torch.SymInt, torch.SymFloat)) and size.node.hint is None for size in sizes):
        return None  # made of a value that an earlier piece has read on the host
    recorder = _Recorder()
    with torch.no_grad(), FakeTensorMode():
        inputs = _concrete(values)
        try:
            with recorder:
                outputs = tree_leaves(piece(*inputs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None
    owner = {storage_id(value): i for i, value in reversed(list(enumerate(inputs))) if isinstance(value, torch.Tensor)}
    mutated = frozenset(owner[s] for s in recorder.written if s in owner)
    return Effects(tuple(recorder.launches), mutated, owners_of(inputs, outputs, storage_id))


def owners_of(inputs: Sequence, outputs: Sequence, identity: Callable[[torch.Tensor], int]) -> tuple[tuple[str, int] | None, ...]:
    """Whose memory each output is, see ``Effects.owners``; ``identity`` is equal for two tensors that share memory."""
    first: dict[int, tuple[str, int]] = {}
    found = []
    for kind, values in (("input", inputs), ("output", outputs)):
        for i, value in enumerate(values):
            owner = first.setdefault(identity(value), (kind, i)) if isinstance(value, torch.Tensor) else None
            if kind == "output":
                found.append(owner)
    return tuple(found)


def _concrete(values: list) -> list:
    """Fake tensors with the sizes of the trace's example in place of its symbols, and with the same memory shared.

    # subtle: run on the symbols themselves, a question like "is this contiguous?" would fix them to the example's sizes, for good.
    """
    size = lambda s: s.node.hint if isinstance(s, torch.SymInt) else s  # noqa: E731  private: int(s) would fix the symbol, too
    memory: dict[tuple, torch.Tensor] = {}

    def concrete(value):
        if not isinstance(value, torch.Tensor):
            return size(value)
        key = storage_id(value), value.dtype
        if key not in memory:
            elements = size(value.untyped_storage().nbytes()) // value.element_size()
            memory[key] = torch.empty(elements, dtype=value.dtype, device=value.device)
        return memory[key].as_strided([*map(size, value.shape)], [*map(size, value.stride())], size(value.storage_offset()))

    return [concrete(value) for value in values]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.written: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.written.update(storage_id(tensor) for tensor in written_arguments(func, args, kwargs))
        only_asks = func.namespace == "prim"  # prim::device and the like
        if not (only_asks or is_view(func) or changes_the_object(func) or is_allocation(func)):
            self.launches.append(func._schema.name)
        return func(*args, **kwargs)
