"""Tracing: one graph for all sizes, made without running anything, and errors that say where and what to do."""

import functools
import inspect

import pytest
import torch
from torch import nn

import pcg_ref as pcg

WIDTH = 4


class Model(nn.Module):
    """Reads an attribute, writes a buffer."""

    def __init__(self, scale=2.0):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(1))
        self.scale = scale

    def forward(self, x, positions, shift=1.0, *, keyword=0.5):
        self.calls.add_(1)
        return self.linear(x) * self.scale + positions[:, None] + shift + keyword + self.calls


def inputs(tokens):
    return torch.randn(tokens, WIDTH), torch.arange(tokens)


def assert_equals_model(trace, model, sizes=(2, 3, 7, 64)):
    """Compare with eager, results and state, both from the same state."""
    module = getattr(getattr(model, "func", model), "__self__", model)
    calls = module.calls if isinstance(module, Model) else torch.zeros(1)
    for tokens in sizes:
        args = inputs(tokens)[:1] if model is torch.sin else inputs(tokens)
        before = calls.clone()
        expected = model(*args)
        after = calls.clone()
        calls.copy_(before)
        assert torch.equal(trace(*args), expected)
        assert torch.equal(calls, after)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def test_one_graph_for_many_sizes():
    model = Model()
    trace = pcg.trace(model, *inputs(5))
    assert_equals_model(trace, model)
    assert trace.compile_count == 1
    placeholders = trace.graph_module.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(trace.example_inputs) == len(trace.input_names)
    assert sum(isinstance(value, torch.SymInt) for value in trace.example_inputs) == 1


def test_tracing_runs_nothing():
    model = Model()
    x, positions = inputs(5)
    copies = x.clone(), positions.clone()
    pcg.trace(model, x, positions)
    assert model.calls.item() == 0
    assert torch.equal(x, copies[0]) and torch.equal(positions, copies[1])


def test_the_inputs_have_the_users_names():
    model = Model()
    trace = pcg.trace(model, *inputs(5))
    named = dict(zip(trace.input_names, trace.example_inputs, strict=True))
    assert named["linear.weight"] is model.linear.weight and named["linear.bias"] is model.linear.bias
    assert named["calls"] is model.calls
    assert {"x", "positions"} <= set(named)
    owners = {node.meta.get("owner") for node in trace.graph_module.graph.find_nodes(op="placeholder")}
    assert owners == {"parameter", "buffer", "static input", None}  # None: the size


def test_another_body_runs_behind_the_guards():
    model, seen = Model(), []
    trace = pcg.trace(model, *inputs(5))

    def body(*flat):
        seen.append(flat)
        return (flat[trace.input_names.index("x")] * 0,)

    x, positions = inputs(9)
    assert torch.equal(trace.call(body, x, positions), torch.zeros(9, WIDTH))
    assert model.calls.item() == 0 and [v for v in seen[0] if isinstance(v, int)] == [9]
    assert_equals_model(trace, model, sizes=(3,))  # the graph is back


# What can be traced.


def with_hooks():
    model = Model()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    model.register_forward_hook(lambda module, args, output: output + 3)
    return model


def with_inner_hook():
    model = Model()
    model.linear.register_forward_hook(lambda module, args, output: output * 3)
    return model


class Decorated(Model):
    @torch.no_grad()
    def forward(self, x, positions):
        return super().forward(x, positions)


class CallableObject:
    def __call__(self, x, positions):
        return x * 7 + positions[:, None]


def closure(factor):
    return lambda x, positions: x * factor + positions[:, None]


def with_defaults(x, positions, factor=3.0, *, shift=0.25):
    return x * factor + positions[:, None] + shift


