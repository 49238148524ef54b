"""The whole path on chat prompts: ``python -m pcg_ref demo``.

Prompts are packed into batches, the batches run through captured graphs, and every real token's logits are compared with what the
model gives for each request alone. Every number that is printed was measured in this very run; with ``--json`` the same numbers are one
document. This module measures and prints; it captures and splits nothing by itself.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import torch
from torch import nn

from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.models.tiny import TinyDecoder
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
ROUNDS = {"cpu": 3, "cuda": 20}  # of the timing
# Relative, a row of logits. Half precision differs by a few per cent between attention kernels in deep models; a wrong row by far more.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2}
WIDTH = 116


@dataclass(frozen=True)
class Subject:
    """A model, how text becomes its tokens, and what its results are compared with.

    Attributes:
        model: Called as ``model(tokens[T], positions[T])``, with ``logits``.
        encode: A prompt to token ids.
        decode: A token id to text.
        reference: One request's tokens ``[n]`` to its logits ``[n, V]``, computed without our packing.
        oracle: What ``reference`` is, in words.
        versions: Of the packages that matter.
    """

    model: nn.Module
    encode: Callable[[str], list[int]]
    decode: Callable[[int], str]
    reference: Callable[[torch.Tensor], torch.Tensor]
    oracle: str
    versions: dict[str, str]


def load(name: str, device: torch.device, dtype: torch.dtype) -> Subject:
    """Load ``"tiny"``, ``"smollm2"``, or what transformers finds by ``name``. Raises as ``load_packed``."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if name == "tiny":
        model = TinyDecoder().to(device, dtype)

        def alone(tokens: torch.Tensor) -> torch.Tensor:
            batch = PackedBatch(tokens, [len(tokens)])
            with forward_context(batch):
                return model.logits(model(batch.tokens, batch.positions))

        oracle = "the same model run eagerly, each request alone (nobody else implements it)"
        return Subject(model, lambda text: list(text.encode()), lambda i: repr(bytes([i]))[1:], alone, oracle, versions)

    from pcg_ref.models.hf_attention import attention_of
    from pcg_ref.models.loading import chat_tokens, load_packed

    packed, tokenizer = load_packed(name, dtype, device)
    causal_lm = packed.causal_lm

    def transformers_alone(tokens: torch.Tensor) -> torch.Tensor:
        with attention_of(causal_lm, "eager"):
            return causal_lm(input_ids=tokens[None], use_cache=False).logits[0]

    import transformers

    oracle = "transformers' own model and eager attention, each request alone, nothing packed"
    versions["transformers"] = transformers.__version__
    encode, decode = (lambda text: chat_tokens(tokenizer, text)), (lambda i: json.dumps(tokenizer.decode([i]), ensure_ascii=False))
    return Subject(packed, encode, decode, transformers_alone, oracle, versions)


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
        for section, show in _sections(document, prompts, model, strategy, compiler, buckets):
            if not as_json:
                print("\n".join(show(section)), flush=True)
    if as_json:
        print(json.dumps(document, indent=1, ensure_ascii=False))
    return 0 if all(batch["equal"] for batch in document["batches"]) else 1


