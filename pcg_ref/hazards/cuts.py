"""Hazards of cutting an FX graph: what crosses a cut, what is found as one, and in which order the pieces run."""

from __future__ import annotations

import torch
from torch.fx.passes.split_module import split_module

import pcg_ref as pcg
from pcg_ref.hazards.common import T, Verdict, batch, compare, hazard_pair, hazard_scale, hazard_write, ones


def own_pieces(graph, op):
    """The obvious rule: a number for each node, which grows before and after every call of ``op``."""
    number, piece_of = 0, {}
    for node in graph.nodes:
        number += node.target is op
        piece_of[node] = number
        number += node.target is op
    return piece_of


def crossings(items):
    """Inputs of pieces that are neither a tensor, which has one address, nor an integer."""
    inputs = [node for item in items for node in item.graph.graph.find_nodes(op="placeholder")]
    values = [node.meta.get("example_value") for node in inputs]
    return sorted({type(value).__name__ for value in values if not isinstance(value, (torch.Tensor, torch.SymInt, int))})


def two_results(x):
    one, ten = hazard_pair(x * 2)
    return one + ten


def h4_naive(device):
    x = ones(device)
    graph_module = pcg.trace(two_results, x, dynamic_dims={}).graph_module
    piece_of = own_pieces(graph_module.graph, hazard_pair)  # the tuple is taken apart behind the cut
    cut = split_module(graph_module, None, piece_of.__getitem__, keep_original_order=True)
    crossing = cut.submod_1(cut.submod_0(x))
    static = crossing.clone()  # the next graph's input, at an address that stays: a tuple has none
    graph = pcg.capture(cut.submod_2, static)
    static.copy_(cut.submod_1(cut.submod_0(x.fill_(5))))
    graph.replay()
    return compare(graph.output, two_results(x))


def h4_protected(device):
    piecewise = pcg.PiecewiseModel(pcg.trace(two_results, ones(device, 7)), [hazard_pair], capture_sizes=[T])
    if crossings(piecewise.items):
        return Verdict("crosses a cut", f"{crossings(piecewise.items)}")
    x = ones(device)
    sequence = piecewise.capture(x)
    for value in (5, 7):
        x.fill_(value)
        sequence.replay()
    return compare(sequence.output, two_results(x))


def keeps_the_shape(x):
    shape, written = x.size(), torch.empty_like(x)
    hazard_write(x * 2, written)
    return (written.flatten() + 1).view(shape)


def h5_naive(device):
    traced, x = pcg.trace(keeps_the_shape, ones(device, 7)), ones(device) * 5
    piece_of = own_pieces(traced.graph_module.graph, hazard_write)  # the size is asked for before the cut, and used behind it
    cut = split_module(traced.graph_module, None, piece_of.__getitem__, keep_original_order=True)
    examples = [node.meta["example_value"] for node in cut.submod_0.graph.find_nodes(op="placeholder")]
    compile_piece = torch._dynamo.lookup_backend("aot_eager")  # the stage in front of inductor
    compile_piece(cut.submod_0, examples)
    return compare(traced.call(cut, x), keeps_the_shape(x))


def h5_protected(device, compiler="eager"):
    piecewise = pcg.PiecewiseModel(pcg.trace(keeps_the_shape, ones(device, 7)), [hazard_write], compiler, [T])
    if crossings(piecewise.items):
        return Verdict("crosses a cut", f"{crossings(piecewise.items)}")
    x = ones(device)
    sequence = piecewise.capture(x)
    for value in (5, 7):
        x.fill_(value)
        sequence.replay()
    return compare(sequence.output, keeps_the_shape(x))


def two_writes(x):
    first = torch.empty_like(x)
    hazard_write(x * 2, first)
    second = torch.empty_like(x)  # between two cuts: an allocation, and nothing to launch
    hazard_write(first, second)
    return second + 1


def h6_naive(device):
    graph = pcg.capture(torch.empty_like, ones(device))  # the piece between the two cuts
    return Verdict("empty graph" if graph.empty else "equal to eager", "one submission at each replay, for nothing")


def h6_protected(device):
    piecewise = pcg.PiecewiseModel(pcg.trace(two_writes, ones(device, 7)), [hazard_write], capture_sizes=[T])
    x = ones(device)
    sequence = piecewise.capture(x)
    graphs = [segment.graph for segment in sequence.segments if isinstance(segment, pcg.GraphSegment)]
    if empty := sum(graph.empty for graph in graphs):
        return Verdict("empty graph", f"{empty} of {len(graphs)} graphs")
    x.fill_(5)
    return compare(sequence.replay(), two_writes(x))


def both_spellings(x):
    first, second = torch.empty_like(x), torch.empty_like(x)
    torch.ops.pcg_ref.hazard_scale(x + 1, first)
    torch.ops.pcg_ref.hazard_scale.default(first + 1, second)
    return second + 1


def h7_naive(device):
    with pcg.forward_context(batch(device, 7)):
        nodes = pcg.trace(both_spellings, ones(device, 7)).graph_module.graph.nodes
    calls = [node for node in nodes if "hazard_scale" in node.name]
    found = [node for node in calls if str(node.target) == "pcg_ref.hazard_scale"]  # by the name that is printed
    return Verdict("cut missed" if len(found) < len(calls) else "equal to eager", f"{len(found)} of {len(calls)} calls found")


def h7_protected(device):
    x, traced = ones(device), pcg.trace(both_spellings, ones(device, 7))
    for op in (hazard_scale, torch.ops.pcg_ref.hazard_scale, "pcg_ref::hazard_scale", "pcg_ref.hazard_scale.default"):
        piecewise = pcg.PiecewiseModel(traced, [op], capture_sizes=[T])
        x.fill_(1)
        with pcg.forward_context(batch(device, 8)):
            sequence = piecewise.capture(x)
        x.fill_(5)
        with pcg.forward_context(batch(device, 1, 3, 4)):  # a call that was missed would still scale by one request
            verdict = compare(sequence.replay(), both_spellings(x))
        if not verdict.holds:
            return verdict
    return verdict


def around_a_write(x, state):
    before = state + x
    hazard_write(x * 10, state)
    return before + state * 2  # behind the write, though nothing but the order says so


def h8_naive(device):
    traced = pcg.trace(around_a_write, ones(device, 7), ones(device, 7))
    piece_of = own_pieces(traced.graph_module.graph, hazard_write)
    cut = split_module(traced.graph_module, None, piece_of.__getitem__)  # its default order: by data dependence alone
    x, state = ones(device) * 5, ones(device) * 3
    return compare(traced.call(cut, x, state), around_a_write(x, ones(device) * 3))


def h8_protected(device):
    piecewise = pcg.PiecewiseModel(pcg.trace(around_a_write, ones(device, 7), ones(device, 7)), [hazard_write], capture_sizes=[T])
    x, state = ones(device), ones(device)
    sequence = piecewise.capture(x, state)
    x.fill_(5)
    state.fill_(3)
    return compare(sequence.replay(), around_a_write(x, ones(device) * 3))
