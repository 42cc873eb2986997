"""Whole numbers for a program whose solution without that demand has nearly all of them: depth first, one column after the other.

The program of an axis has one row that its groups share (`launched`). Its solution without the demand for whole numbers is where that row
binds a mixture of two whole solutions. To hold one column at a whole number and to solve again from there takes a few steps of the simplex
method, so that a solution within the gap is found long before a solver of integer programs has begun. What was not looked into is in the
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy
from numpy.typing import NDArray

__all__ = ["WHOLE", "Relaxed", "dive", "parted"]

WHOLE = 1e-6  # what is so near to a whole number is one, as it is for the solver
STEPS = 150  # programs that are solved before another way is taken
INFINITY = float("inf")
Values: TypeAlias = NDArray[numpy.float64]
Relaxed: TypeAlias = tuple[float, Values]
"""The least objective without the demand for whole numbers, infinite where there is no solution; and the columns of that solution."""


@dataclass(frozen=True, slots=True)
class _Open:
    """What is to be looked into: columns that are held, and an objective that nothing in there is below."""

    least: float
    held: Mapping[int, float]


def parted(whole: NDArray[numpy.bool_], values: Values) -> NDArray[numpy.intp]:
    """The columns that are to be whole numbers, and are not."""
    return numpy.flatnonzero(whole & (abs(values - values.round()) >= WHOLE))


def dive(
    solve: Callable[[Mapping[int, float]], Relaxed | None], first: Relaxed, whole: NDArray[numpy.bool_], costs: Values, gap: float,
    best: Relaxed | None = None, go_on: Callable[[], bool] = lambda: True,
) -> tuple[float, float, Values] | None:  # fmt: skip
    """The objective, the bound and the columns of the best whole solution that was found in STEPS programs, or None. solve: the program
    with columns held at values, None where it was not solved. first: the program as it is. costs: of the columns, of which those that are
    to be whole are 0 or 1. best: a whole solution that is known. go_on: whether there is time for one more program."""
    open_ = [_Open(first[0], {})]
    passed = INFINITY  # the least of what was left
    for step in range(STEPS):
        if not open_ or not go_on():
            break
        at = open_.pop()
        found = first if step == 0 else solve(at.held)
        if found is None:
            passed = min(passed, at.least)
        elif found[0] < (INFINITY if best is None else best[0]):
            apart = parted(whole, found[1])
            if len(apart):
                open_ += _both(apart, found, costs, at.held)
            else:
                best = found
        if best is not None:
            near = best[0] - gap * abs(best[0])
            passed = min([passed, *(x.least for x in open_ if x.least >= near)])
            open_ = [x for x in open_ if x.least < near]
    return None if best is None else (best[0], min([passed, best[0], *(x.least for x in open_)]), best[1])


def _both(apart: NDArray[numpy.intp], found: Relaxed, costs: Values, held: Mapping[int, float]) -> list[_Open]:
    """The column that costs the most by not being whole, held at the farther of its whole numbers, and last at the nearer."""
    least, values = found
    column = int(apart[numpy.argmax(costs[apart] * abs(values[apart] - values[apart].round()))])
    near = float(values[column].round())
    return [_Open(least, {**held, column: x}) for x in (1.0 - near, near)]
