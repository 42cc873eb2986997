"""The denoising U-Net of Stable Diffusion XL from modules of torch, for planning it on the meta device.

The sizes are those of its config.json (stabilityai/stable-diffusion-xl-base-1.0, unet; arXiv 2307.01952, table 1): channels 320, 640, 1280;
two residual blocks a level down and three up; at the levels after the first 2 and 10 transformer layers after each, 10 in the
middle; heads of 64 channels; text of width 2048 and length 77; time and pooled text of width 2816 embedded in 1280.
Names of shapes: B batch, C channels, Y and X image, L positions, T text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["UNet", "Unet"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unet:
    """channels, layers: of each level, and transformer layers after each of its residual blocks. blocks: residual blocks of a level on the
    way down."""

    channels: tuple[int, ...] = (320, 640, 1280)
    layers: tuple[int, ...] = (0, 2, 10)
    blocks: int = 2
    text: int = 2048
    pooled: int = 2816
    latent: int = 4
    groups: int = 32


class _Residual(nn.Module):
    def __init__(self, d: Unet, ins: int, outs: int, embedded: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.GroupNorm(d.groups, ins, eps=1e-5), nn.SiLU(), nn.Conv2d(ins, outs, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(embedded, outs))
        self.leave = nn.Sequential(nn.GroupNorm(d.groups, outs, eps=1e-5), nn.SiLU(), nn.Conv2d(outs, outs, 3, padding=1))
        self.shortcut = nn.Identity() if ins == outs else nn.Conv2d(ins, outs, 1)

    def forward(self, x_BCYX: Tensor, time: Tensor) -> Tensor:
        h = self.enter(x_BCYX) + self.time(time)[:, :, None, None]
        return self.shortcut(x_BCYX) + self.leave(h)


class _Attention(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLC: Tensor, context_BTC: Tensor) -> Tensor:
        pairs = ((self.query, x_BLC), (self.key, context_BTC), (self.value, context_BTC))
        q, k, v = (f(x).unflatten(2, (self.heads, 64)).transpose(1, 2) for f, x in pairs)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    """Attention to itself, attention to the text, gated MLP."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = _Attention(width, width), _Attention(width, text)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLC: Tensor, text_BTC: Tensor) -> Tensor:
        h = self.norms[0](x_BLC)
        x_BLC = x_BLC + self.own(h, h)
        x_BLC = x_BLC + self.cross(self.norms[1](x_BLC), text_BTC)
        value, gate = self.up(self.norms[2](x_BLC)).chunk(2, dim=-1)
        return x_BLC + self.down(value * F.gelu(gate))


class _Transformer(nn.Module):
    def __init__(self, d: Unet, width: int, layers: int) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.GroupNorm(d.groups, width, eps=1e-6), nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(_Layer(width, d.text) for _ in range(layers))

    def forward(self, x_BCYX: Tensor, text_BTC: Tensor) -> Tensor:
        x_BLC = self.enter(self.norm(x_BCYX).flatten(2).transpose(1, 2))
        for layer in self.layers:
            x_BLC = layer(x_BLC, text_BTC)
        return x_BCYX + self.leave(x_BLC).transpose(1, 2).unflatten(2, x_BCYX.shape[2:])


class _Step(nn.Module):
    """A residual block and the transformer after it, if there is one."""

    def __init__(self, d: Unet, ins: int, outs: int, embedded: int, layers: int) -> None:
        super().__init__()
        self.residual = _Residual(d, ins, outs, embedded)
        self.transformer = _Transformer(d, outs, layers) if layers else None

    def forward(self, x_BCYX: Tensor, time: Tensor, text_BTC: Tensor) -> Tensor:
        x_BCYX = self.residual(x_BCYX, time)
        return x_BCYX if self.transformer is None else self.transformer(x_BCYX, text_BTC)


class UNet(nn.Module):
    """Forward returns the mean squared error of the predicted noise: latents and noise [B, 4, Y, X], time [B], text [B, T, width],
    pooled [B, width]."""

    def __init__(self, d: Unet) -> None:
        super().__init__()
        first, embedded = d.channels[0], 4 * d.channels[0]
        self.first = first
        self.time = nn.Sequential(nn.Linear(first, embedded), nn.SiLU(), nn.Linear(embedded, embedded))
        self.pooled = nn.Sequential(nn.Linear(d.pooled, embedded), nn.SiLU(), nn.Linear(embedded, embedded))
        self.enter = nn.Conv2d(d.latent, first, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        ins, kept = first, [first]
        last = len(d.channels) - 1
        for level, (outs, layers) in enumerate(zip(d.channels, d.layers, strict=True)):
            self.down.append(nn.ModuleList(_Step(d, ins if k == 0 else outs, outs, embedded, layers) for k in range(d.blocks)))
            kept += [outs] * d.blocks
            ins = outs
            if level < last:
                self.shrink.append(nn.Conv2d(outs, outs, 3, stride=2, padding=1))
                kept.append(outs)
        self.middle = _Step(d, ins, ins, embedded, d.layers[-1])
        self.after = _Residual(d, ins, ins, embedded)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, (outs, layers) in reversed(list(enumerate(zip(d.channels, d.layers, strict=True)))):
            steps = []
            for _ in range(d.blocks + 1):
                steps.append(_Step(d, ins + kept.pop(), outs, embedded, layers))
                ins = outs
            self.up.append(nn.ModuleList(steps))
            if level:
                self.grow.append(nn.Conv2d(outs, outs, 3, padding=1))
        self.leave = nn.Sequential(nn.GroupNorm(d.groups, first), nn.SiLU(), nn.Conv2d(first, d.latent, 3, padding=1))

    def forward(self, latents: Tensor, time: Tensor, text: Tensor, pooled: Tensor, noise: Tensor) -> Tensor:
        half = self.first // 2
        frequencies = torch.exp(torch.arange(half, device=time.device, dtype=torch.float32) * (-math.log(10000.0) / half))
        angles = time[:, None].float() * frequencies
        embedded = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(latents.dtype)) + self.pooled(pooled)
        x = self.enter(latents)
        kept = [x]
        for level, steps in enumerate(self.down):
            for step in steps:  # type: ignore[attr-defined]
                x = step(x, embedded, text)
                kept.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
                kept.append(x)
        x = self.after(self.middle(x, embedded, text), embedded)
        for level, steps in enumerate(self.up):
            for step in steps:  # type: ignore[attr-defined]
                x = step(torch.cat([x, kept.pop()], dim=1), embedded, text)
            if level < len(self.grow):
                x = self.grow[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.leave(x).float(), noise.float())
