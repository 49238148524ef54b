"""What runs inside a piece: the FX graph as it is, or the kernels that inductor generates from it.

Orthogonal to capture: either result is launched into a CUDA graph afterwards. Mirrors the two compilers of SGLang's
``compilation/compiler_interface.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx


class EagerCompiler:
    """Runs the piece's FX graph operator by operator."""

    name = "eager"

    def compile(self, piece: fx.GraphModule) -> Callable:
        """Returns the graph's own ``forward``; nothing is generated."""
        return piece.forward


class CompiledPiece:
    """A compiled piece together with the graph that it was compiled from.

    Calling it runs the generated code. The graph is kept for those who need the piece's shapes without running it: dispatch cannot
    look into generated code.
    """

    def __init__(self, piece: fx.GraphModule) -> None:
        self.piece = piece
        # subtle: torch.compile a second time, and not a compiler called on the traced shapes as the engines do. Inductor may find out
        # that a size equals another (64 tokens, 64 columns) and specialise on it; here a guard notices at the next size, there nobody.
        # Once captured, neither costs anything.
        self.run = torch.compile(piece, fullgraph=True, dynamic=True, backend="inductor")

    def __call__(self, *args):
        return self.run(*args)


class InductorCompiler:
    """Generates kernels for a piece, once for all sizes of its dynamic dimension and once for all pieces of the same structure.

    The weights of a piece are inputs, so that the layers of a decoder differ in nothing else: however many there are, three pieces are
    compiled.
    """

    name = "inductor"

    def __init__(self) -> None:
        self._compiled: dict[str, CompiledPiece] = {}

    def compile(self, piece: fx.GraphModule) -> CompiledPiece:
        """Returns a callable whose first call generates the code: seconds, a C++ compiler on CPU, Triton on CUDA."""
        key = _structure(piece)
        if key not in self._compiled:
            self._compiled[key] = CompiledPiece(piece)
        return self._compiled[key]


def _structure(piece: fx.GraphModule) -> str:
    """Equal for two pieces exactly when the same code computes both: their nodes but for the names, and the inputs' shapes."""
    index = {node: i for i, node in enumerate(piece.graph.nodes)}
    rows = []
    for node in piece.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Index(index[n]))
        if node.op in ("get_attr", "call_module"):  # what such a node stands for is the piece's own
            target: object = id(piece)
        elif node.op == "placeholder":
            value = node.meta.get("example_value")
            is_tensor = isinstance(value, torch.Tensor)
            target = (value.dtype, value.device, tuple(value.shape), value.stride(), type(value)) if is_tensor else type(value)
            args = ()
        else:
            target = node.target
        rows.append(repr((node.op, target, args, kwargs)))
    return "\n".join(rows)


class _Index(int):
    """The place of a node, told apart from a number."""

    def __repr__(self) -> str:
        return f"node {int(self)}"


COMPILERS = {compiler.name: compiler for compiler in (EagerCompiler, InductorCompiler)}
