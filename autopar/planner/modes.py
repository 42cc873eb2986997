"""What of a block runs again in backward: spans of its operators, at several prices of memory.

    cost      what runs again costs its forward seconds; what is kept costs its bytes times the price
    keep(k)   the storages that operator k keeps for backward, each at the last operator of the block that keeps it
    span      the storages that enter it, and the forward time of its operators (see `again_s`)

For one price the best spans are a shortest path over the operators of the block. Two points of the block's Pareto set (seconds that
run again, bytes kept) have a price at which they cost the same; what is best at that price lies between them, or nothing does. No
operator is named here: that softmax, dropout and activation functions run again and matrix products do not follows from their prices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from autopar.ir import Span, refs
from autopar.measure.launches import AGAIN
from autopar.planner.liveness import Liveness
from autopar.planner.price import Ledger
from cost_models.uncertainty import More

__all__ = ["RECOMPUTES", "Mode", "Recompute", "Unsure", "again_s", "run_again", "spans_at_prices"]

POINTS = 3  # of a block's Pareto set between nothing and all of it running again
Table = NDArray[numpy.float64]
SIMPLER_S = 1e-9  # of each operator and each span that runs again: of equal ones the fewer and shorter


class Unsure(NamedTuple):
    """Of the most that a pass needs: saved activations beyond what earlier pieces keep, and temporaries, in bytes."""

    saved: float = 0.0
    temporary: float = 0.0

    def counted(self, nbytes: float, more: More) -> float:
        """So many bytes, of which these count for more."""
        return nbytes + more.saved * self.saved + more.temporary * self.temporary


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to run a piece. again_s: seconds of what runs again in backward, for one micro-batch. kept_bytes: between forward and
    backward. The most beside what is kept of earlier pieces: forward_bytes, while its forward pass runs; backward_bytes, while its
    backward pass does, gradients included; later_bytes, without gradients; unsure: of these three. spans: what runs again, as operators
    counted from the piece's first."""

    name: str
    again_s: float = 0.0
    kept_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    later_bytes: float = 0.0
    unsure: tuple[Unsure, Unsure, Unsure] = (Unsure(), Unsure(), Unsure())
    spans: tuple[Span, ...] = ()

    def with_more(self, more: More) -> Mode:
        """What is kept, and what a pass needs, with more for what is less certain; a pass needs no less than is kept."""
        kept = self.kept_bytes * (1 + more.saved)
        passes = (self.forward_bytes, self.backward_bytes, self.later_bytes)
        forward, backward, later = (max(kept, x.counted(n, more)) for x, n in zip(self.unsure, passes, strict=True))
        return replace(self, kept_bytes=kept, forward_bytes=forward, backward_bytes=backward, later_bytes=later)


def run_again(ledger: Ledger, liveness: Liveness, span: Span) -> Span:
    """The operators of a span that do run. Where the recipe stops early, nothing runs behind the last operator that keeps something, nor
    that one if it keeps nothing but its operands."""
    stop = span.stop
    if ledger.stops_early:
        while stop > span.start and not liveness.keeps(stop - 1):
            stop -= 1
        if stop > span.start and liveness.keeps_operands_alone(stop - 1):
            stop -= 1
    return Span(span.start, stop)


def again_s(ledger: Ledger, liveness: Liveness, span: Span) -> float:
    """Seconds of running a span again."""
    again = run_again(ledger, liveness, span)
    forward, _, _ = ledger.seconds(range(again.start, again.stop))
    return forward


def issued_s(ledger: Ledger, liveness: Liveness, block: Span, spans: Sequence[Span]) -> float:
    """Seconds by which the host, kept by the checkpoints of spans of a block that run again, is later than without: it is ahead of the
    device by what the device takes longer for the block's backward pass."""
    if not ledger.stops_early or not spans or not ledger.launch_s:
        return 0.0
    costs = ledger.costs[block.start : block.stop]
    ahead_s = sum(c.backward_s for c in costs) - sum(c.host_s[1] for c in costs)
    return max(0.0, kept_s(ledger, liveness, spans) - max(0.0, ahead_s))


def kept_s(ledger: Ledger, liveness: Liveness, spans: Sequence[Span]) -> float:
    """Seconds that the checkpoints of spans that run again keep a host with, beside the launches of their operators."""
    once, each = AGAIN
    return ledger.launch_s * sum(once + each * len(run_again(ledger, liveness, span)) for span in spans)


def spans_at_prices(ledger: Ledger, liveness: Liveness, block: Span, points: int = POINTS) -> list[tuple[Span, ...]]:
    """Spans of a block that run again, of the points of its Pareto set between nothing and all of it; the fewest bytes last. Worked out
    once for a ledger."""
    if (block, points) not in ledger.spans_again:
        ledger.spans_again[block, points] = _at_prices(ledger, liveness, block, points)
    return ledger.spans_again[block, points]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """A kind of modes. name: as it is pinned. offers: of a rank's ledger and liveness and the span of a block, the ways of the kind in
    which the block may run, each as the spans of its operators that run again in backward; () keeps everything. What each costs and keeps
    follows from its spans."""

    name: str
    offers: Callable[[Ledger, Liveness, Span], Sequence[tuple[Span, ...]]]


