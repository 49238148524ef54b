"""Hazards of frozen addresses: a graph reads and writes where it did at capture, and runs no Python."""

from __future__ import annotations

from torch import nn

import pcg_ref as pcg
from pcg_ref.hazards.common import D, Rows, T, Verdict, batch, compare, eagerly, hazard_fresh, ones, refused


def fresh_between(x):  # the split operator returns fresh memory
    return hazard_fresh(x * 2) + 1


def h1_naive(device):
    x, pool = ones(device), pcg.GraphPool(device)
    first = pcg.capture(lambda x: x * 2, x, pool=pool)
    first.replay()
    middle = hazard_fresh(first.output)
    second = pcg.capture(lambda m: m + 1, middle, pool=pool)  # the address of this very tensor is frozen
    x.fill_(5)
    first.replay()
    hazard_fresh(first.output)  # the right numbers, but somewhere else
    second.replay()
    return compare(second.output, fresh_between(x), stale=fresh_between(ones(device)))


def h1_protected(device):
    traced = pcg.trace(fresh_between, ones(device, 7))
    piecewise = pcg.PiecewiseModel(traced, [hazard_fresh], capture_sizes=[T], on_fresh_output="bridge")
    x = ones(device)
    sequence = piecewise.capture(x)
    for value in (5, 7):
        x.fill_(value)
        sequence.replay()  # the bridge: the fresh result is copied to where the next graph reads
    return compare(sequence.output, fresh_between(x), stale=fresh_between(ones(device)))


def h2_naive(device):
    x = ones(device)
    graph = pcg.capture(lambda x: x * 2, x)
    x.fill_(5)
    graph.replay()
    kept = graph.output  # a name for memory that the next replay writes to again
    x.fill_(7)
    graph.replay()
    return compare(kept, ones(device) * 10, overwritten=x * 2)


def h2_protected(device):
    model = Rows(device)
    runner = pcg.PrefillRunner(model, buckets=[T])
    runner.capture(progress=False)
    first, second = batch(device, 3, 2, token=5), batch(device, 4, 1, token=7)
    kept = runner.run(first)  # a copy, unless copy_output=False
    later = runner.run(second)
    return compare(kept, eagerly(model, first), overwritten=later)


def h3_naive(device):
    x, calls = ones(device), []

    def region(x):
        calls.append("called")  # Python: no device work, and so not in the graph
        return x * 2

    graph = pcg.capture(region, x)
    calls.clear()
    for _ in range(3):
        graph.replay()
    return Verdict("equal to eager" if len(calls) == 3 else "side effect lost", f"{len(calls)} calls in 3 replays")


def h3_protected(device):
    calls = []
    note = pcg.eager_on_graph(lambda hidden: calls.append("called"))  # an eager segment: its Python does run

    def model(tokens, positions):
        hidden = tokens[:, None] * 2.0
        note(hidden)
        return hidden + 1

    runner = pcg.PrefillRunner(model, "breakable", buckets=[T], device=device)
    runner.capture(progress=False)
    calls.clear()
    for _ in range(3):
        runner.run(batch(device, 3, 2))
    return Verdict("equal to eager" if len(calls) == 3 else "side effect lost", f"{len(calls)} calls in 3 runs")


def h16_naive(device):
    x, linear = ones(device), nn.Linear(D, D, bias=False, device=device)
    linear(x)
    graph = pcg.capture(linear, x)
    old = linear.weight.fill_(1)  # kept, so that its memory is not given to others: stale numbers and no illegal access
    linear.weight = nn.Parameter(old * 3)
    x.fill_(5)
    graph.replay()
    return compare(graph.output, linear(x), stale=x @ old.T)


def h16_protected(device):
    model = Rows(device)
    runner = pcg.PrefillRunner(model, buckets=[T])
    runner.capture(progress=False)
    old = model.weight
    model.weight = nn.Parameter(old * 3)
    requests = batch(device, 3, 2, token=5)
    try:
        hidden = runner.run(requests)
    except RuntimeError as error:
        return refused(error, names="weight")
    return compare(hidden, eagerly(model, requests), stale=requests.tokens[:, None] * old * 2)
