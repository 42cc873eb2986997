"""What of a block runs again in backward: spans of its operators, at several prices of memory.

    cost      what runs again costs its forward seconds; what is kept costs its bytes times the price
    keep(k)   the storages that operator k keeps for backward, each at the last operator of the block that keeps it
    span      the storages that enter it, and the forward time of its operators (see `again_s`)

For one price the best spans are a shortest path over the operators of the block. Two points of the block's Pareto set (seconds that
run again, bytes kept) have a price at which they cost the same; what is best at that price lies between them, or nothing does. No
operator is named here: that softmax, dropout and activation functions run again and matrix products do not follows from their prices.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autopar.ir import Span, refs
from autopar.planner.liveness import Liveness
from autopar.planner.price import Ledger

__all__ = ["RECOMPUTES", "Mode", "again_s", "spans_at_prices"]

RECOMPUTES = ("none", "selective", "full")  # the kinds of modes, as pins name them
POINTS = 3  # of a block's Pareto set between nothing and all of it running again
SIMPLER_S = 1e-9  # of each operator and each span that runs again: of equal ones the fewer and shorter


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to run a piece. again_s: seconds of what runs again in backward, for one micro-batch. kept_bytes: between forward and
    backward. The most beside what is kept of earlier pieces: forward_bytes, while its forward pass runs; backward_bytes, while its
    backward pass does, gradients included; later_bytes, without gradients. spans: what runs again, as operators counted from the
    piece's first."""

    name: str
    again_s: float = 0.0
    kept_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    later_bytes: float = 0.0
    spans: tuple[Span, ...] = ()


def again_s(ledger: Ledger, liveness: Liveness, span: Span) -> float:
    """Seconds of running a span again. Where the recipe stops early, nothing runs behind the last operator that keeps something, nor that
    one if it keeps nothing but its operands."""
    stop = span.stop
    if ledger.stops_early:
        while stop > span.start and not liveness.keeps(stop - 1):
            stop -= 1
        if stop > span.start and liveness.keeps_operands_alone(stop - 1):
            stop -= 1
    forward, _, _ = ledger.seconds(range(span.start, stop))
    return forward


def spans_at_prices(ledger: Ledger, liveness: Liveness, block: Span, points: int = POINTS) -> list[tuple[Span, ...]]:
    """Spans of a block that run again, of the points of its Pareto set between nothing and all of it; the fewest bytes last."""
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

    def _priced(self, outside: Collection[str], last: dict[str, int]) -> list[list[tuple[float, int]]]:
        """For each first operator and each last one, counted from the block's first: seconds and bytes."""
        program, live, block = self.ledger.program, self.liveness, self.block
        forward = [self.ledger.seconds((k,))[0] for k in range(block.start, block.stop)]
        reads = [live.crossing(refs(program.ops[k])) for k in range(block.start, block.stop)]
        makes = [live.made(Span(k, k + 1)) for k in range(block.start, block.stop)]
        early = self.ledger.stops_early
        found = []
        for i in range(len(block)):
            made: set[str] = set()
            entering: dict[str, int] = {}
            seconds = ran = 0.0  # of all that ran so far; of what must run for what is kept so far
            row = []
            for j in range(i, len(block)):
                k = block.start + j
                entering |= {x: n for x, n in reads[j].items() if x not in made and x not in outside}
                made |= makes[j]
                if live.keeps(k):
                    ran = seconds + (0.0 if live.keeps_operands_alone(k) else forward[j])
                seconds += forward[j]
                nbytes = sum(n for x, n in entering.items() if last.get(x, k) <= k and (x not in last or last[x] >= block.start + i))
                row.append((ran if early else seconds, nbytes))
            found.append(row)
        return found

    def best(self, price: float) -> tuple[Span, ...]:
        """The spans that cost least at a price of memory. All of the block in one is not asked for."""
        n = len(self.block)
        least: list[tuple[float, int]] = [(0.0, -1)]  # up to an operator: cost, and where the last span began (-1: it is kept)
        for stop in range(1, n + 1):
            option = (least[stop - 1][0] + price * self.kept[stop - 1], -1)
            for start in range(stop):
                if (start, stop) == (0, n):
                    continue
                seconds, nbytes = self.spans[start][stop - 1 - start]
                cost = least[start][0] + seconds + price * nbytes + SIMPLER_S * (stop - start + 1)
                if cost < option[0]:
                    option = (cost, start)
            least.append(option)
        found, stop = [], n
        while stop:
            start = least[stop][1]
            if start >= 0:
                found.append(Span(self.block.start + start, self.block.start + stop))
            stop = start if start >= 0 else stop - 1
        return tuple(reversed(found))

    def point(self, spans: tuple[Span, ...]) -> _Point:
        """As liveness counts it."""
        kept = self.liveness.kept(self.block, spans)
        seconds = sum(again_s(self.ledger, self.liveness, s) for s in spans)
        return _Point(spans, seconds, sum(n for x, n in kept.items() if x not in self.outside))
