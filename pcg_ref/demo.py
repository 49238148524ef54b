"""The whole path on chat prompts: ``python -m pcg_ref demo``.

Prompts are packed into batches, the batches run through captured graphs, and every real token's logits are compared with what the
model gives for each request alone. Every number that is printed was measured in this very run; with ``--json`` the same numbers are
one document. This module measures; it captures and splits nothing by itself, and ``demo_text`` puts into words what is printed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stdout

import torch
from torch import nn

from pcg_ref import demo_text
from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.demo_model import Subject, load
from pcg_ref.pieces import operators
from pcg_ref.runner import PrefillRunner
from pcg_ref.show.split import split_text

PROMPTS = (
    "Hi!",
    "What is the capital of France?",
    "Write a haiku about autumn leaves, and then explain in one sentence what each of its three lines means.",
    "A train leaves at 9:40 and needs 2 hours and 35 minutes, with a stop of 10 minutes on the way. Another one leaves at 10:05, "
    "does not stop, and needs 2 hours and 20 minutes. Which of the two arrives first, and how many minutes earlier?",
)
MAX_REQUESTS = 8  # of a batch
LARGEST_BUCKET = 2048  # that is captured without being asked for
ROUNDS = {"cpu": 3, "cuda": 30}  # of the timing, at most
TIMING_LIMIT_S = 4  # for one batch; a round that has begun is finished
# Relative, a row of logits. Half precision differs by a few per cent between attention kernels in deep models, a wrong row by more.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2}


def main(prompts: Sequence[str], model: str, strategy: str, compiler: str, buckets: list[int] | None, as_json: bool) -> int:
    """Run the demo and print it.

    Args:
        prompts: At least one.
        model: See ``load``.
        strategy: Of the runner.
        compiler: Of the runner.
        buckets: Sizes to capture; the powers of two that the batches need by default.
        as_json: Print one JSON document to stdout, and nothing else there.

    Returns:
        0, or 1 if a batch differs from the reference by more than rounding.

    Raises:
        Exception: Whatever loading, tracing or the runner raises.
    """
    document: dict = {}
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        for lines_of, *found in _sections(document, prompts, model, strategy, compiler, buckets):
            if not as_json:
                print("\n".join(lines_of(*found)), flush=True)
    if as_json:
        print(json.dumps(document, indent=1, ensure_ascii=False))
    return 0 if all(batch["equal"] for batch in document["batches"]) else 1


@torch.no_grad()
def _sections(document: dict, prompts: Sequence[str], name: str, strategy: str, compiler: str, buckets: list[int] | None):
    """Do one part of the work after the other, add it to the document, and yield the function that shows it with its arguments."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seconds: dict[str, float] = {}
    document["seconds"] = seconds
    print(f"loading {name} ...", file=sys.stderr)
    with _timed(seconds, "load"):
        subject = load(name, device, dtype)
        encoded = [subject.encode(prompt) for prompt in prompts]
    document["run"] = _about(name, subject, device, dtype)
    yield demo_text.run, document["run"]

    members = compose(len(prompts))
    totals = [sum(len(encoded[i]) for i in batch) for batch in members]
    runner = PrefillRunner(subject.model, strategy, buckets or powers_of_two(totals), compiler)
    print(f"capturing with strategy {strategy} ...", file=sys.stderr)
    report = runner.capture(progress=True)
    seconds |= report["setup_s"]
    piecewise = getattr(runner.implementation, "piecewise", None)
    document["trace"] = _trace(piecewise, seconds) if piecewise is not None else None
    yield demo_text.trace, document["trace"], strategy
    document["split"] = _split(piecewise) if piecewise is not None and strategy != "full" else None
    yield demo_text.split, document["split"]
    document["capture"] = dict(report) | {"asked_for": buckets is not None}
    yield demo_text.capture, document["capture"]

    document["oracle"], document["batches"] = subject.oracle, []
    yield demo_text.oracle, subject.oracle
    for batch in members:
        with _timed(seconds, "compare"):
            compared = _compare(subject, runner, [encoded[i] for i in batch], [prompts[i] for i in batch])
        document["batches"].append({"members": batch} | compared)
        yield demo_text.batch, len(document["batches"]), document["batches"][-1]
    with _timed(seconds, "timing"):
        document["timing"] = _measure(subject, runner, document["batches"])
    yield demo_text.timing, document


@contextmanager
def _timed(seconds: dict[str, float], what: str):
    start = time.perf_counter()
    yield
    seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - start


