"""Random generators while the user's own code runs: the same draws in every run, and other ones, to see whether they matter."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch

from autopar import generators
from autopar.run import outside_draws

__all__ = ["OTHER_DRAWS", "drawn_outside", "seeded"]


@contextlib.contextmanager
def seeded(seed: int, *, outside: bool = True) -> Iterator[None]:
    """Every run inside draws the same random numbers; the random states are restored after it."""
    with generators.kept(), outside_draws.kept():
        torch.manual_seed(seed)
        if outside:
            outside_draws.seed(seed)
        yield


@contextlib.contextmanager
def drawn_outside() -> Iterator[list[str]]:
    """Holds, after it, the generators other than torch's that the code inside drew from; their states are as before."""
    drawn: list[str] = []
    with outside_draws.kept():
        before = outside_draws.states()
        yield drawn
        drawn += [name for name, a, b in zip(("random", "numpy.random"), before, outside_draws.states()) if a != b]


LOWEST, HIGHEST = 0, 0x12DD9BB3  # words of the state of a Mersenne twister, which gives 0 and 2^32 - 1 of them
OTHER_DRAWS = tuple((*(word,) * 500, *range(1, 125)) for word in (LOWEST, HIGHEST))  # then others: loops that wait for a number end
OTHER_DRAWS += tuple((*random.Random(seed).getstate()[1][1:624], 0) for seed in range(101, 109))  # their first words are all the same

