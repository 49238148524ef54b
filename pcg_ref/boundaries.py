"""What crosses each cut: who makes a tensor, who reads it, who owns its memory, and whether its address stays."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from pcg_ref.effects import effects
from pcg_ref.splitting import SplitItem

_VERDICTS = {
    "graph pool": "written by a captured graph: the same address at every replay",
    "allocation": "allocated once per size by a piece that launches nothing, and kept",
    "static input": "the caller's: copy new contents in, never pass another tensor",
    "parameter": "the model's: change it in place, never replace it",
    "buffer": "the model's: change it in place, never replace it",
    "fresh": "allocated anew at every call: the next graph would read the old address unless it is bridged",
    "bridge": "allocated anew at every call, and copied to a buffer that stays: the graphs read the buffer",
    "unknown": "the graph carries no shapes, so that its memory cannot be followed; make it with trace()",
}


@dataclass(frozen=True)
class Boundary:
    """One tensor that crosses a cut.

    Attributes:
        name: The name by which the pieces that read it know it (the user's variable, if Dynamo kept it); of an output, its node.
        producer: The piece that makes it, or ``"input"``.
        consumers: The pieces that read it, and ``"output"``.
        shape: Its shape; dynamic sizes are symbols. ``None`` when the graph carries none.
        dtype: Its dtype, or ``None``.
        bytes: What its elements take, as an expression in the symbols of ``shape``, or ``None``.
        owner: Whose memory it is: ``"graph pool"``, ``"allocation"``, ``"static input"``, ``"parameter"``, ``"buffer"``, ``"fresh"``,
            ``"bridge"`` or ``"unknown"``. A view has its base's owner.
        address: ``"fixed"``, ``"fresh"`` or ``"unknown"``.
        verdict: The same in words.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    shape: tuple[str, ...] | None
    dtype: torch.dtype | None
    bytes: str | None
    owner: str
    address: str
    verdict: str

    @property
    def consumer(self) -> str:
        return ", ".join(self.consumers)


def boundaries(split_gm: fx.GraphModule, items: Sequence[SplitItem]) -> list[Boundary]:
    """One row for each tensor that enters a piece or leaves one, in the order of the split module.

    Args:
        split_gm: The split module of ``split_graph``, in which fresh results are ``"fresh"``, or of a ``PiecewiseModel``, which gives
            each a ``"bridge"``.
        items: Its pieces.

    Returns:
        Rows; integers that cross (symbolic sizes) are no tensors and have none.
    """
    pieces = {item.submod_name: item for item in items}
    owners: dict[fx.Node, str] = {}
    rows = []
    for node in split_gm.graph.nodes:
        if node.op == "placeholder":
            owners[node] = node.meta.get("owner", "static input")
            _add_row(rows, node, node, "input", owners[node], node.name)
        elif node.op == "call_module":
            item = pieces[node.target]
            made = tree_leaves(item.graph.graph.find_nodes(op="output")[0].args)  # the piece's own nodes, which carry name and shape
            bridged = hasattr(split_gm.get_submodule(node.target), "bridges")
            for (inner, outer, name), owner in zip(results(pieces, node, made), _owners(item, node, owners, len(made), bridged)):
                if outer is not None:
                    owners[outer] = owner
                    _add_row(rows, inner, outer, item.submod_name, owner, name)
    return rows


def results(pieces: Mapping[str, SplitItem], call: fx.Node, made: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node | None, str]]:
    """For each result of a piece its node in the piece, its node in the split module (``None`` if unused), and its name.

    # subtle: split_module numbers a piece's own nodes anew, so that "query" becomes "cat"; the piece that reads it keeps the name.
    """
    taken = {user.args[1]: user for user in call.users if user.op == "call_function" and user.target is operator.getitem}
    found = []
    for i, inner in enumerate(made):
        outer = taken.get(i) if taken else call
        readers = [user for user in (outer.users if outer is not None else ()) if user.op == "call_module"]
        name = inner.name
        if readers:
            name = pieces[readers[0].target].graph.graph.find_nodes(op="placeholder")[readers[0].args.index(outer)].name
        found.append((inner, outer, name))
    return found


def _owners(item: SplitItem, call: fx.Node, owners: dict[fx.Node, str], count: int, bridged: bool) -> list[str]:
    found = effects(item.graph)
    if found is None:
        return ["unknown"] * count
    fresh = "bridge" if bridged else "fresh"
    new = fresh if item.is_splitting_graph else "graph pool" if found.launches else "allocation"
    return [new if source is None else owners.get(call.args[source], new) for source in found.sources]


def _add_row(rows: list[Boundary], node: fx.Node, outer: fx.Node, producer: str, owner: str, name: str) -> None:
    value = node.meta.get("example_value")
    consumers = tuple(dict.fromkeys(user.target if user.op == "call_module" else "output" for user in outer.users))
    if not consumers or (value is not None and not isinstance(value, torch.Tensor)):
        return
    shape = tuple(str(size) for size in value.shape) if value is not None else None
    size = str(value.numel() * value.element_size()) if value is not None else None
    address = {"fresh": "fresh", "unknown": "unknown"}.get(owner, "fixed")
    rows.append(Boundary(name, producer, consumers, shape, getattr(value, "dtype", None), size, owner, address, _VERDICTS[owner]))
