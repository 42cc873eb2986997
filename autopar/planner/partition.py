"""Stages and recompute of a whole model: where the pipeline is cut, and which pieces run again in backward.

    minimise   (m - 1) t + sum_k (f_k + b_k) + sum_{k again} f_k            (the pipeline's closed form: fill, drain, slowest stage)
    slowest    t >= sum_{k in s} (f_k + b_k) + sum_{k in s again} f_k        for every stage s
    memory     sum_{k in s} (state_k + w_s kept_k) - w_s sum_{k in s again} freed_k + max_{k in s} temporary_k <= limit
    part       every stage has something to train

m: micro-batches, w_s: micro-batches in flight on stage s. Solved exactly: what a stage [i, j) must run again to fit is a small
knapsack of its own (`_Stages.again`; pieces that are alike are counted, not told apart); given a limit on t, the cuts that run the
least again are a shortest path over (stages, pieces), and of these those with the smallest t; the limit is then lowered below the t
that was found, until nothing better can come. A run of 100 equal layers is as easy as one of 10.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import Infeasible
from autopar.planner.solver import Outcome

__all__ = ["Partition", "Piece", "least_bytes", "partition", "peak_bytes"]

GIB = float(2**30)
KNAPSACK_NODES = 5000
GAP = 1e-5  # relative, to which the cuts are proven
ROUNDS = 400  # limits on the slowest stage that are tried for one candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One segment as the program sees it. state_bytes: parameters, gradients and optimizer states of what first appears in
    it. kept_bytes: activations saved by one micro-batch; freed_bytes: how much less if it is recomputed (0: it cannot be).
    temporary_bytes: the most that is alive only while it runs. trains: it reads a trainable parameter."""

    forward_s: float
    backward_s: float
    state_bytes: float
    kept_bytes: float
    freed_bytes: float = 0.0
    temporary_bytes: float = 0.0
    trains: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """cuts: the index of the first segment of every stage but the first. recomputed: indices of segments."""

    cuts: tuple[int, ...]
    recomputed: frozenset[int]
    outcome: Outcome


def partition(
    pieces: tuple[Piece, ...],
    *,
    stages: int,
    micro_batches: int,
    in_flight: tuple[int, ...],
    limit_bytes: float,
    recompute: str,
    worth_s: float = math.inf,
    cuts: tuple[int, ...] | None = None,
    rounds: int = ROUNDS,
) -> Partition | None:
    """The best stages and recomputation. recompute: 'none', 'full' (all that can be) or 'auto'. worth_s: an objective that is
    not below it is of no use; None if there is no other. cuts: where they are decided already. rounds: how often the limit on the
    slowest stage may be lowered; beyond it the answer is out of budget, with its bound. Raises Infeasible when no assignment fits into
    limit_bytes."""
    start = time.perf_counter()
    spans = _Stages(pieces, stages, in_flight, limit_bytes, recompute, cuts)
    total_s = spans.busy[-1] + (sum(p.forward_s for p in pieces if p.freed_bytes > 0) if recompute == "full" else 0.0)
    rest = micro_batches - 1
    evenly_s = max(total_s / stages, max(p.forward_s + p.backward_s for p in pieces))

    def objective(path: _Path) -> float:
        return rest * path.slowest_s + total_s + path.again_s

    best: _Path | None = None
    if cuts is None and least_bytes(pieces, stages, in_flight, recompute) > limit_bytes:
        raise Infeasible(f"stages: no cuts of {len(pieces)} segments into {stages} stages fit into {limit_bytes / GIB:.2f} GiB")
    if worth_s < math.inf and rest:
        best = spans.path((worth_s - total_s) / rest)  # a slower stage alone would cost more than it is worth
        if best is None or rest * max(evenly_s, (total_s + best.again_s) / stages) + total_s + best.again_s >= worth_s:
            return None
    limit_s = evenly_s
    while best is None and limit_s < 2 * total_s:  # the first limit under which there is an answer
        limit_s *= 1.1
        best = spans.path(limit_s)
    best = best or spans.path(math.inf)
    if best is None:
        raise Infeasible(f"stages: no cuts of {len(pieces)} segments into {stages} stages fit into {limit_bytes / GIB:.2f} GiB")
    limit_s = (objective(best) - total_s) / rest * (1 + 1e-12) if rest else math.inf
    bound, done = 0.0, False
    for _ in range(rounds):
        path = spans.path(limit_s)
        if path is None:
            bound, done = objective(best), True
            break
        if objective(path) < objective(best):
            best = path
        again_s = path.again_s  # whatever comes now runs no less again
        bound = min(rest * max(evenly_s, (total_s + again_s) / stages) + total_s + again_s, objective(best))
        if bound >= min(objective(best), worth_s) * (1 - GAP):
            done = True
            break
        limit_s = path.slowest_s * (1 - 1e-12)
    if spans.slack_s:
        bound, done = max(0.0, bound - (rest + stages) * spans.slack_s), False
    if bound >= worth_s:
        return None
    outcome = Outcome(
        objective=objective(best), bound=bound, gap=(objective(best) - bound) / objective(best) if objective(best) else 0.0,
        seconds=time.perf_counter() - start, solver="dynamic program", variables=0, constraints=0,
        status="solved" if done else "out of budget",
    )  # fmt: skip
    return Partition(cuts=best.cuts, recomputed=spans.recomputed(best.cuts), outcome=outcome)


