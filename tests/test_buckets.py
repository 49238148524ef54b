"""Buckets: SGLang's list, written out, and the choice at each of its edges."""

import pytest

import pcg_ref as pcg

# As in SGLang 0.5.23 (server_args.py), up to 8192.
SGLANG = [
    *(4, 8, 12, 16, 20, 24, 28, 32),
    *(48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
    *(288, 320, 352, 384, 416, 448, 480, 512),
    *(576, 640, 704, 768, 832, 896, 960, 1024),
    *(1280, 1536, 1792, 2048, 2304, 2560, 2816, 3072, 3328, 3584, 3840, 4096),
    *(4608, 5120, 5632, 6144, 6656, 7168, 7680, 8192),
]


@pytest.mark.parametrize("max_tokens", [4, 31, 32, 33, 47, 48, 256, 287, 512, 575, 1024, 1279, 4096, 4607, 8191, 8192])
def test_default_buckets_are_sglangs(max_tokens):
    assert pcg.default_buckets(max_tokens) == [size for size in SGLANG if size <= max_tokens]


@pytest.mark.parametrize("max_tokens", [3, 0, -1])
def test_no_bucket_below_four(max_tokens):
    with pytest.raises(ValueError, match=f"max_tokens={max_tokens}.*smallest bucket, 4"):
        pcg.default_buckets(max_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(1, 4), (3, 4), (4, 4), (5, 8), (32, 32), (33, 48), (256, 256), (257, 288), (8192, 8192)]
)
def test_the_smallest_bucket_that_holds_the_batch(num_tokens, bucket):
    assert pcg.bucket_for(num_tokens, SGLANG, max_padding_factor=4.0) == (bucket, None)


def test_larger_than_the_largest_has_no_bucket():
    bucket, reason = pcg.bucket_for(8193, SGLANG)
    assert bucket is None and "larger than the largest bucket 8192" in reason


def test_nothing_captured_has_no_bucket():
    assert pcg.bucket_for(8, []) == (None, "nothing captured")


@pytest.mark.parametrize(
    ("num_tokens", "factor", "fits"), [(32, 2.0, True), (31, 2.0, False), (65, 2.0, False), (65, 16.0, True), (64, 1.0, True)]
)
def test_padding_up_to_the_factor_and_not_above(num_tokens, factor, fits):
    buckets = [64, 1024]
    bucket, reason = pcg.bucket_for(num_tokens, buckets, factor)
    assert bucket == ((64 if num_tokens <= 64 else 1024) if fits else None)
    assert reason is None if fits else f"factor {factor:g}" in reason