def compose(count: int) -> list[list[int]]:
    """Which of ``count`` prompts go into each batch: at least three batches, no two alike, every prompt in at least one."""
    if count == 1:
        return [[0], [0, 0], [0, 0, 0]]
    every = list(range(count))
    if count <= MAX_REQUESTS:
        groups = [every[: count // 2], every[count // 2 :], every]
    else:
        groups = [every[i : i + MAX_REQUESTS] for i in range(0, count, MAX_REQUESTS)]
    longest = max(groups, key=len)
    return [*groups, longest[::-1]]  # the same tokens in number, and other boundaries


def powers_of_two(totals: Sequence[int]) -> list[int]:
    """The sizes that batches of these many tokens need: few, and never more than twice the tokens."""
    return sorted({min(LARGEST_BUCKET, 2 ** max(1, math.ceil(math.log2(total)))) for total in totals})


def _about(name: str, subject: Subject, device: torch.device, dtype: torch.dtype) -> dict:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    module = getattr(subject.model, "causal_lm", subject.model)
    return {
        "model": name,
        "class": type(module).__name__,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "device": device.type,
        "hardware": where,
        "dtype": str(dtype).removeprefix("torch."),
        "simulation": device.type == "cpu",
        "versions": subject.versions,
    }


def _trace(piecewise, seconds: dict[str, float]) -> dict:
    nodes = list(piecewise.trace.graph_module.graph.nodes)
    kinds = [node.meta.get("owner") for node in nodes if node.op == "placeholder"]
    return {
        "nodes": sum(node.op not in ("placeholder", "get_attr", "output") for node in nodes),
        "parameters": kinds.count("parameter"),
        "buffers": kinds.count("buffer"),
        "compile_count": piecewise.trace.compile_count,
        "seconds": seconds["trace"],
    }


def _split(piecewise) -> dict:
    eager = [item for item in piecewise.items if item.is_splitting_graph]
    listing = split_text(piecewise.split_module, piecewise.items, layers=1)
    first = [block.splitlines() for block in listing.split("\n\n") if block.startswith("piece")]
    pieces = []
    for item, lines in zip(piecewise.items, first):
        # The code itself is for `python -m pcg_ref split`: here which of the model's modules it came from.
        pieces.append({"facts": [line.strip() for line in lines if not line.startswith("    ")], "modules": _modules(item.graph)})
    return {
        "pieces": len(piecewise.items),
        "eager_pieces": len(eager),
        "split_ops": sorted({operators(item.graph) for item in eager}),
        "first_pieces": pieces,
    }


def _modules(graph: torch.fx.GraphModule) -> list[str]:
    """The model's own modules that the nodes of a piece come from, in order."""
    found: dict[str, None] = {}
    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") if node.op in ("call_function", "call_method") else None
        if stack:
            path, _ = list(stack.values())[-1]
            found[path.removeprefix("L['self']").removeprefix(".causal_lm").removeprefix(".model").strip(".")] = None
    # What a module computes between its children is left out: its name is in theirs.
    return [name for name in found if name and not any(other.startswith(name + ".") for other in found)]


def _compare(subject: Subject, runner: PrefillRunner, requests: list[list[int]], prompts: list[str]) -> dict:
    tokens = torch.tensor(sum(requests, []), dtype=torch.int64, device=runner.device)
    lengths = [len(request) for request in requests]
    before = runner.report()
    hidden = runner.run(PackedBatch(tokens, lengths))
    after = runner.report()
    # What the runner did is read off its own counters.
    bucket = next((b for b, row in after["buckets"].items() if row["replays"] > before["buckets"][b]["replays"]), None)
    reason = next((why for why, count in after["eager"].items() if count > before["eager"].get(why, 0)), None)
    found = {"lengths": lengths, "tokens": sum(lengths), "bucket": bucket, "ran_eagerly": reason}
    if bucket is not None:
        row = after["buckets"][bucket]
        found |= {"padding": bucket - sum(lengths), "graphs": row["graphs"], "eager_segments": row["eager_segments"]}
    differences, relatives, same, following = [], [], 0, []
    # Request by request, so that no more than one request's logits exist at a time.
    for prompt, part, rows in zip(prompts, tokens.split(lengths), hidden.split(lengths)):
        ours, theirs = subject.model.logits(rows).float(), subject.reference(part).float()
        differences.append((ours - theirs).abs().max())
        relatives.append(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())
        same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        texts = [subject.decode(int(logits[-1].argmax())) for logits in (ours, theirs)]
        following.append({"prompt": prompt, "tokens": len(part), "next": texts[0], "next_of_oracle": texts[1]})
    difference, relative = (torch.stack(values).max().item() for values in (differences, relatives))  # NaN stays NaN
    equal = relative <= TOLERANCES[hidden.dtype]
    return found | {"max_difference": difference, "relative": relative, "same_argmax": same, "equal": equal, "requests": following}


def _measure(subject: Subject, runner: PrefillRunner, batches: list[dict]) -> list[dict]:
    """Milliseconds a batch, eager against replay; the same requests in another order are not measured again."""
    rows: dict[tuple, dict] = {}
    for number, batch in enumerate(batches, 1):
        lengths = batch["lengths"]
        key = tuple(sorted(lengths))
        if key not in rows:
            about = {"batch": number, "tokens": sum(lengths), "requests": len(lengths), "bucket": batch["bucket"]}
            rows[key] = about | _medians(subject, runner, lengths, replayed=batch["bucket"] is not None)
    return list(rows.values())


def _medians(subject: Subject, runner: PrefillRunner, lengths: list[int], replayed: bool) -> dict:
    """Both ways in turn, so that a machine that slows down slows both, and on new random tokens each time."""
    calls = {"eager_ms": lambda batch: _eagerly(subject.model, batch)} | ({"replay_ms": runner.run} if replayed else {})
    for call in calls.values():
        _duration_ms(call, lengths, subject.model.vocab_size, runner.device)  # warms up
    times: dict[str, list[float]] = {what: [] for what in calls}
    deadline = time.perf_counter() + TIMING_LIMIT_S
    while len(times["eager_ms"]) < ROUNDS[runner.device.type] and not (times["eager_ms"] and time.perf_counter() > deadline):
        for what, call in calls.items():
            times[what].append(_duration_ms(call, lengths, subject.model.vocab_size, runner.device))
    medians = {what: statistics.median(values) for what, values in times.items()}
    return {"rounds": len(times["eager_ms"]), "eager_ms": None, "replay_ms": None} | medians


def _eagerly(model: nn.Module, batch: PackedBatch) -> None:
    with forward_context(batch):
        model(batch.tokens, batch.positions)


def _duration_ms(call: Callable, lengths: list[int], vocabulary: int, device: torch.device) -> float:
    batch = PackedBatch(torch.randint(vocabulary, (sum(lengths),), device=device), lengths)
    _synchronize(device)
    start = time.perf_counter()
    call(batch)
    _synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

