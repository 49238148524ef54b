"""A Llama-style decoder small enough to read, packed: all tokens of all requests in one ``[T, D]`` tensor.

It has what makes piecewise graphs interesting (norms, grouped-query attention, rotary positions, a gated MLP, residuals) and no KV
cache, no sampling and no weights worth keeping.

Letters: ``T`` tokens, ``D`` width, ``H`` query heads, ``K`` key/value heads, ``C`` head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pcg_ref.attention import unified_attention_with_output


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``x`` ``[T, heads, C]`` by ``cos``, ``sin`` ``[T, 1, C/2]``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TinyLayer(nn.Module):
    """One decoder layer: attention and a gated MLP, each behind a norm and a residual."""

    def __init__(self, layer_id: int, width: int, heads: int, kv_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.layer_id, self.heads, self.kv_heads, self.head_dim = layer_id, heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(hidden)).unflatten(-1, (-1, self.head_dim))  # [T, H + 2K, C]
        query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = torch.empty_like(query)  # [T, H, C], allocated before the cut: the next piece reads this very address
        unified_attention_with_output(query, key, value, attended, self.head_dim**-0.5, self.layer_id)
        hidden = hidden + self.o_proj(attended.flatten(1))
        gate, up = self.gate_up(self.norm2(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


class TinyDecoder(nn.Module):
    """Token ids to hidden states, ``model(tokens[T], positions[T]) -> hidden[T, D]``, under a forward context.

    Args:
        vocab_size: Token ids are ``0 .. vocab_size - 1``.
        width: ``D``.
        layers: Decoder layers.
        heads: ``H``; ``D / H`` is the head dimension and must be even.
        kv_heads: ``K``, a divisor of ``H``.
        mlp_width: Width between the MLP's two projections.
        seed: Seed of the random weights; the global generator is left as it was.

    Raises:
        ValueError: The sizes do not divide.
    """

    def __init__(
        self, vocab_size: int = 256, width: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 2, mlp_width: int = 64,
        seed: int = 0,
    ) -> None:
        if width % heads or heads % kv_heads or (width // heads) % 2:
            raise ValueError(f"width {width} / heads {heads} must be even, and kv_heads {kv_heads} a divisor of heads")
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocab_size, width)
            self.layers = nn.ModuleList(TinyLayer(i, width, heads, kv_heads, mlp_width) for i in range(layers))
            self.norm = nn.RMSNorm(width)
            self.lm_head = nn.Linear(width, vocab_size, bias=False)
        head_dim = width // heads
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim), persistent=False)
        self.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, None] * self.inv_freq  # [T, 1, C/2]
        hidden = self.embed(tokens)  # [T, D]
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab_size]`` from ``[rows, D]``; outside every graph, for the rows that are asked for."""
        return self.lm_head(hidden)
