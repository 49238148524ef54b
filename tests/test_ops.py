"""Operators: what a definition accepts, what a notebook cell that runs twice does, and what the compiler sees."""

import pytest
import torch

import pcg_ref as pcg
from pcg_ref.ops import python_body


def scaled(x: torch.Tensor, factor: float, output: torch.Tensor) -> None:
    output.copy_(x * factor)


scale_op = pcg.register_custom_op(mutates_args=["output"])(scaled)


def define(source: str, **arguments):
    """Define an operator from source text, as a notebook cell would; ``arguments`` go to register_custom_op."""
    scope = {"torch": torch, "__name__": "a_notebook"}
    exec(compile(source, "<cell>", "exec", dont_inherit=True), scope)
    return pcg.register_custom_op(**arguments)(scope["cell_op"])


ADD_ONE = "def cell_op(x: torch.Tensor) -> torch.Tensor: return x + 1"


@pytest.fixture
def registry():
    """Leave the registry of split operators as it was."""
    before = pcg.split_ops()
    yield before
    for op in set(pcg.split_ops()) - set(before):
        pcg.ops._split_ops.pop(op)


def test_calling_the_operator_runs_the_body():
    x, output = torch.randn(3), torch.empty(3)
    assert scale_op(x, 2.5, output) is None
    assert torch.equal(output, x * 2.5)
    assert isinstance(scale_op, torch._ops.OpOverload) and torch.ops.pcg_ref.scaled.default is scale_op
    assert python_body(scale_op) is scaled and python_body(torch.ops.aten.add.Tensor) is None


def test_the_schema_says_what_is_written():
    assert [(a.name, bool(a.alias_info and a.alias_info.is_write)) for a in scale_op._schema.arguments] == [
        ("x", False),
        ("factor", False),
        ("output", True),
    ]


def test_torch_accepts_the_definition():
    torch.library.opcheck(
        scale_op, (torch.randn(3), 2.0, torch.empty(3)), test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


def test_one_name_may_be_given_as_a_string():
    op = define("def cell_op(x: torch.Tensor) -> None: x.add_(1)", mutates_args="x")
    assert op._schema.arguments[0].alias_info.is_write


def test_the_compiler_sees_one_opaque_node():
    graphs = []

    def backend(graph_module, _):
        graphs.append(graph_module)
        return graph_module

    def forward(x):
        output = torch.empty_like(x)
        scale_op(x + 1, 3.0, output)
        return output * 2

    torch.compile(forward, backend=backend, fullgraph=True)(torch.randn(4))
    targets = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert targets.count(scale_op) == 1 and not any("copy" in str(t) for t in targets)
    x = torch.randn(5)
    assert torch.equal(torch.compile(forward, backend="aot_eager", fullgraph=True)(x), (x + 1) * 3.0 * 2)


@pytest.mark.parametrize(
    "second",
    [ADD_ONE.replace("+ 1", "+ 2"), "def cell_op(x: torch.Tensor, by: int = 2) -> torch.Tensor: return x + by"],
    ids=["body", "schema"],
)
def test_a_cell_may_run_again(second, registry):
    first = pcg.register_split_op()(define(ADD_ONE, fake=lambda x: torch.empty_like(x)))
    again = define(second, fake=lambda x, by=2: x.new_empty(7))
    assert torch.equal(again(torch.zeros(2)), torch.full((2,), 2.0))
    assert torch.equal(torch.ops.pcg_ref.cell_op(torch.zeros(2)), torch.full((2,), 2.0))
    with torch._subclasses.FakeTensorMode():
        assert again(torch.zeros(2)).shape == (7,)  # the new shape function, too
    assert first not in pcg.split_ops() and python_body(first) is None
    pcg.register_split_op()(again)
    assert pcg.split_ops() == (*registry, again)


def test_another_functions_name_is_not_taken_over():
    define(ADD_ONE, fake=torch.empty_like)

    def cell_op(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(
        ValueError, match="pcg_ref::cell_op is already defined by a_notebook.cell_op; give .*test_another.* another name"
    ):
        pcg.register_custom_op(fake=torch.empty_like)(cell_op)
    assert torch.equal(torch.ops.pcg_ref.cell_op(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("def cell_op(x): pass", {}, "parameter 'x' of 'cell_op' has no type annotation.*'x: torch.Tensor'"),
        ("def cell_op(x: torch.Tensor, n) -> None: pass", {}, "parameter 'n'"),
        ("def cell_op(x: torch.Tensor) -> None: pass", {"mutates_args": ["y"]}, r"mutates_args names \['y'\].*parameters \['x'\]"),
        ("def cell_op(n: int) -> None: pass", {"mutates_args": ["n"]}, "only Tensors"),
        ("def cell_op(x: dict) -> None: pass", {}, "unsupported type"),
        (ADD_ONE, {}, "returns Tensor.*fake="),
        (
            "def cell_op(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: return x, x",
            {},
            r"returns \(Tensor, Tensor\).*fake=",
        ),
    ],
)
def test_a_bad_definition_is_refused(source, arguments, message):
    with pytest.raises(ValueError, match=message):
        define(source, **arguments)


def test_a_refused_definition_leaves_the_earlier_one():
    define(ADD_ONE, fake=torch.empty_like)
    with pytest.raises(ValueError):
        define("def cell_op(x): pass")
    assert torch.equal(torch.ops.pcg_ref.cell_op(torch.zeros(2)), torch.ones(2))


def test_a_result_that_was_not_annotated_is_an_error_at_the_first_call():
    op = define("def cell_op(x: torch.Tensor): return x + 1")
    with pytest.raises(RuntimeError, match="cell_op to return None"):
        op(torch.zeros(2))


def test_annotations_may_be_text():
    source = ADD_ONE.replace("torch.Tensor", "Tensor")  # a name that only the cell knows
    op = define("from __future__ import annotations\nfrom torch import Tensor\n" + source, fake=torch.empty_like)
    assert str(op._schema) == "pcg_ref::cell_op(Tensor x) -> Tensor"


def test_tags_reach_the_operator():
    op = define("def cell_op(x: torch.Tensor) -> None: pass", tags=[torch.Tag.cudagraph_unsafe])
    assert torch.Tag.cudagraph_unsafe in op.tags and torch.Tag.cudagraph_unsafe not in scale_op.tags


def test_a_packet_registers_all_its_overloads(registry):
    assert pcg.register_split_op()(torch.ops.aten.bmm) is torch.ops.aten.bmm
    assert set(pcg.split_ops()) - set(registry) >= {torch.ops.aten.bmm.default, torch.ops.aten.bmm.out}


def test_registering_twice_counts_once(registry):
    for _ in range(2):
        assert pcg.register_split_op()(scale_op) is scale_op
    assert pcg.split_ops() == (*registry, scale_op)


def test_a_function_is_no_split_op(registry):
    with pytest.raises(TypeError, match="needs an operator, got <function scaled.*register_custom_op"):
        pcg.register_split_op()(scaled)
    assert pcg.split_ops() == registry
