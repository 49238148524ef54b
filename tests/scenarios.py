"""What is done to a program: how it is captured, which batches come, what changes in between, what fails.

A scenario prints as Python, as a program does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from programs import Grammar, Program

STRATEGIES = ("tc_piecewise", "tc_piecewise", "breakable", "full")


@dataclass(frozen=True)
class Run:
    """A batch; with ``fail_at`` the body of that call of an operator raises."""

    lengths: tuple[int, ...]
    seed: int
    fail_at: int | None = None


@dataclass(frozen=True)
class Change:
    """New numbers in a weight, in place; ``moved``: by a new parameter, which must be noticed, and is taken back afterwards."""

    seed: int
    moved: bool = False


@dataclass(frozen=True)
class Switch:
    """Another value of a Python attribute, which a replay may follow or refuse, and which is taken back afterwards."""

    name: str
    value: object


@dataclass(frozen=True)
class Scenario:
    """What is done to one program.

    Attributes:
        direct: Through ``PiecewiseModel``, ``capture_breakable`` and ``capture`` at captured sizes; else through ``PrefillRunner``.
        sizes: Captured sizes, in the order of capture.
        events: Batches and changes.
        fail_at: The body of that call of an operator raises during the first capture.
        out_of_memory_at: That allocation of graph memory fails during the first capture (CPU simulation).
    """

    strategy: str
    sizes: tuple[int, ...]
    events: tuple
    direct: bool = False
    replay: str = "flat"
    compiler: str = "eager"
    copy_output: bool = True
    fail_at: int | None = None
    out_of_memory_at: int | None = None
    debug: bool = False


def draw(rng: random.Random, inductor: bool = False, **options):
    """A program and a scenario for it."""
    direct = rng.choice([True, False]) if (chosen := options.pop("direct", None)) is None else chosen
    breaks = rng.randrange(5) == 0 and not inductor and "breakable" in options.get("strategies", ("breakable",))
    program = Grammar(rng, across_rows=direct, breaks=breaks, host=rng.randrange(40) == 0).draw()
    return program, scenario(rng, program, compiler="inductor" if inductor else "eager", direct=direct, **options)


def scenario(rng, program: Program, strategies=STRATEGIES, compiler="eager", direct=False, sizes=None) -> Scenario:
    """Draw what is done to a program."""
    allowed = [s for s in strategies if not (s == "full" and (program.reads_metadata or program.has_breaks))]
    strategy = "breakable" if program.has_breaks else rng.choice(allowed or ["tc_piecewise"])
    sizes = tuple(rng.choice([(8, 4), (16, 6, 2), (12,), (24, 7), (5, 9)])) if sizes is None else sizes
    largest = max(sizes)
    # subtle: what these return shares memory or not by strides, and the stride of a dimension of size 1 is any: written in place, a single
    # row unpadded is another program.
    fewest = 2 if direct or program.uses("contiguous", "reshape", "flatten") else 1
    events: list = []
    for _ in range(rng.randrange(4, 10)):
        kind = rng.randrange(12)
        if kind == 0:
            events.append(Change(rng.randrange(100), moved=not direct and rng.choice([True, False])))
        elif kind in (1, 2) and not direct:
            events.append(Switch(*rng.choice([("factor", 3), ("wide", None), ("shift", 2)])))
        rows = rng.choice([fewest, 2, largest, largest + 3, rng.randrange(fewest, largest + 1)])
        if direct and rng.randrange(8):
            rows = rng.choice(sizes)
        lengths = []
        while sum(lengths) < rows:
            lengths.append(rng.randrange(1, rows - sum(lengths) + 1))
        events.append(Run(tuple(lengths), rng.randrange(1000), rng.randrange(1, 4) if rng.randrange(6) == 0 else None))
    fault = rng.randrange(8)
    return Scenario(
        strategy, sizes, tuple(events), bool(direct), rng.choice(["flat", "stitched"]) if strategy == "tc_piecewise" else "flat",
        compiler if strategy != "breakable" else "eager", rng.choice([True, True, False]),
        fail_at=rng.randrange(1, 8) if fault == 0 else None, out_of_memory_at=rng.randrange(1, 30) if fault == 1 else None,
        debug=rng.randrange(6) == 0,
    )  # fmt: skip
