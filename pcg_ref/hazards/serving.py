"""Hazards of buckets: sizes that are not captured, and rows that no request owns."""

from __future__ import annotations

import torch

import pcg_ref as pcg
from pcg_ref.hazards.common import D, Rows, T, Verdict, batch, compare, eagerly, hazard_store, ones


def h11_naive(device):
    sizes, x = [64, 1024], ones(device, 1024)
    graphs = {size: pcg.capture(lambda x: x * 2, x[:size]) for size in sizes}
    size = min(size for size in sizes if size >= 65)  # 65 tokens
    graphs[size].replay()
    rows = len(graphs[size].output)
    return Verdict("over-padded" if rows > 2 * 65 else "equal to eager", f"{rows} rows computed for 65 tokens")


def h11_protected(device):
    model, requests = Rows(device), batch(device, 30, 35)
    runner = pcg.PrefillRunner(model, buckets=[64, 1024])
    runner.capture(progress=False)
    if sorted(runner.sequences) != runner.buckets:
        return Verdict("not captured", f"{sorted(runner.sequences)} of {runner.buckets}")
    verdict = compare(runner.run(requests), eagerly(model, requests))
    if not verdict.holds:
        return verdict
    reasons = list(runner.report()["eager"])
    return Verdict("runs eagerly", reasons[0]) if reasons else Verdict("over-padded", "1024 rows computed for 65 tokens")


def h12_naive(device):
    rows, slots, cache = ones(device), torch.arange(T, device=device), torch.zeros(16, D, device=device)
    graph = pcg.capture(lambda rows, slots: cache.index_copy_(0, slots, rows), rows, slots)
    graph.replay()  # the first request: eight tokens, into the slots 0 to 7
    before = cache[:8].clone()
    rows.fill_(5)
    slots[:5] = torch.arange(8, 13, device=device)  # the second: five tokens, and three rows of padding
    graph.replay()
    changed = (cache[:8] != before).any(1).nonzero().flatten().tolist()
    return Verdict("state changed" if changed else "equal to eager", f"slots {changed} of the first request")


def store_doubled(rows, slots, cache):
    doubled = rows * 2
    hazard_store(doubled, slots, cache)
    return doubled


def h12_protected(device):
    rows, slots, cache = ones(device), torch.arange(T, device=device), torch.zeros(16, D, device=device)
    examples = ones(device, 7), torch.arange(7, device=device), torch.zeros_like(cache)
    traced = pcg.trace(store_doubled, *examples, dynamic_dims={"rows": 0, "slots": 0})
    piecewise = pcg.PiecewiseModel(traced, [hazard_store], capture_sizes=[T])
    with pcg.forward_context(batch(device, 8)):
        piecewise.capture(rows, slots, cache).replay()
    expected = cache.clone()
    expected[8:13] = 10
    rows.fill_(5)
    slots[:5] = torch.arange(8, 13, device=device)
    with pcg.forward_context(batch(device, 5), padded_num_tokens=T):
        piecewise.sequences[T].replay()
    return compare(cache, expected)


def attend(x):  # [T, D] -> [T, D]
    x, output = x[:, None], torch.empty_like(x[:, None])
    pcg.unified_attention_with_output(x, x, x, output, 1e-6, 0)  # so small a scale that each row becomes the mean of those it sees
    return output[:, 0]


def h13_naive(device):
    x = torch.arange(T * D, device=device).view(T, D).float()
    bounds = torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32, device=device)  # where four requests start and end
    with pcg.forward_context(batch(device, 2, 2, 2, 2), static_cu_seqlens=bounds):
        attend(x)
        graph = pcg.capture(attend, x)
    bounds[:2] = torch.tensor([0, 5])  # one request of five tokens; what is behind is still the first batch's
    graph.replay()
    with pcg.forward_context(batch(device, 5)):
        return compare(graph.output[:5], attend(x[:5]))


def h13_protected(device):
    model = pcg.TinyDecoder().to(device)
    first, second = batch(device, 2, 2, 2, 2), batch(device, 5)
    # The padding is a request of its own, three tokens 0 at position 0: defined rows, and nobody's keys.
    padded = torch.cat([second.tokens, second.tokens.new_zeros(3)]), torch.cat([second.positions, second.positions.new_zeros(3)])
    with pcg.forward_context(pcg.PackedBatch(padded[0], [5, 3])):
        expected = model(*padded)
    for strategy in ("full", "tc_piecewise", "breakable"):
        runner = pcg.PrefillRunner(model, strategy, buckets=[T])
        runner.capture(progress=False)
        runner.run(first)
        runner.run(second)
        if not (verdict := compare(runner.sequences[T].output, expected)).holds:
            return verdict
    return verdict
