"""Splitting: the engines' partition, the original's results for every input, and what may not cross a cut."""

import itertools
import json
import operator
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_engine_partitions import ALL_STEPS, OPS, RECORDING, WIDTH, RandomGraph, partition, recorded_graph
from torch import fx, nn

import pcg_ref as pcg
from pcg_ref.effects import effects

SIZES = (2, 5, 9)
RECORDED = json.loads(RECORDING.read_text())
mix, fill, pair = OPS
PACKETS = dict(zip(("mix", "fill", "pair"), OPS))


def rows(tokens, seed=0):
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed + tokens))


def run(callable_, *args, state=None):
    """The results, and what the call left in its arguments and in ``state``, which is then set back."""
    before = None if state is None else state.clone()
    with torch.no_grad():
        results = callable_(*args)
    left = [results] if isinstance(results, torch.Tensor) else list(results)
    left += [*args] + ([] if state is None else [state.clone()])
    if state is not None:
        state.copy_(before)
    return left


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_nothing_but_tensors_and_integers_crosses(split, *args):
    """Run the split module and look at what each piece takes and returns."""
    seen = []

    def watch(piece, inputs, output):
        returned = piece.graph.find_nodes(op="output")[0].args[0]
        seen.extend([*inputs, *(output if isinstance(returned, (tuple, list)) else [output])])

    handles = [piece.register_forward_hook(watch) for piece in split.children()]
    with torch.no_grad():
        split(*args)
    for handle in handles:
        handle.remove()
    assert {type(value) for value in seen} <= {torch.Tensor, nn.Parameter, int}


def is_split(node):
    return node.op == "call_function" and node.target in {target for op in OPS for target in (op, op.default)}


def work(graph):
    """The nodes that do something; taking a tuple apart is its producer's work."""
    unpacks = lambda n: n.target is operator.getitem and n.args[0].op == "call_function" and is_split(n.args[0])  # noqa: E731
    return [n for n in graph.nodes if n.op.startswith("call_") and not unpacks(n)]


def assert_well_formed(graph, items):
    """Every split operator is in a flagged piece of split operators alone, and the pieces follow the order of the graph."""
    assert [(item.graph_id, item.submod_name) for item in items] == [(i, f"submod_{i}") for i in range(len(items))]
    assert all({is_split(n) for n in work(item.graph.graph)} == {item.is_splitting_graph} for item in items)
    assert all(
        one.is_splitting_graph != other.is_splitting_graph for one, other in itertools.pairwise(items)
    )  # none could be larger

    def ids(graph):  # an index without shapes moves to its producer, since it may be a tuple's
        return [n.meta["id"] for n in work(graph) if n.target is not operator.getitem and "id" in n.meta]

    assert [i for item in items for i in ids(item.graph.graph)] == ids(graph)


# The engines.


def test_enough_graphs_were_recorded():
    assert RECORDED["versions"]["sglang"] == "0.5.23" and RECORDED["versions"]["vllm"] == "0.33.0"
    assert sum(len(pieces) > 1 for pieces in RECORDED["partitions"].values()) > 200
    assert len(RECORDED["partitions"]) + len(RECORDED["disagreed"]) == 400


@pytest.mark.parametrize("tenth", range(10))
def test_the_partition_is_the_engines_where_they_agree(tenth):
    for seed in [seed for seed in RECORDED["partitions"] if int(seed) % 10 == tenth]:
        items = pcg.split_graph(recorded_graph(int(seed)), OPS, allow_none=True)[1]
        assert partition(items) == RECORDED["partitions"][seed], f"seed {seed}"


# Properties.


@settings(max_examples=150)
@given(rng=st.randoms(use_true_random=False), shapes=st.booleans())
def test_a_split_graph_equals_the_original(rng, shapes):
    module = RandomGraph(rng, shapes=shapes).module
    code, nodes = module.code, [(n, n.args, dict(n.meta)) for n in module.graph.nodes]
    split, items = pcg.split_graph(module, OPS, allow_none=True)

    assert module.code == code and [(n, n.args, dict(n.meta)) for n in module.graph.nodes] == nodes  # the input is as it was
    assert_well_formed(module.graph, items)
    for tokens in SIZES:
        expected = run(module, tokens, rows(tokens), rows(tokens, 50), state=module.state)
        assert_same(run(split, tokens, rows(tokens), rows(tokens, 50), state=module.state), expected)
    assert_nothing_but_tensors_and_integers_crosses(split, 7, rows(7), rows(7, 50))


@pytest.mark.parametrize("seed", range(25))
def test_a_traced_and_split_program_equals_the_original(seed):
    module = RandomGraph(random.Random(1000 + seed), shapes=True, steps=ALL_STEPS).module
    trace = pcg.trace(lambda x, y: module(x.shape[0], x, y), rows(6), rows(6))
    for i, node in enumerate(trace.graph_module.graph.nodes):
        if node.target != "size":  # those are replaced
            node.meta["id"] = i
    split, items = pcg.split_graph(trace.graph_module, OPS, allow_none=True)
    assert_well_formed(trace.graph_module.graph, items)
    for tokens in SIZES:
        expected = run(partial(module, tokens), rows(tokens), rows(tokens, 50), state=module.state)
        actual = run(partial(trace.call, split), rows(tokens), rows(tokens, 50), state=module.state)
        assert_same(actual, expected)
    trace.call(lambda *flat: assert_nothing_but_tensors_and_integers_crosses(split, *flat) or split(*flat), rows(7), rows(7, 50))
    assert trace.compile_count == 1


