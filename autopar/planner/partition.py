"""Stages and modes of a whole model: where the pipeline is cut, and what of each piece runs again in backward.

    minimise   (m - 1) t + sum_k (f_k + b_k + again_k)              (the pipeline's closed form: fill, drain, slowest stage)
    slowest    t >= sum_{k in s} (f_k + b_k + again_k)              for every stage s
    memory     stage_bytes(the pieces of s in their modes) <= limit for every stage s                               stage_account
    part       every stage has something to train

m: micro-batches; again_k: seconds that the mode of piece k costs. What a stage [i, j) must run again to fit is a small choice of its own:
how many pieces of each run of equal ones are in which mode (`stage_modes`). Given a limit on t, the cuts that run the least again
are a shortest path over (stages, pieces), and of these those with the smallest t; the limit is then lowered below the t that was found,
until nothing better can come. A run of 100 equal layers is as easy as one of 10. Where all layers differ there are thousands of stages:
each counts for what it must run again at least (`_Stages.least_s`), and what it does run again is found out when a path goes through it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy
from numpy.typing import NDArray

from autopar.errors import Infeasible
from autopar.planner.modes import Mode
from autopar.planner.solver import Outcome, OutOfBudget
from autopar.planner.stage_account import NODES as NODES_OF_MODES
from autopar.planner.stage_account import Account, Counts, EveryStage, Piece, Run, allowed, stage_modes, steps_of

__all__ = ["FEWER", "UNSOLVED", "KnownModes", "Over", "Partition", "Place", "Refused", "TooLarge", "least_bytes", "partition"]

GIB = float(2**30)
NEAR = 1e-9  # relative, what sums of floats are off by
GAP = 1e-5  # relative, to which the cuts are proven
ROUNDS = 400  # limits on the slowest stage that are tried for one candidate
UNSOLVED = Outcome(objective=0.0, bound=0.0, gap=0.0, seconds=0.0, solver="none", variables=0, constraints=0)  # of stages as given
NODES = 2000  # places of cuts that are looked at around the best ones
A_SEARCH = 20  # as many as which the search for the modes of one stage counts for
SEARCHED = 20_000  # nodes of the searches for the modes of the stages of one candidate: each takes as many as it likes until these are gone
FEWER = 20  # and then so many each
StepTime = Callable[[tuple[int, ...], tuple[int, ...]], float]  # of cuts and modes
Place = tuple[int, ...]  # of a stage: its first piece, the first one behind it, its number; of several: of each, and the rank
Over = Mapping[Place, float]  # bytes
Refused = Mapping[Place, Collection[tuple[int, ...]]]  # modes of its pieces
Again = tuple[float, tuple[tuple[int, ...], ...]]  # seconds; of each run how many pieces are in which of the allowed modes
KnownModes = dict[tuple[object, ...], tuple[Again | None, float]]  # None if none fit; the seconds that they are at least
Seconds = NDArray[numpy.float64]


class TooLarge(Infeasible):
    """Whatever the cuts and modes, there is a stage that does not fit. least_bytes: as `least_bytes` says."""

    def __init__(self, message: str, least_bytes: float) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """cuts: the index of the first piece of every stage but the first. modes: of every piece, as an index of its modes."""

    cuts: tuple[int, ...]
    modes: tuple[int, ...]
    outcome: Outcome

    @property
    def recomputed(self) -> frozenset[int]:
        """The pieces of which something runs again."""
        return frozenset(k for k, mode in enumerate(self.modes) if mode)


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
    over: Over | None = None,
    refused: Refused | None = None,
    step_s: StepTime | None = None,
    least_ends_s: float = 0.0,
    nodes: int = NODES_OF_MODES,
    known: KnownModes | None = None,
) -> Partition | None:
    """The best stages and modes. recompute: 'none', 'selective', 'full' (each where a piece has such a mode) or 'auto'. worth_s: an
    objective that is not below it is of no use; None if there is no other. cuts: where they are decided already. rounds: how often the
    limit on the slowest stage may be lowered; beyond it the answer is out of budget, with its bound. over: what certain stages need
    beyond what their pieces say; refused: modes of certain stages that are known not to fit. step_s: of cuts and modes, with the terms
    that the objective leaves out, which come to least_ends_s at least: of cuts that could be as good as the best ones those with the
    fastest step are taken (`_Stages.nearby`). nodes: of the search for the modes of each stage (`stage_modes`): the bound is one whatever
    they are. known: modes that were looked for before, of the same pieces. Raises Infeasible when nothing fits into limit_bytes,
    OutOfBudget when nothing was found that does."""
    start = time.perf_counter()
    known = {} if known is None else known
    spans = _Stages(pieces, stages, in_flight, micro_batches, limit_bytes, recompute, cuts, over or {}, refused or {}, nodes, known)
    total_s = spans.busy[-1]
    rest = micro_batches - 1
    evenly_s = max(total_s / stages, max(b - a for a, b in zip(spans.busy, spans.busy[1:], strict=False)))

    def objective(path: _Path) -> float:
        return rest * path.slowest_s + total_s + path.again_s

    def at_least(path: _Path) -> float:
        """The objective, were the stages as fast as each other."""
        return rest * max(evenly_s, (total_s + path.again_s) / stages) + total_s + path.again_s

    def descent(first: _Path | None, limit_s: float, *, low: bool = False) -> tuple[_Path | None, float, bool]:
        """The best path, what none is below, and whether that is proven to the gap, from a first one and a limit on the slowest stage on.
        low: of what stages run again at least, where that is less than what was found."""
        best, bound = first, 0.0
        for _ in range(rounds):
            path = spans.path(limit_s, low=low)
            if path is None:
                return best, objective(best) if best else math.inf, True
            if best is None or objective(path) < objective(best):
                best = path
            bound = min(at_least(path), objective(best))  # whatever comes now runs no less again
            if bound >= min(objective(best), worth_s) * (1 - GAP):
                return best, bound, True
            limit_s = path.slowest_s * (1 - 1e-12)
        return best, bound, False

    best: _Path | None = None
    if cuts is None and not spans.could_fit():
        text = f"stages: no cuts of {len(pieces)} segments into {stages} stages fit into {limit_bytes / GIB:.2f} GiB"
        raise TooLarge(text, spans.least_bytes())
    least_s = rest * evenly_s + total_s
    if worth_s < math.inf and rest:
        limit_s = (worth_s - total_s) / rest  # a slower stage alone would cost more than it is worth
        best = spans.path(limit_s)
        if best is None or at_least(best) >= worth_s:
            low = best if spans.exact else spans.path(limit_s, low=True)
            if low is None or at_least(low) >= worth_s:
                return None
    limit_s = evenly_s
    while best is None and limit_s < 2 * total_s:  # the first limit under which there is an answer
        limit_s *= 1.1
        best = spans.path(limit_s)
    best = best or spans.path(math.inf)
    if best is None:
        text = f"stages: no cuts of {len(pieces)} segments into {stages} stages fit into {limit_bytes / GIB:.2f} GiB"
        raise Infeasible(text) if spans.exact else OutOfBudget(text, least_s)
    limit_s = (objective(best) - total_s) / rest * (1 + 1e-12) if rest else math.inf
    best, bound, done = descent(best, limit_s)
    assert best is not None, "it began with one"
    if not spans.exact:
        _, low_s, low_done = descent(None, limit_s, low=True)
        bound = min(bound, low_s)
        done = done and low_done and bound >= objective(best) * (1 - GAP)
    if bound >= worth_s:
        return None
    outcome = Outcome(
        objective=objective(best), bound=bound, gap=(objective(best) - bound) / objective(best) if objective(best) else 0.0,
        seconds=time.perf_counter() - start, solver="dynamic program", variables=0, constraints=0,
        status="solved" if done else "out of budget",
    )  # fmt: skip
    chosen = best.cuts
    if step_s is not None and cuts is None and stages > 1:
        chosen = spans.nearby(best.cuts, micro_batches, evenly_s, step_s, least_ends_s)
    return Partition(cuts=chosen, modes=spans.modes(chosen), outcome=outcome)


def least_bytes(pieces: tuple[Piece, ...], stages: int, in_flight: tuple[int, ...], micro_batches: int, recompute: str) -> float:
    """The memory below which there are no cuts: that of the fullest stage of the leanest ones."""
    return _Stages(pieces, stages, in_flight, micro_batches, math.inf, recompute, None, {}, {}).least_bytes()


@dataclass(frozen=True, slots=True)
class _Path:
    again_s: float
    slowest_s: float
    cuts: tuple[int, ...]


def _counts(account: Account, modes: Sequence[int]) -> Counts:
    """Of each run how many pieces are in which of its allowed modes. modes: of each piece, as an index of its modes."""
    found, k = [], 0
    for run in account.runs:
        here = modes[k : k + run.count]
        found.append(tuple(here.count(m) for m in run.modes))
        k += run.count
    return tuple(found)


@dataclass
class _Stages:
    """What each stage [i, j) takes, worked out when it is first asked for. exact: whether the modes of all stages that were looked at are
    the best ones, and those that do not fit are known not to: else their search was cut short. searched: nodes of these searches."""

    pieces: Sequence[Piece]
    stages: int
    in_flight: Sequence[int]
    micro_batches: int
    limit_bytes: float
    recompute: str
    pinned: Sequence[int] | None
    over: Over
    refused: Refused
    nodes: int = NODES_OF_MODES
    known: KnownModes = field(default_factory=dict)
    exact: bool = True
    searched: int = 0
    busy: list[float] = field(default_factory=lambda: [0.0])
    trained: list[int] = field(default_factory=lambda: [0])
    _here: set[tuple[object, ...]] = field(default_factory=set)  # what is known of these stages
    _at: dict[Place, tuple[Again | None, float]] = field(default_factory=dict)  # as what is known
    _modes: dict[Place, tuple[int, ...]] = field(default_factory=dict)
    _every: dict[str, EveryStage] = field(default_factory=dict)  # by modes
    _bytes: dict[tuple[str, int], Seconds] = field(default_factory=dict)  # by modes and micro-batches in flight
    _fits: dict[tuple[str, int], NDArray[numpy.bool_]] = field(default_factory=dict)  # the same
    _least: dict[int, Seconds] = field(default_factory=dict)  # by micro-batches in flight: of [i, j), seconds
    # by micro-batches in flight and whether at least: of runs, seconds (not known yet: nan)
    _tables: dict[tuple[int, bool], Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds: dict[Piece, int] = {}
        self.kind = [kinds.setdefault(p, len(kinds)) for p in self.pieces]
        self.of_kind = list(kinds)
        self.may = [allowed(p.modes, self.recompute) for p in self.of_kind]
        least_s = [min(p.modes[m].again_s for m in may) for p, may in zip(self.of_kind, self.may, strict=True)]
        self.fastest = [
            max(k for k, m in enumerate(may) if p.modes[m].again_s == s) for p, may, s in zip(self.of_kind, self.may, least_s, strict=True)
        ]
        for p, kind in zip(self.pieces, self.kind, strict=True):
            self.busy.append(self.busy[-1] + p.forward_s + p.backward_s + least_s[kind])
            self.trained.append(self.trained[-1] + p.trains)
        self.of_span, self.runs = _runs_of_spans(tuple(self.kind))
        ends, trained = numpy.array(self.busy), numpy.array(self.trained)
        self.ends = ends
        self.between = ends[None, :] - ends[:, None]  # from the first piece of a stage to the one behind it: seconds
        self.open = (self.of_span >= 0) & ((self.stages == 1) | (trained[None, :] > trained[:, None]))
        self.named: dict[int, list[tuple[int, int]]] = {}  # the stages of which something is known that their pieces do not say
        for i, j, s in dict.fromkeys((*self.over, *self.refused)):
            self.named.setdefault(s, []).append((i, j))

    def account(self, runs: Sequence[tuple[int, int]], s: int) -> Account:
        return Account(
            runs=tuple(Run(piece=self.of_kind[k], count=n, modes=self.may[k]) for k, n in runs), in_flight=self.in_flight[s],
            micro_batches=self.micro_batches,
        )  # fmt: skip

    def fits(self, s: int, modes: str) -> NDArray[numpy.bool_]:
        """Of stage s as [i, j): whether it can fit in any modes ('leanest'), or does if nothing runs again beyond what must ('fastest')."""
        key = modes, self.in_flight[s]
        if key not in self._fits:
            self._fits[key] = self._stage_bytes(self.in_flight[s], modes) <= self.limit_bytes
        return self._fits[key]

    def _stage_bytes(self, in_flight: int, modes: str) -> Seconds:
        """modes: 'leanest', 'fastest', or 'apart' where a piece needs no more in a pass than in its leanest mode, and what the others keep
        is that of their fastest."""
        if modes not in self._every:
            of_kind = []
            for p, may, fastest in zip(self.of_kind, self.may, self.fastest, strict=True):
                least, plain = _leanest([p.modes[m] for m in may]), p.modes[may[fastest]]
                apart = replace(least, kept_bytes=plain.kept_bytes)
                of_kind.append({"leanest": least, "fastest": plain, "apart": apart}[modes])
            each = [of_kind[k] for k in self.kind]
            self._every[modes] = EveryStage(self.pieces, each, self.micro_batches, first=self.stages == 1)
        if (modes, in_flight) not in self._bytes:
            self._bytes[modes, in_flight] = self._every[modes].bytes(in_flight)
        return self._bytes[modes, in_flight]

    def least_s(self, in_flight: int) -> Seconds:
        """What stages [i, j) must run again at least: what is missing where they need most, by steps along the hulls of their pieces, the
        cheapest byte first, parts of steps included, as if each byte were kept by all micro-batches in flight."""
        if in_flight not in self._least:
            lacks = numpy.maximum(self._stage_bytes(in_flight, "apart") - self.limit_bytes, 0.0) / in_flight
            lacks[numpy.isinf(lacks)] = 0.0  # no stages
            found, kinds = numpy.zeros_like(lacks), numpy.array(self.kind)
            steps = [
                (step.seconds / step.nbytes, step.nbytes, step.run)
                for kind, (p, may, fastest) in enumerate(zip(self.of_kind, self.may, self.fastest, strict=True))
                for step in steps_of(kind, Run(piece=p, count=1, modes=may), fastest)
            ]
            for rate, nbytes, kind in sorted(steps):
                before = numpy.concatenate(([0], numpy.cumsum(kinds == kind)))
                taken = numpy.minimum(lacks, nbytes * (before[None, :] - before[: len(lacks), None]))
                numpy.maximum(taken, 0.0, out=taken)
                found += rate * taken
                lacks -= taken
            found[lacks > NEAR * self.limit_bytes] = math.inf
            self._least[in_flight] = found * (1 - NEAR)
        return self._least[in_flight]

    def again(self, i: int, j: int, s: int) -> Again | None:
        """The least that stage s must run again if it is [i, j), beyond what its pieces must in any case: seconds, and for each run of
        equal pieces how many are in which of the allowed modes. None if it cannot fit."""
        place = (i, j, s)
        if place not in self._at:
            self._at[place] = self._again_at(i, j, s)
        return self._at[place][0]

    def _again_at(self, i: int, j: int, s: int) -> tuple[Again | None, float]:
        place = (i, j, s)
        over, refused = self.over.get(place, 0.0), self.refused.get(place, ())
        if not over and not refused:
            if self.fits(s, "fastest")[i, j]:
                of = self.runs[self.of_span[i, j]]
                return (0.0, tuple(tuple(n if k == self.fastest[kind] else 0 for k in range(len(self.may[kind]))) for kind, n in of)), 0.0
            if not self.fits(s, "leanest")[i, j]:
                return None, math.inf
        return self._again(int(self.of_span[i, j]), s, over, refused)

    def _again(self, which: int, s: int, over: float, refused: Collection[tuple[int, ...]]) -> tuple[Again | None, float]:
        """Of a stage of these runs; and the seconds that it must run again at least."""
        account = self.account(self.runs[which], s)
        counted = frozenset(_counts(account, modes) for modes in refused)
        room = self.limit_bytes - over
        key = (self.in_flight[s], room, counted, which, self.nodes)
        if key not in self.known:
            self.known[key] = self._searched(account, room, counted)
        again, at_least_s = self.known[key]
        if key not in self._here:
            self._here.add(key)
            self.exact = self.exact and (math.inf if again is None else again[0]) == at_least_s
            if not over and not counted:
                for low, seconds in ((False, math.inf if again is None else again[0]), (True, at_least_s)):
                    self._table(s, low)[which] = seconds
        return again, at_least_s

    def _searched(self, account: Account, room: float, refused: frozenset[Counts]) -> tuple[Again | None, float]:
        nodes = self.nodes if self.searched < SEARCHED else min(self.nodes, FEWER)
        try:
            found = stage_modes(account, room, nodes, refused)
        except OutOfBudget as budget:
            self.searched += nodes
            return None, budget.bound
        if found is None:
            return None, math.inf
        self.searched += found.visited
        return (found.again_s, found.counts), found.again_s - found.slack_s

    def _table(self, s: int, low: bool) -> Seconds:
        return self._tables.setdefault((self.in_flight[s], low), numpy.full(len(self.runs), numpy.nan))

    def _seconds(self, s: int, rows: slice, columns: slice, wanted: NDArray[numpy.bool_], low: bool) -> Seconds:
        """What stages [i, j) must run again, of those that are wanted, as far as it is known; infinite where they cannot fit."""
        plain = self.fits(s, "fastest")[rows, columns]
        between = wanted & ~plain
        between &= self.fits(s, "leanest")[rows, columns]
        found = numpy.where(wanted & plain, 0.0, math.inf)
        if between.any():
            known = self._table(s, low)[self.of_span[rows, columns]]
            least_s = self.least_s(self.in_flight[s])[rows, columns]
            numpy.copyto(found, numpy.where(numpy.isnan(known), least_s, known), where=between)
        for i, j in self.named.get(s, ()):
            inside = rows.start <= i < rows.stop and columns.start <= j < columns.stop
            if inside and wanted[i - rows.start, j - columns.start] and (i, j, s) in self._at:
                again, at_least_s = self._at[i, j, s]
                found[i - rows.start, j - columns.start] = at_least_s if low else math.inf if again is None else again[0]
        return found

    def _at_least_s(self, i: int, j: int, s: int) -> float:
        """What stage s must run again if it is [i, j), as far as that is known without a search; infinite if it cannot fit."""
        if (i, j, s) in self._at:
            return self._at[i, j, s][1]
        if self.fits(s, "fastest")[i, j]:
            return 0.0
        return float(self.least_s(self.in_flight[s])[i, j]) if self.fits(s, "leanest")[i, j] else math.inf

    def path(self, limit_s: float, *, low: bool = False) -> _Path | None:
        """The cuts that run the least again, of these those with the fastest slowest stage, no stage above limit_s. low: by what stages run
        again at least, as far as that is known."""
        path = self._path(limit_s, low)
        while path is not None and not low:
            here = len(self._here)
            for s, (i, j) in enumerate(pairwise((0, *path.cuts, len(self.pieces)))):
                self.again(i, j, s)
            if len(self._here) == here:
                break
            path = self._path(limit_s, low)
        return path

    def _path(self, limit_s: float, low: bool) -> _Path | None:
        """By what is known of stages. All stages [i, j) with the same number are looked at together."""
        count, stages = len(self.pieces), self.stages
        limit_s = limit_s * (1 + 1e-13)
        again_s, slowest_s = numpy.full(count + 1, math.inf), numpy.full(count + 1, math.inf)
        again_s[0] = slowest_s[0] = 0.0  # of what is placed so far
        began = []  # of each stage: its first piece, by the first piece behind it
        for s in range(stages):
            first, behind = (count, count + 1) if s == stages - 1 else (s + 1, count - stages + s + 2)
            if s < stages - 1 and self.pinned is not None:
                first, behind = self.pinned[s], self.pinned[s] + 1
            there = numpy.flatnonzero(again_s < math.inf)
            if not len(there):
                return None
            if s < stages - 1:  # no stage that may begin by then ends later
                behind = max(first + 1, min(behind, int(numpy.searchsorted(self.ends, self.busy[there[-1]] + limit_s, side="right"))))
            rows, columns = slice(int(there[0]), int(there[-1]) + 1), slice(first, behind)
            busy_s = self.between[rows, columns]
            wanted = self.open[rows, columns] & (busy_s <= limit_s) & (again_s[rows, None] < math.inf)
            more_s = self._seconds(s, rows, columns, wanted, low)
            busy_s = busy_s + more_s
            fits = wanted & (busy_s <= limit_s)
            total_s = numpy.where(fits, again_s[rows, None] + more_s, math.inf)
            least_s = total_s.min(0)
            best = fits & (total_s == least_s)
            most_s = numpy.where(best, numpy.maximum(slowest_s[rows, None], busy_s), math.inf)
            fastest_s = most_s.min(0)
            began.append((first, rows.start + (best & (most_s == fastest_s)).argmax(0)))
            again_s, slowest_s = numpy.full(count + 1, math.inf), numpy.full(count + 1, math.inf)
            again_s[columns], slowest_s[columns] = least_s, fastest_s
        if not again_s[count] < math.inf:
            return None
        cuts, end = [], count
        for first, starts in reversed(began[1:]):
            end = int(starts[end - first])
            cuts.append(end)
        return _Path(float(again_s[count]), float(slowest_s[count]), tuple(reversed(cuts)))

    def nearby(
        self, cuts: tuple[int, ...], micro_batches: int, evenly_s: float, step_s: StepTime, least_ends_s: float, nodes: int = NODES
    ) -> tuple[int, ...]:
        """The cuts with the fastest step of those whose objective, with the least of what it leaves out, is below that of the best ones:
        all of them, as far as the nodes reach."""
        best, best_s = cuts, step_s(cuts, self.modes(cuts))
        count, stages, rest, total_s = len(self.pieces), self.stages, micro_batches - 1, self.busy[-1]
        visited = 0

        def place(s: int, i: int, again_s: float, slowest_s: float, made: tuple[int, ...]) -> None:
            nonlocal visited, best, best_s
            for j in range(i + 1, count - stages + s + 2) if s < stages - 1 else [count]:
                visited += 1
                busy_s = self.busy[j] - self.busy[i]
                least_s = rest * max(slowest_s, busy_s, evenly_s) + total_s + again_s + least_ends_s
                if visited > nodes or least_s >= best_s:
                    return
                if self.trained[j] == self.trained[i] or least_s + self._at_least_s(i, j, s) >= best_s:
                    continue
                known = len(self.known)
                again = self.again(i, j, s)
                visited += A_SEARCH * (len(self.known) - known)
                if again is None or least_s + again[0] >= best_s:
                    continue
                if s < stages - 1:
                    place(s + 1, j, again_s + again[0], max(slowest_s, busy_s + again[0]), (*made, j))
                elif (found := step_s(made, self.modes(made))) < best_s:
                    best, best_s = made, found

        place(0, 0, 0.0, 0.0, ())
        return best

    def modes(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The mode of every piece, as an index of its modes, for these cuts."""
        found: list[int] = []
        bounds = (0, *cuts, len(self.pieces))
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if (i, j, s) not in self._modes:
                self._modes[i, j, s] = self._modes_at(i, j, s)
            found += self._modes[i, j, s]
        return tuple(found)

    def _modes_at(self, i: int, j: int, s: int) -> tuple[int, ...]:
        """Of the pieces of stage s if it is [i, j)."""
        again = self.again(i, j, s)
        assert again is not None, "a stage of a path fits"
        runs = zip(self.account(self.runs[self.of_span[i, j]], s).runs, again[1], strict=True)
        return tuple(m for run, counts in runs for m, n in zip(run.modes, counts, strict=True) for _ in range(n))

    def could_fit(self) -> bool:
        """Whether there are cuts with which every stage can."""
        there = numpy.arange(len(self.pieces) + 1) == 0  # where the next stage can begin
        for s in range(self.stages):
            fits = self.fits(s, "leanest")
            there = fits[there[: len(fits)]].any(0)
        return bool(there[-1])

    def least_bytes(self) -> float:
        """Of the fullest stage of the leanest cuts."""
        fullest = numpy.where(numpy.arange(len(self.pieces) + 1) == 0, 0.0, math.inf)  # of the stages so far, by where the next one begins
        for s in range(self.stages):
            nbytes = self._stage_bytes(self.in_flight[s], "leanest")
            fullest = numpy.maximum(fullest[: len(nbytes), None], nbytes).min(0)
        return float(fullest[-1])