@dataclass(frozen=True, slots=True)
class _Path:
    again_s: float
    slowest_s: float
    cuts: tuple[int, ...]


class _Stages:
    """What each stage [i, j) takes, worked out when it is first asked for."""

    def __init__(
        self, pieces: Sequence[Piece], stages: int, in_flight: Sequence[int], limit_bytes: float, recompute: str, cuts: Sequence[int] | None
    ) -> None:
        self.pieces, self.stages, self.in_flight, self.limit_bytes, self.pinned = pieces, stages, in_flight, limit_bytes, cuts
        self.may, self.all = recompute != "none", recompute == "full"
        self.kinds: dict[Piece, int] = {}
        self.kind = [self.kinds.setdefault(p, len(self.kinds)) for p in pieces]
        self.busy, self.trained = [0.0], [0]
        for p in pieces:
            self.busy.append(self.busy[-1] + p.forward_s + p.backward_s)
            self.trained.append(self.trained[-1] + p.trains)
        self.state, self.kept = _running([p.state_bytes for p in pieces]), _running([p.kept_bytes for p in pieces])
        self.slack_s = 0.0  # by how much the answer to one of the small knapsacks may be above the least, where one was cut short
        self._known: dict[tuple[object, ...], tuple[float, tuple[tuple[int, int], ...]] | None] = {}
        self._placed: dict[tuple[int, int, int], tuple[float, tuple[tuple[int, int], ...]] | None] = {}

    def again(self, i: int, j: int, s: int) -> tuple[float, tuple[tuple[int, int], ...]] | None:
        """(seconds, how many pieces of which kind) of the least that stage s must run again if it is [i, j); None if it cannot fit."""
        flights = self.in_flight[s]
        place = (i, j, flights)
        if place not in self._placed:
            counts: dict[int, int] = {}
            for k in self.kind[i:j]:
                counts[k] = counts.get(k, 0) + 1
            key = (flights, *sorted(counts.items()))
            if key not in self._known:
                self._known[key] = self._least(i, j, counts, flights)
            self._placed[place] = self._known[key]
        return self._placed[place]

    def _least(self, i: int, j: int, counts: dict[int, int], flights: int) -> tuple[float, tuple[tuple[int, int], ...]] | None:
        spare = max(p.temporary_bytes for p in self.pieces[i:j])
        over = self.state[j] - self.state[i] + flights * (self.kept[j] - self.kept[i]) + spare - self.limit_bytes
        pieces = list(self.kinds)
        can = [(k, n) for k, n in counts.items() if self.may and pieces[k].freed_bytes > 0 and flights]
        if self.all:
            freed = flights * sum(n * pieces[k].freed_bytes for k, n in can)
            return (sum(n * pieces[k].forward_s for k, n in can), tuple(can)) if over <= freed else None
        if over <= 0:
            return 0.0, ()
        found = _knapsack([(pieces[k].forward_s, flights * pieces[k].freed_bytes, n, k) for k, n in can], over)
        if found is None:
            return None
        self.slack_s = max(self.slack_s, found[0] - found[2])
        return found[:2]

    def path(self, limit_s: float) -> _Path | None:
        """The cuts that run the least again, of these those with the fastest slowest stage, no stage above limit_s."""
        count, stages = len(self.pieces), self.stages
        limit_s = limit_s * (1 + 1e-13)
        reach: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]  # placed -> (again, slowest, where the last stage began)
        for s in range(stages):
            ends: dict[int, tuple[float, float, int]] = {}
            before = reach[-1]
            last = s == stages - 1
            for j in [count] if last else range(s + 1, count - stages + s + 2) if self.pinned is None else [self.pinned[s]]:
                best: tuple[float, float, int] | None = None
                for i in range(j - 1, s - 1, -1):
                    busy_s = self.busy[j] - self.busy[i]
                    if busy_s > limit_s:
                        break
                    if i not in before or (stages > 1 and self.trained[j] == self.trained[i]):
                        continue
                    again = self.again(i, j, s)
                    if again is None or busy_s + again[0] > limit_s:
                        continue
                    option = (before[i][0] + again[0], max(before[i][1], busy_s + again[0]), i)
                    if best is None or option < best:
                        best = option
                if best is not None:
                    ends[j] = best
            reach.append(ends)
        if count not in reach[-1]:
            return None
        again_s, slowest_s, _ = reach[-1][count]
        cuts, end = [], count
        for s in range(stages, 1, -1):
            end = reach[s][end][2]
            cuts.append(end)
        fixed_s = sum(p.forward_s for p in self.pieces if p.freed_bytes > 0) if self.all else 0.0
        return _Path(again_s - fixed_s, slowest_s, tuple(reversed(cuts)))

    def recomputed(self, cuts: tuple[int, ...]) -> frozenset[int]:
        """The pieces that the stages of these cuts run again; of those that are alike in a stage the first ones."""
        found = set()
        bounds = (0, *cuts, len(self.pieces))
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
            again = self.again(i, j, s)
            assert again is not None, "a stage of a path fits"
            left = dict(again[1])
            for k in range(i, j):
                if left.get(self.kind[k], 0):
                    left[self.kind[k]] -= 1
                    found.add(k)
        return frozenset(found)


