"""What the pictures and texts of a split have in common: names as the user knows them, shapes with ``T``, the kinds of pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from pcg_ref.boundaries import Boundary, results
from pcg_ref.effects import effects
from pcg_ref.splitting import SplitItem

# Okabe-Ito, all three readable under black text. Each kind also has a shape and a word of its own.
STYLES = {
    "graph": 'shape=box, fillcolor="#56B4E9"',
    "eager": 'shape=octagon, fillcolor="#E69F00"',
    "constant": 'shape=note, fillcolor="#F0E442"',
}
WORDS = {"graph": "CUDA graph", "eager": "eager", "constant": "no launch, not captured"}
FRESH = 'style=dashed, color="#D55E00", fontcolor="#D55E00"'
OWNED_BY_THE_MODEL = ("parameter", "buffer")


def shown_pieces(items: Sequence[SplitItem], layers: int) -> list[SplitItem]:
    """The pieces up to the one after ``layers`` eager pieces."""
    eager = [i for i, item in enumerate(items) if item.is_splitting_graph]
    return list(items[: eager[layers - 1] + 2] if len(eager) >= layers > 0 else items)


def kind_of(item: SplitItem) -> str:
    if item.is_splitting_graph:
        return "eager"
    found = effects(item.graph)
    return "graph" if found is None or found.launches else "constant"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}{'es' if word.endswith('ch') else 's'}"


def is_the_models(row: Boundary) -> bool:
    return row.producer == "input" and row.owner in OWNED_BY_THE_MODEL


def written_inputs(item: SplitItem) -> set[str]:
    """The inputs that the piece writes into."""
    found = effects(item.graph)
    placeholders = item.graph.graph.find_nodes(op="placeholder")
    return {placeholders[i].name for i in found.mutated} if found else set()


def display_names(split_gm: fx.GraphModule, items: Sequence[SplitItem]) -> tuple[dict[str, str], dict[str, str]]:
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
        elif node.meta.get("owner") in OWNED_BY_THE_MODEL:
            path = re.sub(r"(^|_)(modules|parameters|buffers)_", ".", node.name.removeprefix("l_self_"))
            names[node.name] = path.strip(".").removesuffix("_")
        else:
            name = node.name.removeprefix("l_").removesuffix("_")
            names[node.name] = node.name if name in inside else name  # x = x + 1 would be two tensors of one name
    return symbols, names


def shape_text(shape: Sequence[object] | None, symbols: dict[str, str]) -> str:
    if shape is None:
        return ""
    return "[" + ", ".join(re.sub(r"\b[su]\d+\b", lambda m: symbols.get(m[0], m[0]), str(size)) for size in shape) + "]"


def result_names(split_gm: fx.GraphModule, items: Sequence[SplitItem], item: SplitItem) -> dict[str, str]:
    """A piece's results by the names under which the next pieces know them, unless the piece uses that name for something else."""
    call = next(node for node in split_gm.graph.find_nodes(op="call_module") if node.target == item.submod_name)
    taken = {node.name for node in item.graph.graph.nodes}
    made = tree_leaves(item.graph.graph.find_nodes(op="output")[0].args)
    found = {}
    for inner, outer, name in results({other.submod_name: other for other in items}, call, made):
        if outer is not None and name not in taken:
            found[inner.name] = name
    return found
