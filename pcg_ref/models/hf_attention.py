"""How attention of a transformers model reaches the split op, and what an architecture asks of attention.

transformers looks its attention function up by name, so an unmodified model is rerouted by registering a name. Two are registered:

- ``"pcg_ref"`` calls the split op and does nothing else, because it is traced.
- ``"pcg_ref_probe"`` also notes what each layer asks for and refuses what the operator does not compute. It runs once, when a model
  is wrapped, and is never traced.

Letters: ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``C`` head dimension.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pcg_ref.attention import unified_attention_with_output

IMPLEMENTATION = "pcg_ref"
_PROBE = "pcg_ref_probe"

REMEDY = "run this model with transformers itself, or choose one without it"

# What transformers passes to an attention function by keyword when, and only when, the architecture needs it.
_UNSUPPORTED = {
    "softcap": "an attention-logit soft cap",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias on the attention scores",
    "indices": "sparse attention over chosen keys",
    "block_indices": "sparse attention over chosen keys",
    "head_mask": "a head mask",
}


@dataclass
class AttentionNeeds:
    """What the layers of a model asked of attention during a probe.

    Attributes:
        layer_ids: The layer of each attention call, in order.
        windows: Every sliding window or chunk size that was asked for, in tokens.
    """

    layer_ids: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)


_needs: contextvars.ContextVar[AttentionNeeds] = contextvars.ContextVar("pcg_ref_attention_needs")


def register() -> None:
    """Make both names known to transformers; harmless to repeat."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionInterface.register(_PROBE, _attend_and_note)
    # subtle: "pcg_ref" gets no mask function. For a name without one transformers builds no mask at all; with one it would still
    # look for packed sequences in the positions first, which would leave dead nodes in every trace.
    AttentionMaskInterface.register(_PROBE, _note_window)


def implementation_of(model: torch.nn.Module) -> str:
    """The name of the attention function that a transformers model uses now."""
    return model.config._attn_implementation  # private: transformers has a public setter and no public getter


@contextlib.contextmanager
def attention_of(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Let a transformers model use the attention function ``name`` until the block ends, then the one from before."""
    before = implementation_of(model)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def probing(model: torch.nn.Module) -> Iterator[AttentionNeeds]:
    """Note what ``model`` asks of attention while the block runs.

    Raises:
        ValueError: From inside the forward, when a layer asks for something that the operator does not compute.
    """
    token = _needs.set(AttentionNeeds())
    try:
        with attention_of(model, _PROBE):
            yield _needs.get()
    finally:
        _needs.reset(token)


def _attend(module, query, key, value, attention_mask, scaling: float | None = None, **kwargs):
    """[1, H, T, C], [1, K, T, C], [1, K, T, C] -> ([1, T, H, C], no weights): transformers' contract for attention functions."""
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # views; the last dimension stays contiguous
    # Allocated here, in the traced part, so that the memory belongs to a captured piece and keeps its address.
    # subtle: query is a transposed view, whose strides empty_like would keep; transformers flattens the heads next, which must be a
    # view of this memory and not a copy.
    output = torch.empty_like(query, memory_format=torch.contiguous_format)  # [T, H, C]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    unified_attention_with_output(query, key, value, output, scale, module.layer_idx)
    return output.unsqueeze(0), None


def _attend_and_note(module, query, key, value, attention_mask, scaling: float | None = None, **kwargs):
    _refuse_unsupported(module, query, key, value, kwargs)
    needs = _needs.get()
    needs.layer_ids.append(module.layer_idx)
    if kwargs.get("sliding_window") is not None:
        needs.windows.append(kwargs["sliding_window"])
    return _attend(module, query, key, value, attention_mask, scaling, **kwargs)


def _note_window(*args, local_size: int | None = None, **kwargs) -> None:
    # Some architectures (Llama 4's chunks) limit attention by the mask alone and tell the attention function nothing.
    if local_size is not None:
        _needs.get().windows.append(local_size)


def _refuse_unsupported(module, query, key, value, kwargs: dict) -> None:
    caller = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', 'unknown')})"
    for name, feature in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{caller} asks for {feature} ({name}=...), which the packed attention operator lacks: {REMEDY}")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{caller} asks for bidirectional attention, and the packed attention operator is causal: {REMEDY}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{caller} asks for cross attention, {query.shape[2]} queries over {key.shape[2]} keys: {REMEDY}")
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        dims = [x.shape[-1] for x in (query, key, value)]
        raise ValueError(f"{caller} has different head dimensions {dims} for query, key and value; they must agree: {REMEDY}")
    if getattr(module, "layer_idx", None) is None:
        raise ValueError(f"{caller} has no layer_idx, so its calls cannot be told apart: {REMEDY}")
