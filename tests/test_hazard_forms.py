"""The hazards in other forms: other operators, dtypes, layouts, signatures and owners of state, each against eager on new input."""

from __future__ import annotations

import gc
from typing import Optional

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pcg_ref as pcg
from pcg_ref.hazards.common import Rows, batch, eagerly, hazard_fresh, hazard_pair, hazard_write
from pcg_ref.strategies.breakable import capture_breakable

D = 4
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def refill(tensor):
    """New contents at the same address, small so that sums are exact in every dtype."""
    tensor.copy_(torch.randint(0, 3, tensor.shape))


def like(device, dtype=torch.float32, rows=8):
    return torch.zeros(rows, D, device=device, dtype=dtype)


def assert_equal_to_eager(run, program, inputs, replays=3):
    """``run`` replays on the static ``inputs``, and must compute what ``program`` does, in its results and in what it writes."""
    for _ in range(replays):
        for tensor in inputs:
            refill(tensor)
        copies = [tensor.clone() for tensor in inputs]
        with torch.no_grad():
            expected, got = program(*copies), run()
        torch.testing.assert_close(got, expected, check_stride=False, equal_nan=True)
        torch.testing.assert_close(list(inputs), copies)


def graph_segments(sequence):
    return [segment for segment in sequence.segments if isinstance(segment, pcg.GraphSegment)]


def check(program, *examples, ops, compiler="eager", sizes=(8, 5)):
    """Every bucket flat and stitched, and by eager breaks; interleaved, so that one overwrites what it can of the others."""
    trace = pcg.trace(program, *(torch.zeros_like(e.repeat(3, *[1] * (e.dim() - 1))[:17]) for e in examples))
    piecewise = pcg.PiecewiseModel(trace, ops, compiler, sizes, debug=True)
    runs = []
    for size in sizes:
        inputs = [e.repeat(3, *[1] * (e.dim() - 1))[:size].clone() for e in examples]
        for tensor in inputs:
            refill(tensor)
        sequence = piecewise.capture(*inputs)
        runs += [(sequence.replay, inputs), (lambda inputs=inputs: piecewise(*inputs), inputs)]
        if compiler == "eager":
            inputs = [tensor.clone() for tensor in inputs]
            sequence = capture_breakable(program, *inputs, pool=pcg.GraphPool(examples[0].device))
            runs.append((sequence.replay, inputs))
    for _ in range(2):
        for run, inputs in runs:
            assert_equal_to_eager(run, program, inputs, replays=1)
    assert trace.compile_count == 1
    assert not any(segment.graph.empty for sequence in piecewise.sequences.values() for segment in graph_segments(sequence))
    return piecewise


