"""What crosses the cuts, as a picture and as a text: whose memory each tensor is, how large, and whether its address stays."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from pcg_ref.boundaries import Boundary, boundaries
from pcg_ref.show.dot import Drawing
from pcg_ref.show.names import (
    FRESH,
    STYLES,
    WORDS,
    display_names,
    is_the_models,
    kind_of,
    plural,
    shape_text,
    shown_pieces,
    written_inputs,
)
from pcg_ref.splitting import SplitItem

_COLORS = {  # Okabe-Ito, made light enough for black text; the owner is also a word in each node
    "graph pool": "#D3ECF9",
    "allocation": "#FAF5B8",
    "static input": "#CCEBE2",
    "bridge": "#F5DCC3",
    "fresh": "#FFFFFF",
}


def draw_boundaries(split_gm: fx.GraphModule, items: Sequence[SplitItem], layers: int = 1) -> Drawing:
    """The pieces in order, and between them each tensor that crosses: its bytes, its owner, and whether its address stays.

    Args:
        split_gm: The split module of ``split_graph`` or of a ``PiecewiseModel``.
        items: Its pieces.
        layers: Pieces are drawn up to the one after this many eager pieces, with the tensors that reach them.

    Returns:
        The drawing; its DOT text is ``str(drawing)``.
    """
    symbols, names = display_names(split_gm, items)
    shown = {item.submod_name: item for item in shown_pieces(items, layers)}
    written = {name: written_inputs(item) for name, item in shown.items()}
    lines = ["digraph boundaries {", "  rankdir=LR;", '  node [style=filled, fontname="Helvetica", fontsize=10];']
    lines.append('  edge [fontname="Helvetica", fontsize=9];')
    for name, item in shown.items():
        lines.append(f'  {name} [{STYLES[kind_of(item)]}, label="piece {item.graph_id}\\n{WORDS[kind_of(item)]}"];')
    rows = [row for row in boundaries(split_gm, items) if not is_the_models(row) and shown.keys() & {row.producer, *row.consumers}]
    for i, row in enumerate(rows):
        tensor = f"{names.get(row.name, row.name)} {shape_text(row.shape, symbols)}"
        label = rf"{tensor}\n{_dtype(row)}, {_bytes(row, symbols)}\n{row.owner}: {_address(row)}"
        style = FRESH if row.address == "fresh" else 'color="#555555"'
        lines.append(f'  tensor{i} [shape=box, fillcolor="{_COLORS.get(row.owner, "#DDDDDD")}", {style}, label="{label}"];')
        if row.producer in shown:
            lines.append(f"  {row.producer} -> tensor{i};")
        for consumer in row.consumers:
            if consumer in shown:
                both = ' [dir=both, label="writes"]' if row.name in written[consumer] else ""
                lines.append(f"  tensor{i} -> {consumer}{both};")
    counts = ", ".join(f"{sum(row.owner == owner for row in rows)} {owner}" for owner in dict.fromkeys(row.owner for row in rows))
    alt = f"The first {plural(len(shown), 'piece')} and the tensors that cross their cuts, by owner: {counts}."
    return Drawing("\n".join([*lines, "}"]), alt=alt)


def boundary_text(split_gm: fx.GraphModule, items: Sequence[SplitItem], layers: int = 1) -> str:
    """The same as a table, parameters and buffers counted a kind, with the verdict on each kind of memory below.

    Args:
        split_gm: The split module of ``split_graph`` or of a ``PiecewiseModel``.
        items: Its pieces.
        layers: Tensors that the pieces up to the one after this many eager pieces make; 0 for all.
    """
    symbols, names = display_names(split_gm, items)
    shown = {item.submod_name for item in shown_pieces(items, layers)} | {"input"}
    rows = boundaries(split_gm, items)
    table = [row for row in rows if row.producer in shown and not is_the_models(row)]
    lines = [f"{'tensor':<24} {'from':>6}  {'to':<22} {'shape':<18} {'dtype':<9} {'bytes':>12}  {'owner':<13} address"]
    for row in table:
        way = f"{_piece(row.producer):>6}  {_pieces(row.consumers):<22}"
        what = f"{shape_text(row.shape, symbols):<18} {_dtype(row):<9} {_bytes(row, symbols).removesuffix(' bytes'):>12}"
        lines.append(f"{names.get(row.name, row.name):<24} {way} {what}  {row.owner:<13} {_address(row)}")
    for owner in ("buffer", "parameter"):
        if count := sum(row.owner == owner and is_the_models(row) for row in rows):
            lines.append(f"{f'({plural(count, owner)})':<24} {'input':>6}  {'':<22} {'':<18} {'':<9} {'':>12}  {owner:<13} stays")
    if hidden := sum(row.producer not in shown for row in rows):
        lines.append(f"... {hidden} more that later pieces make")
    verdicts = dict.fromkeys((row.owner, row.verdict) for row in rows)
    return "\n".join([*lines, "", *(f"{owner}: {verdict}" for owner, verdict in verdicts)])


def _address(row: Boundary) -> str:
    return {"fixed": "stays", "fresh": "new each time"}.get(row.address, row.address)


def _dtype(row: Boundary) -> str:
    return str(row.dtype).removeprefix("torch.")


def _bytes(row: Boundary, symbols: dict[str, str]) -> str:
    if row.bytes is None:
        return "? bytes"
    expression = re.sub(r"\b[su]\d+\b", lambda match: symbols.get(match[0], match[0]), row.bytes)
    return f"{expression} bytes"


def _piece(name: str) -> str:
    return name.removeprefix("submod_")


def _pieces(names: Sequence[str]) -> str:
    shown = [_piece(name) for name in names]
    return ", ".join(shown) if len(shown) <= 4 else f"{shown[0]}, {shown[1]} ... {shown[-1]} ({len(shown)})"
