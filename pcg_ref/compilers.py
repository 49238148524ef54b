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
    """Generates kernels for the piece, once for all sizes of its dynamic dimension."""

    name = "inductor"

    def compile(self, piece: fx.GraphModule) -> CompiledPiece:
        """Returns a callable whose first call generates the code: seconds, a C++ compiler on CPU, Triton on CUDA."""
        return CompiledPiece(piece)


COMPILERS = {compiler.name: compiler for compiler in (EagerCompiler, InductorCompiler)}