@torch.no_grad()
def _sections(document: dict, prompts: Sequence[str], name: str, strategy: str, compiler: str, buckets: list[int] | None):
    """Do one part of the work after the other, add it to the document, and yield it with the function that shows it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seconds: dict[str, float] = {}
    document["seconds"] = seconds
    print(f"loading {name} ...", file=sys.stderr)
    with _timed(seconds, "load"):
        subject = load(name, device, dtype)
        encoded = [subject.encode(prompt) for prompt in prompts]
    document["run"] = _about(name, subject, device, dtype)
    yield document["run"], _show_run

    members = compose(len(prompts))
    totals = [sum(len(encoded[i]) for i in batch) for batch in members]
    runner = PrefillRunner(subject.model, strategy, buckets or powers_of_two(totals), compiler)
    start = time.perf_counter()
    with _timed(seconds, "capture"):
        report = runner.capture(progress=True)
    piecewise = getattr(runner._impl, "piecewise", None)
    if piecewise is not None:
        # The first thing that happens after tracing and splitting is a run of the first piece.
        seconds["trace and split"] = piecewise.events[0].start - start
        seconds["capture"] -= seconds["trace and split"]
    document["trace"] = _trace(piecewise, seconds) if piecewise is not None else None
    yield (document["trace"], strategy), _show_trace
    document["split"] = _split(piecewise) if piecewise is not None and strategy != "full" else None
    yield document["split"], _show_split
    document["capture"] = dict(report) | {"asked_for": buckets is not None}
    yield document["capture"], _show_capture

    document["oracle"], document["batches"] = subject.oracle, []
    yield subject.oracle, _show_oracle
    for batch in members:
        with _timed(seconds, "compare"):
            document["batches"].append(_compare(subject, runner, [encoded[i] for i in batch], [prompts[i] for i in batch]))
        yield (len(document["batches"]), document["batches"][-1]), _show_batch
    with _timed(seconds, "timing"):
        document["timing"] = _measure(subject, runner, document["batches"])
    yield document, _show_timing


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
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
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
        "seconds_with_split": seconds["trace and split"],
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
    found: list[str] = []
    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") if node.op == "call_function" or node.op == "call_method" else None
        for path, kind in list(stack.values())[-1:] if stack else ():
            name = path.replace("L['self']", "").strip(".")
            # What a module computes between its children would repeat its name again and again.
            if name and name not in found and not any(other.startswith(name + ".") for other in found):
                found.append(name)
    return found


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
    difference, relative, same, following = 0.0, 0.0, 0, []
    # Request by request, so that no more than one request's logits exist at a time.
    for prompt, part, rows in zip(prompts, tokens.split(lengths), hidden.split(lengths)):
        ours, theirs = subject.model.logits(rows).float(), subject.reference(part).float()
        difference = max(difference, (ours - theirs).abs().max().item())
        relative = max(relative, ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item())
        same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        texts = [subject.decode(int(logits[-1].argmax())) for logits in (ours, theirs)]
        following.append({"prompt": prompt, "tokens": len(part), "next": texts[0], "next_of_oracle": texts[1]})
    equal = relative <= TOLERANCES[hidden.dtype]  # false for NaN
    return found | {"max_difference": difference, "relative": relative, "same_argmax": same, "equal": equal, "requests": following}


def _measure(subject: Subject, runner: PrefillRunner, batches: list[dict]) -> list[dict]:
    """Milliseconds a batch, eager against replay in turn, on new random tokens each time."""
    rows: dict[tuple, dict] = {}
    for number, batch in enumerate(batches, 1):
        lengths = batch["lengths"]
        if (key := tuple(sorted(lengths))) in rows:
            continue  # the same requests in another order
        times: dict[str, list[float]] = {"eager_ms": [], "replay_ms": []}
        calls = {"eager_ms": lambda batch: _eagerly(subject.model, batch)} | ({"replay_ms": runner.run} if batch["bucket"] else {})
        for round_number in range(ROUNDS[runner.device.type] + 1):
            for what, call in calls.items():
                duration_ms = _duration_ms(call, lengths, subject.model.vocab_size, runner.device)
                if round_number:  # the first warms up
                    times[what].append(duration_ms)
        medians = {what: statistics.median(values) if values else None for what, values in times.items()}
        rows[key] = {"batch": number, "tokens": sum(lengths), "requests": len(lengths), "bucket": batch["bucket"]} | medians
    return list(rows.values())


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


# What is printed. Each function takes what was measured, and returns lines.


def _show_run(run: dict) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        f"{run['model']} ({run['class']}, {run['parameters'] / 1e6:.3g} million parameters), {run['dtype']}, on {run['device']}: "
        f"{run['hardware']}; {versions}"
    ]
    if run["simulation"]:
        lines.append("Without a CUDA device graphs are simulated by tapes: the same semantics, and no measure of speed.")
    return lines


def _show_trace(found: tuple[dict | None, str]) -> list[str]:
    trace, strategy = found
    lines = ["", "1. Trace"]
    if trace is None:
        where = {"full": "nobody looks for boundaries", "eager": "nothing is captured"}.get(strategy, "the capture finds the boundaries")
        return [*lines, f"   None, and no FX graph: with strategy {strategy!r} {where}."]
    return lines + [
        f"   One FX graph of {trace['nodes']} nodes over {trace['parameters']} parameters and {trace['buffers']} buffers, its token "
        f"dimension T dynamic;",
        f"   the compiler was called {trace['compile_count']} time(s); {trace['seconds_with_split']:.1f} s with the split.",
    ]


def _show_split(split: dict | None) -> list[str]:
    lines = ["", "2. Split"]
    if split is None:
        return [*lines, "   None: there is no FX graph that is cut. Segments, if any, come from the capture."]
    graphs = split["pieces"] - split["eager_pieces"]
    lines.append(f"   {split['pieces']} pieces: {graphs} for graphs, {split['eager_pieces']} that stay eager, at {', '.join(split['split_ops'])}.")
    lines.append("   The first layer's (python -m pcg_ref split shows the code):")
    for piece in split["first_pieces"]:
        wrapped = [piece["facts"][0], *(f"  {fact}" for fact in piece["facts"][1:]), f"  from {', '.join(piece['modules'])}"]
        for line in wrapped:
            lines += textwrap.wrap(line, WIDTH, initial_indent="   ", subsequent_indent=" " * 11, break_long_words=False)
    return lines


def _show_capture(capture: dict) -> list[str]:
    lines = ["", "3. Capture"]
    if not capture["buckets"]:
        return [*lines, "   Nothing: every batch runs eagerly."]
    choice = "asked for" if capture["asked_for"] else "the powers of two that these batches need"
    lines.append(f"   Buckets ({choice}), the largest first into one pool of {capture['pool_bytes'] / 2**20:.1f} MiB:")
    for bucket, row in reversed(capture["buckets"].items()):
        lines.append(f"   {bucket:>6} tokens: {row['graphs']} graphs and {row['eager_segments']} eager segments, {row['capture_ms'] / 1e3:.2f} s")
    return lines


def _show_oracle(oracle: str) -> list[str]:
    return ["", "4. Batches, every real token's logits compared with " + oracle]


def _show_batch(numbered: tuple[int, dict]) -> list[str]:
    number, batch = numbered
    how = f"runs eagerly, {batch['ran_eagerly']}"
    if batch["bucket"] is not None:
        segments = batch["graphs"] + batch["eager_segments"]
        how = f"bucket {batch['bucket']}, {batch['padding']} rows of padding, {segments} segments replayed"
    lines = [
        f"   Batch {number}: {batch['tokens']} tokens; {how}; largest difference {batch['max_difference']:.1e}, "
        f"same argmax {batch['same_argmax']}/{batch['tokens']}" + ("" if batch["equal"] else "; NOT EQUAL")
    ]
    for request in batch["requests"]:
        prompt = textwrap.shorten(request["prompt"], 76, placeholder=" ...")
        other = "" if request["next"] == request["next_of_oracle"] else f" (reference: {request['next_of_oracle']})"
        lines.append(f"     {request['tokens']:>5} tokens  {prompt:<76} -> {request['next']}{other}")
    return lines


def _show_timing(document: dict) -> list[str]:
    run, seconds = document["run"], document["seconds"]
    versions = f"torch {run['versions']['torch']}"
    lines = ["", f"5. Milliseconds a batch, median of {ROUNDS[run['device']]}, {run['dtype']} on {run['device']}, {versions}"]
    if run["simulation"]:
        lines.append("   This is the tape simulation on the CPU, and no measure of speed.")
    lines.append(f"   {'batch':>5} {'requests':>9} {'tokens':>7} {'bucket':>7} {'eager':>9} {'replay':>9}")
    for row in document["timing"]:
        replay = "-" if row["replay_ms"] is None else f"{row['replay_ms']:.2f}"
        lines.append(f"   {row['batch']:>5} {row['requests']:>9} {row['tokens']:>7} {row['bucket'] or '-':>7} {row['eager_ms']:>9.2f} {replay:>9}")
    spent = ", ".join(f"{what} {value:.1f} s" for what, value in seconds.items())
    return [*lines, "", f"Where the time went: {spent}."]
