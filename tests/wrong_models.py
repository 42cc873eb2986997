"""Models with which autopar is used wrongly, or at its limits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

WIDTH, CLASSES = 8, 4


class Net(nn.Module):
    """A classifier; dropout and batch norm, where asked for, make it depend on the mode."""

    def __init__(self, *, width: int = 16, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.gelu(self.second(self.drop(F.gelu(self.norm(self.first(x))))))
        return F.cross_entropy(self.last(hidden), y)


class Branching(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return super().forward(x, y)


@library.custom_op("autopar_tests::reversed_samples", mutates_args=())
def reversed_samples(x: Tensor) -> Tensor:
    return x.flip(0).contiguous()


@reversed_samples.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


reversed_samples.register_autograd(lambda ctx, grad: grad.flip(0).contiguous())


class Unruled(Net):
    """With an operator that mixes samples and has no rule."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(reversed_samples(F.gelu(self.first(x)))), reversed_samples(y))


def batch(size: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


def model(kind: type[Net] = Net, **options: object) -> Net:
    torch.manual_seed(0)
    return kind(**options)  # type: ignore[arg-type]


def net() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return model(), batch()


def wider() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return model(width=32), batch()


def odd() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return model(), batch(7)


def branching() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return model(Branching), batch()


def unruled() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return model(Unruled), batch()


def missing() -> tuple[nn.Module, dict[str, Tensor]]:
    return model(), {"x": batch()[0]}
