"""The adapter that runs an unmodified transformers causal LM over a packed batch.

Every token-wise part of such a model works on ``[1, T]`` as on any other input, once it is given the positions explicitly. Only
attention mixes tokens, and that goes to the split op. So nothing of the model is copied or rewritten; what remains is to make sure
that the assumption holds for the architecture at hand, and to refuse it when not. There is no KV cache and no training here.

Letters: ``T`` tokens, ``N`` rows, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from pcg_ref.context import PackedBatch, current_context, forward_context
from pcg_ref.models import hf_attention
from pcg_ref.models.hf_attention import REMEDY


class PackedCausalLM(nn.Module):
    """A transformers causal LM as ``model(tokens[T], positions[T]) -> hidden[T, D]``.

    Works for any architecture whose layers mix tokens by plain causal attention alone and call it through transformers'
    ``AttentionInterface``. Construction runs a handful of tokens through the model and compares the logits with transformers' own
    eager attention, so an architecture that this adapter gets wrong is an error here and not a wrong result later.

    Args:
        causal_lm: A ``...ForCausalLM`` with its weights, all on one device.

    Attributes:
        causal_lm: The model, the same object.
        hidden_size: ``D``.
        vocab_size: ``V``; token ids are below it.
        max_request_length: Longest request that is computed exactly, or ``None`` for no limit: the smallest sliding window, or the
            size of a learned position table. Rotary positions set no limit.

    Raises:
        ValueError: The architecture needs what the packed attention operator does not do, or results differ from transformers' own.

    Side effects: ``causal_lm`` is put into eval mode, its parameters no longer require gradients, and its config names
    ``"pcg_ref"`` as the attention implementation; ``causal_lm.set_attn_implementation("sdpa")`` undoes that, after which this
    adapter must not be used. If construction fails, the attention implementation is what it was.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm.requires_grad_(False)
        self.eval()
        hf_attention.register()
        _check_structure(causal_lm)
        self.vocab_size: int = _text_config(causal_lm).vocab_size
        self.max_request_length: int | None = _longest_exact_request(causal_lm)
        self.hidden_size: int = _check_against_transformers(self)
        causal_lm.set_attn_implementation(hf_attention.IMPLEMENTATION)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the decoder, its final norm included.

        Args:
            tokens: ``[T]`` int64, on the model's device.
            positions: ``[T]`` int64, each token's place in its own request.

        Returns:
            ``[T, D]`` in the model's dtype.

        Raises:
            RuntimeError: Outside a forward context.
            ValueError: See ``check_batch``. Neither a trace nor a graph can hold that check; with those it is the caller's to make.
        """
        if not torch.compiler.is_compiling():
            context = current_context()
            # With static boundaries this is the capture of a whole forward, for a stand-in batch as long as the bucket.
            if context.static_cu_seqlens is None:
                self.check_batch(context.batch)
        body = self.causal_lm.base_model
        output = body(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        return output.last_hidden_state.squeeze(0)

    def check_batch(self, batch: PackedBatch) -> None:
        """Refuse a batch that this model would compute wrongly; reads host metadata only.

        Raises:
            ValueError: A request is longer than ``max_request_length``, or has a prefix, for which there is no KV cache.
        """
        if self.max_request_length is not None and batch.max_length > self.max_request_length:
            raise ValueError(
                f"a request has {batch.max_length} tokens, but {type(self.causal_lm).__name__} is exact only up to "
                f"max_request_length={self.max_request_length} (its sliding window or position table): shorten the request"
            )
        if any(batch.prefix_lengths or ()):
            raise ValueError(f"prefix_lengths={batch.prefix_lengths}, but PackedCausalLM has no KV cache: prefill requests whole")

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Next-token logits of chosen rows, exactly as the architecture computes them: scaling and soft cap included.

        Args:
            hidden_rows: ``[N, D]``, rows of what ``forward`` returned.

        Returns:
            ``[N, V]``.
        """
        # The architecture's own forward, on a shallow copy whose decoder returns the rows that it is given; weights are shared.
        body = copy.copy(self.causal_lm.base_model)
        body.forward = lambda *args, inputs_embeds, **kwargs: _GivenHidden(inputs_embeds)
        head = copy.copy(self.causal_lm)
        # subtle: a shallow copy shares the dict of submodules, so without a new one the stand-in would end up in the model itself.
        head._modules = head._modules | {head.base_model_prefix: body}  # private: nn.Module has no public shallow copy
        return head(inputs_embeds=hidden_rows.unsqueeze(0), use_cache=False).logits.squeeze(0)

    def train(self, mode: bool = True) -> PackedCausalLM:
        """Refuse training mode, in which dropout would act: this is inference only.

        Raises:
            ValueError: ``mode`` is true.
        """
        if mode:
            raise ValueError("PackedCausalLM is for inference: the split op has no dropout or gradients; train causal_lm itself")
        return super().train(mode)


