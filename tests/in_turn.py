"""Programs of `benchmarks/trap_programs` in tests: each under some of the plans. The benchmark `traps` runs all under all of them."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks._traps import PROGRAMS

__all__ = ["in_turn"]

ON_MORE_RANKS = "hybrid3"  # of which one program is enough
ONE_OF = 4


def in_turn(kind: str, *plans: tuple[str, ...], without: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """The programs of a kind, in the order of their names: the first under the first of these groups of plans, the second under the
    second, and so on in turns; and of those that name plans of their own every fourth under these too."""
    names = sorted(name for name, program in PROGRAMS.items() if program.kind == kind and name not in set(without))
    own = {name: tuple(plan for plan in PROGRAMS[name].plans if plan != ON_MORE_RANKS) for name in names}
    also = {name: own[name] for name in [name for name in names if own[name]][::ONE_OF]}
    return {name: tuple(dict.fromkeys((*plans[k % len(plans)], *also.get(name, ())))) for k, name in enumerate(names)}
