"""Compare first, then time: rounds in which every system runs the same new batch, in an order drawn anew.

Letters: ``T`` tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from pcg_ref.bench.systems import System
from pcg_ref.context import PackedBatch
from pcg_ref.segments import GraphSegment

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}  # of ||out - eager|| / ||eager||


def random_batch(num_tokens: int, num_requests: int, vocab_size: int, device: torch.device, rng: random.Random) -> PackedBatch:
    """``num_tokens`` random tokens in ``num_requests`` requests of random, uneven lengths."""
    cuts = sorted(rng.sample(range(1, num_tokens), min(num_requests, num_tokens) - 1))
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, num_tokens])]
    return PackedBatch(torch.randint(vocab_size, (num_tokens,)).to(device), lengths)


def worst_error(systems: Sequence[System], batches: Sequence[PackedBatch]) -> dict[str, float]:
    """The largest ``||out - eager|| / ||eager||`` of each system; every one sees the batches in turn, buckets mixed.

    Raises:
        RuntimeError: An error is above the dtype's tolerance. Nothing wrong is ever timed.
    """
    eager = systems[0].run
    worst: dict[str, float] = defaultdict(float)
    for batch in batches:
        reference = eager(batch)
        tolerance = TOLERANCES[reference.dtype]
        for system in systems[1:]:
            error = ((system.run(batch).float() - reference.float()).norm() / reference.float().norm()).item()
            worst[system.name] = max(worst[system.name], error)
            if not error <= tolerance:
                raise RuntimeError(f"{system.name} differs from eager by {error:.3g} (tolerance {tolerance}) on lengths {batch.lengths}")
    return worst


def interleaved(
    functions: dict[str, Callable[[], object]], rounds: int, new_round: Callable[[], None], device: torch.device, rng: random.Random
) -> dict[str, dict[str, dict[str, float]]]:
    """Time every function once a round, in random order.

    Args:
        functions: By name; each enqueues its work.
        rounds: How many rounds count; three more run first.
        new_round: Called before each round, untimed.
        device: What to wait for.
        rng: For the order.

    Returns:
        For each name ``{"total_ms": stats, "host_ms": stats}``: until the device is done, and until the host is.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(rounds + 3):
        new_round()
        for name in rng.sample(list(functions), len(functions)):
            wait()
            start = time.perf_counter()
            functions[name]()
            host = time.perf_counter()
            wait()
            samples[name].append((time.perf_counter() - start, host - start))
    return {
        name: {"total_ms": _stats([total for total, _ in pairs[3:]]), "host_ms": _stats([host for _, host in pairs[3:]])}
        for name, pairs in samples.items()
    }


def _stats(seconds: list[float]) -> dict[str, float]:
    milliseconds = sorted(1e3 * s for s in seconds)
    return {
        "median": statistics.median(milliseconds),
        "p10": milliseconds[len(milliseconds) // 10],
        "p90": milliseconds[len(milliseconds) * 9 // 10],
    }


def device_work(run: Callable[[], object], calls: int = 5) -> dict[str, float]:
    """Kernels and copies of one call, and the milliseconds in which at least one of them ran, by torch's profiler: a mean of ``calls``."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            run()
            torch.cuda.synchronize()  # so that calls do not overlap
    events = [e.time_range for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy_us, end = 0.0, 0.0
    for interval in sorted(events, key=lambda interval: interval.start):
        busy_us += max(0.0, interval.end - max(interval.start, end))
        end = max(end, interval.end)
    return {"kernels": round(len(events) / calls), "busy_ms": busy_us / calls / 1e3}


def loop_cost(system: System, batch: PackedBatch, rounds: int, rng: random.Random) -> dict[str, float]:
    """Host microseconds of one flat replay, apart: all of it, its graph launches alone, its eager segments alone."""
    runner, bucket = system.runner, batch.num_tokens
    segments = runner.sequences[bucket].segments
    graphs = [s.replay for s in segments if isinstance(s, GraphSegment)]
    eager = [s.replay for s in segments if not isinstance(s, GraphSegment)]
    functions = {
        "sequence_us": runner.sequences[bucket].replay,
        "graphs_us": lambda: [replay() for replay in graphs],
        "eager_us": lambda: [replay() for replay in eager],
    }
    with runner.implementation.context(batch, bucket) as context:
        context.cu_seqlens  # planned once a batch; here before the clock starts
        with torch.no_grad():
            timed = interleaved(functions, rounds, lambda: None, runner.device, rng)
    return {name: 1e3 * stats["host_ms"]["median"] for name, stats in timed.items()} | {"eager_segments": len(eager)}
