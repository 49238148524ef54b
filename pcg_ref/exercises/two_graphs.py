"""Checks for the exercises of ``notebooks/01_two_graphs_by_hand.ipynb``.

Letters: ``T`` rows of the bucket (8), ``n`` real rows, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pcg_ref.exercises import answered, device, equal, exercise, require
from pcg_ref.graphs import capture
from pcg_ref.pools import GraphPool

T, D = 8, 32


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(device())


def _part(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)  # [T, D]


def _running_mean(h: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """``[sum(lengths), D]``: each row the mean of its request's rows up to itself."""
    requests = h[: sum(lengths)].split(lengths)
    return torch.cat([r.cumsum(0) / torch.arange(1, len(r) + 1, device=r.device)[:, None] for r in requests])


@exercise
def check_submit(submit: Callable) -> str:
    """``submit(graph, static_x, x)`` runs a captured region on ``x`` ``[n, D]`` and returns ``[n, D]`` that the caller may keep."""
    region = partial(_part, _random(D, D) / D**0.5)
    static_x = torch.zeros(T, D, device=device())
    region(static_x)
    graph = capture(region, static_x)
    count, replay = [], graph.replay
    graph.replay = lambda: (count.append(1), replay())
    kept = []
    for n in (5, 8, 1, 7, 3):
        x = _random(n, D)
        result = answered(submit(graph, static_x, x))
        require(isinstance(result, torch.Tensor) and result.shape == (n, D), f"for {n} rows the result must be a [{n}, {D}] tensor")
        require(equal(result, region(x)), f"wrong for {n} rows: was x written into static_x before replay?")
        kept.append((result, region(x)))
    require(all(equal(result, expected) for result, expected in kept), "right when returned, overwritten by a later replay")
    require(len(count) == len(kept), f"{len(count)} replays for {len(kept)} batches")
    return f"{len(kept)} batches, {len(count)} replays"


@exercise
def check_bridged(bridged: Callable) -> str:
    """``bridged(step)`` returns a function that calls ``step`` and puts its fresh result at one fixed address."""
    region = partial(_part, _random(D, D) / D**0.5)
    decoys = []  # hold every fresh result, so that the next one must lie elsewhere

    def step(h: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        decoys.append(_running_mean(h, lengths))
        return decoys[-1]

    fixed, other = answered(bridged(step)), bridged(step)
    bridge = answered(fixed(_random(T, D), [T]))
    region(bridge)
    graph = capture(region, bridge)
    require(other(_random(T, D), [T]).data_ptr() != bridge.data_ptr(), "two bridged steps share one buffer")
    batches = ([3, 5], [8], [1, 1, 6], [2, 5, 1])
    for lengths in batches:
        h = _random(T, D)
        result = fixed(h, lengths)
        require(result.data_ptr() == bridge.data_ptr(), "the second result is at another address than the first")
        graph.replay()
        require(equal(graph.output, region(_running_mean(h, lengths))), f"the graph does not see the result for lengths {lengths}")
    return f"{len(batches)} batches, 1 address, {bridge.nbytes} bytes of bridge"


@exercise
def check_build(build: Callable) -> str:
    """``build(parts, step, static_x, pool)`` captures three parts and returns ``run(x, lengths)``, ``step`` eager between them."""
    weights = [_random(D, D) / D**0.5 for _ in range(3)]
    calls: list[str] = []

    def part(i: int, x: torch.Tensor) -> torch.Tensor:
        calls.append("part")
        return _part(weights[i], x)

    def step(h: torch.Tensor, lengths: list[int], out: torch.Tensor) -> None:
        calls.append("step")
        out[: sum(lengths)] = _running_mean(h, lengths)

    def eager(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        for weight in weights[:2]:
            x = _running_mean(_part(weight, x), lengths)
        return _part(weights[2], x)

    pool = GraphPool(device())
    run = answered(build([partial(part, i) for i in range(3)], step, torch.zeros(T, D, device=device()), pool))
    require(pool.bytes > 0, "the pool was not used: pass it to capture")
    calls.clear()
    kept = []
    batches = ([3, 2], [4, 4], [1, 5], [8], [1, 1, 1])
    for lengths in batches:
        x = _random(sum(lengths), D)
        result = answered(run(x, lengths))
        require(equal(result, eager(x, lengths)), f"wrong for lengths {lengths}")
        kept.append((result, eager(x, lengths)))
    require(all(equal(result, expected) for result, expected in kept), "right when returned, overwritten by a later run")
    require("part" not in calls, f"the Python of the parts ran {calls.count('part')} times after capture")
    steps = calls.count("step")
    require(steps == 2 * len(batches), f"step ran {steps} times in {len(batches)} runs, expected 2 a run")
    return f"{len(batches)} batches; a run is 3 replays and 2 eager calls"