def _running(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for v in values:
        sums.append(sums[-1] + v)
    return sums


def _knapsack(
    items: Sequence[tuple[float, float, int, int]], need: float, nodes: int = KNAPSACK_NODES
) -> tuple[float, tuple[tuple[int, int], ...], float] | None:
    """The cheapest of items (seconds, bytes, how many there are, kind) that come to `need` bytes: (seconds, ((kind, how many), ...), a
    bound from below, which is the seconds unless the nodes ran out), or None if all of them do not. Branch and bound, the cheapest byte
    first."""
    items = sorted(items, key=lambda x: (x[0] / x[1], x))
    after = [sum(nbytes * n for _, nbytes, n, _ in items[k:]) for k in range(len(items) + 1)]
    if after[0] < need:
        return None
    best: tuple[float, tuple[tuple[int, int], ...]] = (math.inf, ())
    visited = 0

    def least_s(k: int, left: float) -> float:
        """If parts of items could be taken."""
        found = 0.0
        for seconds, nbytes, n, _ in items[k:]:
            if left <= nbytes * n:
                return found + seconds * left / nbytes
            found, left = found + seconds * n, left - nbytes * n
        return found

    def take(k: int, left: float, spent: float, chosen: tuple[tuple[int, int], ...]) -> None:
        nonlocal best, visited
        visited += 1
        if left <= 0:
            best = min(best, (spent, chosen))
            return
        if after[k] < left or spent + least_s(k, left) >= best[0] * (1 - 1e-12) or (visited > nodes and best[0] < math.inf):
            return
        seconds, nbytes, n, kind = items[k]
        for taken in range(min(n, math.ceil(left / nbytes)), -1, -1):
            take(k + 1, left - taken * nbytes, spent + taken * seconds, (*chosen, (kind, taken)) if taken else chosen)

    take(0, need, 0.0, ())
    return (*best, best[0] if visited <= nodes else least_s(0, need))


def least_bytes(pieces: tuple[Piece, ...], stages: int, in_flight: tuple[int, ...], recompute: str) -> float:
    """The memory below which there are no cuts: that of the fullest stage of the leanest ones, with all recomputed that can be."""
    freed = [0.0 if recompute == "none" else p.freed_bytes for p in pieces]
    leanest: dict[int, float] = {0: 0.0}  # segments placed -> the fullest of the stages so far
    for s in range(stages):
        total = _running([p.state_bytes + in_flight[s] * (p.kept_bytes - f) for p, f in zip(pieces, freed, strict=True)])
        ends: dict[int, float] = {}
        for j in range(s + 1, len(pieces) + 1):
            spare, best = 0.0, math.inf
            for i in range(j - 1, s - 1, -1):
                spare = max(spare, pieces[i].temporary_bytes)
                if total[j] - total[i] >= best:
                    break
                if i in leanest:
                    best = min(best, max(leanest[i], total[j] - total[i] + spare))
            if best < math.inf:
                ends[j] = best
        leanest = ends
    return leanest[len(pieces)]


def peak_bytes(pieces: tuple[Piece, ...], cuts: tuple[int, ...], recomputed: frozenset[int], in_flight: tuple[int, ...]) -> list[float]:
    """Memory of every stage of given cuts, as the rows state it."""
    bounds = (0, *cuts, len(pieces))
    kept = [p.kept_bytes - (p.freed_bytes if k in recomputed else 0) for k, p in enumerate(pieces)]
    return [
        sum(pieces[k].state_bytes + in_flight[s] * kept[k] for k in range(i, j)) + max(pieces[k].temporary_bytes for k in range(i, j))
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
