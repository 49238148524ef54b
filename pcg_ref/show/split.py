"""The split FX graph, as a picture and as a text. Both are built from the split module itself; nothing is computed.

The token dimension is shown as ``T``, whatever symbol torch gave it, and parameters by their names in the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx

from pcg_ref.boundaries import Boundary, boundaries
from pcg_ref.effects import effects
from pcg_ref.pieces import operators
from pcg_ref.show.dot import Drawing
from pcg_ref.show.names import (
    FRESH,
    OWNED_BY_THE_MODEL,
    STYLES,
    WORDS,
    display_names,
    is_the_models,
    kind_of,
    plural,
    result_names,
    shape_text,
    shown_pieces,
    written_inputs,
)
from pcg_ref.splitting import SplitItem


def draw_split(split_gm: fx.GraphModule, items: Sequence[SplitItem], layers: int = 2) -> Drawing:
    """The pieces in order, and on the edges the tensors that cross.

    Args:
        split_gm: The split module of ``split_graph``.
        items: Its pieces.
        layers: Pieces are drawn up to the one after this many eager pieces; those between it and the last become one node.

    Returns:
        The drawing; its DOT text is ``str(drawing)``.
    """
    symbols, names = display_names(split_gm, items)
    shown = shown_pieces(items, layers)
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
        lines.append(f'  more [shape=plaintext, label="... {_count(hidden, "more ")}"];')
    if len(shown) < len(items):
        lines.append(_piece_node(items[-1]))
    lines.append("  output [shape=plaintext];")
    for (producer, consumer), rows in _edges(split_gm, items, node_of).items():
        label = r"\n".join(f"{names.get(row.name, row.name)} {shape_text(row.shape, symbols)}" for row in rows)
        style = f", {FRESH}" if any(row.address == "fresh" for row in rows) else ""
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
    symbols, names = display_names(split_gm, items)
    rows = boundaries(split_gm, items)
    shown = shown_pieces(items, layers)
    lines = []
    for item in shown:
        lines.append(f"piece {item.graph_id}, {WORDS[kind_of(item)]}: {_facts(item)}")
        taken, written = _entering(rows, item), written_inputs(item)
        made = [row for row in rows if row.producer == item.submod_name]
        for word, side in (("takes", taken), ("writes", [row for row in taken if row.name in written]), ("gives", made)):
            if side:
                tensors = [f"{names.get(row.name, row.name)} {shape_text(row.shape, symbols)}" for row in side]
                lines.append(f"  {word} " + ", ".join(tensors))
        local = names | result_names(split_gm, items, item)
        code = [(_rename(line, local), _comment(node, symbols)) for line, node in _code(item.graph)]
        width = min(72, max((len(line) for line, _ in code), default=0))
        lines += [f"    {line:<{width}}{comment}".rstrip() for line, comment in code] + [""]
    if rest := items[len(shown) :]:
        lines.append(f"... {_count(rest, 'more ')}")
    return "\n".join(lines).rstrip()


def print_split(split_gm: fx.GraphModule, items: Sequence[SplitItem], layers: int = 1) -> None:
    """Print ``split_text``."""
    print(split_text(split_gm, items, layers))


def _facts(item: SplitItem) -> str:
    """A piece in numbers: nodes, launches (calls of ATen operators that do device work), and what it reads of the model."""
    placeholders = item.graph.graph.find_nodes(op="placeholder")
    nodes = [n for n in item.graph.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    facts = [plural(len(nodes), "node")]
    if item.is_splitting_graph:
        facts.append("calls " + operators(item.graph))
    elif found := effects(item.graph):
        facts.append(plural(len(found.launches), "launch"))
    for owner in OWNED_BY_THE_MODEL:
        if count := sum(n.meta.get("owner") == owner for n in placeholders):
            facts.append(plural(count, owner))
    return ", ".join(facts)


def _count(items: Sequence[SplitItem], more: str = "") -> str:
    eager = sum(item.is_splitting_graph for item in items)
    return f"{plural(len(items), more + 'piece')} ({eager} eager)"


def _piece_node(item: SplitItem) -> str:
    kind = kind_of(item)
    label = rf"piece {item.graph_id}: {WORDS[kind]}\n" + _facts(item).replace(", calls", r"\ncalls")
    return f'  {item.submod_name} [{STYLES[kind]}, label="{label}"];'


def _edges(split_gm: fx.GraphModule, items: Sequence[SplitItem], node_of: dict[str, str]) -> dict[tuple[str, str], list[Boundary]]:
    """What crosses between two nodes of the drawing; parameters and buffers are folded into the pieces.

    A piece that writes into a tensor in place is where its later readers have it from.
    """
    written = {item.submod_name: written_inputs(item) for item in items}
    edges: dict[tuple[str, str], list[Boundary]] = {}
    for row in boundaries(split_gm, items):
        if is_the_models(row):
            continue
        source = row.producer
        for consumer in row.consumers:
            edge = node_of.get(source, source), node_of.get(consumer, consumer)
            if edge[0] != edge[1] and row not in edges.setdefault(edge, []):
                edges[edge].append(row)
            if row.name in written.get(consumer, ()):
                source = consumer
    return edges


def _entering(rows: Sequence[Boundary], item: SplitItem) -> list[Boundary]:
    return [row for row in rows if item.submod_name in row.consumers and not is_the_models(row)]


def _alt(items: Sequence[SplitItem]) -> str:
    named = items if len(items) <= 9 else [*items[:5], items[-1]]
    pieces = [f"{item.graph_id} {WORDS[kind_of(item)]}" for item in named]
    if named is not items:
        pieces.insert(-1, "and so on to")
    return f"The FX graph cut into {_count(items)}, in order: {', '.join(pieces)}. Edges name the tensors that cross."


# Code.


def _comment(node: fx.Node | None, symbols: dict[str, str]) -> str:
    value = node.meta.get("example_value") if node is not None else None
    return f"  # {shape_text(value.shape, symbols)}" if isinstance(value, torch.Tensor) else ""


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
