"""Checks for the exercises of ``notebooks/02_trace_and_split.ipynb``.

Letters: ``T`` tokens, ``D`` width.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch.fx.passes.split_module import split_module

from pcg_ref.boundaries import boundaries
from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.exercises import answered, device, equal, exercise, require
from pcg_ref.explain import TraceError
from pcg_ref.ops import register_custom_op, split_ops
from pcg_ref.splitting import split_graph
from pcg_ref.tracing import trace

D = 16


def _random(rows: int) -> torch.Tensor:
    return torch.randn(rows, D).to(device())


@exercise
def check_branchless(fn: Callable) -> str:
    """``fn(x)`` equals ``x * 2 if x.sum() > 0 else x - 1`` and can be traced whole."""
    answered(fn(_random(5)))
    try:
        traced = trace(fn, _random(7))
    except TraceError:
        raise AssertionError("it cannot be traced as one graph: does Python still ask for a value of x?") from None
    signs = set()
    for rows in (5, 2, 11, 3, 8, 31):
        for sign in (1, -1):
            x = _random(rows).abs() * sign + 0.1 * _random(rows)
            signs.add(bool(x.sum() > 0))
            require(equal(traced(x), x * 2 if x.sum() > 0 else x - 1), f"wrong for {rows} rows whose sum is {x.sum():+.1f}")
    require(traced.compile_count == 1 and len(signs) == 2, f"{traced.compile_count} traces for six sizes, expected 1")
    return f"12 inputs of 6 sizes and both signs, {traced.compile_count} trace"


@exercise
def check_request_mean(make: Callable) -> str:
    """``make()`` registers and returns a split operator ``op(values, output)``: each output row is the mean of its request."""
    op = answered(make())
    require(isinstance(op, torch._ops.OpOverload), f"make() must return the operator, got {type(op).__name__}")
    require(op in split_ops(), "the operator is registered, but not as a split operator")

    def model(x: torch.Tensor) -> torch.Tensor:
        values = x * 2
        output = torch.empty_like(values)
        op(values, output)
        return output + values

    example = _random(6)
    with forward_context(_batch([6])):
        traced = trace(model, example)
    split_gm, items = split_graph(traced.graph_module, [op])
    require([item.is_splitting_graph for item in items] == [False, True, False], f"{len(items)} pieces, expected 3")
    batches = [[random.randint(1, 9) for _ in range(requests)] for requests in (1, 4, 2, 7)]
    for lengths in batches:
        x = _random(sum(lengths))
        expected = torch.cat([r.mean(0, keepdim=True).expand_as(r) for r in (x * 2).split(lengths)]) + x * 2
        with forward_context(_batch(lengths)):
            require(equal(traced.call(split_gm, x), expected), f"wrong for lengths {lengths}: are they read when the body runs?")
    require(traced.compile_count == 1, f"{traced.compile_count} traces, expected 1: the operator is not opaque")
    fresh = sum(row.address == "fresh" for row in boundaries(split_gm, items))
    return f"{len(batches)} batches, {len(items)} pieces, {fresh} fresh tensors across a cut"


def _batch(lengths: list[int]) -> PackedBatch:
    return PackedBatch(torch.zeros(sum(lengths), dtype=torch.int64, device=device()), lengths)


@register_custom_op(mutates_args=["x"])
def exercise_barrier(x: torch.Tensor) -> None:
    x.add_(1)


@exercise
def check_piece_numbers(assign: Callable) -> str:
    """``assign(is_split)`` gives each node of a graph its piece, from whether it is a split operator."""
    pieces, programs = 0, [[True], [False], [False, True, True, False], [True, False]]
    programs += [[random.random() < 0.4 for _ in range(random.randint(2, 12))] for _ in range(8)]
    for is_split in programs:

        def program(x: torch.Tensor) -> torch.Tensor:
            for split in is_split:
                if split:
                    exercise_barrier(x)
                else:
                    x = x * 2
            return x

        numbers = answered(assign(list(is_split)))
        traced = trace(program, _random(6))
        _, items = split_graph(traced.graph_module, [exercise_barrier], allow_none=True)
        expected = [item.graph_id for item in items for node in item.graph.graph.nodes if node.op == "call_function"]
        require(list(numbers) == expected, f"for {is_split} it gives {numbers}, split_graph cuts {expected}")
        nodes = traced.graph_module.graph.find_nodes(op="call_function", target=exercise_barrier, sort=False)
        order = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
        require([n in nodes for n in order] == is_split, "the program was traced in another way than expected")
        of = dict(zip(order, numbers))
        cut = split_module(traced.graph_module, None, of.__getitem__, keep_original_order=True)
        x = _random(random.randint(2, 9))
        require(equal(traced.call(cut, x.clone()), program(x.clone())), f"the pieces for {is_split} compute something else")
        pieces += len(items)
    return f"{len(programs)} programs, {pieces} pieces"
