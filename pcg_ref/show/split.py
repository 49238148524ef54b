"""The split FX graph, as a picture and as a text. Both are built from the split module itself; nothing is computed.

The token dimension is shown as ``T``, whatever symbol torch gave it, and parameters by their names in the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from pcg_ref.boundaries import Boundary, boundaries, results
from pcg_ref.effects import effects
from pcg_ref.pieces import operators
from pcg_ref.show.dot import Drawing
from pcg_ref.splitting import SplitItem

# Okabe-Ito, all three readable under black text. Each kind also has a shape and a word of its own.
_STYLES = {
    "graph": 'shape=box, fillcolor="#56B4E9"',
    "eager": 'shape=octagon, fillcolor="#E69F00"',
    "constant": 'shape=note, fillcolor="#F0E442"',
}
_WORDS = {"graph": "CUDA graph", "eager": "eager", "constant": "no launch, not captured"}
_FRESH = 'style=dashed, color="#D55E00", fontcolor="#D55E00"'
_OWNED_BY_THE_MODEL = ("parameter", "buffer")


def draw_split(split_gm: fx.GraphModule, items: Sequence[SplitItem], layers: int = 2) -> Drawing:
    """The pieces in order, and on the edges the tensors that cross.

    Args:
        split_gm: The split module of ``split_graph``.
        items: Its pieces.
        layers: Pieces are drawn up to the one after this many eager pieces; those between it and the last become one node.

    Returns:
        The drawing; its DOT text is ``str(drawing)``.
    """
    symbols, names = _names(split_gm, items)
    shown = _shown(items, layers)
    if len(items) - len(shown) <= 2:  # a node in place of one piece would save nothing
        shown = list(items)
    hidden = items[len(shown) : -1]
    node_of = {item.submod_name: "more" if item in hidden else item.submod_name for item in items}
    lines = ["digraph split {", '  node [style=filled, fillcolor="white", fontname="Helvetica", fontsize=11];']
    lines.append('  edge [fontname="Helvetica", fontsize=9];')
    lines.append("  input [shape=plaintext];")
    for item in shown:
        lines.append(_piece_node(item))
    if hidden:
        lines.append(f"  more [shape=plaintext, label=\"... {_count(hidden, 'more ')}\"];")
    if len(shown) < len(items):
        lines.append(_piece_node(items[-1]))
    lines.append("  output [shape=plaintext];")
    for (producer, consumer), rows in _edges(split_gm, items, node_of).items():
        label = r"\n".join(f"{names.get(row.name, row.name)} {_shape(row.shape, symbols)}" for row in rows)
        style = f", {_FRESH}" if any(row.address == "fresh" for row in rows) else ""
        lines.append(f'  {producer} -> {consumer} [label="{label}"{style}];')
    return Drawing("\n".join([*lines, "}"]), alt=_alt(items))


def split_text(split_gm: fx.GraphModule, items: Sequence[SplitItem], layers: int = 1) -> str:
    """The pieces as readable code.

    Args:
        split_gm: The split module of ``split_graph``.
        items: Its pieces.
        layers: Pieces are written out up to the one after this many eager pieces; the others share one line.

    Returns:
        Lines. A piece is what torch.fx generates for it, with the model's names for parameters and shapes at line ends.
    """
    symbols, names = _names(split_gm, items)
    rows = boundaries(split_gm, items)
    shown = _shown(items, layers)
    lines = []
    for item in shown:
        lines.append(f"piece {item.graph_id}, {_WORDS[_kind(item)]}: {_facts(item)}")
        taken, written = _entering(rows, item), _written(item)
        made = [row for row in rows if row.producer == item.submod_name]
        for word, side in (("takes", taken), ("writes", [row for row in taken if row.name in written]), ("gives", made)):
            if side:
                tensors = [f"{names.get(row.name, row.name)} {_shape(row.shape, symbols)}" for row in side]
                lines.append(f"  {word} " + ", ".join(tensors))
        local = names | _result_names(split_gm, items, item)
        code = [(_rename(line, local), _comment(node, symbols)) for line, node in _code(item.graph)]
        width = min(72, max((len(line) for line, _ in code), default=0))
        lines += [f"    {line:<{width}}{comment}".rstrip() for line, comment in code] + [""]
    if rest := items[len(shown) :]:
        lines.append(f"... {_count(rest, 'more ')}")
    return "\n".join(lines).rstrip()


def print_split(split_gm: fx.GraphModule, items: Sequence[SplitItem], layers: int = 1) -> None:
    """Print ``split_text``."""
    print(split_text(split_gm, items, layers))


def _shown(items: Sequence[SplitItem], layers: int) -> list[SplitItem]:
    """The pieces up to the one after ``layers`` eager pieces."""
    eager = [i for i, item in enumerate(items) if item.is_splitting_graph]
    return list(items[: eager[layers - 1] + 2] if len(eager) >= layers > 0 else items)


def _kind(item: SplitItem) -> str:
    if item.is_splitting_graph:
        return "eager"
    found = effects(item.graph)
    return "graph" if found is None or found.launches else "constant"


def _facts(item: SplitItem) -> str:
    """A piece in numbers: nodes, launches (calls of ATen operators that do device work), and what it reads of the model."""
    placeholders = item.graph.graph.find_nodes(op="placeholder")
    nodes = [n for n in item.graph.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    facts = [_plural(len(nodes), "node")]
    if item.is_splitting_graph:
        facts.append("calls " + operators(item.graph))
    elif found := effects(item.graph):
        facts.append(_plural(len(found.launches), "launch"))
    for owner in _OWNED_BY_THE_MODEL:
        if count := sum(n.meta.get("owner") == owner for n in placeholders):
            facts.append(_plural(count, owner))
    return ", ".join(facts)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}{'es' if word.endswith('ch') else 's'}"


def _count(items: Sequence[SplitItem], more: str = "") -> str:
    eager = sum(item.is_splitting_graph for item in items)
    return f"{_plural(len(items), more + 'piece')} ({eager} eager)"


def _piece_node(item: SplitItem) -> str:
    kind = _kind(item)
    label = rf"piece {item.graph_id}: {_WORDS[kind]}\n" + _facts(item).replace(", calls", r"\ncalls")
    return f'  {item.submod_name} [{_STYLES[kind]}, label="{label}"];'


def _edges(split_gm: fx.GraphModule, items: Sequence[SplitItem], node_of: dict[str, str]) -> dict[tuple[str, str], list[Boundary]]:
    """What crosses between two nodes of the drawing; parameters and buffers are folded into the pieces.

    A piece that writes into a tensor in place is where its later readers have it from.
    """
    written = {item.submod_name: _written(item) for item in items}
    edges: dict[tuple[str, str], list[Boundary]] = {}
    for row in boundaries(split_gm, items):
        if _is_the_models(row):
            continue
        source = row.producer
        for consumer in row.consumers:
            edge = node_of.get(source, source), node_of.get(consumer, consumer)
            if edge[0] != edge[1] and row not in edges.setdefault(edge, []):
                edges[edge].append(row)
            if row.name in written.get(consumer, ()):
                source = consumer
    return edges


def _is_the_models(row: Boundary) -> bool:
    return row.producer == "input" and row.owner in _OWNED_BY_THE_MODEL


def _written(item: SplitItem) -> set[str]:
    """The inputs that the piece writes into."""
    found = effects(item.graph)
    placeholders = item.graph.graph.find_nodes(op="placeholder")
    return {placeholders[i].name for i in found.mutated} if found else set()


def _entering(rows: Sequence[Boundary], item: SplitItem) -> list[Boundary]:
    return [row for row in rows if item.submod_name in row.consumers and not _is_the_models(row)]


def _alt(items: Sequence[SplitItem]) -> str:
    named = items if len(items) <= 9 else [*items[:5], items[-1]]
    pieces = [f"{item.graph_id} {_WORDS[_kind(item)]}" for item in named]
    if named is not items:
        pieces.insert(-1, "and so on to")
    return f"The FX graph cut into {_count(items)}, in order: {', '.join(pieces)}. Edges name the tensors that cross."


# Names and shapes.


def _names(split_gm: fx.GraphModule, items: Sequence[SplitItem]) -> tuple[dict[str, str], dict[str, str]]:
    """Torch's symbols by the letters shown, and the flat inputs by the names that they have for the user."""
    symbols: dict[str, str] = {}
    names: dict[str, str] = {}
    inside = {node.name for item in items for node in item.graph.graph.nodes}
    for node in split_gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        sizes = [value] if isinstance(value, torch.SymInt) else value.shape if isinstance(value, torch.Tensor) else ()
        for symbol in re.findall(r"\b[su]\d+\b", " ".join(map(str, sizes))):
            symbols.setdefault(symbol, f"T{len(symbols) + 1}" if symbols else "T")
        if isinstance(value, torch.SymInt):
            names[node.name] = symbols.get(str(value), str(value))
        elif node.meta.get("owner") in _OWNED_BY_THE_MODEL:
            path = re.sub(r"(^|_)(modules|parameters|buffers)_", ".", node.name.removeprefix("l_self_"))
            names[node.name] = path.strip(".").removesuffix("_")
        else:
            name = node.name.removeprefix("l_").removesuffix("_")
            names[node.name] = node.name if name in inside else name  # x = x + 1 would be two tensors of one name
    return symbols, names