# Mutation around cuts (H8): a buffer is read, written, and written by a cut, before and after a cut that does not touch it.

ORDERS = sorted(set(itertools.permutations(["read", "read", "write", "fill", "mix"])))


def reads_and_writes(order):
    def program(x, state):
        alias, seen = state.view(-1, WIDTH), []
        for i, step in enumerate(order):
            if step == "read":
                seen.append(alias[0] * (i + 1))  # without shapes this integer index could be a tuple's
            elif step == "write":
                state.add_(x)
            elif step == "fill":
                fill(x, state)
            else:
                seen.append(mix(x)[0])
        return torch.stack(seen)

    return program


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_reads_and_writes_keep_their_order_around_cuts(order):
    program = reads_and_writes(order)
    split, _ = pcg.split_graph(fx.symbolic_trace(program), OPS)
    assert_same(run(split, rows(5), rows(5, 50)), run(program, rows(5), rows(5, 50)))


@pytest.mark.parametrize("order", ORDERS[::5], ids="-".join)
def test_reads_and_writes_keep_their_order_around_cuts_of_a_trace(order):
    split_traced(reads_and_writes(order), rows(6), rows(6))


# What crosses a cut (H4, H5, H6), with and without shapes.


def split_traced(program, *args, ops=OPS):
    trace = pcg.trace(program, *args)
    split, items = pcg.split_graph(trace.graph_module, ops)
    for tokens in SIZES:
        others = [rows(tokens, i) for i in range(len(args))]
        assert_same(run(partial(trace.call, split), *[o.clone() for o in others]), run(program, *[o.clone() for o in others]))
    trace.call(
        lambda *flat: assert_nothing_but_tensors_and_integers_crosses(split, *flat) or split(*flat),
        *[rows(7, i) for i in range(len(args))],
    )
    return split, items


def two_results(x):
    a, b = pair(x)
    c = mix(a)
    return c + b


def chunks_across(x):
    low, high = x.chunk(2, dim=1)
    y = mix(x)
    return torch.cat([high, low], dim=1) + y


def sorted_across(x):
    order = x.sort(dim=0)
    return mix(x) + order.values * order.indices


def pair_to_the_end(x):
    return pair(x)


@pytest.mark.parametrize("program", [two_results, chunks_across, sorted_across, pair_to_the_end], ids=lambda f: f.__name__)
def test_no_tuple_crosses(program):
    _, items = split_traced(program, rows(6))
    for item in items:
        calls = [n for n in item.graph.graph.nodes if n.target in (pair, pair.default, torch.chunk, torch.sort)]
        assert all(user.target is operator.getitem for n in calls for user in n.users)


def test_the_index_of_a_tensor_stays_where_it_is():
    _, items = split_traced(lambda x: mix(x)[0] + 1, rows(6))
    assert [[n.target for n in item.graph.graph.nodes if n.op.startswith("call_")] for item in items] == [
        [mix],
        [operator.getitem, operator.add],
    ]


def whole_size(x):
    size = x.shape
    y = mix(x)
    return y.view(size) * size.numel() + torch.ones(size) * len(size)


def negative_and_sliced_sizes(x):
    size = x.size()
    y = mix(x)
    return y.view(*size[:-1], size[-1]).reshape(size[-1], size[0]).view(size)


def size_of_one_dimension(x):
    tokens = x.size(0)
    y = mix(x)
    return y.view(tokens, -1) + tokens


@pytest.mark.parametrize("program", [whole_size, negative_and_sliced_sizes, size_of_one_dimension], ids=lambda f: f.__name__)
def test_sizes_cross_as_integers(program):
    _, items = split_traced(program, rows(6))
    assert [item.is_splitting_graph for item in items].count(True) == 1


@pytest.mark.parametrize("index", [0, 1, -1, -2])
def test_sizes_cross_as_integers_without_shapes(index):
    graph = fx.symbolic_trace(lambda x: (lambda size: mix(x) * size[index] + size[0])(x.shape))
    split, _ = pcg.split_graph(graph, OPS)
    for tokens in SIZES:
        assert_same(run(split, rows(tokens)), run(graph, rows(tokens)))
    assert_nothing_but_tensors_and_integers_crosses(split, rows(3))


def test_a_whole_size_without_shapes_is_refused():
    with pytest.raises(ValueError, match="torch.Size of unknown rank.*view.*pcg.trace"):
        pcg.split_graph(fx.symbolic_trace(lambda x: (lambda size: mix(x).view(size))(x.shape)), OPS)