CALLABLES = {
    "module": Model,
    "hooks": with_hooks,
    "inner hook": with_inner_hook,
    "decorated forward": Decorated,
    "bound method": lambda: Model().forward,
    "partial": lambda: functools.partial(Model().forward, keyword=4.0),
    "partial of a partial": lambda: functools.partial(functools.partial(with_defaults, shift=2.0), factor=5.0),
    "closure": lambda: closure(5.0),
    "defaults": lambda: with_defaults,
    "object": CallableObject,
    "builtin": lambda: torch.sin,
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_all_kinds_of_callables(kind):
    model = CALLABLES[kind]()
    trace = pcg.trace(model, *(inputs(5)[:1] if model is torch.sin else inputs(5)))
    assert_equals_model(trace, model)
    assert trace.compile_count == 1


@pytest.mark.parametrize("kind", ["module", "hooks", "decorated forward", "bound method", "partial", "defaults"])
def test_dimensions_may_be_named(kind):
    trace = pcg.trace(CALLABLES[kind](), *inputs(5), dynamic_dims={"x": 0, 1: [0]})
    assert trace(*inputs(9)).shape == (9, WIDTH)
    assert trace.compile_count == 1


@pytest.mark.parametrize("model", [Model(), functools.partial(Model().forward, shift=2.0)], ids=["module", "partial"])
def test_parameters_have_names_through_wrappers(model):
    assert {"linear.weight", "linear.bias", "calls"} <= set(pcg.trace(model, *inputs(5)).input_names)


def test_a_parameter_that_a_function_closes_over_is_a_parameter():
    linear = nn.Linear(WIDTH, WIDTH)
    trace = pcg.trace(lambda x: linear(x), inputs(5)[0])
    owners = [node.meta.get("owner") for node in trace.graph_module.graph.find_nodes(op="placeholder")]
    assert owners.count("parameter") == 2


# Which dimensions vary.


def test_only_the_named_dimensions_vary():
    trace = pcg.trace(lambda x, table: x @ table, torch.randn(3, 6), torch.randn(6, 5), dynamic_dims={"x": 0, "table": 1})
    x, table = torch.randn(9, 6), torch.randn(6, 8)
    assert torch.equal(trace(x, table), x @ table) and trace.compile_count == 1
    trace(torch.randn(9, 7), torch.randn(7, 8))
    assert trace.compile_count == 2


def test_several_dimensions_of_one_tensor_vary():
    trace = pcg.trace(lambda x: x.sin(), torch.randn(3, 6), dynamic_dims={0: [0, -1]})
    for shape in [(2, 9), (5, 4), (7, 7)]:
        x = torch.randn(shape)
        assert torch.equal(trace(x), x.sin())
    assert trace.compile_count == 1


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("dims", [None, {"x": 0}, {0: 0}])
def test_sizes_that_torch_specialises_are_refused(size, dims):
    with pytest.raises(ValueError, match=f"'x' has size {size} in its dynamic dimension 0.*at least 2"):
        pcg.trace(lambda x: x + 1, torch.randn(size, WIDTH), dynamic_dims=dims)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"y": 0}, r"'y', which is no tensor argument; the arguments are \['x', 'k'\]"),
        ({2: 0}, "names 2, which"),
        ({-1: 0}, "names -1, which"),
        ({"k": 0}, "'k', which is no tensor"),
        ({"x": 2}, r"dimension 2 for argument 'x', whose shape is \[6, 4\]"),
        ({"x": [0, -3]}, "dimension -3"),
    ],
)
def test_bad_dimensions_are_refused(dims, message):
    with pytest.raises(ValueError, match=message):
        pcg.trace(lambda x, k: x + k, torch.randn(6, WIDTH), 3, dynamic_dims=dims)


# What cannot be traced.


def branch_on_data(x):
    if x.sum() > 0:  # HERE
        return x + 1
    return x - 1


def branch_on_item(x):
    n = x.sum().item()
    if n > 3:  # HERE
        return x
    return x * n


def prints(x):
    y = x + 1
    print(y)  # HERE
    return y * 2


def breaks(x):
    torch._dynamo.graph_break()  # HERE
    return x * 2


def adds_six_rows(x):
    return x + torch.ones(6, 1)  # HERE


def views_six_rows(x):
    return x.view(6, 2, 2)  # HERE


