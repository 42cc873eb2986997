"""Small models of many kinds, captured once, for the tests of the planner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.ir import Program

__all__ = ["PROGRAMS", "captured_of", "program_of"]


class Mlp(nn.Module):
    """Two layers and a sum over samples."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


class Attention(nn.Module):
    """One layer of attention with a fused q|k|v."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        return self.out(mixed).pow(2).mean()


class Tied(nn.Module):
    """An embedding that is the output layer too, around a stack of equal layers; the loss is over labelled tokens."""

    def __init__(self, vocabulary: int = 32, width: int = 16, layers: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        scale = input_ids.to(x.dtype).cos().unsqueeze(-1)  # derives from inputs alone, and every layer reads it
        for layer in self.layers:
            x = layer(x, scale)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Masked(nn.Module):
    """Attention under a mask that is made of the tokens."""

    def __init__(self, vocabulary: int = 64, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.embed, self.head = heads, nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, (n, length) = self.embed(input_ids), input_ids.shape
        there = (input_ids != 0)[:, None, None, :] & torch.ones(length, length, dtype=torch.bool).tril()
        q, k, v = (part(x).view(n, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=there).transpose(1, 2).reshape(n, length, -1)
        return F.cross_entropy(self.head(x + self.o(mixed)).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Expanded(nn.Module):
    """Attention under a mask that sizes decide, which is expanded over samples and heads, with a token that is repeated for each sample."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.token = heads, nn.Parameter(torch.randn(1, 1, width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, (length, width) = len(x), x.shape[1:]
        x = torch.cat([self.token.repeat(n, 1, 1), x], 1)
        places = torch.arange(length + 1)
        near = ((places[:, None] - places[None]).abs() < 3)[None, None].expand(n, 1, length + 1, length + 1)
        bias = torch.where(near, torch.zeros(1, self.heads, length + 1, length + 1, dtype=x.dtype), -1e9)
        q, k, v = (t.view(n, length + 1, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(n, length + 1, width)
        return self.out(mixed).pow(2).mean()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))


class Shifted(nn.Module):
    """Blocks that read what was made before them once and keep nothing of it, unless they run again."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(width, width), nn.ModuleList(ShiftedBlock(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.enter(x).cumsum(1)
        for block in self.blocks:
            x = block(x, shift)
        return x.square().mean()


class ShiftedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(F.gelu(x + shift))))


class Normed(nn.Module):
    """Batch norm: statistics of the whole batch, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).pow(2).mean()


class Places(nn.Module):
    """Places drawn for each sample: of two results of one operator one is made for each sample, and one is the same for all."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        values, places = torch.rand(x.shape).topk(3)
        mask = torch.zeros(x.shape, dtype=x.dtype).scatter(1, places, 1.0)
        return self.down(torch.relu(self.up(x)) * mask).pow(2).sum() * values.mean()


class Spectral(nn.Module):
    """A weight of spectral norm one, by a vector in a buffer that each step brings nearer to the weight's own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()


class Balanced(nn.Module):
    """A gate with a load-balancing loss: a product of two means over all tokens, which is no sum over tokens."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(width, experts), nn.Linear(experts, width)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        chosen = F.one_hot(share.argmax(-1), share.shape[-1]).to(x.dtype)
        balance = (share.mean(0) * chosen.mean(0)).sum()
        return self.out(share).pow(2).mean() + balance


class Skips(nn.Module):
    """A skip connection over everything, and an integer that every layer reads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(width, width) for _ in range(3))
        self.table = nn.Embedding(4, width)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.first(x)
        m = self.second(torch.relu(h)) + self.table(kind)
        chosen = m.argmax(-1)  # an integer made of what has a gradient: no cut may be crossed by it
        return (self.last(m) + h + self.table(chosen % 4)).pow(2).mean()


class Adapted(nn.Module):
    """A frozen matrix with a trained addition of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Module) -> nn.Module:
    """The model, of which nothing trains but an adapter at each linear layer of its layers."""
    model.requires_grad_(False)
    for layer in model.get_submodule("layers"):  # type: ignore[union-attr]
        for name, child in layer.named_children():
            if isinstance(child, nn.Linear):
                setattr(layer, name, Adapted(child))
    return model


def _tokens(batch: int, length: int = 8, vocabulary: int = 32) -> dict[str, Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length) % vocabulary
    return {"input_ids": ids, "labels": torch.where(ids % 3 == 0, -100, ids)}


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mlp": lambda: (Mlp(), {"x": torch.ones(8, 8), "y": torch.zeros(8, 8)}),
    "wide": lambda: (Mlp(768), {"x": torch.ones(48, 768), "y": torch.zeros(48, 768)}),
    "attention": lambda: (Attention(), {"x": torch.ones(4, 8, 16)}),
    "expanded": lambda: (Expanded(), {"x": torch.ones(4, 7, 16)}),
    "tied": lambda: (Tied(), _tokens(4)),
    "stack": lambda: (Tied(layers=4), _tokens(8)),
    "pair": lambda: (Tied(vocabulary=64, width=64, layers=2), _tokens(2, 16, 64)),
    "masked": lambda: (Masked(), _tokens(8, 64, 64)),
    "deep": lambda: (Tied(vocabulary=256, width=128, layers=6), _tokens(12, 64, 256)),
    "adapted": lambda: (adapted(Tied(vocabulary=256, width=128, layers=4)), _tokens(12, 64, 256)),
    "shifted": lambda: (Shifted(), {"x": torch.ones(8, 16, 64)}),
    "normed": lambda: (Normed(), {"x": torch.ones(8, 3, 6, 6)}),
    "spectral": lambda: (Spectral(), {"x": torch.ones(8, 8)}),
    "balanced": lambda: (Balanced(), {"x": torch.ones(8, 8)}),
    "places": lambda: (Places(), {"x": torch.ones(8, 8)}),
    "skips": lambda: (Skips(), {"x": torch.ones(8, 8), "kind": torch.zeros(8, dtype=torch.long)}),
}


@functools.cache
def captured_of(name: str, *, exact: bool = False) -> tuple[Captured, dict[str, Any]]:
    """A model above, captured with its inputs. exact: in float64, with inputs drawn at random."""
    torch.manual_seed(0)
    model, inputs = PROGRAMS[name]()
    if exact:
        model = model.double()
        inputs = {k: torch.randn(t.shape, dtype=torch.float64) if t.is_floating_point() else t for k, t in inputs.items()}
    return capture(model, inputs), inputs


def program_of(name: str) -> Program:
    """The captured program of a model above."""
    return captured_of(name)[0].program
