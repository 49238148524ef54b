"""Three ways to find the boundaries. Each ends in a ``SegmentSequence``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from pcg_ref.context import PackedBatch
from pcg_ref.segments import SegmentSequence


class Strategy(Protocol):
    """What the runner asks of a strategy.

    Attributes:
        setup_s: Seconds spent before the first capture, by what for: ``"trace"``, ``"compile"`` (the general run, in which inductor
            generates its code).
    """

    setup_s: dict[str, float]

    def capture(self, bucket: int, tokens: torch.Tensor, positions: torch.Tensor) -> SegmentSequence:
        """Capture one bucket.

        Args:
            bucket: The size.
            tokens: ``[bucket]`` int64, static.
            positions: ``[bucket]`` int64, static.

        Side effects: runs the model a few times on the static inputs.
        """

    def refuses(self, batch: PackedBatch) -> str | None:
        """Why this batch must run eagerly, or ``None``."""

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether the forward has read this tensor, one that the model kept before the first capture."""

    def guarded_names(self) -> frozenset[str] | None:
        """Names of the module attributes that the graphs may depend on; ``None`` if any may be one."""

    def check_guards(self, change: str, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Raises ``RecompileError`` unless the graphs do not depend on ``change``, an attribute's, in words."""

    def context(self, batch: PackedBatch, bucket: int) -> AbstractContextManager:
        """The forward context for one replay, with whatever the graphs read from the device put in place."""


def stand_in(model: object, tokens: torch.Tensor) -> PackedBatch:
    """A batch of zeros that fills ``tokens``, in requests that the model allows."""
    longest = getattr(model, "max_request_length", None) or len(tokens)
    lengths = [longest] * (len(tokens) // longest) + [len(tokens) % longest] * bool(len(tokens) % longest)
    return PackedBatch(torch.zeros_like(tokens), lengths)
