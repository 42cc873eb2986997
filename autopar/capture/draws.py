"""Random generators while the user's own code runs: the same draws in every run, and other ones, to see whether they matter."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from autopar import generators

__all__ = ["OTHER_DRAWS", "drawn_outside", "other_draws", "seeded"]


@contextlib.contextmanager
def seeded(seed: int, *, outside: bool = True) -> Iterator[None]:
    """Every run inside draws the same random numbers; the random states are restored after it."""
    with generators.kept(), _outside_kept():
        torch.manual_seed(seed)
        if outside:
            random.seed(seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(seed)
        yield


@contextlib.contextmanager
def _outside_kept() -> Iterator[None]:
    python, numpy = random.getstate(), sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)


@contextlib.contextmanager
def drawn_outside() -> Iterator[list[str]]:
    """Holds, after it, the generators other than torch's that the code inside drew from; their states are as before."""
    drawn: list[str] = []
    with _outside_kept():
        numpy = sys.modules.get("numpy")
        before = (random.getstate(), _numpy_state(numpy))
        yield drawn
        drawn += [name for name, a, b in zip(("random", "numpy.random"), before, (random.getstate(), _numpy_state(numpy))) if a != b]


def _numpy_state(numpy: Any) -> object:
    if numpy is None:
        return None
    name, keys, position, *rest = numpy.random.get_state()
    return name, keys.tobytes(), position, tuple(rest)


LOWEST, HIGHEST = 0, 0x12DD9BB3  # words of the state of a Mersenne twister, which gives 0 and 2^32 - 1 of them
OTHER_DRAWS = tuple((*(word,) * 500, *range(1, 125)) for word in (LOWEST, HIGHEST))  # then others: loops that wait for a number end
OTHER_DRAWS += tuple((*random.Random(seed).getstate()[1][1:624], 0) for seed in range(101, 109))  # their first words are all the same


@contextlib.contextmanager
def other_draws(words: tuple[int, ...]) -> Iterator[None]:
    """Inside, Python's and numpy's global generators have this state."""
    with _outside_kept():
        random.setstate((3, (*words, 0), None))
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0, 0, 0.0))
        yield
