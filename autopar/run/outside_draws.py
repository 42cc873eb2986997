"""The generators of Python and of numpy that all code of a process shares, `random` and `numpy.random`."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from autopar import generators

__all__ = ["alike", "from_seed", "kept", "seed", "states"]


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


def seed(number: int | tuple[int, ...]) -> None:
    """Let both begin at a number below 2^32, or in a state: the 624 words of a Mersenne twister."""
    numpy = sys.modules.get("numpy")
    if isinstance(number, int):
        random.seed(number)
        if numpy is not None:
            numpy.random.seed(number)
        return
    random.setstate((3, (*number, 0), None))
    if numpy is not None:
        numpy.random.set_state(("MT19937", numpy.array(number, dtype=numpy.uint32), 0, 0, 0.0))


def states() -> tuple[object, object]:
    """Of Python's and of numpy's (None before it is imported), to be compared."""
    return random.getstate(), _of_numpy(sys.modules.get("numpy"))


def _of_numpy(numpy: Any) -> object:
    if numpy is None:
        return None
    name, keys, position, *rest = numpy.random.get_state()
    return name, keys.tobytes(), position, tuple(rest)


@contextlib.contextmanager
def from_seed(number: int | tuple[int, ...], *, outside: bool = True) -> Iterator[None]:
    """Inside, torch's own generators begin at the number, or at 0 beside words, and both of these as `seed` lets them (outside; else they
    go on); afterwards all go on as if nothing had been drawn."""
    with kept(), generators.kept():
        generators.seed(number if isinstance(number, int) else 0)
        if outside:
            seed(number)
        yield


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Inside, both draw what follows from torch's generator of the CPU, which is alike on all ranks in a call of a parallel module and
    goes on by one number; afterwards they go on as if nothing had been drawn: what each rank draws for its own data stays its own."""
    number = int(torch.randint(2**32, (), device="cpu"))
    with kept():
        seed(number)
        yield
