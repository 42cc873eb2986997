"""Programs of `benchmarks/trap_programs` in tests: each under some of the plans. The benchmark `traps` runs all under all of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TypeVar

from benchmarks._traps import PROGRAMS

__all__ = ["in_turn", "one_for"]

T = TypeVar("T")

ON_MORE_RANKS = "hybrid3"  # of which one program is enough
ONE_OF = 4


def one_for(name: str, *of: T) -> T:
    """One of these, by the name alone: which one it is does not change with the other programs that there are."""
    return of[zlib.crc32(name.encode()) % len(of)]


def in_turn(kind: str, *plans: tuple[str, ...], without: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """The programs of a kind, each under one of these groups of plans; and about every fourth of those that name plans of their own under
    these too."""
    names = sorted(name for name, program in PROGRAMS.items() if program.kind == kind and name not in set(without))
    return {name: tuple(dict.fromkeys((*one_for(name, *plans), *_own(name)))) for name in names}


def _own(name: str) -> tuple[str, ...]:
    own = tuple(plan for plan in PROGRAMS[name].plans if plan != ON_MORE_RANKS)
    return own if one_for(name[::-1], *range(ONE_OF)) == 0 else ()
