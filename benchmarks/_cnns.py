"""Convolutional networks from the names that tables of training speed give them, for rebuilding published runs on the meta device.

A name becomes a description (`described`), the description a module (`cnn`) whose forward(images, labels) is the mean cross-entropy:
images float [B, 3, size, size], labels int64 [B]. A name that does not determine the network is not completed by a guess: None.
The modules take any image size; `image_of` says which one a table's row means.

Of what the networks' authors also train with, stochastic depth is left out (a scale of the residual branch for each sample).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Cnn", "DenseNet", "Inverted", "ResNet", "Vgg", "cnn", "described", "image_of"]

Activation = type[nn.ReLU] | type[nn.ReLU6] | type[nn.SiLU]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNet:
    """Residual networks (arXiv 1512.03385) with the stride in the 3x3 convolution ("v1.5"). Stage i has blocks[i] blocks of
    base * 2**i channels c. bottleneck: 1x1 to enter * c, 3x3 to middle * c in so many groups, 1x1 to 4 * c; else two 3x3 to c.
    squeeze: the hidden width of squeeze-and-excitation (arXiv 1709.01507), a sixteenth of the block's output or 16 channels."""

    blocks: tuple[int, ...]
    bottleneck: bool
    base: int = 64
    enter: int = 1
    middle: int = 1
    groups: int = 1
    squeeze: Literal["none", "sixteenth", "sixteen"] = "none"
    classes: int = 1000

    def build(self) -> nn.Module:
        block, expansion = (_Bottleneck, 4) if self.bottleneck else (_Basic, 1)
        stages, ins = [], self.base
        for i, blocks in enumerate(self.blocks):
            channels = self.base * 2**i
            stage = []
            for b in range(blocks):
                stage.append(block(self, ins, channels, stride=2 if i and not b else 1))
                ins = channels * expansion
            stages.append(nn.Sequential(*stage))
        stem = nn.Sequential(_conv(3, self.base, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
        return _Classifier(nn.Sequential(stem, *stages), ins, self.classes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inverted:
    """Networks of inverted residuals: MobileNetV2 (arXiv 1801.04381), EfficientNet (arXiv 1905.11946). Each row of `stages` is
    (expansion, channels, repeats, stride, kernel). squeeze: squeeze-and-excitation to a quarter of the block's input channels,
    or of the expanded ones ("wide")."""

    stages: tuple[tuple[int, int, int, int, int], ...]
    stem: int
    head: int
    activation: Activation
    dropout: float
    squeeze: Literal["none", "input", "expanded"] = "none"
    classes: int = 1000

    def build(self) -> nn.Module:
        stages, ins = [], self.stem
        for expansion, outs, repeats, stride, kernel in self.stages:
            stage = []
            for r in range(repeats):
                stage.append(_Inverted(self, ins, outs, expansion, kernel, stride if r == 0 else 1))
                ins = outs
            stages.append(nn.Sequential(*stage))
        stem = _conv(3, self.stem, 3, stride=2, activation=self.activation)
        head = _conv(ins, self.head, 1, activation=self.activation)
        return _Classifier(nn.Sequential(stem, *stages, head), self.head, self.classes, self.dropout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vgg:
    """VGG (arXiv 1409.1556): so many 3x3 convolutions in each of the five stages, two hidden layers of 4096."""

    convolutions: tuple[int, int, int, int, int]
    batch_norm: bool
    classes: int = 1000

    def build(self) -> nn.Module:
        return _Vgg(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseNet:
    """DenseNet-BC (arXiv 1608.06993): every layer adds `growth` channels to what it read; transitions halve channels and sizes."""

    blocks: tuple[int, ...]
    growth: int
    stem: int
    classes: int = 1000

    def build(self) -> nn.Module:
        parts: list[nn.Module] = [nn.Sequential(_conv(3, self.stem, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))]
        channels = self.stem
        for i, layers in enumerate(self.blocks):
            if i:
                parts.append(_transition(channels, channels // 2))
                channels //= 2
            parts.append(nn.Sequential(*(_Dense(channels + k * self.growth, self.growth) for k in range(layers))))
            channels += layers * self.growth
        return _Classifier(nn.Sequential(*parts, nn.BatchNorm2d(channels), nn.ReLU()), channels, self.classes)


Cnn = ResNet | Inverted | Vgg | DenseNet


def _conv(
    ins: int, outs: int, kernel: int, *, stride: int = 1, groups: int = 1, activation: Activation | None = nn.ReLU
) -> nn.Sequential:
    """Convolution, batch norm and activation."""
    convolution = nn.Conv2d(ins, outs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outs), *([activation()] if activation else []))


class _Squeeze(nn.Module):
    """The factor of squeeze-and-excitation, [B, channels, 1, 1]."""

    def __init__(self, channels: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.down, self.activation, self.up = nn.Conv2d(channels, hidden, 1), activation(), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.up(self.activation(self.down(F.adaptive_avg_pool2d(x, 1)))))


class _Basic(nn.Module):
    def __init__(self, d: ResNet, ins: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(ins, channels, 3, stride=stride), _conv(channels, channels, 3, activation=None))
        self.shortcut = _shortcut(ins, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class _Bottleneck(nn.Module):
    def __init__(self, d: ResNet, ins: int, channels: int, stride: int) -> None:
        super().__init__()
        enter, middle, outs = d.enter * channels, d.middle * channels, 4 * channels
        self.body = nn.Sequential(
            _conv(ins, enter, 1), _conv(enter, middle, 3, stride=stride, groups=d.groups), _conv(middle, outs, 1, activation=None)
        )
        self.shortcut = _shortcut(ins, outs, stride)
        hidden = {"none": 0, "sixteenth": outs // 16, "sixteen": 16}[d.squeeze]
        self.squeeze = _Squeeze(outs, hidden, nn.ReLU) if hidden else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.squeeze is not None:
            return F.relu(torch.addcmul(self.shortcut(x), y, self.squeeze(y)))
        return F.relu(y + self.shortcut(x))


def _shortcut(ins: int, outs: int, stride: int) -> nn.Module:
    return nn.Identity() if ins == outs and stride == 1 else _conv(ins, outs, 1, stride=stride, activation=None)


class _Inverted(nn.Module):
    def __init__(self, d: Inverted, ins: int, outs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = ins * expansion
        self.expand = _conv(ins, wide, 1, activation=d.activation) if expansion > 1 else nn.Identity()
        self.depthwise = _conv(wide, wide, kernel, stride=stride, groups=wide, activation=d.activation)
        hidden = {"none": 0, "input": ins // 4, "expanded": wide // 4}[d.squeeze]
        self.squeeze = _Squeeze(wide, hidden, d.activation) if hidden else None
        self.project = _conv(wide, outs, 1, activation=None)
        self.residual = ins == outs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.depthwise(self.expand(x))
        if self.squeeze is not None:
            y = y * self.squeeze(y)
        y = self.project(y)
        return x + y if self.residual else y


class _Dense(nn.Module):
    def __init__(self, ins: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(ins), nn.ReLU(), _conv(ins, 4 * growth, 1), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.body(x)), 1)


def _transition(ins: int, outs: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(ins), nn.ReLU(), nn.Conv2d(ins, outs, 1, bias=False), nn.AvgPool2d(2))


class _Classifier(nn.Module):
    """Features, their mean over the image, dropout, one linear layer, the loss."""

    def __init__(self, features: nn.Module, channels: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.features, self.dropout = features, nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.features(images), 1).flatten(1)
        return F.cross_entropy(self.head(self.dropout(pooled)).float(), labels)


class _Vgg(nn.Module):
    def __init__(self, d: Vgg) -> None:
        super().__init__()
        stages = []
        for ins, (outs, count) in zip((3, 64, 128, 256, 512), zip((64, 128, 256, 512, 512), d.convolutions)):
            widths = (ins, *[outs] * count)
            stages.append(nn.Sequential(*(_vgg_conv(i, o, d.batch_norm) for i, o in pairwise(widths)), nn.MaxPool2d(2)))
        self.features = nn.Sequential(*stages)
        self.head = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(),
            nn.Linear(4096, d.classes),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.features(images), 7).flatten(1)
        return F.cross_entropy(self.head(pooled).float(), labels)


def _vgg_conv(ins: int, outs: int, batch_norm: bool) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(ins, outs, 3, padding=1), *([nn.BatchNorm2d(outs)] if batch_norm else []), nn.ReLU())


RESNET_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
VGG_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
DENSENETS = {  # (blocks, growth, channels of the stem)
    121: ((6, 12, 24, 16), 32, 64), 161: ((6, 12, 36, 24), 48, 96), 169: ((6, 12, 32, 32), 32, 64), 201: ((6, 12, 48, 32), 32, 64),
}  # fmt: skip
MOBILENET_V2 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3),
)  # fmt: skip
EFFICIENTNET_B0 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip
EFFICIENTNET_SCALES = (  # b0 to b7: (factor of channels, factor of repeats, image size, dropout)
    (1.0, 1.0, 224, 0.2), (1.0, 1.1, 240, 0.2), (1.1, 1.2, 260, 0.3), (1.2, 1.4, 300, 0.3),
    (1.4, 1.8, 380, 0.4), (1.6, 2.2, 456, 0.4), (1.8, 2.6, 528, 0.5), (2.0, 3.1, 600, 0.5),
)  # fmt: skip
EFFICIENTNET = r"efficientnet(widese)?b([0-7])"


def _efficientnet(variant: int, wide_squeeze: bool) -> Inverted:
    width, depth, _, dropout = EFFICIENTNET_SCALES[variant]

    def scaled(channels: int) -> int:
        """To a multiple of 8, and never down by more than a tenth."""
        rounded = max(8, int(channels * width + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * channels * width else rounded

    return Inverted(
        stages=tuple((e, scaled(c), math.ceil(r * depth), s, k) for e, c, r, s, k in EFFICIENTNET_B0),
        stem=scaled(32), head=scaled(1280), activation=nn.SiLU, dropout=dropout, squeeze="expanded" if wide_squeeze else "input",
    )  # fmt: skip


def _wide_resnet(layers: int, name: tuple[str | None, str | None], extra: str) -> ResNet | None:
    """Alpa's form (alpa/model/wide_resnet.py): only the output of the 3x3 convolution is widened. What name and row state must agree."""
    stated = (_number(r"base channels", extra), _number(r"width factor", extra))
    base, factor = (int(n) if n else s for n, s in zip(name, stated))
    if not base or not factor or any(n and s and int(n) != s for n, s in zip(name, stated)):
        return None
    return ResNet(blocks=RESNET_BLOCKS[layers], bottleneck=True, base=base, middle=factor)


def _number(what: str, extra: str) -> int | None:
    found = re.search(rf"\b{what}[ =:]+(\d+)\b", extra, re.IGNORECASE)
    return int(found[1]) if found else None


def _compact(name: str) -> str:
    """ResNet-50 v1.5 as resnet50v1.5."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def described(name: str, *, extra: str = "", source: str = "") -> Cnn | None:
    """The network that a table calls so; None if the name is unknown or leaves something open (as the groups of a ResNeXt).

    extra: what the row says besides, as "image 224; base channels 224; width factor 4". source: who printed the row: NVIDIA's
    examples ("nvidia...") squeeze the blocks of SE-ResNeXt to 16 channels where the paper takes a sixteenth of them.
    """
    compact = _compact(name)

    def means(pattern: str) -> re.Match[str] | None:
        return re.fullmatch(pattern, compact)

    squeeze: Literal["sixteenth", "sixteen"] = "sixteen" if source.lower().startswith("nvidia") else "sixteenth"
    if m := means(r"(se)?resnet(18|34|50|101|152|200)(?:v1\.5)?"):
        layers = int(m[2])
        if m[1] and layers < 50:
            return None
        return ResNet(blocks=RESNET_BLOCKS[layers], bottleneck=layers >= 50, squeeze=squeeze if m[1] else "none")
    if m := means(r"(se)?resnext(50|101|152)(32|64)x(4|8|16|32|48)d"):
        groups, width = int(m[3]), int(m[3]) * int(m[4]) // 64
        return ResNet(
            blocks=RESNET_BLOCKS[int(m[2])], bottleneck=True, enter=width, middle=width, groups=groups,
            squeeze=squeeze if m[1] else "none",
        )  # fmt: skip
    if m := means(r"wideresnet(50|101)2"):  # the form of torchvision: both inner widths doubled
        return ResNet(blocks=RESNET_BLOCKS[int(m[1])], bottleneck=True, enter=2, middle=2)
    if m := means(r"wideresnet(50|101|152|200)(?:c(\d+))?(?:w(\d+))?"):
        return _wide_resnet(int(m[1]), (m[2], m[3]), extra)
    if m := means(EFFICIENTNET):
        return _efficientnet(int(m[2]), wide_squeeze=bool(m[1]))
    if means(r"mobilenetv2(?:1\.0)?"):
        return Inverted(stages=MOBILENET_V2, stem=32, head=1280, activation=nn.ReLU6, dropout=0.2)
    if m := means(r"vgg(11|13|16|19)(bn)?"):
        return Vgg(convolutions=VGG_CONVOLUTIONS[int(m[1])], batch_norm=bool(m[2]))
    if m := means(r"densenet(121|161|169|201)"):
        blocks, growth, stem = DENSENETS[int(m[1])]
        return DenseNet(blocks=blocks, growth=growth, stem=stem)
    return None


def cnn(name: str, *, extra: str = "", source: str = "") -> nn.Module | None:
    """The module that `described` describes, in training mode on the default device; None where it describes none."""
    network = described(name, extra=extra, source=source)
    return None if network is None else network.build().train()


def image_of(name: str, *, extra: str = "") -> int:
    """Pixels of a side: what `extra` states ("image 380"), else what the variant of EfficientNet is made for, else 224."""
    stated = _number(r"image(?: size)?", extra)
    variant = re.fullmatch(EFFICIENTNET, _compact(name))
    return stated or (EFFICIENTNET_SCALES[int(variant[2])][2] if variant else 224)