@functools.lru_cache(maxsize=64)
def _runs_of_spans(kinds: tuple[int, ...]) -> tuple[NDArray[numpy.int64], list[tuple[tuple[int, int], ...]]]:
    """For all pieces [i, j) of these kinds the number of their runs, (kind, how many) in their order; and the runs by number. -1 where
    there are none."""
    count = len(kinds)
    end = list(range(1, count + 1))
    for k in range(count - 2, -1, -1):
        end[k] = end[k + 1] if kinds[k] == kinds[k + 1] else end[k]
    number: dict[tuple[tuple[int, int], ...], int] = {}
    found = numpy.full((count + 1, count + 1), -1)
    for i in range(count):
        runs: list[tuple[int, int]] = []
        k = i
        while k < count:
            for j in range(k + 1, end[k] + 1):
                found[i, j] = number.setdefault((*runs, (kinds[k], j - k)), len(number))
            runs.append((kinds[k], end[k] - k))
            k = end[k]
    return found, list(number)


def _leanest(modes: Sequence[Mode]) -> Mode:
    """The least of every figure, and running again, where that needs less."""
    return Mode(
        name="leanest", again_s=max(m.again_s for m in modes), kept_bytes=min(m.kept_bytes for m in modes),
        forward_bytes=min(m.forward_bytes for m in modes), backward_bytes=min(m.backward_bytes for m in modes),
        later_bytes=min(m.later_bytes for m in modes),
    )  # fmt: skip
