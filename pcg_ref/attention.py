"""The split operator itself: causal attention over a packed batch.

The signature knows nothing of requests: the compiler sees one opaque operator on ``[T, ...]`` tensors. Where each request starts is
read from ``current_context()`` when the body runs, which is why the operator must run outside the graphs. Mirrors SGLang's and vLLM's
``unified_attention_with_output``.

There is no KV cache here: every request is prefilled whole.

Letters: ``T`` tokens (padding included), ``H`` query heads, ``K`` key/value heads, ``C`` head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pcg_ref.context import ForwardContext, current_context
from pcg_ref.ops import register_custom_op, register_split_op


@register_split_op()
@register_custom_op(mutates_args=["output"], tags=(torch.Tag.cudagraph_unsafe,))
def unified_attention_with_output(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, scale: float, layer_id: int
) -> None:
    """Causal self-attention of each request over its own tokens, written into ``output``.

    Args:
        query: ``[T, H, C]``.
        key: ``[T, K, C]``; ``K`` divides ``H``, each key head serves ``H // K`` query heads.
        value: ``[T, K, C]``.
        output: ``[T, H, C]``, written whole, padded rows included; its address is what the next graph reads.
        scale: Factor on the scores.
        layer_id: The layer that calls; here only a name in traces, with a KV cache the layer whose slots are meant.

    Raises:
        RuntimeError: Outside a forward context.
    """
    context = current_context()
    # Flash kernels take half precision alone and head dimensions in multiples of 8.
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0:
        _flash_varlen(query, key, value, output, scale, context)
    elif context.static_cu_seqlens is not None:
        _masked(query, key, value, output, scale, context)
    else:
        _per_request(query, key, value, output, scale, context)


# One kernel for all requests. The ATen operators, because the public torch.nn.attention.varlen takes grouped heads and an output only
# from torch 2.13 on, and costs an operator call of its own. From then on the kernel writes where it is told; before, one copy remains.
_flash_forward = torch.ops.aten._flash_attention_forward.default
_flash_forward_into = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)


def _flash_varlen(query, key, value, output, scale: float, context: ForwardContext) -> None:
    bounds, longest = context.cu_seqlens, context.max_length
    if _flash_forward_into is not None:
        _flash_forward_into(output, query, key, value, bounds, bounds, longest, longest, 0.0, True, False, scale=scale)
    else:
        output.copy_(_flash_forward(query, key, value, bounds, bounds, longest, longest, 0.0, True, False, scale=scale)[0])


def _per_request(query, key, value, output, scale: float, context: ForwardContext) -> None:
    start = 0
    for n in context.lengths:
        rows = slice(start, start + n)
        # [n, heads, C] -> [1, heads, n, C], the layout of scaled_dot_product_attention
        q, k, v = (x[rows].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        output[rows] = result.squeeze(0).transpose(0, 1)
        start += n


def _masked(query, key, value, output, scale: float, context: ForwardContext) -> None:
    # Everything by device tensors, so that a graph may hold it: whose token is this, from the boundaries.
    row = torch.arange(query.shape[0], device=query.device)
    request = torch.searchsorted(context.cu_seqlens, row, right=True)  # [T]
    sees = (request[:, None] == request[None, :]) & (row[:, None] >= row[None, :])  # [T, T]
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))  # [H, T, C]
    weights = (q @ k.transpose(1, 2) * scale).masked_fill(~sees, float("-inf")).softmax(-1)  # [H, T, T]
    # subtle: a weight of 0 does not silence a value of NaN or infinity, and another request's (or the padding's) must not get here.
    # So such values count as 0 for everybody, and whoever does see one gets NaN.
    broken = ~v.isfinite()
    result = (weights @ v.masked_fill(broken, 0)).masked_fill((sees.to(v.dtype) @ broken.to(v.dtype)) > 0, float("nan"))
    output.copy_(result.transpose(0, 1))
