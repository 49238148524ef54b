"""Three ways to find the boundaries. Each ends in a ``SegmentSequence``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from pcg_ref.context import PackedBatch
from pcg_ref.segments import SegmentSequence


class Strategy(Protocol):
    """What the runner asks of a strategy."""

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

    def context(self, batch: PackedBatch, bucket: int) -> AbstractContextManager:
        """The forward context for one replay, with whatever the graphs read from the device put in place."""