def test_a_piece_of_allocations_alone_is_known_as_one():
    def program(x):
        y = mix(x)
        output = torch.empty_like(y).view(-1, WIDTH)
        fill(y, output)
        return output

    _, items = split_traced(program, rows(6))
    assert [item.is_splitting_graph for item in items] == [True, False, True]
    assert effects(items[1].graph).launches == ()


# How an operator is matched (H7).


@pytest.mark.parametrize(
    "ops",
    [
        [mix],
        [mix.default],
        mix,
        mix.default,
        ["pcg_graphs::mix"],
        ["pcg_graphs.mix"],
        ["pcg_graphs.mix.default"],
        ["pcg_graphs::mix.default"],
        "pcg_graphs::mix",
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [mix, mix.default], ids=["packet", "overload"])
def test_an_operator_is_found_however_it_is_named_and_called(ops, call):
    graph = fx.symbolic_trace(lambda x: call(x + 1) + 1)
    assert [item.is_splitting_graph for item in pcg.split_graph(graph, ops)[1]] == [False, True, False]


def test_one_overload_of_several():
    graph = fx.symbolic_trace(lambda x: torch.ops.aten.add.Scalar(torch.ops.aten.add.Tensor(x, x), 2))
    for ops, flags in [
        (["aten::add.Tensor"], [True, False]),
        ([torch.ops.aten.add.Scalar], [False, True]),
        (["aten::add"], [True]),
    ]:
        assert [item.is_splitting_graph for item in pcg.split_graph(graph, ops)[1]] == flags


def test_any_function_may_be_a_boundary():
    graph = fx.symbolic_trace(lambda x: torch.sin(x + 1) * 2)
    assert [item.is_splitting_graph for item in pcg.split_graph(graph, [torch.sin])[1]] == [False, True, False]


def test_the_registry_is_the_default():
    graph = fx.symbolic_trace(lambda x: mix(x) + 1)
    before = set(pcg.split_ops())
    with pytest.raises(ValueError, match="no split operator in the graph"):
        pcg.split_graph(graph)
    try:
        pcg.register_split_op()(mix)
        assert [item.is_splitting_graph for item in pcg.split_graph(graph)[1]] == [True, False]
    finally:
        for op in set(pcg.split_ops()) - before:
            pcg.ops._split_ops.pop(op)


@pytest.mark.parametrize("name", ["pcg_graphs::mx", "pcg_graphs.mix.defualt", "pcg_graph::mix", "mix", "", "pcg_graphs"])
def test_an_unknown_name_is_an_error_with_the_nearest_known(name):
    graph = fx.symbolic_trace(lambda x: mix.default(x) + 1)
    with pytest.raises(ValueError, match=f"'{name}' is no operator; nearest known: .*pcg_graphs.mix"):
        pcg.split_graph(graph, [name])


@pytest.mark.parametrize("ops", [[mix], ["pcg_graphs::mix"], []], ids=str)
def test_a_graph_without_split_operator(ops):
    graph = fx.symbolic_trace(lambda x: torch.sin(x) + 1)
    with pytest.raises(ValueError, match="no split operator in the graph.*sin.*register_split_op.*allow_none=True"):
        pcg.split_graph(graph, ops)
    split, items = pcg.split_graph(graph, ops, allow_none=True)
    assert [item.is_splitting_graph for item in items] == [False]
    assert_same(run(split, rows(3)), run(graph, rows(3)))


# Shapes of graphs.


def chain(*names):
    """A program from operators by name; ``add`` is no split operator."""

    def program(x):
        for name in names:
            x = x + 1 if name == "add" else PACKETS[name](x)[0] if name == "pair" else PACKETS[name](x)
        return x

    return program


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        (["mix"], [1]),
        (["mix", "mix"], [1]),
        (["pair", "mix", "pair"], [1]),
        (["mix", "add"], [1, 0]),
        (["add", "pair"], [0, 1]),
        (["add", "mix", "mix", "add", "pair", "add"], [0, 1, 0, 1, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("tracer", ["trace", "symbolic_trace"])
def test_split_operators_in_a_row_share_a_piece(names, flags, tracer):
    program = chain(*names)
    if tracer == "trace":
        _, items = split_traced(program, rows(6))
    else:
        split, items = pcg.split_graph(fx.symbolic_trace(program), OPS)
        assert_same(run(split, rows(4)), run(program, rows(4)))
    assert [item.is_splitting_graph for item in items] == [bool(flag) for flag in flags]


def test_parameters_and_submodules_are_shared_with_the_original():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return self.linear(mix(self.linear(x))) * self.weight

    model = Model()
    split, items = pcg.split_graph(fx.symbolic_trace(model), OPS)
    assert [item.is_splitting_graph for item in items] == [False, True, False]
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.linear.bias.fill_(7.0)
    assert_same(run(split, rows(4)), run(model, rows(4)))


def test_a_graph_with_nothing_in_it():
    split, items = pcg.split_graph(fx.symbolic_trace(lambda x: x), OPS, allow_none=True)
    assert items == [] and torch.equal(split(rows(3)), rows(3))