class _GivenHidden:
    """What a decoder returns, by name or by index, when it has nothing but hidden states to return."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index):
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None  # caches, router logits and the like, which differ by architecture


def _text_config(causal_lm: nn.Module):
    return causal_lm.config.get_text_config(decoder=True)


def _check_structure(causal_lm: nn.Module) -> None:
    """What can be read off the model without running it."""
    name = type(causal_lm).__name__
    if causal_lm.config.is_encoder_decoder or causal_lm.base_model is causal_lm or causal_lm.get_output_embeddings() is None:
        raise ValueError(f"{name} is not a decoder with a language-model head; use a ...ForCausalLM class of transformers")
    if not getattr(_text_config(causal_lm), "is_causal", True):
        raise ValueError(f"the config of {name} says is_causal=False, and the packed attention operator is causal: {REMEDY}")
    devices = {str(parameter.device) for parameter in causal_lm.parameters()}
    if len(devices) != 1:
        raise ValueError(f"the parameters of {name} are on {sorted(devices)}; load it on one device, without device_map")
    for rope_type in _rope_types(causal_lm):
        # They also write the frequencies into the module, so requests of one batch would change each other's and later batches'.
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"{name} has RoPE of type {rope_type!r}, whose frequencies depend on the longest position of a batch; that cannot "
                f"be held in a trace: set rope_parameters to a static type (default, linear, yarn, llama3) or choose another model"
            )


def _rope_types(causal_lm: nn.Module) -> set[str]:
    types: set[str] = set()
    for module in causal_lm.modules():
        found = getattr(module, "rope_type", None)  # one name, or one for each kind of layer
        types.update(found.values() if isinstance(found, dict) else [found] if isinstance(found, str) else [])
    return types


@torch.no_grad()
def _longest_exact_request(causal_lm: nn.Module) -> int | None:
    """Probe what each layer asks of attention, and derive ``max_request_length``."""
    config = _text_config(causal_lm)
    batch = _probe_batch(causal_lm, [2, 3])
    with hf_attention.probing(causal_lm) as needs, forward_context(batch):
        causal_lm.base_model(input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False)
    silent = sorted(set(range(config.num_hidden_layers)) - set(needs.layer_ids))
    if silent or len(needs.layer_ids) != config.num_hidden_layers:
        detail = f"layers {silent} make none" if silent else f"the calls come from layers {needs.layer_ids}"
        raise ValueError(
            f"{type(causal_lm).__name__} must call attention through transformers' AttentionInterface once in each of its "
            f"{config.num_hidden_layers} layers, but {detail}: other token mixing (attention of its own, convolution, recurrence) "
            f"would mix the requests of a batch; {REMEDY}"
        )
    limits = list(needs.windows)  # a window of w tokens, the token itself included, is no limit to a request of w tokens
    if not _rope_types(causal_lm) and getattr(config, "max_position_embeddings", None):
        limits.append(config.max_position_embeddings)  # RoPE extrapolates; a table of learned positions ends
    return min(limits, default=None)


@torch.no_grad()
def _check_against_transformers(model: PackedCausalLM) -> int:
    """Compare packed logits with transformers' own, request by request, and return the width ``D``."""
    causal_lm, longest = model.causal_lm, model.max_request_length or 3
    batch = _probe_batch(causal_lm, [min(2, longest), min(3, longest)])
    with hf_attention.attention_of(causal_lm, "eager"):
        alone = [causal_lm(input_ids=part[None], use_cache=False).logits[0] for part in batch.tokens.split(batch.lengths)]
    with hf_attention.attention_of(causal_lm, hf_attention.IMPLEMENTATION), forward_context(batch):
        hidden = model(batch.tokens, batch.positions)
        packed = model.logits(hidden)
    expected = torch.cat(alone).float()
    error = ((packed.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-20)).max().item()
    # Half precision differs by a few per cent between attention kernels in deep models; mixed-up requests differ by far more.
    tolerance = 1e-3 if packed.dtype in (torch.float32, torch.float64) else 0.2
    if not error <= tolerance:  # written so that NaN fails
        raise ValueError(
            f"{type(causal_lm).__name__}: packed logits differ from transformers' own by {error:.2g} (relative; up to {tolerance} "
            f"is rounding), so it mixes tokens, or computes logits, in a way that this adapter does not know: {REMEDY}"
        )
    return hidden.shape[-1]


def _probe_batch(causal_lm: nn.Module, lengths: list[int]) -> PackedBatch:
    vocab_size = _text_config(causal_lm).vocab_size
    # From the middle of the vocabulary: special tokens tend to sit at the ends.
    tokens = (torch.arange(sum(lengths)) + vocab_size // 2) % vocab_size
    return PackedBatch(tokens.to(next(causal_lm.parameters()).device), lengths)