# H1, H2: what an operator returns, in every dtype and layout.


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: torch.empty_like(x))
def form_same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: x.new_empty(x.shape[1], x.shape[0]).t())
def form_transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: x.new_empty(()))
def form_total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: x.new_empty(1, x.shape[1]).expand(x.shape))
def form_expanded(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=True).expand(x.shape)


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: x.new_empty(2 * x.shape[0], x.shape[1])[::2])
def form_strided(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 0)[::2]


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: x.new_empty(0, x.shape[1]))
def form_nothing(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0, x.shape[1])


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: [torch.empty_like(x), x.new_empty(x.shape[0])])
def form_list(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * 3, x.sum(1)]


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"], fake=lambda x, output: torch.empty_like(x))
def form_writes_and_returns(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    output.copy_(x * 2)
    return x * 3


def double(x):
    return x | x.logical_not() if x.dtype == torch.bool else x + x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fresh_result_of_any_dtype(dtype, device):
    check(lambda x: double(form_same(double(x))), like(device, dtype), ops=[form_same])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_written_argument_of_any_dtype(dtype, device):
    def program(x):
        y = double(x)
        output = torch.empty_like(y)
        hazard_write(y, output)
        return double(output)

    check(program, like(device, dtype), ops=[hazard_write])


@pytest.mark.parametrize(
    "op, compiler",
    [
        (form_transposed, "eager"), (form_total, "eager"), (form_expanded, "eager"), (form_strided, "eager"),
        pytest.param(form_transposed, "inductor", marks=pytest.mark.inductor),
    ],
    ids=str,
)
def test_a_fresh_result_of_any_layout(op, compiler, device):
    check(lambda x: op(x * 2) + x, like(device), ops=[op], compiler=compiler)


def test_a_fresh_result_without_elements(device):
    check(lambda x: torch.cat([form_nothing(x * 2), x * 2]), like(device), ops=[form_nothing])


def test_a_list_of_results(device):
    def program(x):
        first, second = form_list(x + 1)
        return first * second[:, None]

    check(program, like(device), ops=[form_list])


def test_an_operator_that_writes_and_returns(device):
    def program(x):
        y = x + 1
        output = torch.empty_like(y)
        returned = form_writes_and_returns(y, output)
        return output + returned

    check(program, like(device), ops=[form_writes_and_returns])


@pytest.mark.parametrize(
    "program",
    [
        lambda x: hazard_pair(x * 2)[1] + 1,  # the first is not used
        lambda x: hazard_pair(x * 2)[0],  # and here nothing comes behind
        lambda x: torch.stack(hazard_pair(hazard_pair(x)[1])).sum(0),
        lambda x: (lambda p, q: p[0] + hazard_fresh(p[1] * 2) + p[0])(hazard_pair(x), 0),  # used two cuts later
        lambda x: hazard_fresh(hazard_fresh(x) + 1),
        lambda x: (hazard_fresh(x), hazard_fresh(x + 1)),
        lambda x: (x, hazard_fresh(x)),
        lambda x: (lambda f: (f, f.t(), f[1:]))(hazard_fresh(x * 2)),
    ],
    ids=["second only", "at the end", "one after the other", "two cuts later", "fresh of fresh", "two outputs", "an input", "views"],
)
def test_where_results_go(program, device):
    check(program, like(device), ops=[hazard_pair, hazard_fresh])


# H4 and signatures: how an operator is called.


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"])
def form_optional(
    x: torch.Tensor, output: torch.Tensor, bias: Optional[torch.Tensor] = None, scale: float = 1.0, times: int = 1, negate: bool = False,
    how: str = "add",
) -> None:
    y = x * scale * times
    y = y if bias is None else y + bias if how == "add" else y * bias
    output.copy_(-y if negate else y)


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"])
def form_many(xs: list[torch.Tensor], output: torch.Tensor, weights: list[float]) -> None:
    output.copy_(sum(x * w for x, w in zip(xs, weights)))


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["outputs"])
def form_writes_many(x: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    for i, output in enumerate(outputs):
        output.copy_(x * (i + 1))


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"])
def form_rows(x: torch.Tensor, output: torch.Tensor, rows: int) -> None:
    output.copy_(x * rows)


def calls_with(*args, **kwargs):
    def program(x):
        y = x + 1
        output = torch.empty_like(y)
        form_optional(y, output, *[a(y) if callable(a) else a for a in args], **{k: v(y) if callable(v) else v for k, v in kwargs.items()})
        return output + 1

    return program


def by_keywords_alone(x):
    y = x + 1
    output = torch.empty_like(y)
    form_optional(output=output, x=y)
    return output * 2


def with_a_list(x):
    y = x + 1
    output = torch.empty_like(y)
    form_many([y, x, y * 2], output, [1.0, 2.0, 3.0])
    return output + y


def with_a_list_of_outputs(x):
    outputs = [torch.empty_like(x), torch.empty_like(x)]
    form_writes_many(x + 1, outputs)
    return outputs[0] * outputs[1]


def with_a_size(x):
    output = torch.empty_like(x)
    form_rows(x + 1, output, x.shape[0])
    return output + x.shape[0]


def with_a_size_of_its_own(x):
    output = torch.empty_like(x)
    form_rows(x + 1, output, 2 * x.shape[0] - 1)
    return output.view(x.shape[0] * D).view(-1, D) + 1


@pytest.mark.parametrize(
    "program",
    [
        calls_with(),
        calls_with(lambda y: y * 2),
        calls_with(None, 2.0, 3),
        calls_with(bias=lambda y: y + 1, negate=True, how="mul"),
        by_keywords_alone,
        with_a_list,
        with_a_list_of_outputs,
        with_a_size,
        with_a_size_of_its_own,
    ],
    ids=["no optionals", "a tensor", "None and numbers", "keywords", "keywords alone", "a list", "written list", "a size", "own size"],
)
def test_how_an_operator_is_called(program, device):
    check(program, like(device), ops=[form_optional, form_many, form_writes_many, form_rows])


@pytest.mark.inductor
def test_how_an_operator_is_called_by_inductors_pieces(device):
    check(with_a_list_of_outputs, like(device), ops=[form_writes_many], compiler="inductor")
    check(with_a_size_of_its_own, like(device), ops=[form_rows], compiler="inductor")


# H5, H6: sizes across a cut, and pieces with nothing to launch.


def cut(x):
    output = torch.empty_like(x)
    hazard_write(x + 1, output)
    return output


SIZES = {
    "shape": lambda x: (lambda s, y: y.flatten().view(s))(x.shape, cut(x)) + 1,
    "size()": lambda x: (lambda s, y: y.flatten().view(s))(x.size(), cut(x)) + 1,
    "unpacked": lambda x: (lambda s, y: y.flatten().view(*s))(x.shape, cut(x)) + 1,
    "longer": lambda x: (lambda s, y: y[..., None].expand(s))((*x.shape, 2), cut(x)) + 1,
    "sliced": lambda x: (lambda s, y: y.new_ones(s) + y.sum())(x.shape[:1], cut(x)),
    "product": lambda x: (lambda s, y: y.reshape(s))(x.numel(), cut(x)) * 2,
    "rows": lambda x: (lambda s, y: y * s)(x.size(0), cut(x)),
    "len": lambda x: (lambda s, y: y * s)(len(x), cut(x)),
    "of a view": lambda x: (lambda s, y: y.view(s) + 1)(x.t()[:, None].shape, cut(x.clone()).t()[:, None].clone()),
    "arithmetic": lambda x: (lambda n, y: F.pad(y, (0, 0, 0, n)))(x.shape[0] // 2 + 1, cut(x)),
    "compared": lambda x: (lambda s, y: y * 2 if s == y.shape else y)(x.shape, cut(x)),
    "arange": lambda x: (lambda n, y: y + torch.arange(n, device=y.device)[:, None])(x.shape[0], cut(x)),
}


@pytest.mark.parametrize(
    "name, compiler",
    [*((name, "eager") for name in SIZES), *(pytest.param(name, "inductor", marks=pytest.mark.inductor) for name in ("shape", "longer"))],
)
def test_sizes_across_a_cut(name, compiler, device):
    piecewise = check(SIZES[name], like(device), ops=[hazard_write], compiler=compiler)
    for item in piecewise.items:
        for node in item.graph.graph.find_nodes(op="placeholder"):
            assert isinstance(node.meta["example_value"], (torch.Tensor, torch.SymInt, int))


def between(middle):
    def program(x):
        y = x * 2
        first = torch.empty_like(y)
        hazard_write(y, first)
        second = middle(first)
        third = torch.empty_like(second)
        hazard_write(second, third)
        return third + 1

    return program


NOTHING = {
    "view": lambda y: y.view(-1),
    "transpose": lambda y: y.t(),
    "slice": lambda y: y[1:],
    "strides": lambda y: y.as_strided((y.shape[0], 2), (D, 2)),
    "expand": lambda y: y[:1].expand(3, D),
    "detach": lambda y: y.detach(),
    "unsqueeze": lambda y: y.unsqueeze(1).squeeze(1),
    "chunk": lambda y: y.chunk(2, 1)[1],
    "unbind": lambda y: y.unbind(1)[2],
    "contiguous already": lambda y: y.contiguous(),
    "float already": lambda y: y.float(),
    "real": lambda y: y.real,
    "view as complex": lambda y: torch.view_as_real(torch.view_as_complex(y.view(-1, 2, 2))),
    "another dtype's view": lambda y: y.view(torch.int32).view(torch.float32),
    "diagonal": lambda y: y.diagonal(),
    "in place view": lambda y: y.view(y.shape).t_().t_(),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_launch_between_two_cuts(name, device):
    piecewise = check(between(NOTHING[name]), like(device), ops=[hazard_write])
    assert [segment.name for segment in graph_segments(piecewise.sequences[8])] == ["submod_0", "submod_4"]


# H8: writes and reads, through views, in place, and in chains.


def chain(x):
    y = (x * 2).add_(1).mul_(3)
    hazard_write(y + 1, y)
    y.sub_(1).clamp_(max=20)
    hazard_write(y * 2, y)
    return y.relu_()


def views_of_views(x):
    y = torch.zeros_like(x) + x
    hazard_write(x[1:-1, :2] * 2, y.view(-1, D)[1:-1][:, 2:])
    y[:, ::2].mul_(2)
    hazard_write(y.t()[1:3] + 1, y.t()[:2])
    return y + x


def read_write_read(x):
    before = x.sum(0)
    hazard_write(x * 2, x)
    between = x.sum(0)
    x.add_(1)
    hazard_write(x * 3, x)
    return torch.stack([before, between, x.sum(0)])


def scatter(x):
    index = torch.arange(x.shape[0], device=x.device).flip(0)
    y = torch.zeros_like(x).index_add_(0, index, x).index_copy_(0, index[:2], x[:2])
    hazard_write(y.scatter(1, torch.ones_like(x, dtype=torch.int64), x), y)
    y.masked_fill_(y > 2, -1)
    y[index[:1]] = y.new_full((), 7)  # and not 7, a number of the host, which CUDA refuses to copy
    hazard_write(y.cumsum(0), y)
    return y.index_put_((index,), x, accumulate=True)


def several_outputs(x):
    values, indices = (x * 10 + torch.arange(D, device=x.device)).sort(1, descending=True)
    output = torch.empty_like(values)
    hazard_write(values, output)
    left, right = output.split(2, 1)
    top = output.topk(2, 1)
    return left + right, indices, top.values, torch.var_mean(output, 0)


def an_output_that_is_a_view(x):
    y = x + 1
    output = torch.empty_like(y)
    hazard_write(y, output)
    return output.t(), output[1:], y


@pytest.mark.parametrize("program", [chain, views_of_views, read_write_read, scatter, several_outputs, an_output_that_is_a_view])
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_reads_and_writes(program, compiler, device):
    check(program, like(device), ops=[hazard_write], compiler=compiler)


def turned_in_place(x):
    y = x * 2
    first = torch.empty_like(y)
    hazard_write(y, first)
    first.t_()  # changes the tensor object alone
    return hazard_fresh(first) + 1


def test_a_tensor_object_that_is_turned_in_place_and_crosses_is_refused(device):
    with pytest.raises(ValueError, match=r"t_\(\) changes the tensor object 'first'.* write y = x\.t\(.*\n.*first\.t_\(\)"):
        pcg.PiecewiseModel(pcg.trace(turned_in_place, like(device)), [hazard_write, hazard_fresh], capture_sizes=[8])
    check(lambda x: hazard_fresh((x * 2).t_()).t() + 1, like(device), ops=[hazard_fresh])


def test_inputs_of_many_layouts(device):
    x = torch.zeros(8, 2 * D, device=device)[:, ::2]
    trace = pcg.trace(lambda x: cut(x) * 2, torch.zeros(17, 2 * D, device=device)[:, ::2])
    piecewise = pcg.PiecewiseModel(trace, [hazard_write], capture_sizes=[8])
    assert_equal_to_eager(piecewise.capture(x).replay, lambda x: cut(x) * 2, [x])


def test_a_number_is_frozen_and_said_so(device):
    trace = pcg.trace(lambda x, s: cut(x) * s, torch.zeros(17, D, device=device), 2.0)
    piecewise = pcg.PiecewiseModel(trace, [hazard_write], capture_sizes=[8])
    x = like(device)
    piecewise.capture(x, 2.0)
    with pytest.raises(RuntimeError, match="frozen|trace"):
        piecewise(x, 3.0)


# H9, H16: state and weights of a model, wherever it keeps them.


def buffer(model, device, dtype):
    model.register_buffer("state", torch.zeros(D, device=device, dtype=dtype))


def buffer_of_a_child(model, device, dtype):
    model.child = nn.Module()
    model.child.register_buffer("state", torch.zeros(D, device=device, dtype=dtype), persistent=False)


def attribute(model, device, dtype):
    model.state = torch.zeros(D, device=device, dtype=dtype)


def in_a_list(model, device, dtype):
    model.states = [torch.zeros(D, device=device, dtype=dtype), torch.zeros(D, device=device, dtype=dtype)]


def in_a_dictionary(model, device, dtype):
    model.states = {"k": torch.zeros(D, device=device, dtype=dtype)}


def view_of_a_buffer(model, device, dtype):
    model.register_buffer("whole", torch.zeros(2, D, device=device, dtype=dtype))
    model.part = model.whole[1]


WHERE = [buffer, buffer_of_a_child, attribute, in_a_list, in_a_dictionary, view_of_a_buffer]


class Adds(nn.Module):
    """Adds to a tensor that ``where`` keeps for it, in the graph or in the split operator."""

    def __init__(self, where, in_split_op, dtype, device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D, device=device), requires_grad=False)
        where(self, device, dtype)
        self.where, self.in_split_op = where.__name__, in_split_op

    def kept(self):
        if self.where == "buffer_of_a_child":
            return self.child.state
        if self.where == "view_of_a_buffer":
            return self.part
        if self.where == "in_a_list":
            return self.states[1]
        return self.states["k"] if self.where == "in_a_dictionary" else self.state

    def forward(self, tokens, positions):
        state, hidden = self.kept(), tokens[:, None] * self.weight
        if self.in_split_op:
            hazard_write(state * 2 + 1, state)
        else:
            state.mul_(2).add_(1)
            hazard_write(hidden * 1, hidden)
        return hidden + state.abs().float()


@pytest.mark.parametrize(
    "where, strategy, dtype",
    [
        *((where, "tc_piecewise", torch.float32) for where in WHERE),
        *((where, strategy, torch.float32) for where in (buffer, in_a_list) for strategy in ("breakable", "full")),
        *((buffer, "tc_piecewise", dtype) for dtype in (torch.bfloat16, torch.int64, torch.complex64)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("in_split_op", [False, True], ids=["in the graph", "in the split operator"])
def test_state_is_kept_through_capture_and_written_by_each_run(where, strategy, in_split_op, dtype, device):
    model, oracle = (Adds(where, in_split_op, dtype, device) for _ in range(2))
    for m in (model, oracle):
        m.kept().fill_(3)
    runner = pcg.PrefillRunner(model, strategy, buckets=[8, 16])
    runner.capture(progress=False)
    torch.testing.assert_close(model.kept(), oracle.kept())
    for lengths in ([3, 5], [9, 4], [2, 3]):
        requests = batch(device, *lengths)
        torch.testing.assert_close(runner.run(requests), eagerly(oracle, requests))
        torch.testing.assert_close(model.kept(), oracle.kept())


def replace_parameter(model):
    model.weight = nn.Parameter(model.weight * 3)


def replace_data(model):
    model.weight.data = model.weight.data * 3


def through_half(model):
    model.half().float()
    model.weight.mul_(3)


def assign_state(model):
    model.load_state_dict({key: value * 3 for key, value in model.state_dict().items()}, assign=True)


def swap_child(model):
    model.child = type(model.child)(D, D, bias=False, device=model.weight.device)


def replace_buffer(model):
    model.offset = model.offset + 1


def replace_attribute(model):
    model.plain = model.plain + 1


def replace_in_list(model):
    model.several[0] = model.several[0] + 1


def tie(model):
    model.child.weight = nn.Parameter(model.child.weight.clone() + 1)


class Weights(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D, device=device), requires_grad=False)
        self.child = nn.Linear(D, D, bias=False, device=device).requires_grad_(False)
        self.register_buffer("offset", torch.ones(D, device=device))
        self.plain = torch.ones(D, device=device)
        self.several = [torch.ones(D, device=device)]

    def forward(self, tokens, positions):
        hidden = self.child(tokens[:, None] * self.weight + self.offset) * self.plain + self.several[0]
        written = torch.empty_like(hidden)
        hazard_write(hidden, written)
        return written + 1


MOVES = [replace_parameter, replace_data, through_half, assign_state, swap_child, replace_buffer, replace_attribute, replace_in_list, tie]
@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
@pytest.mark.parametrize("move", MOVES)
def test_what_has_moved_is_noticed_or_makes_no_difference(move, strategy, device):
    model = Weights(device)
    runner = pcg.PrefillRunner(model, strategy, buckets=[8])
    runner.capture(progress=False)
    keep = [model.weight.detach(), model.child.weight.detach(), model.offset, model.plain, *model.several]  # so that addresses differ
    with torch.no_grad():
        move(model)
    requests = batch(device, 3, 5)
    try:
        hidden = runner.run(requests)
    except RuntimeError as error:  # a RecompileError is one
        assert any(name in str(error) for name in ("weight", "child", "offset", "plain", "several")), error
    else:
        torch.testing.assert_close(hidden, eagerly(model, requests))
    assert keep


class BatchNormed(Rows):
    """In training mode: the forward updates two float buffers and counts in an integer one."""

    def __init__(self, device):
        super().__init__(device)
        self.norm = nn.BatchNorm1d(D, device=device).requires_grad_(False)

    def forward(self, tokens, positions):
        return self.norm(super().forward(tokens, positions))


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_running_statistics(strategy, device):
    model, oracle = BatchNormed(device), BatchNormed(device)
    runner = pcg.PrefillRunner(model, strategy, buckets=[8])
    runner.capture(progress=False)
    for token in (2, 5):
        requests = batch(device, 3, 5, token=token)
        torch.testing.assert_close(runner.run(requests), eagerly(oracle, requests))
        torch.testing.assert_close(dict(model.named_buffers()), dict(oracle.named_buffers()))


# H10: what a model reads beside its inputs.


class Reads(Rows):
    extra = 1

    def __init__(self, device):
        super().__init__(device)
        self.flag, self.count, self.scale, self.how, self.none = True, 2, 0.5, "add", None
        self.pair, self.table, self.child = (1, 2), {"k": 1}, nn.Dropout(0.5)
        self.child.eval()

    def forward(self, tokens, positions):
        hidden = super().forward(tokens, positions) * self.scale * self.count
        hidden = hidden + 1 if self.flag else hidden
        hidden = hidden + self.pair[0] + self.table["k"] + self.extra + (0 if self.none is None else 1)
        return self.child(hidden + 1 if self.how == "add" else hidden)


CHANGES = {
    "bool": ("flag", False),
    "int": ("count", 3),
    "float": ("scale", 0.25),
    "str": ("how", "mul"),
    "None": ("none", 1),
    "tuple": ("pair", (5, 2)),
    "dict": ("table", {"k": 7}),
}


@pytest.mark.parametrize(
    "kind, strategy, replay",
    [
        *((kind, "tc_piecewise", "flat") for kind in CHANGES),
        *((kind, "tc_piecewise", "stitched") for kind in ("float", "tuple")),
        *((kind, strategy, "flat") for kind in ("bool", "dict") for strategy in ("breakable", "full")),
        ("of the class", "tc_piecewise", "stitched"),
        *(("of the class", strategy, "flat") for strategy in ("tc_piecewise", "breakable", "full")),
    ],
)
def test_a_changed_attribute_is_refused_or_runs_eagerly(kind, strategy, replay, device):
    for on_recompile in ("error", "eager"):
        model = Reads(device)
        runner = pcg.PrefillRunner(model, strategy, [8], replay=replay, on_recompile=on_recompile)
        runner.capture(progress=False)
        requests = batch(device, 3, 5)
        torch.testing.assert_close(runner.run(requests), eagerly(model, requests))
        name, value = CHANGES.get(kind, ("extra", 5))
        setattr(model, name, value)
        if on_recompile == "error":
            with pytest.raises(pcg.RecompileError, match=name):
                runner.run(requests)
        else:
            torch.testing.assert_close(runner.run(requests), eagerly(model, requests))
            assert any(name in reason for reason in runner.report()["eager"])


# H12, H13: rows that no request owns.


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["cache"])
def form_store(rows: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    n = pcg.current_context().num_tokens
    cache.view(-1, D)[slots[:n]] = rows[:n].to(cache.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_a_cache_of_any_dtype_keeps_the_rows_of_others(dtype, slot_dtype, device):
    def program(rows, slots, cache):
        doubled = rows * 2
        form_store(doubled, slots, cache)
        return doubled + cache.sum().float()

    def fill(n):
        rows.copy_(torch.randint(0, 9, rows.shape))
        rows[n:] = float("nan")  # whatever the padding holds
        slots[:n] = torch.randperm(64)[:n].to(slots)

    cache = torch.zeros(8, 8, D, dtype=dtype, device=device)  # pages
    rows, slots = like(device), torch.arange(8, dtype=slot_dtype, device=device)
    examples = like(device, rows=17), torch.zeros(17, dtype=slot_dtype, device=device), torch.zeros_like(cache)
    piecewise = pcg.PiecewiseModel(pcg.trace(program, *examples, dynamic_dims={0: 0, 1: 0}), [form_store], capture_sizes=[8])
    with pcg.forward_context(batch(device, 8)):
        piecewise.capture(rows, slots, cache)
    oracle = cache.clone()
    for n in (8, 5, 3, 1, 7):
        fill(n)
        with pcg.forward_context(batch(device, n), padded_num_tokens=8):
            result = piecewise.sequences[8].replay()[:n]
        with pcg.forward_context(batch(device, n)):
            expected = program(rows[:n], slots[:n], oracle)
        assert torch.equal(cache, oracle)
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_row_is_defined_whatever_was_there(strategy, dtype, device):
    model = pcg.TinyDecoder().to(device, dtype)
    runner = pcg.PrefillRunner(model, strategy, [8], debug=True)  # graph memory is NaN before each replay
    runner.capture(progress=False)
    for lengths in ([2, 2, 2, 2], [5], [1, 1], [7], [1, 1, 1, 1, 1]):
        requests = batch(device, *lengths)
        if sum(lengths) >= 4:
            torch.testing.assert_close(runner.run(requests), eagerly(model, requests), atol=2e-2, rtol=2e-2)
            assert runner.sequences[8].output.isfinite().all()


# H14, H15: the collector and the pool, under every strategy.


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(strategy, enabled, device):
    calls = []

    class Fails(Rows):
        def forward(self, tokens, positions):
            hidden = super().forward(tokens, positions)
            calls.append(len(tokens))
            if len(calls) == 2:  # the first was the warm-up, this is the capture
                raise KeyError("inside")
            return hidden

    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        pcg.PrefillRunner(Rows(device), strategy, [8, 16]).capture(progress=False)
        assert gc.isenabled() is enabled
        if strategy != "tc_piecewise":  # that one runs the graph, and not the model
            with pytest.raises(KeyError):
                pcg.PrefillRunner(Fails(device), strategy, [8, 16]).capture(progress=False)
            assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


class Wide(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096, device=device), requires_grad=False)

    def forward(self, tokens, positions):
        hidden = tokens[:, None] * self.weight
        written = torch.empty_like(hidden)
        hazard_write(hidden, written)
        hidden = written * 2
        again = torch.empty_like(hidden)
        hazard_write(hidden, again)
        return again + hidden


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_smaller_sizes_share_the_memory_of_the_largest(strategy, device):
    sizes = [256, 512, 1024]
    every, alone = pcg.PrefillRunner(Wide(device), strategy, sizes), pcg.PrefillRunner(Wide(device), strategy, sizes[-1:])
    for runner in (every, alone):
        runner.capture(progress=False)
    assert every.report()["pool_bytes"] <= 1.2 * alone.report()["pool_bytes"]
