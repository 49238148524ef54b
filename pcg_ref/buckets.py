"""Which sizes are captured, and which of them a batch runs at. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Sequence

# (up to, step): SGLang's prefill list (server_args.py, cuda_graph_config prefill sizes), which is fine where padding would cost most.
_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
_LAST_STEP = 512


def default_buckets(max_tokens: int) -> list[int]:
    """SGLang's default prefill sizes up to ``max_tokens``, ascending: 4-32 by 4, 48-256 by 16, 288-512 by 32, 576-1024 by 64,
    1280-4096 by 256, above by 512.

    Raises:
        ValueError: ``max_tokens`` is below the smallest size, 4.
    """
    if max_tokens < 4:
        raise ValueError(f"max_tokens={max_tokens} is below the smallest bucket, 4")
    buckets, size = [], 0
    while True:
        size += next((step for up_to, step in _STEPS if size < up_to), _LAST_STEP)
        if size > max_tokens:
            return buckets
        buckets.append(size)


def bucket_for(num_tokens: int, buckets: Sequence[int], max_padding_factor: float = 2.0) -> tuple[int | None, str | None]:
    """The smallest bucket that holds ``num_tokens``, or the reason why none does.

    Args:
        num_tokens: Real tokens of the batch, at least 1.
        buckets: The captured sizes, ascending.
        max_padding_factor: The most rows that may run for each real one.

    Returns:
        ``(bucket, None)``, or ``(None, reason)``.
    """
    bucket = next((b for b in buckets if b >= num_tokens), None)
    if bucket is None:
        return None, f"larger than the largest bucket {buckets[-1]}" if buckets else "nothing captured"
    if bucket > max_padding_factor * num_tokens:
        return None, f"padding above the factor {max_padding_factor:g}"
    return bucket, None
