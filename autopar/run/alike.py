"""What every rank does, or none: before whole tensors are read or written by all ranks, those of a machine are seen to do the same.

The collective of a rank that goes on alone (`if rank == 0: print(p.norm())`) would be answered by another one of the others. So ranks look
into each other's records first, which takes microseconds. What ranks of other machines do is not seen.
"""

from __future__ import annotations

import math
import operator
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from autopar.errors import LaunchError
from autopar.run import record, watchdog
from autopar.run.record import Wrote
from autopar.run.watchdog import Watchdog

__all__ = ["begin_writing", "check_written", "done_by_every_rank", "note_written"]

_ROUNDING = 1e-5  # how far apart a number may be on two ranks, relative to it: kernels need not add in one order
_SMALL = 1e-6  # and of numbers below this, relative to this
_LOOKS = 20  # before a rank that waits sleeps between them
_PAUSE_S = 0.0002


def done_by_every_rank(what: str, name: str, *, of: str = "") -> None:
    """Wait until the other ranks of this machine come to the same. what: is about to be done with the tensor of this name, as 'gather'.
    of: what else must be the same, for several tensors: their names.

    Raises LaunchError if one of them does something else, is in a later call of a module, or has ended.
    """
    watch = watchdog.current()
    if watch is None or torch.compiler.is_compiling():
        return
    mine = record.reads(zlib.crc32(f"{what} {name} {of}".encode()))
    record.entered(record.AGREEMENT)  # on each rank, also the last to come: a call that breaks off compares how many they have begun
    looks = 0
    while not _together(watch, mine, what, name):
        looks += 1
        time.sleep(0.0 if looks < _LOOKS else _PAUSE_S)
    record.left()


def _together(watch: Watchdog, mine: record.Reads, what: str, name: str) -> bool:
    """Whether all others have come to it. Raises LaunchError if one never will."""
    waits = False
    for rank, other in watch.beside.items():
        theirs = other.reads()
        if theirs.count == mine.count and theirs.of != mine.of:
            raise _alone(watch, rank, what, name)
        if theirs.count < mine.count:
            if theirs.calls > mine.calls or watch.ended(rank):
                raise _alone(watch, rank, what, name)
            waits = True
    return not waits


def _alone(watch: Watchdog, rank: int, what: str, name: str) -> LaunchError:
    record.left()  # no rank has gone: the error is of the program
    return LaunchError(
        f"rank {watch.rank} is about to {what} {name}, which all ranks do together, and rank {rank} does something else: it is "
        f"{watch.where(rank)}. Read and write whole parameters and gradients (norms, a state_dict, autopar.save and load), and read what a "
        f"call returns beside its loss, on every rank, instead of one alone, and let rank 0 print or write what comes of it"
    )


@dataclass(slots=True)
class _Written:
    """To parameters and gradients since the last call. what: to which, in which way, as a number below 2**32. numbers: how many they were
    changed by. total: of these, each by its logarithm: of two that differ by one part in so many it differs by as much."""

    what: int = 0
    numbers: int = 0
    total: float = 0.0


_written = _Written()


def begin_writing() -> None:
    """Collective: from now on it is noted what the ranks write to parameters."""
    global _written
    _written = _Written()


def note_written(what: str, name: str, operands: Iterable[object] = ()) -> None:
    """The loop has changed a parameter or gradient in place, or an optimizer has stepped. operands: of what it was changed by, numbers and
    tensors of one are noted. What is written in a call (by hooks) is not: ranks have hooks of other parameters there."""
    if record.computes() or torch.compiler.is_compiling():
        return
    words, here = f"{what} {name}", _written
    numbers = [number for x in operands if (number := _number(x)) is not None]
    weight = 1 + zlib.crc32(words.encode()) / 2**32  # so that numbers which change places are seen
    for number in numbers:
        if math.isfinite(number):
            here.numbers, here.total = here.numbers + 1, here.total + weight * math.asinh(number / _SMALL)
        else:
            words += f" {number}"
    here.what = (here.what + zlib.crc32(f"{words} {len(numbers)}".encode())) & 0xFFFFFFFF


def _number(x: object) -> float | None:
    if isinstance(x, Tensor):  # of a GPU a number could not be read without waiting for it; tolist() runs no operator
        read = type(x) is Tensor and x.dim() == 0 and x.device.type == "cpu" and not x.is_complex()
        return float(cast("float", x.tolist())) if read else None
    return float(x) if isinstance(x, (int, float)) else None


def check_written() -> None:
    """A call begins. LaunchError where a rank of this machine has begun it too, and has written something else before it."""
    global _written
    here, _written = _written, _Written()
    watch = watchdog.current()
    if watch is None:
        return
    mine, within = record.wrote(here.what, here.total), 2 * _ROUNDING * here.numbers

    def differs(theirs: Wrote) -> bool:
        return theirs.call == mine.call and (theirs.what != mine.what or abs(theirs.total - mine.total) > within)

    if (rank := watch.differing_from(operator.methodcaller("wrote"), differs)) is not None:
        first, second = sorted((watch.rank, rank))
        raise LaunchError(
            f"ranks {first} and {second} have changed parameters or gradients by other numbers, or not equally often, since the last call "
            f"(an optimizer's step on one rank alone, numbers that each rank draws for itself): they would train different models. Make "
            f"every rank do the same: give all the same seed, or use the number of one (dist.broadcast) on all"
        )
