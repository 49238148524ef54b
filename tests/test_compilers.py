"""Pieces of one structure are compiled once; pieces that differ anywhere are not taken for each other."""

import pytest
import torch
from torch import nn

import pcg_ref as pcg
from pcg_ref.compilers import InductorCompiler
from pcg_ref.ops import register_custom_op, register_split_op

pytestmark = pytest.mark.inductor


@register_split_op()
@register_custom_op(mutates_args=["x"])
def compilers_cut(x: torch.Tensor) -> None:
    x.add_(0.5)


class Layers(nn.Module):
    def __init__(self, factors, widths):
        super().__init__()
        torch.manual_seed(0)
        self.factors = factors
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in zip([6, *widths], widths)).requires_grad_(False)

    def forward(self, x):
        for linear, factor in zip(self.linears, self.factors):
            x = linear(x) * factor
            compilers_cut(x)
        return x


@pytest.mark.parametrize(
    "factors, widths, kinds",
    [([2.0] * 5, [6] * 5, 1), ([2.0, 3.0, 2.0, 2.0], [6] * 4, 2), ([2.0] * 3, [6, 5, 6], 3), ([2.0, 2, True], [6] * 3, 3)],
    ids=["alike", "a constant differs", "widths differ", "types of constants differ"],
)
def test_pieces_alike_are_compiled_once(factors, widths, kinds):
    model = Layers(factors, widths)
    trace = pcg.trace(model, torch.randn(67, 6))
    items = [item for item in pcg.split_graph(trace.graph_module, [compilers_cut])[1] if not item.is_splitting_graph]
    compiler = InductorCompiler()
    assert len({id(compiler.compile(item.graph)) for item in items}) == kinds


def test_layers_of_one_kernel_keep_their_own_weights(device):
    model = Layers([2.0, 2.0, 3.0, 2.0], [6] * 4).to(device)
    piecewise = pcg.PiecewiseModel(pcg.trace(model, torch.randn(67, 6, device=device)), [compilers_cut], "inductor", [4, 8])
    static = {size: torch.randn(size, 6, device=device) for size in (8, 4)}
    for x in static.values():
        piecewise.capture(x)
    for size in (4, 8, 4):
        static[size].normal_()
        torch.testing.assert_close(piecewise.sequences[size].replay(), model(static[size].clone()), rtol=1e-4, atol=1e-4)
