"""Hazards of time and memory: what happens around a capture, and what must stay as it was."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import torch

import pcg_ref as pcg
from pcg_ref.hazards.common import D, Rows, T, Verdict, batch, compare, eagerly, ones, refused
from pcg_ref.tracing import with_own_code


class Remembers(Rows):  # every forward adds to a buffer, one on zeros, too
    def __init__(self, device):
        super().__init__(device)
        self.register_buffer("total", torch.zeros(D, device=device))

    def forward(self, tokens, positions):
        hidden = super().forward(tokens, positions)
        self.total.add_(hidden.sum(0) + 1)
        return hidden


def h9_naive(device):
    x, total = ones(device), torch.zeros(D, device=device)

    def region(x):
        return total.add_(x.sum(0))

    for _ in range(3):
        region(x)  # warm-up, on numbers that are no request's
    pcg.capture(region, x)
    return Verdict("state changed" if total.any() else "equal to eager", f"total is {total[0].item():g} before the first request")


def h9_protected(device):
    model, oracle, requests = Remembers(device), Remembers(device), batch(device, 3, 5, token=5)
    for state in (model.total, oracle.total):
        state.fill_(7)
    runner = pcg.PrefillRunner(model, buckets=[T])
    runner.capture(progress=False)
    if not torch.equal(model.total, oracle.total):
        return Verdict("state changed", f"total is {model.total[0].item():g} after capture, and was 7")
    runner.run(requests)
    eagerly(oracle, requests)
    return compare(model.total, oracle.total)


def h10_naive(device):
    model, requests, traces = Rows(device), batch(device, 3, 5), []

    def backend(graph_module, example_inputs):
        traces.append("a trace")  # where an engine would go on to warm up and to capture, whatever it is doing
        return graph_module.forward

    compiled = torch.compile(with_own_code(model), fullgraph=True, backend=backend)
    compiled(requests.tokens, requests.positions)
    model.residual = False  # a guard that nobody thought of
    compiled(requests.tokens, requests.positions)
    return Verdict("recompiled" if len(traces) > 1 else "equal to eager", f"{len(traces)} traces, the second in the middle of serving")


def h10_protected(device):
    model = Rows(device)
    runner = pcg.PrefillRunner(model, buckets=[T])
    runner.capture(progress=False)
    model.residual = False
    requests = batch(device, 3, 5, token=5)
    try:
        hidden = runner.run(requests)
    except pcg.RecompileError as error:
        return refused(error, names="residual")
    traces = runner.implementation.piecewise.trace.compile_count
    return Verdict("recompiled", f"{traces} traces") if traces > 1 else compare(hidden, eagerly(model, requests))


def drop_in_a_cycle(held):
    """The last name of what ``held`` holds goes, and a cycle keeps it for the collector. Then Python works on."""
    cycle = [held.pop()]
    cycle.append(cycle)
    del cycle
    for _ in range(20_000):
        more = []
        more.append(more)


def old_graph():  # the tape's on every device: the end of a CUDA graph inside a capture may ruin the capture
    return pcg.capture(lambda x: x + 1, torch.ones(T, D))


def h14_naive(device):
    x, held, gone = ones(device), [old_graph()], []
    alive = weakref.ref(held[0])

    def region(x):
        drop_in_a_cycle(held)
        gone.append(alive() is None)
        return x * 2

    gc.collect()  # the garbage of others is not part of the lesson
    pcg.capture(region, x)
    return Verdict("collected during capture" if gone[0] else "no collection", f"an old graph destroyed inside: {gone[0]}")


def h14_protected(device):
    held, gone = [old_graph(), old_graph()], []
    alive = [weakref.ref(graph) for graph in held]

    def model(tokens, positions):  # called twice, for warm-up and for capture
        drop_in_a_cycle(held)
        gone.append(None in [graph() for graph in alive])
        return tokens[:, None] * 2.0

    pcg.PrefillRunner(model, "breakable", buckets=[T], device=device).capture(progress=False)
    with suppress(ZeroDivisionError), pcg.gc_held_off():
        1 / 0  # noqa: B018  a capture that fails
    restored = gc.isenabled()
    what = "collected during capture" if any(gone) else "no collection" if restored else "state changed"
    return Verdict(what, f"an old graph destroyed inside: {any(gone)}; the collector on again: {restored}")


SIZES, WIDE = (256, 512, 1024, 2048), 8192  # results of 8 to 64 MiB: smaller ones would hide in the allocator's rounding


def grown(pool_bytes, alone_bytes):
    ratio = pool_bytes / alone_bytes
    return Verdict("pool grew" if ratio > 1.5 else "no growth", f"{len(SIZES)} sizes need about {ratio:.0f} x what the largest needs")


def h15_naive(device):
    x = torch.ones(SIZES[-1], WIDE, device=device)
    pool, alone = pcg.GraphPool(device), pcg.GraphPool(device)
    kept = [pcg.capture(lambda x: x * 2, x[:size], pool=pool) for size in SIZES]  # ascending, and each owns its output
    kept += [pcg.capture(lambda x: x * 2, x, pool=alone)]
    return grown(pool.bytes, alone.bytes)


def h15_protected(device):
    weight = torch.ones(WIDE, device=device)

    def model(tokens, positions):
        return tokens[:, None] * weight

    every, alone = (pcg.PrefillRunner(model, "full", buckets=sizes, device=device) for sizes in (SIZES, SIZES[-1:]))
    for runner in (every, alone):
        runner.capture(progress=False)  # descending, and outputs as weak references
    return grown(every.pool.bytes, alone.pool.bytes)
