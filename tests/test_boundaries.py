"""Boundaries and effects: whose memory crosses a cut, and what a piece writes, launches and shares."""

import pytest
import torch
from record_engine_partitions import OPS, WIDTH
from torch import fx, nn

import pcg_ref as pcg
from pcg_ref.effects import effects, is_allocation, is_view, storage_id, written_arguments

mix, fill, pair = OPS


class Model(nn.Module):
    """One tensor of every owner crosses a cut, some of them as views."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x):
        a = x * 2
        half = x[:, : WIDTH // 2]
        b = mix(a)  # cut
        c = b + self.state
        d = c.view(-1, WIDTH).unsqueeze(0)
        e = mix(self.weight)  # cut
        out = torch.empty_like(a)
        fill(a, out)  # cut, behind a piece that only allocates
        return out @ e, d + half.sum(), self.state.add_(1)


@pytest.fixture
def split():
    trace = pcg.trace(Model(), torch.randn(6, WIDTH))
    return pcg.split_graph(trace.graph_module, OPS)


def test_every_tensor_has_its_owner(split):
    rows = pcg.boundaries(*split)
    assert [item.is_splitting_graph for item in split[1]] == [False, True] * 3 + [False]
    inputs = {row.owner: row for row in rows if row.producer == "input"}
    assert {owner: row.consumers for owner, row in inputs.items()} == {
        "static input": ("submod_0",),
        "buffer": ("submod_2", "submod_6"),
        "parameter": ("submod_3",),
    }
    assert [(row.producer, row.consumers, row.owner, row.address) for row in rows if row.producer != "input"] == [
        ("submod_0", ("submod_1", "submod_4", "submod_5"), "graph pool", "fixed"),  # a
        ("submod_0", ("submod_6",), "static input", "fixed"),  # half
        ("submod_1", ("submod_2",), "fresh", "fresh"),  # b
        ("submod_2", ("submod_6",), "graph pool", "fixed"),  # d, a view of c
        ("submod_3", ("submod_6",), "fresh", "fresh"),  # e
        ("submod_4", ("submod_5", "submod_6"), "allocation", "fixed"),  # out
        ("submod_6", ("output",), "graph pool", "fixed"),
        ("submod_6", ("output",), "graph pool", "fixed"),
        ("submod_6", ("output",), "buffer", "fixed"),
    ]


def test_a_row_says_it_in_words(split):
    row = next(row for row in pcg.boundaries(*split) if row.owner == "fresh")
    assert row.shape[1:] == (str(WIDTH),) and not row.shape[0].isdigit() and row.dtype == torch.float32
    assert "bridged" in row.verdict and row.consumer == "submod_2"
    assert next(row for row in pcg.boundaries(*split) if row.producer == "submod_0").consumer == "submod_1, submod_4, submod_5"


def test_bytes_are_those_of_the_tensors(split):
    a, b = (next(row for row in pcg.boundaries(*split) if row.producer == producer) for producer in ("submod_0", "submod_1"))
    symbol = a.shape[0]
    for row in (a, b):
        assert eval(row.bytes, {symbol: 7}) == torch.zeros(7, WIDTH).nbytes


def test_a_piecewise_model_bridges_what_is_fresh():
    """Its boundaries say so, and the bridge has that many bytes."""
    piecewise = pcg.PiecewiseModel(pcg.trace(Model(), torch.randn(6, WIDTH)), OPS, capture_sizes=[4])
    rows = pcg.boundaries(piecewise.split_module, piecewise.items)
    before = pcg.boundaries(*pcg.split_graph(piecewise.trace.graph_module, OPS))
    assert [row.owner.replace("bridge", "fresh") for row in rows] == [row.owner for row in before]
    bridged = [row for row in rows if row.owner == "bridge"]
    assert len(bridged) == 2 and all(row.address == "fixed" and "buffer that stays" in row.verdict for row in bridged)
    sequence = piecewise.capture(torch.randn(4, WIDTH))
    symbol = rows[0].shape[0]
    assert sequence.bridged_bytes() == sum(eval(row.bytes, {symbol: 4}) for row in bridged)


def test_the_owners_are_where_the_addresses_say():
    """What is called an input's memory has that input's address when the split module runs, and nothing else has."""
    model = Model()
    trace = pcg.trace(model, torch.randn(6, WIDTH))
    split_gm, items = pcg.split_graph(trace.graph_module, OPS)
    storages = []

    class Watch(fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            if isinstance(value, torch.Tensor) and node.users:
                storages.append(value.untyped_storage().data_ptr())
            return value

    x = torch.randn(9, WIDTH)
    with torch.no_grad():
        trace.call(lambda *flat: Watch(split_gm).run(*flat), x)
    mine = {x.data_ptr(): "static input", model.weight.data_ptr(): "parameter", model.state.data_ptr(): "buffer"}
    owners = [row.owner for row in pcg.boundaries(split_gm, items)]
    assert [owner if owner in mine.values() else None for owner in owners] == [mine.get(storage) for storage in storages]


def test_two_results_have_a_row_each():
    trace = pcg.trace(lambda x: (lambda ab: ab[0] * ab[1])(pair(x + 1)), torch.randn(6, WIDTH))
    rows = pcg.boundaries(*pcg.split_graph(trace.graph_module, OPS))
    assert [(row.producer, row.owner) for row in rows if row.producer == "submod_1"] == [("submod_1", "fresh")] * 2


def test_integers_have_no_row():
    trace = pcg.trace(lambda x: (lambda n: mix(x + 1) * n)(x.shape[0]), torch.randn(6, WIDTH))
    rows = pcg.boundaries(*pcg.split_graph(trace.graph_module, OPS))
    assert rows and all(row.dtype == torch.float32 for row in rows)


def test_without_shapes_the_memory_is_unknown():
    split = pcg.split_graph(fx.symbolic_trace(lambda x: mix(x + 1) * 2), OPS)
    rows = pcg.boundaries(*split)
    assert [(row.owner, row.address) for row in rows] == [("static input", "fixed")] + [("unknown", "unknown")] * 3
    assert rows[1].shape is None and rows[1].dtype is None and "trace()" in rows[1].verdict
    assert effects(split[1][0].graph) is None


# Effects of one piece.


def effects_of(program, *args):
    graph = pcg.trace(program, *args).graph_module
    names = [node.name.removeprefix("l_").removesuffix("_") for node in graph.graph.find_nodes(op="placeholder")]
    found = effects(graph)
    sources = tuple(None if i is None else names[i] for i in found.sources)
    return found.launches, {names[i] for i in found.mutated}, sources


def writes_through_a_view(x, y):
    x.view(-1)[2:4].mul_(2)
    return y.t()


EFFECTS = {
    "views": (lambda x, y: (x.view(-1), y[0]), 0, set(), ("x", "y")),
    "a size": (lambda x, y: (x.view(x.shape[0], 2, -1), y.shape[0]), 0, set(), ("x", None)),
    "allocations": (lambda x, y: (torch.empty_like(x), x.new_empty(3), torch.empty(x.shape)), 0, set(), (None, None, None)),
    "zeros launch": (lambda x, y: torch.zeros_like(x), 1, set(), (None,)),
    "fresh": (lambda x, y: (x + y).view(-1), 1, set(), (None,)),
    "in place": (lambda x, y: x.add_(y), 1, {"x"}, ("x",)),
    "in place, then a view": (lambda x, y: x.add_(1)[1:], 1, {"x"}, ("x",)),
    "through a view": (writes_through_a_view, 1, {"x"}, ("y",)),
    "out=": (lambda x, y: torch.add(x, 1, out=y), 1, {"y"}, ("y",)),
    "a write to fresh memory": (lambda x, y: (x + 1).add_(y), 2, set(), (None,)),
    "a copy": (lambda x, y: (x.clone(), x.contiguous()), 1, set(), (None, "x")),
    "a split operator's write": (lambda x, y: (fill(x, y), y)[1], 1, {"y"}, ("y",)),
    "a split operator's result": (lambda x, y: pair(x), 1, set(), (None, None)),
    "chunks": (lambda x, y: x.chunk(2, 1), 0, set(), ("x", "x")),
}


@pytest.mark.parametrize("kind", EFFECTS)
def test_effects(kind):
    program, launches, mutated, sources = EFFECTS[kind]
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    found = effects_of(program, x, y)
    assert len(found[0]) >= 1 if launches else found[0] == ()
    assert found[1:] == (mutated, sources)
    # The same from outside, on real memory.
    before = {"x": x.clone(), "y": y.clone()}
    results = program(x, y)
    results = results if isinstance(results, tuple | list) else (results,)
    owners = {x.untyped_storage().data_ptr(): "x", y.untyped_storage().data_ptr(): "y"}
    assert tuple(owners.get(r.untyped_storage().data_ptr()) if isinstance(r, torch.Tensor) else None for r in results) == sources
    assert {name for name, value in (("x", x), ("y", y)) if not torch.equal(value, before[name])} == mutated


def test_effects_computes_nothing():
    model = Model()
    trace = pcg.trace(model, torch.randn(6, WIDTH))
    found = effects(trace.graph_module)
    assert [trace.input_names[i] for i in found.mutated] == ["state"]
    assert model.state.eq(0).all()


@pytest.mark.parametrize(
    ("op", "view", "allocation"),
    [
        (torch.ops.aten.view.default, True, False),
        (torch.ops.aten.split.Tensor, True, False),
        (torch.ops.aten.add.Tensor, False, False),
        (torch.ops.aten.add_.Tensor, False, False),
        (torch.ops.aten.empty_like.default, False, True),
        (torch.ops.aten.new_empty.default, False, True),
        (torch.ops.aten.empty_strided.default, False, True),
        (torch.ops.aten.zeros_like.default, False, False),
        (fill.default, False, False),
    ],
    ids=str,
)
def test_kinds_of_operators(op, view, allocation):
    assert (is_view(op), is_allocation(op)) == (view, allocation)


def test_written_arguments_by_position_name_and_list():
    a, b = torch.ones(2), torch.ones(2)
    assert written_arguments(fill.default, (a, b), {})[0] is b
    assert written_arguments(fill.default, (a,), {"output": b})[0] is b
    assert [t is s for t, s in zip(written_arguments(torch.ops.aten._foreach_add_.Scalar, ([a, b], 1), {}), (a, b))] == [True, True]
    assert written_arguments(mix.default, (a,), {}) == []


def test_storage_id_follows_views():
    a = torch.ones(4)
    assert storage_id(a) == storage_id(a[1:]) != storage_id(a.clone())
