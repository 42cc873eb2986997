"""How near predictions are to what was measured: their errors, and whether they put it in the same order."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LEAST_GROUP", "Score", "score", "tau"]

LEAST_GROUP = 3  # runs of one question, below which their order says nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Of relative errors: their median, their 90th percentile, and the median of the signed ones; inside: the share of the measured
    figures within their interval."""

    count: int
    median_ape: float
    p90_ape: float
    bias: float
    inside: float | None = None

    def record(self) -> dict[str, float | None]:
        return {
            "count": self.count, "median_ape": self.median_ape, "p90_ape": self.p90_ape, "bias": self.bias, "inside": self.inside,
        }  # fmt: skip


def score(signed: Sequence[float], inside: Sequence[bool] = ()) -> Score | None:
    """None where there is nothing to score. inside: whether each measured figure lies in its interval, where there are intervals."""
    if not signed:
        return None
    sizes = sorted(abs(e) for e in signed)
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return Score(
        count=len(sizes), median_ape=statistics.median(sizes), p90_ape=p90, bias=statistics.median(signed),
        inside=statistics.fmean(inside) if inside else None,
    )  # fmt: skip


def tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of (predicted, measured) pairs; None where either is the same throughout."""
    concordant = discordant = ties_a = ties_b = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            if a == c or b == d:
                ties_a, ties_b = ties_a + (a == c and b != d), ties_b + (b == d and a != c)
            elif (a < c) == (b < d):
                concordant += 1
            else:
                discordant += 1
    total = concordant + discordant
    scale = ((total + ties_a) * (total + ties_b)) ** 0.5
    return (concordant - discordant) / scale if scale else None
