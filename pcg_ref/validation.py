"""What a runner refuses, before anything is captured or written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

import torch

from pcg_ref.context import PackedBatch

STRATEGIES = ("tc_piecewise", "breakable", "full", "eager")


def validate_choices(
    strategy: str, compiler: str, replay: str, on_fresh_output: str, on_recompile: str, on_oversize: str, max_padding_factor: float,
    max_requests: int,
) -> None:  # fmt: skip
    """Raises ``ValueError`` for a choice of a runner that does not exist, or that makes no sense with the others."""
    _choose("strategy", strategy, STRATEGIES)
    _choose("compiler", compiler, ("eager", "inductor"))
    _choose("replay", replay, ("flat", "stitched"))
    _choose("on_fresh_output", on_fresh_output, ("bridge", "error"))
    _choose("on_recompile", on_recompile, ("error", "eager"))
    _choose("on_oversize", on_oversize, ("eager", "error"))
    if strategy == "breakable" and compiler != "eager":
        raise ValueError(f"strategy 'breakable' uses no compiler; choose compiler='eager', or 'tc_piecewise' for {compiler!r}")
    if replay == "stitched" and strategy != "tc_piecewise":
        raise ValueError(f"strategy {strategy!r} has no split module to replay stitched; choose replay='flat', or 'tc_piecewise'")
    if not max_padding_factor >= 1:  # nan included
        raise ValueError(f"max_padding_factor={max_padding_factor} is not at least 1, so that nothing would be replayed")
    if max_requests < 1:
        raise ValueError(f"max_requests={max_requests} leaves no slot for a request; give at least 1")


def _choose(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}; choose one of {list(choices)}")


def validated_buckets(buckets: Iterable[int]) -> list[int]:
    """The sizes, ascending, each once. Raises ``ValueError`` for what is no list of sizes that can be captured."""
    try:
        sizes = sorted({operator.index(size) for size in buckets})
    except TypeError:
        raise ValueError(f"buckets={buckets!r} is no list of whole numbers; give for example [64, 128, 256]") from None
    if not sizes or sizes[0] < 2:
        raise ValueError(f"buckets {sizes}: give at least one size, each at least 2 (torch specialises sizes 0 and 1)")
    return sizes


def validate_batch(batch: PackedBatch, device: torch.device, model: Callable) -> None:
    """Raises ``ValueError`` for a batch that this model cannot run on this device; the message says what to do."""
    if not isinstance(batch, PackedBatch):
        raise ValueError(f"run() takes a PackedBatch, got {type(batch).__name__}; build one with pcg.PackedBatch(tokens, lengths)")
    if batch.tokens.device != device:
        raise ValueError(f"tokens are on {batch.tokens.device}, the runner on {device}; move them with tokens.to(...)")
    vocabulary = getattr(model, "vocab_size", None)
    if vocabulary is not None and batch.max_token >= vocabulary:
        raise ValueError(f"token id {batch.max_token} is outside the vocabulary of {vocabulary}")
    if any(batch.prefix_lengths or ()):
        raise ValueError(f"prefix_lengths {batch.prefix_lengths} need a KV cache, and there is none; prefill each request whole")
    longest = getattr(model, "max_request_length", None)
    if longest is not None and batch.max_length > longest:
        raise ValueError(f"a request of {batch.max_length} tokens is longer than the model's attention allows, {longest}")


def require_hidden(output: object, bucket: int) -> None:
    """Raises ``ValueError`` unless a model's output is one tensor with a row for each token."""
    if not isinstance(output, torch.Tensor) or output.dim() == 0 or output.shape[0] != bucket:
        got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ValueError(f"the model must return one tensor with a row for each of the {bucket} tokens, got {got}")
