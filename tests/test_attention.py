"""The split operator: causal attention over a packed batch. The oracle is a softmax in float64, one request and head at a time."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import pcg_ref as pcg
from pcg_ref.ops import split_ops

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
PATHS = ["per request", "static"]  # boundaries known on the host, or only on the device as inside a full graph


def inputs(rows, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, device="cpu", dtype=torch.float32, seed=0):
    """query, key, value as a model has them: strided views of one projection's result."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    return qkv.split([heads, kv_heads, kv_heads], dim=1)


def oracle(query, key, value, lengths, scale):
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double().repeat_interleave(groups, 1), value.double().repeat_interleave(groups, 1)
    output, start = torch.zeros_like(query), 0
    for n in lengths:
        for head in range(query.shape[1]):
            q, k, v = (x[start : start + n, head] for x in (query, key, value))
            scores = (q @ k.t() * scale).masked_fill(torch.ones(n, n, device=q.device).triu(1).bool(), float("-inf"))
            output[start : start + n, head] = scores.softmax(-1) @ v
        start += n
    return output


def batch_of(lengths, device="cpu"):
    return pcg.PackedBatch(torch.zeros(sum(lengths), dtype=torch.int64, device=device), lengths)


def bounds_of(lengths, rows, slots=9, device="cpu"):
    """What the full strategy keeps on the device: boundaries, and sentinels at the end."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return torch.tensor([0, *ends, *[rows] * (slots - len(lengths))], dtype=torch.int32, device=device)


def attend(query, key, value, lengths, path="per request", scale=0.3, output=None):
    rows, device = query.shape[0], query.device
    output = torch.full_like(query, float("nan")) if output is None else output
    static = bounds_of(lengths, rows, device=device) if path == "static" else None
    with pcg.forward_context(batch_of(lengths, device), rows, static_cu_seqlens=static):
        pcg.unified_attention_with_output(query, key, value, output, scale, 0)
    return output


def attend_into(query, key, value):
    output = torch.empty_like(query)
    pcg.unified_attention_with_output(query, key, value, output, 0.3, 0)
    return output


lengths = st.lists(st.integers(1, 7), min_size=1, max_size=6)
heads = st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1)])


@given(lengths, st.integers(0, 9), heads, st.sampled_from([2, 5, 8]), st.sampled_from(PATHS))
@settings(max_examples=120)
def test_equals_the_oracle(lengths, padding, heads, head_dim, path):
    rows = sum(lengths) + padding
    query, key, value = inputs(rows, *heads, head_dim)
    expected = oracle(query, key, value, [*lengths, padding], 0.3)  # the padding attends to itself: every row is defined
    result = attend(query, key, value, lengths, path)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
@pytest.mark.parametrize("head_dim", [6, 16, 64])
def test_dtypes(path, dtype, tolerance, head_dim, device):
    """Tolerances: a few units in the last place of each dtype. On CUDA half precision in multiples of 8 takes the flash kernel."""
    query, key, value = inputs(40, head_dim=head_dim, device=device, dtype=dtype)
    result = attend(query, key, value, [7, 1, 20, 5], path)
    assert result.dtype == dtype
    expected = oracle(query, key, value, [7, 1, 20, 5, 7], 0.3)
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("changed", [slice(0, 4), slice(4, 9), slice(9, 12)], ids=["first", "second", "padding"])
def test_a_request_does_not_depend_on_its_neighbours(path, changed, device):
    query, key, value = (x.clone() for x in inputs(12, device=device))
    before = attend(query, key, value, [4, 5], path)
    for x in (query, key, value):
        x[changed] = torch.randn_like(x[changed]) * 50
    after = attend(query, key, value, [4, 5], path)
    same = torch.ones(12, dtype=torch.bool)
    same[changed] = False
    torch.testing.assert_close(after[same], before[same])
    assert not torch.allclose(after[changed], before[changed])


@pytest.mark.parametrize("path", PATHS)
def test_a_token_does_not_see_the_future(path, device):
    query, key, value = (x.clone() for x in inputs(6, device=device))
    before = attend(query, key, value, [6], path)
    key[4:], value[4:] = 9, 9
    after = attend(query, key, value, [6], path)
    torch.testing.assert_close(after[:4], before[:4])
    assert not torch.allclose(after[4:], before[4:])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_stays_in_its_request(path, poison, device):
    query, key, value = (x.clone() for x in inputs(12, device=device))
    expected = oracle(query, key, value, [4, 5, 3], 0.3)
    for x in (query, key, value):
        x[4:9] = poison  # a request in the middle
    result = attend(query, key, value, [4, 5], path)
    real = [0, 1, 2, 3, 9, 10, 11]
    torch.testing.assert_close(result[real].double(), expected[real], rtol=1e-4, atol=1e-4)
    assert result[4:9].isnan().all()


def test_it_writes_where_it_is_told_and_returns_nothing(device):
    query, key, value = inputs(5, device=device)
    wide = torch.zeros(5, HEADS, 2 * HEAD_DIM, device=device)
    output = wide[..., ::2]
    with pcg.forward_context(batch_of([5], device)):
        assert pcg.unified_attention_with_output(query, key, value, output, 0.3, 0) is None
    torch.testing.assert_close(output.double(), oracle(query, key, value, [5], 0.3), rtol=1e-5, atol=1e-5)
    assert not wide[..., 1::2].any()


def test_outside_a_context_it_says_what_is_missing(device):
    query, key, value = inputs(5, device=device)
    with pytest.raises(RuntimeError, match="forward_context"):
        pcg.unified_attention_with_output(query, key, value, torch.empty_like(query), 0.3, 0)


def test_it_is_a_split_operator_with_a_sound_definition():
    assert pcg.unified_attention_with_output in split_ops()
    assert torch.Tag.cudagraph_unsafe in pcg.unified_attention_with_output.tags
    query, key, value = inputs(5)
    with pcg.forward_context(batch_of([5])):
        torch.library.opcheck(
            pcg.unified_attention_with_output, (query, key, value, torch.zeros_like(query), 0.3, 0),
            test_utils=["test_schema", "test_faketensor"],
        )  # fmt: skip


def test_inside_a_graph_the_boundaries_are_read_at_replay(device):
    """One capture serves other lengths and numbers of requests, because only device tensors are read."""
    query, key, value = (x.contiguous() for x in inputs(12, device=device))
    bounds = bounds_of([12], 12, device=device)

    with pcg.forward_context(batch_of([12], device), 12, static_cu_seqlens=bounds):
        graph = pcg.capture(attend_into, query, key, value)
    for seed, lengths in enumerate([[12], [5, 7], [1, 1, 1, 2], [3]]):
        for x, fresh in zip((query, key, value), inputs(12, device=device, seed=seed)):
            x.copy_(fresh)
        bounds.copy_(bounds_of(lengths, 12, device=device))
        graph.replay()
        expected = oracle(query, key, value, [*lengths, 12 - sum(lengths)], 0.3)
        torch.testing.assert_close(graph.output.double(), expected, rtol=1e-4, atol=1e-4)


def test_without_static_boundaries_the_hosts_numbers_are_frozen(device):
    """Why attention runs outside the graphs: what the host knows at capture stays in the graph."""
    query, key, value = (x.contiguous() for x in inputs(12, device=device))
    with pcg.forward_context(batch_of([5, 7], device)):
        attend_into(query, key, value)  # warm-up: libraries set themselves up outside the graph
        graph = pcg.capture(attend_into, query, key, value)
    graph.replay()
    torch.testing.assert_close(graph.output.double(), oracle(query, key, value, [5, 7], 0.3), rtol=1e-4, atol=1e-4)
    with pcg.forward_context(batch_of([12], device)):
        graph.replay()  # another batch, and still the old boundaries
    torch.testing.assert_close(graph.output.double(), oracle(query, key, value, [5, 7], 0.3), rtol=1e-4, atol=1e-4)
