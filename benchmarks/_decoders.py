"""Decoder-only transformers from their dimensions, for rebuilding published training runs on the meta device.

A `Decoder` states what the tables of such runs state (layers, widths, vocabulary) and which of the usual forms its parts have. The
module is written as the frameworks compute it: logits and their logarithms in float32, scores that are materialised unless the
attention is fused. Names of shapes: B batch, L length, H hidden, N heads, D width of a head, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Decoder", "build", "decoder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """The dimensions and forms of a decoder. gated: SwiGLU instead of GELU. norm: of what kind. bias: of the linear layers.
    positions: 'rotary', 'learned' (a table of `length` rows) or 'alibi' (a bias of the scores). fused_attention: scores are never
    in memory. experts: of each second layer's MLP, 0 for none; each token goes to `top_k` of them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    length: int
    tied: bool
    gated: bool
    norm: Literal["rms", "layer"]
    bias: bool
    positions: Literal["rotary", "learned", "alibi"]
    fused_attention: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads of keys and values for {self.kv_heads} do not divide a hidden size of {self.hidden}")


class _Attention(nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.d, width = d, d.hidden // d.heads
        self.query = nn.Linear(d.hidden, d.hidden, bias=d.bias)
        self.key = nn.Linear(d.hidden, d.kv_heads * width, bias=d.bias)
        self.value = nn.Linear(d.hidden, d.kv_heads * width, bias=d.bias)
        self.out = nn.Linear(d.hidden, d.hidden, bias=d.bias)

    def forward(self, x_BLH: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        d, (batch, length, _) = self.d, x_BLH.shape
        q, k, v = (p(x_BLH).view(batch, length, -1, d.hidden // d.heads).transpose(1, 2) for p in (self.query, self.key, self.value))
        if rotary is not None:
            q, k = _rotated(q, *rotary), _rotated(k, *rotary)
        if d.fused_attention:
            p = d.dropout if self.training else 0.0
            y_BNLD = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=d.kv_heads != d.heads)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(d.hidden // d.heads)
            later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            y_BNLD = F.dropout(weights, d.dropout, self.training) @ v
        return self.out(y_BNLD.transpose(1, 2).reshape(batch, length, d.hidden))


def _rotated(x_BNLD: Tensor, cosine_LD: Tensor, sine_LD: Tensor) -> Tensor:
    first, second = x_BNLD.chunk(2, -1)
    return x_BNLD * cosine_LD + torch.cat((-second, first), -1) * sine_LD


class _Mlp(nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.up = nn.Linear(d.hidden, d.ffn, bias=d.bias)
        self.gate = nn.Linear(d.hidden, d.ffn, bias=d.bias) if d.gated else None
        self.down = nn.Linear(d.ffn, d.hidden, bias=d.bias)

    def forward(self, x_BLH: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BLH), approximate="tanh"))
        return self.down(F.silu(self.gate(x_BLH)) * self.up(x_BLH))


class _Layer(nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.dropout = d.dropout
        self.before_attention, self.before_mlp = _norm(d), _norm(d)
        self.attention, self.mlp = _Attention(d), _Mlp(d)

    def forward(self, x_BLH: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x_BLH = x_BLH + F.dropout(self.attention(self.before_attention(x_BLH), rotary), self.dropout, self.training)
        return x_BLH + F.dropout(self.mlp(self.before_mlp(x_BLH)), self.dropout, self.training)


def _norm(d: Decoder) -> nn.Module:
    return nn.RMSNorm(d.hidden, eps=1e-5) if d.norm == "rms" else nn.LayerNorm(d.hidden)


class _Model(nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.d = d
        self.tokens = nn.Embedding(d.vocabulary, d.hidden)
        self.positions = nn.Embedding(d.length, d.hidden) if d.positions == "learned" else None
        self.layers = nn.ModuleList(_Layer(d) for _ in range(d.layers))
        self.norm = _norm(d)
        self.head = nn.Linear(d.hidden, d.vocabulary, bias=False)
        if d.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """ids, labels: int64 [B, L]; the mean cross-entropy over all tokens."""
        x_BLH = self.tokens(ids)
        rotary = None
        if self.positions is not None:
            x_BLH = x_BLH + self.positions(torch.arange(ids.shape[1], device=ids.device))
        if self.d.positions == "rotary":
            rotary = self._angles(ids.shape[1], x_BLH)
        x_BLH = F.dropout(x_BLH, self.d.dropout, self.training)
        for layer in self.layers:
            x_BLH = layer(x_BLH, rotary)
        logits = self.head(self.norm(x_BLH)).float()
        return F.cross_entropy(logits.view(-1, self.d.vocabulary), labels.view(-1))

    def _angles(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        width = self.d.hidden // self.d.heads
        rates = 10_000 ** (-torch.arange(0, width, 2, device=like.device) / width)
        angles = torch.outer(torch.arange(length, device=like.device), rates).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def build(d: Decoder) -> nn.Module:
    """The module with weights, in training mode."""
    return _Model(d).train()


def decoder(d: Decoder, dtype: torch.dtype) -> nn.Module:
    """The module on the meta device, its parameters of this dtype, in training mode."""
    with torch.device("meta"):
        return build(d).to(dtype)
