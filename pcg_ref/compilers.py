"""What runs inside a piece: the FX graph as it is, or the kernels that inductor generates from it.

Orthogonal to capture: either result is launched into a CUDA graph afterwards. Mirrors the two compilers of SGLang's
``compilation/compiler_interface.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from pcg_ref.effects import effects


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

        self.effects = effects(piece)

    def __call__(self, *args):
        """What the piece computes, in memory that is shared as the piece shares it.

        Raises:
            RuntimeError: The compiler has parted results, or a result and an input, that share memory.
        """
        results = self.run(*args)
        return results if self.effects is None else _in_memory_of_their_own(results, args, self.effects.owners)


def _in_memory_of_their_own(results: object, args: tuple, owners: Sequence[tuple[str, int] | None]) -> object:
    """The results, moved out of memory that is not theirs in the model.

    # subtle: inductor knows nothing of who writes into a result after the piece. It simplifies 0 + x to x, and hands out the input itself
    # where the piece returns new memory; a split operator that writes there would write into both.
    """
    leaves, spec = tree_flatten(results)
    claimed = {_address(a): ("input", i) for i, a in reversed(list(enumerate(args))) if isinstance(a, torch.Tensor)}
    copies: dict[tuple, torch.UntypedStorage] = {}
    place = {owner: address for address, owner in claimed.items()}
    for i, (leaf, owner) in enumerate(zip(leaves, owners)):
        if owner is None or not leaf.numel():
            continue
        address = _address(leaf)
        if owner[0] == "output" and claimed.setdefault(address, owner) != owner:
            if (owner, address) not in copies:
                copies[owner, address] = leaf.untyped_storage().clone()
            leaves[i] = leaf.new_empty(0).set_(copies[owner, address], leaf.storage_offset(), leaf.shape, leaf.stride())
        if place.setdefault(owner, _address(leaves[i])) != _address(leaves[i]):
            raise RuntimeError(
                f"inductor returns result {i} of a piece in other memory than {owner[0]} {owner[1]}, whose memory it is in the model; what "
                f"is written to one would not be seen in the other. Use compiler='eager'"
            )
    return tree_unflatten(leaves, spec)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