RECOMPUTES: dict[str, Recompute] = {
    row.name: row
    for row in (
        Recompute(name="none", offers=lambda ledger, liveness, block: [()]),
        Recompute(name="selective", offers=lambda ledger, liveness, block: spans_at_prices(ledger, liveness, block)),
        Recompute(name="full", offers=lambda ledger, liveness, block: [(block,)]),
    )
}
"""The kinds of modes. A new one is one entry."""


def _at_prices(ledger: Ledger, liveness: Liveness, block: Span, points: int) -> list[tuple[Span, ...]]:
    table = _Table(ledger, liveness, block)
    none, full = table.point(()), table.point((block,))
    found = {(): none, (block,): full}
    gaps = [(none, full)]
    while gaps and len(found) < 2 + points:
        a, b = gaps.pop(0)
        if b.kept >= a.kept or b.seconds <= a.seconds:
            continue
        price = (b.seconds - a.seconds) / (a.kept - b.kept)
        best = table.point(table.best(price))
        if best.spans not in found and best.cost(price) < a.cost(price) * (1 - 1e-6) and a.kept > best.kept > b.kept:
            found[best.spans] = best
            gaps += [(a, best), (best, b)]
    inner = [p for spans, p in found.items() if spans not in ((), (block,))]
    return [p.spans for p in sorted(inner, key=lambda p: -p.kept)]


@dataclass(frozen=True, slots=True)
class _Point:
    spans: tuple[Span, ...]
    seconds: float
    kept: int

    def cost(self, price: float) -> float:
        return self.seconds + price * self.kept


class _Table:
    """Seconds and bytes of every operator and span of a block."""

    def __init__(self, ledger: Ledger, liveness: Liveness, block: Span) -> None:
        self.ledger, self.liveness, self.block = ledger, liveness, block
        outside = self.outside = liveness.kept_outside(block)
        last: dict[str, int] = {}
        for k in range(block.start, block.stop):
            last.update(dict.fromkeys(liveness.saved[k], k))
        self.kept = [
            sum(n for x, n in liveness.saved[k].items() if last[x] == k and x not in outside) for k in range(block.start, block.stop)
        ]
        self.spans = self._priced(outside, last)

    def _priced(self, outside: Collection[str], last: dict[str, int]) -> tuple[Table, Table]:
        """For each first operator and each last one, counted from the block's first: seconds and bytes."""
        program, live, block = self.ledger.program, self.liveness, self.block
        n = len(block)
        forward = [self.ledger.seconds((k,))[0] for k in range(block.start, block.stop)]
        reads = [live.crossing(refs(program.ops[k])) for k in range(block.start, block.stop)]
        makes = [live.made(Span(k, k + 1)) for k in range(block.start, block.stop)]
        keeps = [live.keeps(k) for k in range(block.start, block.stop)]
        operands = [live.keeps_operands_alone(k) for k in range(block.start, block.stop)]
        early = self.ledger.stops_early
        seconds, nbytes = numpy.full((n, n), numpy.inf), numpy.zeros((n, n))
        for i in range(n):
            made: set[str] = set()
            entered: set[str] = set()
            due = [0] * n  # bytes that count from the operator that keeps them last
            all_s = ran_s = 0.0  # of all that ran so far; of what must run for what is kept so far
            held = 0
            for j in range(i, n):
                for x, size in reads[j].items():
                    if x in made or x in outside or x in entered:
                        continue
                    entered.add(x)
                    at = last.get(x, block.start + j) - block.start
                    if at >= i:
                        due[max(at, j)] += size
                made |= makes[j]
                if keeps[j]:
                    ran_s = all_s + (0.0 if operands[j] else forward[j])
                all_s += forward[j]
                held += due[j]
                seconds[i, j], nbytes[i, j] = ran_s if early else all_s, held
        return seconds, nbytes

    def best(self, price: float) -> tuple[Span, ...]:
        """The spans that cost least at a price of memory. All of the block in one is not asked for."""
        n = len(self.block)
        seconds, nbytes = self.spans
        simpler = SIMPLER_S * (numpy.arange(n, 0, -1) + 1)  # of spans that begin at each operator and end behind the last of so many
        least = numpy.zeros(n + 1)
        began = [-1] * (n + 1)  # up to an operator: where the last span began (-1: it is kept)
        for stop in range(1, n + 1):
            costs = least[:stop] + seconds[:stop, stop - 1] + price * nbytes[:stop, stop - 1] + simpler[n - stop :]
            if stop == n:
                costs[0] = numpy.inf
            start = int(costs.argmin())
            least[stop] = least[stop - 1] + price * self.kept[stop - 1]
            if costs[start] < least[stop]:
                least[stop], began[stop] = costs[start], start
        found, stop = [], n
        while stop:
            start = began[stop]
            if start >= 0:
                found.append(Span(self.block.start + start, self.block.start + stop))
            stop = start if start >= 0 else stop - 1
        return tuple(reversed(found))

    def point(self, spans: tuple[Span, ...]) -> _Point:
        """As liveness counts it."""
        kept = self.liveness.kept(self.block, spans)
        seconds = sum(again_s(self.ledger, self.liveness, s) for s in spans)
        return _Point(spans, seconds, sum(n for x, n in kept.items() if x not in self.outside))