def calls(x):
    return branch_on_data(x * 2)


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (branch_on_data, "hide it in an operator"),
        (branch_on_item, "hide it in an operator"),
        (prints, "Move that line out"),
        (breaks, "Move that line out"),
        (calls, "hide it in an operator"),
        (adds_six_rows, "in terms of its inputs' shapes.*dynamic_dims"),
        (views_six_rows, "in terms of its inputs' shapes.*dynamic_dims"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_error_names_the_line_and_the_remedy(model, remedy):
    lines, first = inspect.getsourcelines(branch_on_data if model is calls else model)
    line = first + next(i for i, text in enumerate(lines) if "# HERE" in text)
    with pytest.raises(pcg.TraceError, match=f"(?s){__file__}:{line} .*{remedy}.*strategy='breakable'") as caught:
        pcg.trace(model, torch.randn(6, WIDTH))
    assert caught.value.__cause__ is not None


def test_a_model_without_tensors_is_refused():
    with pytest.raises(pcg.TraceError, match="FX graph is empty"):
        pcg.trace(lambda x: 3, torch.randn(6, WIDTH))


def test_wrong_arguments_are_the_users_error():
    with pytest.raises(TypeError, match="too many positional"):
        pcg.trace(lambda x: x, *inputs(5))


# Independent traces, second traces and frozen ones.


def test_traces_of_one_class_are_independent():
    scales = [i + 0.125 for i in range(12)]
    models = [Model(scale) for scale in scales]  # more than torch's limit of recompiles, 8
    traces = [pcg.trace(model, *inputs(5)) for model in models]
    for trace in traces:
        trace.freeze()
    for trace, model in zip(traces, models, strict=True):
        assert_equals_model(trace, model, sizes=(2, 9))
    assert [trace.compile_count for trace in traces] == [1] * 12
    # Neither does an earlier trace change what a later one holds: the attribute stays a constant.
    assert all(f"* {scale}" in trace.graph_module.code for trace, scale in zip(traces, scales, strict=True))


def test_a_second_trace_is_counted_and_right():
    model = Model()
    trace = pcg.trace(model, *inputs(5))
    graph = trace.graph_module
    for scale, count in [(2.0, 1), (3.0, 2), (2.0, 2)]:
        model.scale = scale
        assert_equals_model(trace, model)
        assert trace.compile_count == count
    assert trace.graph_module is graph


def change_attribute(model):
    model.scale = 3.0
    return inputs(7)


GUARDS = {
    "attribute": (change_attribute, r"\.scale == 2\.0"),
    "dtype": (lambda model: (inputs(7)[0].double(), inputs(7)[1]), "dtype mismatch. expected Float, actual Double"),
    "width": (lambda model: (torch.randn(7, WIDTH + 1), inputs(7)[1]), "size mismatch at index 1. expected 4, actual 5"),
    "one token": (lambda model: inputs(1), r"2 <= L\['x'\]\.size\(\)\[0\]"),
    "default": (lambda model: (*inputs(7), 9.0), r"L\['shift'\] == 1\.0"),
}


@pytest.mark.parametrize(("kind", "make"), [*((kind, Model) for kind in GUARDS), ("attribute", with_hooks)])
def test_a_frozen_trace_names_the_guard_that_failed(kind, make):
    model = make()
    trace = pcg.trace(model, *inputs(5))
    trace.freeze()
    change, guard = GUARDS[kind]
    with pytest.raises(pcg.RecompileError, match=f"(?s)Guard that failed: .*{guard}.*Restore the state"):
        trace(*change(model))
    assert trace.compile_count == 1 and model.calls.item() == 0  # nothing was traced, nothing ran
    model.scale = 2.0
    assert_equals_model(trace, model, sizes=(5, 8))


def test_the_users_own_error_passes_through_a_frozen_trace():
    trace = pcg.trace(Model(), *inputs(5))
    trace.freeze()

    def body(*flat):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine$"):
        trace.call(body, *inputs(5))


def test_gradients_may_be_on_at_the_call():
    model = Model()
    trace = pcg.trace(model, *inputs(5))
    trace.freeze()
    with torch.enable_grad():
        output = trace(*inputs(5))
    assert not output.requires_grad and trace.compile_count == 1
