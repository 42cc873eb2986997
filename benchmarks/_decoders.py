"""Decoder-only transformers from their dimensions, for rebuilding published training runs on the meta device.

A `Decoder` states what the tables of such runs state (layers, widths, vocabulary) and which of the usual forms its parts have. The
module is written as the frameworks compute it: logits and their logarithms in float32 unless the loss is fused, scores that are
materialised unless the attention is. Names of shapes: B batch, L length, H hidden, N heads, D width of a head, F width of the MLP, V
vocabulary, E experts, C places of an expert.
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
    in memory. fused_loss: nor are logits and their logarithms in float32. experts: of each second layer's MLP, 0 for none; each token goes
    to two of them."""

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
    fused_loss: bool = False
    dropout: float = 0.0
    experts: int = 0

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


class _Experts(nn.Module):
    """Each sample's tokens go to two of E experts, of which each takes C of a sample (Lepikhin et al. 2020, "GShard", algorithms 1 and 2,
    without their auxiliary loss and random second expert)."""

    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.experts = d.experts
        self.gate = nn.Linear(d.hidden, d.experts, bias=False)
        self.up_EHF = nn.Parameter(torch.empty(d.experts, d.hidden, d.ffn))
        self.down_EFH = nn.Parameter(torch.empty(d.experts, d.ffn, d.hidden))

    def forward(self, x_BLH: Tensor) -> Tensor:
        shares_BLE = self.gate(x_BLH).float().softmax(-1)
        to_BLEC = self._places(shares_BLE).to(x_BLH.dtype)
        own_EBCH = torch.einsum("blec,blh->ebch", (to_BLEC > 0).to(x_BLH.dtype), x_BLH)
        made_EBCF = F.relu(torch.einsum("ebch,ehf->ebcf", own_EBCH, self.up_EHF))
        return torch.einsum("blec,ebch->blh", to_BLEC, torch.einsum("ebcf,efh->ebch", made_EBCF, self.down_EFH))

    def _places(self, shares_BLE: Tensor) -> Tensor:
        """What each place of each expert has of each token."""
        capacity = 2 * shares_BLE.shape[1] // self.experts
        places = torch.arange(capacity, device=shares_BLE.device)
        found, left, taken = torch.zeros((), device=shares_BLE.device), shares_BLE, torch.zeros((), device=shares_BLE.device)
        for _ in range(2):
            chosen_BLE = (left == left.amax(-1, keepdim=True)).to(shares_BLE.dtype)
            place_BLE = (chosen_BLE.cumsum(1) + taken) * chosen_BLE - 1
            taken = taken + chosen_BLE.sum(1, keepdim=True)
            found = found + (shares_BLE * chosen_BLE)[..., None] * (place_BLE[..., None] == places).to(shares_BLE.dtype)
            left = left * (1 - chosen_BLE)
        return found


class _Layer(nn.Module):
    def __init__(self, d: Decoder, experts: bool = False) -> None:
        super().__init__()
        self.dropout = d.dropout
        self.before_attention, self.before_mlp = _norm(d), _norm(d)
        self.attention, self.mlp = _Attention(d), _Experts(d) if experts else _Mlp(d)

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
        self.layers = nn.ModuleList(_Layer(d, experts=bool(d.experts) and k % 2 == 1) for k in range(d.layers))
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
        logits = self.head(self.norm(x_BLH))
        if not self.d.fused_loss:
            logits = logits.float()
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
