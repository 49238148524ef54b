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


def simplified_to_the_input(x):
    y = torch.zeros_like(x) + x  # new memory, and for inductor x itself
    compilers_cut(y)
    return y, x * 2


def simplified_to_one(x):
    y = x * 3
    z = y + 0  # new memory, and for inductor y itself
    compilers_cut(y)
    return y, z


def views_stay_views(x):
    y = x * 2 + 1
    compilers_cut(y[:, 1:3])
    compilers_cut(y.t()[:2])
    return y + 1


def a_view_and_its_base_simplified_to_the_input(x):
    y = torch.zeros_like(x) + x
    compilers_cut(y[1:-1][:, 2:])
    compilers_cut(y.t()[:2])
    return y + x


def an_input_is_returned(x):
    half = x[:, :2]
    compilers_cut(half)
    return half * 2, x + 1


PROGRAMS = [
    simplified_to_the_input, simplified_to_one, views_stay_views, a_view_and_its_base_simplified_to_the_input, an_input_is_returned,
]  # fmt: skip


@pytest.mark.parametrize("function", PROGRAMS)
def test_results_share_memory_as_the_model_says(function, device):
    """Inductor may hand out an input, or one result twice; a split operator that writes there would change both."""
    piecewise = pcg.PiecewiseModel(pcg.trace(function, torch.randn(67, 6, device=device)), [compilers_cut], "inductor", [4, 8])
    static = {size: torch.randn(size, 6, device=device) for size in (8, 4)}
    for x in static.values():
        piecewise.capture(x)
    for size in (9, 4, 13, 8, 4):  # 9 and 13 are not captured: generated code runs as it is
        x = static.get(size, torch.empty(size, 6, device=device)).normal_()
        copy = x.clone()
        expected = function(copy)
        torch.testing.assert_close(piecewise(x), expected)
        torch.testing.assert_close(x, copy)


def test_results_that_a_compiler_parts_are_refused(monkeypatch):
    """Here a compiler that copies every result."""
    trace = pcg.trace(views_stay_views, torch.randn(67, 6))
    parted = lambda piece, **options: lambda *args: tuple(t.clone() for t in piece(*args))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", parted)
        piecewise = pcg.PiecewiseModel(trace, [compilers_cut], "inductor")
        with pytest.raises(RuntimeError, match="in other memory than output 0"):
            piecewise(torch.randn(5, 6))
