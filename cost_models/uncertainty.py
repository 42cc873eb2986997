"""How far a prediction may be off: intervals of 80% from what is known of each constant, and of the account itself.

Spreads are relative standard deviations (of the logarithm). A figure of the catalogue may state its own (`spread`); one that does
not has that of how it came to be known. Constants are taken to be off independently of one another. Beside them stands what no
constant of the hardware explains: the account's own spread, of a step and of each part of memory. It was set so that about 80% of the
published runs fall into their intervals (`python -m benchmarks published` prints the share, by source).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "ACCOUNT", "CENTRAL", "OTHER_SOFTWARE", "SPREADS", "More", "interval", "least_upper_bytes", "memory_spread_bytes", "more_for",
    "room_bytes", "spread_of_kind", "step_spread",
]  # fmt: skip

CENTRAL = 1.2816  # 80% of a normal distribution lies within so many standard deviations

SPREADS: dict[str, float] = {"datasheet": 0.0, "measured": 0.03, "fitted": 0.08, "derived": 0.12, "assumed": 0.25}
"""How a figure came to be known -> its spread. Peak rates of datasheets are exact: what is reached of them is another figure."""

ACCOUNT = 0.065
"""Spread of a step that the constants do not explain."""

OTHER_SOFTWARE = SPREADS["derived"]
"""Spread of a step of a software beside those whose runs the constants of a chip were fitted to, which have kernels and hosts of their own:
what two figures differ by of which one was derived from the other."""

MEMORY: dict[str, float] = {
    "parameters": 0.0,
    "gradients": 0.0,
    "optimizer_states": 0.0,
    "saved_activations": 0.1,
    "batch": 0.0,
    "largest_temporary": 0.36,
    "communication_buffers": 0.36,
    "framework_context": 0.2,
    "allocator_slack": 0.75,
}
"""Term of MemoryTerms -> its spread. What rests is counted, not estimated."""


def spread_of_kind(source: str) -> float:
    """Of a figure with a source such as 'fitted: nccl-tests'. ValueError on one that begins with none of SPREADS."""
    kind = source.partition(":")[0]
    if kind not in SPREADS:
        raise ValueError(f"a source must begin with one of {', '.join(SPREADS)}, found {source!r}")
    return SPREADS[kind]


def step_spread(seconds: Mapping[str, float], spreads: Mapping[str, float]) -> float:
    """The spread of a sum of seconds by kind, each with the spread of what its speed depends on; with the account's own."""
    total = sum(seconds.values())
    if total <= 0:
        return ACCOUNT
    return math.hypot(ACCOUNT, *(s / total * spreads[kind] for kind, s in seconds.items()))


def memory_spread_bytes(terms: Mapping[str, float]) -> float:
    """The standard deviation in bytes of a sum of the terms of MemoryTerms, by their names."""
    return math.hypot(*(MEMORY[name] * nbytes for name, nbytes in terms.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class More:
    """How the upper end of an interval of memory is bounded from below by a sum. saved, temporary: for how much more than itself a byte of
    saved activations counts, and one of temporaries, which are less certain than what rests; others: the share of the others' spread that
    may be added to that, since spreads add up as squares do."""

    saved: float = 0.0
    temporary: float = 0.0
    others: float = 1.0


def more_for(saved: float, allocated: float, context: float, slack: float, temporary: float = 0.0) -> More:
    """The bound that is nearest where about so many bytes are saved, and so many temporary, of so many that are allocated."""
    own, passing = MEMORY["saved_activations"] * saved, MEMORY["largest_temporary"] * temporary
    others = _others_bytes(allocated, context, slack)
    every = math.hypot(own, passing, others)
    if own + passing <= 0.0:
        return More()
    counted = CENTRAL / every / (1 + slack)
    return More(
        saved=counted * MEMORY["saved_activations"] * own, temporary=counted * MEMORY["largest_temporary"] * passing, others=others / every
    )


def least_upper_bytes(allocated: float, context: float, slack: float, more: More | None = None) -> float:
    """The least that the upper end of an interval is, of memory of which so much is allocated. slack: share of it that the allocator holds
    besides; context: the framework's bytes. more: in which some bytes count for more; by default all are alike, whatever they are
    for."""
    x = more or More()
    off = _others_bytes(allocated / (1 + max(x.saved, x.temporary)), context, slack)
    return allocated * (1 + slack) + context + CENTRAL * x.others * off


def _others_bytes(allocated: float, context: float, slack: float) -> float:
    """The standard deviation of what is there beside what the program allocates."""
    return math.hypot(MEMORY["framework_context"] * context, MEMORY["allocator_slack"] * slack * allocated)


def room_bytes(limit: float, context: float, slack: float, more: More | None = None) -> float:
    """What may be allocated at most, if the upper end of the interval is to be within a limit: the inverse of least_upper_bytes."""
    left, by_one, x = limit - context, 1 + slack, more or More()
    fixed, share = CENTRAL * x.others * MEMORY["framework_context"] * context, CENTRAL * x.others * MEMORY["allocator_slack"] * slack
    share /= 1 + max(x.saved, x.temporary)
    square = by_one**2 - share**2
    inside = by_one**2 * left**2 - square * (left**2 - fixed**2)
    return (by_one * left - math.sqrt(max(0.0, inside))) / square


def interval(value: float, spread: float) -> tuple[float, float]:
    """The ends of the interval of 80% about a value, in its unit; spread is relative."""
    factor = math.exp(CENTRAL * spread)
    return value / factor, value * factor
