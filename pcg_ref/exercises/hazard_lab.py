"""Checks for the exercises of ``notebooks/06_hazard_lab.ipynb``.

Letters: ``T`` rows of the graphs (8), ``n`` real rows, ``D`` width.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from pcg_ref.exercises import answered, device, equal, exercise, require
from pcg_ref.graphs import capture

T, D = 8, 4


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(device())


def _request_means(bounds: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``[T, D]``: each row the mean of its request, all by device tensors; NaN in a row that is in no request."""
    row = torch.arange(len(x), device=x.device)
    request = torch.searchsorted(bounds, row, right=True)  # 1 for the first
    same = (request[:, None] == request[None, :]).to(x.dtype)  # [T, T]
    return (same @ x / same.sum(1, keepdim=True)).masked_fill(request[:, None] >= len(bounds), float("nan"))


@exercise
def check_bounds(bounds_of: Callable) -> str:
    """``bounds_of(lengths, slots, rows)`` is the list of ``slots + 1`` boundaries of a batch in a graph of ``rows`` rows."""
    slots = 6
    bounds = torch.zeros(slots + 1, dtype=torch.int32, device=device())
    static_x = torch.zeros(T, D, device=device())
    region = partial(_request_means, bounds)
    region(static_x)
    graph = capture(region, static_x)
    batches = [[2, 2, 2, 2], [5], [1, 3], [8], [1, 1, 1, 1, 1], [3, 2, 1]]
    batches += [[random.randint(1, 2) for _ in range(random.randint(1, 4))] for _ in range(4)]
    for lengths in batches:
        ends = answered(bounds_of(list(lengths), slots, T))
        require(len(ends) == slots + 1, f"{len(ends)} boundaries for lengths {lengths}, and the buffer has {slots + 1}")
        n, x = sum(lengths), _random(T, D)
        static_x.copy_(x)
        bounds.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        expected = torch.cat([r.mean(0, keepdim=True).expand_as(r) for r in x[:n].split(lengths)])
        require(equal(graph.output[:n], expected), f"wrong for lengths {lengths}")
        padding = x[n:].mean(0, keepdim=True).expand(T - n, D)
        require(n == T or equal(graph.output[n:], padding), f"the padding behind lengths {lengths} is not one request of its own")
    return f"{len(batches)} batches, 1 graph"


def _reassign(model: nn.Module) -> None:
    model[1].bias = nn.Parameter(model[1].bias * 2)


def _round_trip(model: nn.Module) -> None:
    model[0].half().float()


def _assign(model: nn.Module) -> None:
    model[1].load_state_dict({key: value.clone() for key, value in model[1].state_dict().items()}, assign=True)


def _buffer(model: nn.Module) -> None:
    model[2].running_mean = _random(D)


@exercise
def check_watch(watch: Callable) -> str:
    """``watch(module)`` returns ``check()``, which raises ``RuntimeError`` with the name of a tensor that is not where it was."""
    moves = {"1.bias": _reassign, "0.weight": _round_trip, "1.weight": _assign, "2.running_mean": _buffer}
    for name, move in moves.items():
        model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.BatchNorm1d(D)).to(device())
        before = [tensor.detach() for tensor in [*model.parameters(), *model.buffers()]]  # so that no new tensor gets an old address
        check = answered(watch(model))
        check()
        for tensor in before:
            tensor.add_(1)
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        try:
            check()
        except RuntimeError:
            raise AssertionError("it complains about numbers that changed in place, which a graph reads as they are") from None
        move(model)
        try:
            check()
        except RuntimeError as error:
            require(name in str(error), f"{name} has moved, and the message does not name it")
        else:
            raise AssertionError(f"{name} has moved, and nothing was raised")
    return f"{len(moves)} moves noticed, changes in place allowed"


@exercise
def check_store(build: Callable) -> str:
    """``build(cache, capture)`` captures once and returns ``run(rows, slots)``, which writes ``rows[i]`` to ``cache[slots[i]]``."""
    cache = torch.zeros(33, D, device=device())  # the last row is nobody's
    oracle, graphs, replays = cache.clone(), [], []

    def counting(region: Callable, *args):
        graph = capture(region, *args)
        replay = graph.replay
        graph.replay = lambda: (replays.append(1), replay())
        graphs.append(graph)
        return graph

    run = answered(build(cache, counting))
    require(equal(cache[:-1], oracle[:-1]), "building it has already written to the cache")
    sizes = [8, 5, 1, 7, 3, random.randint(2, 6)]
    order = torch.randperm(32)
    for n in sizes:
        slots, order = order[:n].to(device()), order.roll(-5)  # some slots change hands
        rows = _random(n, D)
        oracle[slots] = rows
        run(rows, slots)
        require(bool((cache[slots] == rows).all()), f"not all of {n} rows are in their slots")
        require(bool((cache[:-1] == oracle[:-1]).all()), f"{n} rows were written, and slots of other requests changed")
    require(len(graphs) == 1, f"{len(graphs)} captures, expected 1")
    require(len(replays) == len(sizes), f"{len(replays)} replays for {len(sizes)} batches: is the write in the graph?")
    return f"{len(sizes)} batches, {len(graphs)} graph, {len(replays)} replays"