def _shape(shape: Sequence[object] | None, symbols: dict[str, str]) -> str:
    if shape is None:
        return ""
    return "[" + ", ".join(re.sub(r"\b[su]\d+\b", lambda m: symbols.get(m[0], m[0]), str(size)) for size in shape) + "]"


def _comment(node: fx.Node | None, symbols: dict[str, str]) -> str:
    value = node.meta.get("example_value") if node is not None else None
    return f"  # {_shape(value.shape, symbols)}" if isinstance(value, torch.Tensor) else ""


def _result_names(split_gm: fx.GraphModule, items: Sequence[SplitItem], item: SplitItem) -> dict[str, str]:
    """A piece's results by the names under which the next pieces know them, unless the piece uses that name for something else."""
    call = next(node for node in split_gm.graph.find_nodes(op="call_module") if node.target == item.submod_name)
    taken = {node.name for node in item.graph.graph.nodes}
    made = tree_leaves(item.graph.graph.find_nodes(op="output")[0].args)
    found = {}
    for inner, outer, name in results({other.submod_name: other for other in items}, call, made):
        if outer is not None and name not in taken:
            found[inner.name] = name
    return found


# Code.


def _code(piece: fx.GraphModule) -> list[tuple[str, fx.Node | None]]:
    """The lines that torch.fx generates for the piece, without signature, clean-up and return, each with the node it computes."""
    nodes = {node.name: node for node in piece.graph.nodes if node.op not in ("placeholder", "output")}
    body = piece.graph.python_code("self").src.split("):\n", 1)[1].splitlines()
    found = []
    for line in body:
        line = line.strip().split(";  ")[0]  # what follows frees names
        if not line or line.startswith("return ") or re.fullmatch(r"l_\w+ = L_\w+", line):
            continue
        match = re.match(r"(\w+)(?: : [\w.\[\], ]+)? = (.*)", line)
        node = nodes.get(match[1]) if match else None
        if node is not None:
            line = match[2] if not node.users else f"{match[1]} = {match[2]}"
        line = re.sub(r"\[\((.*)\)\]$", r"[\1]", line.replace("slice(None, None, None)", ":"))
        found.append((line.replace("torch._C._nn.", "F.").replace("torch.nn.functional.", "F."), node))
    return found


def _rename(line: str, names: dict[str, str]) -> str:
    # Not after a dot: there it is an attribute or an operator.
    return re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), line)
