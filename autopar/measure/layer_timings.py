"""What `autopar profile` runs on a worker: layers of models, forward and backward.

An operator that is timed by itself finds its operands in caches, memory that it may write to, and its own code. Among others it does not,
and is slower by what whole layers show; of layers in which there is nothing to compute, all that is left is what the host needs to issue
operators.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.measure.timings import timed
from autopar.run.launch import default_device

__all__ = ["LAYERS", "ConvLayer", "TransformerLayer", "launch_times", "layer_times", "made"]

ROUNDS = 5
CHAIN, DEPTH = 32, 4  # operators without gradients; layers in which there is nothing to compute
HOST_LAUNCHES, DEVICE_LAUNCHES = 24, 36.25
"""Of a transformer layer, forward and backward, as prices count them: on a host views none, other operators one forward and one backward;
on a device as `autopar.measure.launches` says."""


class TransformerLayer(nn.Module):
    """Before its attention and its MLP a layer norm; causal. [batch, tokens, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (project(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class ConvLayer(nn.Module):
    """A residual block of two convolutions. [batch, channels, side, side] -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm(self.first(x))))))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer of 128 channels": (lambda: TransformerLayer(128, 4), (8, 128, 128)),
    "transformer of 256 channels": (lambda: TransformerLayer(256, 8), (8, 128, 256)),
    "convolutions of 32 channels": (lambda: ConvLayer(32), (8, 32, 56, 56)),
    "convolutions of 64 channels": (lambda: ConvLayer(64), (8, 64, 28, 28)),
    "convolutions of images": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1)),
        (8, 3, 64, 64),
    ),
}
"""Name -> what makes the layer, and the shape that it takes."""


def made(name: str) -> tuple[nn.Module, Tensor]:
    """A layer that ends in a number, and an input of it that wants a gradient."""
    make, shape = LAYERS[name]
    return _Sum(make()), torch.rand(shape).requires_grad_()


class _Sum(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def layer_times() -> dict[str, float]:
    """Seconds of each of LAYERS, forward and backward, while all workers compute it: of several rounds the median, of each the best. The
    CPU's alone."""
    torch.manual_seed(0)
    layers = {name: made(name) for name in LAYERS}
    found: dict[str, list[float]] = {name: [] for name in LAYERS}
    for _ in range(ROUNDS):
        for name, (layer, x) in layers.items():

            def run(layer: nn.Module = layer, x: Tensor = x) -> None:
                layer(x).backward()
                layer.zero_grad()
                x.grad = None

            dist.barrier()
            found[name].append(timed(run, x.device)[0])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def launch_times() -> tuple[float, float]:
    """Seconds of the host for an operator too small to take any: on average of those of a transformer layer, their views and what autograd
    does for them included, forward and backward; and of a single one without gradients. 0 on other ranks than 0."""
    if dist.get_rank() != 0:
        return 0.0, 0.0
    device = default_device()
    layer, x = TransformerLayer(8, 2).to(device), torch.ones(1, 4, 8, device=device)

    def layers() -> None:
        y = x
        for _ in range(DEPTH):
            y = layer(y)
        y.sum().backward()

    def alone() -> None:
        y = x
        for _ in range(CHAIN):
            y = torch.relu(y)

    launches = HOST_LAUNCHES if device.type == "cpu" else DEVICE_LAUNCHES
    of_model_s = timed(layers, device)[1] / (DEPTH * launches)
    with torch.no_grad():
        return of_model_s, timed(alone, device)[1] / CHAIN
