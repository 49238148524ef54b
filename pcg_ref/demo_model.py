"""The models that ``python -m pcg_ref demo`` can run, each with what its results are compared with."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.models.tiny import TinyDecoder


@dataclass(frozen=True)
class Subject:
    """A model, how text becomes its tokens, and what its results are compared with.

    Attributes:
        model: Called as ``model(tokens[T], positions[T])``, with ``logits``.
        encode: A prompt to token ids.
        decode: A token id to text.
        reference: One request's tokens ``[n]`` to its logits ``[n, V]``, computed without our packing.
        oracle: What ``reference`` is, in words.
        versions: Of the packages that matter.
    """

    model: nn.Module
    encode: Callable[[str], list[int]]
    decode: Callable[[int], str]
    reference: Callable[[torch.Tensor], torch.Tensor]
    oracle: str
    versions: dict[str, str]


def load(name: str, device: torch.device, dtype: torch.dtype) -> Subject:
    """Load ``"tiny"``, ``"smollm2"``, or what transformers finds by ``name``. Raises as ``load_packed``."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if name == "tiny":
        model = TinyDecoder().to(device, dtype)

        def alone(tokens: torch.Tensor) -> torch.Tensor:
            batch = PackedBatch(tokens, [len(tokens)])
            with forward_context(batch):
                return model.logits(model(batch.tokens, batch.positions))

        oracle = "those of the plain model, eager and each request alone"
        return Subject(model, lambda text: list(text.encode()), lambda i: repr(bytes([i]))[1:], alone, oracle, versions)

    from pcg_ref.models.hf_attention import attention_of
    from pcg_ref.models.loading import chat_tokens, load_packed

    packed, tokenizer = load_packed(name, dtype, device)
    causal_lm = packed.causal_lm

    def transformers_alone(tokens: torch.Tensor) -> torch.Tensor:
        with attention_of(causal_lm, "eager"):
            return causal_lm(input_ids=tokens[None], use_cache=False).logits[0]

    import transformers

    oracle = "those of transformers' own eager attention, each request alone and unpacked"
    versions["transformers"] = transformers.__version__
    encode, decode = (lambda text: chat_tokens(tokenizer, text)), (lambda i: json.dumps(tokenizer.decode([i]), ensure_ascii=False))
    return Subject(packed, encode, decode, transformers_alone, oracle, versions)
