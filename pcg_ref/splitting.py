"""From one FX graph to pieces: cut at every split operator, and keep the order.

This module knows nothing of CUDA. It does not look into operators, move work across a cut, or capture anything; what a piece does to
memory is asked in ``effects.py``.
"""

from __future__ import annotations

import builtins
import difflib
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from pcg_ref.ops import split_ops


@dataclass
class SplitItem:
    """One piece. The field names are SGLang's and vLLM's (``compilation/backend.py``, ``compilation/backends.py``).

    Attributes:
        submod_name: Its name in the split module.
        graph_id: Its place in the order of execution, from 0.
        is_splitting_graph: Whether it holds split operators, and therefore runs eagerly.
        graph: Its FX graph.
    """

    submod_name: str
    graph_id: int
    is_splitting_graph: bool
    graph: fx.GraphModule


def split_graph(
    graph: fx.GraphModule, ops: Iterable[object] | None = None, *, allow_none: bool = False
) -> tuple[fx.GraphModule, list[SplitItem]]:
    """Cut an FX graph at every call of a split operator.

    A split operator has a piece to itself, which it shares only with split operators that follow at once; the next node starts the
    next piece. The result computes what ``graph`` computes, in the same order. Mirrors ``split_graph`` of SGLang and vLLM.

    Args:
        graph: The graph, left as it is. Nodes that carry ``meta["example_value"]``, as ``trace`` makes them, let sizes cross a cut.
        ops: Split operators, or one: objects (``OpOverload``, ``OpOverloadPacket``, any function called in the graph) or names
            (``"ns::op"``, ``"ns.op"``, ``"ns.op.default"``). The registry by default.
        allow_none: Accept a graph without a split operator, as one piece.

    Returns:
        The split module, whose submodules are the pieces, and one ``SplitItem`` a piece in the order of execution.

    Raises:
        ValueError: A name is no operator, no split operator is called in the graph, or a ``torch.Size`` would have to cross a cut
            and the graph carries no shapes.
    """
    if isinstance(ops, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        ops = [ops]  # a name and a packet can be iterated over: into letters and overload names
    ops = list(split_ops() if ops is None else ops)
    targets = {target for op in ops for target in _resolve(op, graph)}
    # A copy of the nodes; parameters and submodules are shared.
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    graph = fx.GraphModule(graph, copy)
    _sizes_to_integers(graph.graph)

    piece_of, splitting = _assign_pieces(graph.graph, targets)
    if not splitting and not allow_none:
        called = sorted({getattr(n.target, "__name__", str(n.target)) for n in graph.graph.nodes if n.op == "call_function"})
        raise ValueError(
            f"no split operator in the graph: looked for {[str(op) for op in ops] or 'nothing, the registry is empty'}, the graph "
            f"calls {called}. Let the model call one (pcg.unified_attention_with_output, or your own with @register_split_op()); without "
            f"any, split_graph and PiecewiseModel take allow_none=True, and a runner strategy='full'"
        )
    # subtle: keep_original_order. Without it split_module sorts pieces by data dependence alone, and a mutation moves across a read.
    split = split_module(graph, None, lambda node: piece_of[node], keep_original_order=True)
    pieces = sorted(set(piece_of.values()))
    return split, [SplitItem(f"submod_{i}", i, i in splitting, getattr(split, f"submod_{i}")) for i in pieces]


def _assign_pieces(graph: fx.Graph, targets: set) -> tuple[dict[fx.Node, int], set[int]]:
    """The piece of every node, and the pieces that hold split operators."""
    piece, in_split = -1, None
    piece_of: dict[fx.Node, int] = {}
    splitting: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if _unpacks_a_tuple(node) and node.args[0] in piece_of:
            # A tuple is taken apart where it is made, so that no piece takes or returns a tuple as one value.
            piece_of[node] = piece_of[node.args[0]]
            continue
        is_split = node.op == "call_function" and (node.target in targets or _packet_overloads(node.target) & targets)
        if bool(is_split) != in_split:
            piece, in_split = piece + 1, bool(is_split)
        piece_of[node] = piece
        if is_split:
            splitting.add(piece)
    return piece_of, splitting


def _unpacks_a_tuple(node: fx.Node) -> bool:
    if not (node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[1], int)):
        return False
    value = node.args[0].meta.get("example_value")
    # subtle: getitem is also tensor indexing, which must stay where it is: it may read what a later node mutates. Without shapes an
    # integer index is taken for a tuple's; on a tensor that would be a view, which may be made early.
    return value is None or isinstance(value, (tuple, list))


def _packet_overloads(target: object) -> set:
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return set()
    return {getattr(target, name) for name in target.overloads()}


def _resolve(op: object, graph: fx.GraphModule) -> set:
    """The callables that an entry of ``ops`` stands for."""
    if not isinstance(op, str):
        return _packet_overloads(op) or {op}
    found: object = torch.ops
    parts = op.replace("::", ".").split(".")
    try:
        for part in parts:
            found = getattr(found, part)
    except AttributeError:
        found = None
    if isinstance(found, torch._ops.OpOverload) or _packet_overloads(found):
        return _packet_overloads(found) or {found}
    known = {str(o).removesuffix(".default") for o in split_ops()}
    known |= {str(n.target) for n in graph.graph.nodes if isinstance(n.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))}
    near = difflib.get_close_matches(".".join(parts), sorted(known), n=3, cutoff=0.3) or sorted(known)[:3]
    raise ValueError(f"{op!r} is no operator; nearest known: {near}. Write ns::op as registered, or pass the operator itself")


def _sizes_to_integers(graph: fx.Graph) -> None:
    """Replace ``x.size()`` and ``x.shape`` by one ``sym_size`` a dimension: an integer may cross a cut, a ``torch.Size`` may not."""
    for node in list(graph.nodes):
        whole = node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs
        if not whole and not (node.target is builtins.getattr and node.args[1] == "shape"):
            continue
        tensor = node.args[0]
        value = tensor.meta.get("example_value")
        indices = range(value.dim()) if value is not None else _literal_indices(node)
        dims = {}
        with graph.inserting_before(node):
            for i in indices:
                if value is not None and isinstance(value.shape[i], int):
                    dims[i] = value.shape[i]
                else:
                    dims[i] = graph.call_function(torch.ops.aten.sym_size.int, (tensor, i))
                    dims[i].meta = {"example_value": value.shape[i]} if value is not None else {}
        for user in [u for u in node.users if u.target is operator.getitem and u.args[0] is node]:
            index = user.args[1]
            _substitute(user, tuple(dims.values())[index] if isinstance(index, slice) else dims.get(index, dims.get(index + len(dims))))
        _substitute(node, tuple(dims.values()))


def _literal_indices(node: fx.Node) -> list[int]:
    if all(u.target is operator.getitem and isinstance(u.args[1], int) for u in node.users):
        return list(dict.fromkeys(u.args[1] for u in node.users))
    raise ValueError(
        f"{node.name} is a torch.Size of unknown rank, and {[u.name for u in node.users]} use it whole: it could not cross a cut. "
        f"Make the graph with pcg.trace, which records shapes"
    )


def _substitute(node: fx.Node, value: object) -> None:
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: value if n is node else n)
    node.graph.erase_node(node)

