"""The small models of `measured`: of many kinds, each a step of a fraction of a second on one core."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import _cnns, _decoders

__all__ = ["MODELS", "build"]

Made = tuple[nn.Module, dict[str, Tensor]]


def _tokens(batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (batch, length))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def _decoder(layers: int = 4, hidden: int = 128, length: int = 128, batch: int = 8) -> Made:
    dims = _decoders.Decoder(
        layers=layers, hidden=hidden, heads=4, kv_heads=4, ffn=4 * hidden, vocabulary=512, length=length, tied=False, gated=False,
        norm="layer", bias=True, positions="learned",
    )  # fmt: skip
    return _decoders.build(dims), _tokens(batch, length, 512)


class Encoder(nn.Module):
    def __init__(self, vocabulary: int = 512, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.embed(ids))).flatten(0, 1), labels.flatten())


class EncoderDecoder(nn.Module):
    def __init__(self, vocabulary: int = 512, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.body = nn.Transformer(width, 4, layers, layers, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embed(ids), self.embed(labels))).flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """Blocks whose MLP is a weighted sum of experts, each of which sees every token."""

    def __init__(self, width: int = 128, experts: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.up = nn.ParameterList(nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05) for _ in range(layers))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for gate, up, down in zip(self.gates, self.up, self.down, strict=True):
            hidden = F.gelu(torch.einsum("btd,edf->ebtf", x, up))
            made = torch.einsum("ebtf,efd->ebtd", hidden, down)
            x = x + torch.einsum("bte,ebtd->btd", gate(x).softmax(-1), made)
        return F.mse_loss(x, y)


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle, self.up = nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skip = F.silu(self.enter(x))
        inner = F.silu(self.middle(F.silu(self.down(skip))))
        return F.mse_loss(self.leave(torch.cat([skip, self.up(inner)], 1)), y)


class Vit(nn.Module):
    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.patches, self.head = nn.Conv2d(3, width, 8, stride=8), nn.Linear(width, 10)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1)), y)


class StateSpace(nn.Module):
    """Mamba-like: gated blocks of a short causal convolution and a decaying sum over the past, in closed form."""

    decay: Tensor

    def __init__(self, width: int = 128, layers: int = 3, length: int = 128) -> None:
        super().__init__()
        self.enter = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.near = nn.ModuleList(nn.Conv1d(width, width, 4, padding=3, groups=width) for _ in range(layers))
        self.leave = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        steps = torch.arange(length)
        past = (steps[:, None] - steps[None, :]).clamp(min=0)
        self.register_buffer("decay", torch.where(steps[:, None] >= steps[None, :], 0.95**past, 0.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for enter, near, leave in zip(self.enter, self.near, self.leave, strict=True):
            value, gate = enter(x).chunk(2, -1)
            value = F.silu(near(value.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
            x = x + leave((self.decay @ value) * F.silu(gate))
        return F.mse_loss(x, y)


class Mlp(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return F.mse_loss(x, y)


def _pair(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape), "y": torch.randn(*shape)}


def _images(batch: int, size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 3, size, size), "y": torch.randint(10, (batch,))}


def _resnet() -> Made:
    made = _cnns.ResNet(blocks=(1, 1, 1), bottleneck=False, base=16, classes=10).build()
    images = _images(8, 64)
    return made, {"images": images["x"], "labels": images["y"]}


MODELS: dict[str, Callable[[], Made]] = {
    "gpt": _decoder,
    "long": lambda: _decoder(layers=2, length=1024, batch=4),
    "short": lambda: _decoder(layers=4, length=32, batch=32),
    "encoder": lambda: (Encoder(), _tokens(8, 128, 512)),
    "encoder-decoder": lambda: (EncoderDecoder(), _tokens(8, 96, 512)),
    "experts": lambda: (Experts(), _pair(8, 64, 128)),
    "resnet": _resnet,
    "unet": lambda: (UNet(), _pair(8, 3, 48, 48)),
    "vit": lambda: (Vit(), _images(16, 64)),
    "state-space": lambda: (StateSpace(), _pair(8, 128, 128)),
    "wide": lambda: (Mlp(2048, 2), _pair(64, 2048)),
    "deep": lambda: (Mlp(256, 24), _pair(256, 256)),
}


def build(name: str) -> Made:
    """The model and its global batch, the same for every caller."""
    torch.manual_seed(0)
    return MODELS[name]()
