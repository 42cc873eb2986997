"""Models whose forward draws from Python's and numpy's generators: in functions, in submodules and in their own code."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, WIDTH = 8, 6


def mask_of(shape: tuple[int, ...], share: float) -> Any:
    return numpy.random.rand(*shape) < share  # noqa: NPY002


def places_of(mask: Tensor, share: float) -> Tensor:
    """Of each row some of those that are masked, as speech models choose what they hide."""
    found = numpy.zeros(tuple(mask.shape), dtype=bool)
    for row, count in enumerate(mask.sum(-1).tolist()):
        found[row, numpy.random.choice(WIDTH, max(1, int(share * count)), replace=False)] = True  # noqa: NPY002
    return torch.from_numpy(found)


def share() -> float:
    return random.betavariate(1.0, 1.0)


def mixed(x: Tensor) -> tuple[Tensor, Tensor, float]:
    part, order = random.betavariate(1.0, 1.0), torch.randperm(x.shape[0])
    return part * x + (1 - part) * x[order], order, part


def count() -> int:
    return random.randint(1, 3)


def cut() -> Any:
    return numpy.random.rand(random.randint(1, 4))  # noqa: NPY002


def perhaps() -> Any:
    return None if random.random() < 0.5 else numpy.zeros(WIDTH)


def noise_like(layer: nn.Linear) -> Tensor:  # as if it were a method of it
    return torch.full((layer.in_features,), random.random(), dtype=layer.weight.dtype)


class Drawing(nn.Module):
    """Two layers; what is drawn changes what they are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.given(x, mask)))).square().mean()


class ByArray(Drawing):
    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tensor(mask_of((SAMPLES, WIDTH), 0.4), dtype=torch.bool, device=x.device)
        x = x.clone()
        x[hidden] = 0.5
        return x * torch.as_tensor(mask_of((WIDTH,), 0.7), dtype=x.dtype, device=x.device)


class ByTensor(Drawing):
    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(places_of(mask, 0.5), 0.0)


class ByNumber(Drawing):
    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        part = share()
        return part * x + (1 - part) * x.flip(0)


class Mixed(Drawing):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x, order, part = mixed(x)
        found, wanted = self.last(torch.tanh(self.first(x))), mask.to(x.dtype).mean(1, keepdim=True)
        return part * F.mse_loss(found, wanted) + (1 - part) * F.mse_loss(found, wanted[order])


class Flips(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1) if random.random() < 0.5 else x


class BySubmodule(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.flips = Flips()

    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.flips(x)


class Cell(nn.Module):
    """A decoder step by step, with what it should have said or what it said, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.out = nn.Embedding(9, 8), nn.GRUCell(8, 8), nn.Linear(8, 9)

    def forward(self, h: Tensor, wanted: Tensor) -> Tensor:
        said, token = [], wanted[:, 0]
        for step in range(1, wanted.shape[1]):
            h = self.cell(self.table(token), h)
            said.append(self.out(h))
            token = wanted[:, step] if random.random() < 0.5 else said[-1].argmax(1)
        return torch.stack(said, 1)


class TeacherForcing(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Cell()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        wanted = mask.long().cumsum(1)
        return F.cross_entropy(self.decoder(torch.tanh(self.first(x)), wanted).flatten(0, 1), wanted[:, 1:].flatten())


class Itself(Drawing):
    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x.flip(-1)


class Seldom(nn.Module):
    """Mixes the samples, one time in ten."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if random.random() < 0.1 else x


class EachSample(nn.Module):
    """Draws for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([random.random() for _ in range(len(x))], dtype=x.dtype)[:, None]


class Around(nn.Module):
    """Draws before it calls another module, in one line."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * random.random())


class ByCount(Drawing):
    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * count()


class ByCut(Drawing):
    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * torch.tensor(cut(), dtype=x.dtype).sum()


class Perhaps(Drawing):
    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        found = perhaps()
        return x if found is None else x * torch.tensor(found, dtype=x.dtype)


class OfALayer(Drawing):
    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + noise_like(self.first)


class Added(Drawing):
    """Uses an array for more than a tensor of it."""

    def given(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * torch.tensor(mask_of((WIDTH,), 0.5) + 1, dtype=x.dtype)


RUN: dict[str, type[Drawing]] = {k.__name__: k for k in (ByArray, ByTensor, ByNumber, Mixed, BySubmodule, TeacherForcing)}
REFUSED: dict[str, type[Drawing]] = {k.__name__: k for k in (Itself, ByCount, ByCut, Perhaps, OfALayer, Added)}


def batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, mask = torch.randn(SAMPLES, WIDTH, generator=generator), torch.rand(SAMPLES, WIDTH, generator=generator)
    return {"x": x.to(dtype), "mask": mask > 0.3}
