"""The command: set up, compare, time, print, and if asked record."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from pcg_ref.bench.measure import device_work, interleaved, loop_cost, random_batch, worst_error
from pcg_ref.bench.record import provenance, save, tables
from pcg_ref.bench.systems import System, build, load_model


def main(
    model_name: str, sizes: Sequence[int], rounds: int, requests: int, only: Sequence[str], as_json: bool, record: str | None, seed: int
) -> int:
    """Run the benchmark.

    Args:
        model_name: As for ``load_model``.
        sizes: Tokens of the batches; each is a bucket.
        rounds: Timed rounds a size.
        requests: Requests in each batch.
        only: Names of the systems; all if empty. ``"eager"``, the reference, always runs.
        as_json: Print one JSON document in place of the tables.
        record: Folder for the JSON and the plot, or ``None``.
        seed: Of batches and orders.

    Returns:
        The exit code.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(model_name, device, dtype)
    systems: list[System] = []
    for system in build(model, sizes, ["eager", *only] if only else ()):
        seconds = ", ".join(f"{what} {s:.1f} s" for what, s in system.setup_s.items())
        print(f"set up: {system.name} {seconds}".rstrip(), file=sys.stderr)
        systems.append(system)
    new_batch = lambda size: random_batch(size, requests, model.vocab_size, device, rng)  # noqa: E731
    run = {
        "model": model_name,
        "requests": requests,
        "provenance": provenance(device, dtype, " ".join(["python -m pcg_ref", *sys.argv[1:]])),
        **_compare_and_time(systems, sizes, rounds, new_batch, device, rng),
    }
    print(json.dumps(run, indent=1) if as_json else tables(run))
    if record is not None:
        print("recorded:", *save(run, Path(record)), file=sys.stderr)
    return 0


def _compare_and_time(systems: Sequence[System], sizes: Sequence[int], rounds: int, new_batch, device: torch.device, rng) -> dict:
    errors = worst_error(systems, [new_batch(size) for size in rng.sample(list(sizes) * 3, 3 * len(sizes))])
    by_name = {system.name: system for system in systems}
    found = {
        "sizes": list(sizes),
        "rounds": rounds,
        "systems": {name: _facts(system) | {"worst_error": errors.get(name, 0.0)} for name, system in by_name.items()},
        "results": [row for size in sizes for row in _time(systems, size, rounds, new_batch, device, rng)],
    }
    flat = by_name.get("piecewise inductor") or by_name.get("piecewise")
    found["loop"] = {}
    if device.type == "cuda":
        found["loop"] = {size: loop_cost(flat, new_batch(size), rounds, rng) for size in sizes} if flat else {}
        for row in found["results"]:  # last: a profiler slows down everything after it
            run, batch = by_name[row["system"]].run, new_batch(row["T"])
            row |= device_work(partial(run, batch))
    return found


def _facts(system: System) -> dict:
    return {"setup_s": system.setup_s, "pool_bytes": system.pool_bytes, "executable_bytes": system.executable_bytes}


def _time(systems: Sequence[System], size: int, rounds: int, new_batch, device: torch.device, rng: random.Random) -> list[dict]:
    current = {}

    def new_round() -> None:
        current["batch"] = new_batch(size)

    functions = {system.name: lambda run=system.run: run(current["batch"]) for system in systems}
    timed = interleaved(functions, rounds, new_round, device, rng)
    rows = []
    for system in systems:
        row = {"T": size, "system": system.name, **timed[system.name]}
        if system.runner is not None:
            row["segments"] = len(system.runner.sequences[size].segments)
        rows.append(row)
    return rows
