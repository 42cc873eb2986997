"""The generators of Python and of numpy that all code of a process shares, `random` and `numpy.random`."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from autopar import generators

__all__ = ["alike", "from_seed", "from_words", "kept", "seed", "states"]


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Afterwards they go on as if nothing had been drawn inside."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)


def seed(number: int) -> None:
    """Let both begin at a number below 2^32."""
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def states() -> tuple[object, object]:
    """Of Python's and of numpy's (None before it is imported), to be compared."""
    return random.getstate(), _of_numpy(sys.modules.get("numpy"))


def _of_numpy(numpy: Any) -> object:
    if numpy is None:
        return None
    name, keys, position, *rest = numpy.random.get_state()
    return name, keys.tobytes(), position, tuple(rest)


@contextlib.contextmanager
def from_seed(number: int) -> Iterator[None]:
    """Inside, both and torch's own generators begin at a number below 2^32; afterwards they go on as if nothing had been drawn."""
    with kept(), generators.kept():
        torch.manual_seed(number)
        seed(number)
        yield


@contextlib.contextmanager
def from_words(words: tuple[int, ...]) -> Iterator[None]:
    """Inside, both have this state, the 624 words of a Mersenne twister, and torch's own generators begin at 0; afterwards they go on as if
    nothing had been drawn."""
    with kept(), generators.kept():
        torch.manual_seed(0)
        random.setstate((3, (*words, 0), None))
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0, 0, 0.0))
        yield


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Inside, both draw what follows from torch's generator of the CPU, which is alike on all ranks in a call of a parallel module and
    goes on by one number; afterwards they go on as if nothing had been drawn: what each rank draws for its own data stays its own."""
    number = int(torch.randint(2**32, (), device="cpu"))
    with kept():
        seed(number)
        yield
