"""What eager segments read at run time: the packed batch, and the metadata planned from it once.

A graph replays kernels with frozen addresses and shapes, so what changes from batch to batch cannot travel as a Python argument of
a captured region. It travels here: the runner opens a ``forward_context`` around the replay, and the bodies of split operators look
up ``current_context()``. Mirrors SGLang's and vLLM's ``forward_context``.

Letters: ``T`` tokens, ``B`` requests.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The new tokens of several requests, one after the other in one tensor.

    Args:
        tokens: ``[T]`` int64, the token ids of all requests. Read once here (on a GPU this waits for the device).
        lengths: New tokens of each request, ``B`` positive integers with sum ``T``.
        prefix_lengths: Tokens of each request that are already in a KV cache, ``B`` integers >= 0; none by default.

    Raises:
        ValueError: The batch is empty, a length is not a positive integer, the lengths do not sum to ``T``, or ``tokens`` has
            another dtype or rank or holds a negative id.
    """

    tokens: torch.Tensor
    lengths: Sequence[int]
    prefix_lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _integers("lengths", self.lengths, at_least=1))
        if not self.lengths:
            raise ValueError("the batch is empty: lengths=[]; a batch needs at least one request")
        if not isinstance(self.tokens, torch.Tensor) or self.tokens.dtype != torch.int64 or self.tokens.dim() != 1:
            got = f"{self.tokens.dtype} {list(self.tokens.shape)}" if isinstance(self.tokens, torch.Tensor) else type(self.tokens)
            raise ValueError(f"tokens must be a one-dimensional int64 tensor, got {got}; use torch.tensor(ids, dtype=torch.int64)")
        if sum(self.lengths) != self.num_tokens:
            raise ValueError(f"lengths {self.lengths} sum to {sum(self.lengths)}, but tokens holds {self.num_tokens}; they must agree")
        if self.prefix_lengths is not None:
            object.__setattr__(self, "prefix_lengths", _integers("prefix_lengths", self.prefix_lengths, at_least=0))
            if len(self.prefix_lengths) != len(self.lengths):
                raise ValueError(f"{len(self.prefix_lengths)} prefix_lengths for {len(self.lengths)} requests; give one for each")
        if self.min_token < 0:
            raise ValueError(f"tokens holds the negative id {self.min_token}; token ids start at 0")
        # Planned here, where a server would still be busy with the batch before, and not in the forward.
        self.positions, self.cu_seqlens  # noqa: B018

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_requests(self) -> int:
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def _token_range(self) -> list[int]:
        return torch.stack(torch.aminmax(self.tokens)).tolist()

    @property
    def min_token(self) -> int:
        return self._token_range[0]

    @property
    def max_token(self) -> int:
        return self._token_range[1]

    @cached_property
    def positions(self) -> torch.Tensor:
        """``[T]`` int64 on the tokens' device: each token's place in its own request, its prefix included."""
        starts = self.prefix_lengths or [0] * self.num_requests
        return to_device(torch.cat([torch.arange(start, start + n) for start, n in zip(starts, self.lengths)]), self.tokens.device)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """``[B+1]`` int32 on the tokens' device: where each request starts in ``tokens``, and at the end ``T``."""
        return cumulative(self.lengths, self.tokens.device)


def _integers(name: str, values: Sequence[int], at_least: int) -> list[int]:
    """``values`` as Python integers; the integers of NumPy and of torch are welcome, one by one or as an array."""
    try:
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    except TypeError:
        raise ValueError(f"{name} must be a sequence of integers, got {values!r}") from None
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(f"{name} must be integers >= {at_least}, got {value!r} in {values}")
    return values


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    # non_blocking from pageable memory is safe (the driver stages it before it returns) and saves the stream synchronisation that a
    # blocking copy would put into every batch.
    return host.to(device, non_blocking=True)


def cumulative(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """``[len(lengths)+1]`` int32 on ``device``: 0 and the running sums."""
    return to_device(torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32), device)


class ForwardContext:
    """The metadata of one forward, planned once however many layers read it.

    Args:
        batch: The batch as the caller gave it.
        padded_num_tokens: Rows of the tensors that run: the bucket, or the batch's tokens outside graphs.
        static_cu_seqlens: ``[S+1]`` int32 device tensor with a fixed address when the readers are inside a graph, else ``None``. Then
            only ``padded_num_tokens``, ``cu_seqlens`` and ``max_length`` may be read: a number of the host would be frozen into the
            graph with the value that it had at capture.
    """

    def __init__(self, batch: PackedBatch, padded_num_tokens: int, static_cu_seqlens: torch.Tensor | None = None) -> None:
        self._batch = batch
        self.padded_num_tokens = padded_num_tokens
        self.static_cu_seqlens = static_cu_seqlens

    @property
    def batch(self) -> PackedBatch:
        """The batch. Raises ``RuntimeError`` inside a full graph, see ``static_cu_seqlens``."""
        if self.static_cu_seqlens is not None:
            raise RuntimeError(
                "the batch was read inside a full graph, where its numbers would be frozen: read context.cu_seqlens on the device, or "
                "use a strategy that runs this operator eagerly ('tc_piecewise', 'breakable')"
            )
        return self._batch

    @property
    def num_tokens(self) -> int:
        """Real rows; the rows from here to ``padded_num_tokens`` are padding."""
        return self.batch.num_tokens

    @cached_property
    def lengths(self) -> list[int]:
        """The requests' lengths, and the padding as one more request.

        # subtle: with the padding as a request of its own, attention defines every row of its output and no padded row is a key of
        # a real one, without a slice or a fill per layer.
        """
        padding = self.padded_num_tokens - self.num_tokens
        return [*self.batch.lengths, padding] if padding else list(self.batch.lengths)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """``[B+1]`` int32 (``B+2`` with padding) on the tokens' device: the running sums of ``lengths``."""
        if self.static_cu_seqlens is not None:
            return self.static_cu_seqlens
        same = self.padded_num_tokens == self.num_tokens
        return self._batch.cu_seqlens if same else cumulative(self.lengths, self._batch.tokens.device)

    @cached_property
    def max_length(self) -> int:
        """The longest of ``lengths``; inside a full graph the bucket, because the number is frozen."""
        return self.padded_num_tokens if self.static_cu_seqlens is not None else max(self.lengths)


_current: contextvars.ContextVar[ForwardContext | None] = contextvars.ContextVar("pcg_ref_forward_context", default=None)


@contextlib.contextmanager
def forward_context(
    batch: PackedBatch, padded_num_tokens: int | None = None, static_cu_seqlens: torch.Tensor | None = None
) -> Iterator[ForwardContext]:
    """Make ``batch`` what ``current_context()`` returns in this thread, until the block ends, also by an exception.

    Args:
        batch: The batch that runs.
        padded_num_tokens: Rows of the tensors that run, at least ``batch.num_tokens``, which is the default.
        static_cu_seqlens: See ``ForwardContext``; for batches inside a full graph.

    Raises:
        ValueError: Fewer rows than tokens.
    """
    rows = batch.num_tokens if padded_num_tokens is None else padded_num_tokens
    if rows < batch.num_tokens:
        raise ValueError(f"padded_num_tokens={rows} is less than the batch's {batch.num_tokens} tokens")
    token = _current.set(ForwardContext(batch, rows, static_cu_seqlens))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def current_context() -> ForwardContext:
    """The context of the forward that runs now, for the body of an eager segment.

    Raises:
        RuntimeError: No forward runs in this thread.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError("no forward context: call the model inside `with pcg.forward_context(batch):`, or through a PrefillRunner")
    return context
