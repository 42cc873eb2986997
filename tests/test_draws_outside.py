"""Numbers that a forward draws from Python or numpy are refused where they decide what it computes, however seldom, and behind a last layer
of zeros; not where they decide nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure

DECIDES: dict[str, Callable[[], float]] = {
    "seldom above": lambda: 2.0 if random.random() > 0.9 else 1.0,
    "seldom below": lambda: 2.0 if numpy.random.rand() < 0.1 else 1.0,
    "in the middle": lambda: 2.0 if 0.4 < random.random() < 0.6 else 1.0,
    "one of four": lambda: float(numpy.random.choice([1.0, 1.0, 1.0, 3.0])),
    "a number of four": lambda: 1.0 + float(random.randint(0, 3) == 2),
    "seven of ten": lambda: 1.0 if numpy.random.randint(0, 10) < 7 else 2.0,
    "the first of a shuffle": lambda: shuffled([1.0, 1.0, 2.0])[0],
    "a tail": lambda: 2.0 if random.gauss(0, 1) > 1.5 else 1.0,
    "a number": lambda: float(numpy.random.beta(1, 1)),
}
DECIDES_NOTHING: dict[str, Callable[[], float]] = {
    "never below": lambda: 2.0 if random.random() < 0.0 else 1.0,
    "always below": lambda: 1.0 if numpy.random.uniform(0, 1) < 1.0 else 2.0,
    "not used": lambda: (random.random(), 1.0)[1],
}


def shuffled(items: list[float]) -> list[float]:
    random.shuffle(items)
    return items


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[], float], *, zeros: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.draw = nn.Linear(6, 6), nn.Linear(6, 2), draw
        if zeros:
            nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.first(x)) * self.draw()) - 1).square().mean()


@pytest.mark.parametrize("zeros", [False, True], ids=["", "behind zeros"])
@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_is_refused(name: str, zeros: bool) -> None:
    random.seed(0)
    numpy.random.seed(0)
    with pytest.raises(CaptureError, match="depends on random numbers drawn from"):
        capture(Drawing(DECIDES[name], zeros=zeros), (torch.ones(4, 6),))


@pytest.mark.parametrize("name", DECIDES_NOTHING)
def test_what_decides_nothing_is_captured(name: str) -> None:
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    assert capture(Drawing(DECIDES_NOTHING[name], zeros=False), (torch.ones(4, 6),)).program.ops
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before
