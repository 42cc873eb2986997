"""Stages and modes where a rank holds several stages: cuts between them, and a mode for each piece that fits into the rank's memory.

The stages of a rank share its memory, so that the cuts are no shortest path as they are in `partition`. They are looked for around those
that make the slowest stage as fast as can be, by moving one cut at a time; and, as far as a budget of nodes reaches, among all of them,
stage by stage, leaving out what cannot be faster:

    work       m x the pieces on rank r, and the stages before its first one, forward and back  <= the step
    memory     RankAccount of the stages of a rank in their modes                               <= limit for every rank
    part       every stage has something to train

Given cuts, each rank runs as little again as will fit. What comes out is priced by the schedule's simulator; no cuts are faster than
`Outcome.bound`, which is that of the model's work divided evenly where the budget did not reach all cuts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

from autopar.errors import Infeasible
from autopar.planner import stage_account
from autopar.planner.partition import FEWER, UNSOLVED, Over, Partition, Refused
from autopar.planner.rank_account import RankAccount
from autopar.planner.solver import Outcome, OutOfBudget
from autopar.planner.stage_account import Counts, Piece, Run, StageModes, allowed, stage_modes
from cost_models.holds import OnRank
from cost_models.pipeline import Flow

__all__ = ["KnownOfRanks", "least_of_ranks", "partition_of_ranks", "place_of", "rank_bytes"]

NODES = 12_000  # pieces that are gone through for one candidate: all of them for each end of a stage that is looked at
MOVES = 24  # of one cut, each priced
MODES = 4_000  # nodes of the searches for the modes of the ranks of one candidate: as many as each likes until then, and then FEWER each
GIB = float(2**30)
StepTime = Callable[[tuple[int, ...], tuple[int, ...]], float]  # of cuts and modes
KnownOfRanks = dict[Hashable, StageModes | OutOfBudget | None]  # by all that they depend on; None where none fit


def place_of(bounds: tuple[int, ...], flow: Flow, rank: int) -> tuple[int, ...]:
    """What a rank holds: the first piece, and the first piece behind, of each of its stages; and its number. bounds: of all stages."""
    return (*(b for s in flow.stages_of(rank) for b in bounds[s : s + 2]), rank)


def rank_bytes(stages: Sequence[Sequence[Piece]], modes: Sequence[Sequence[int]], on_rank: OnRank) -> float:
    """The most that a rank needs at any moment. stages: the pieces of each of its stages; modes: of each piece."""
    runs = tuple(
        tuple(Run(piece=p, count=1, modes=(m,)) for p, m in zip(own, of, strict=True)) for own, of in zip(stages, modes, strict=True)
    )
    return RankAccount(stages=runs, on_rank=on_rank).bytes([(1,) for own in runs for _ in own])


def least_of_ranks(pieces: tuple[Piece, ...], flow: Flow, recompute: str) -> tuple[tuple[int, ...], float]:
    """The cuts that make the slowest stage as fast as can be, and what the fullest rank needs with them if every piece keeps least."""
    cuts = _evenly(pieces, flow, recompute)
    bounds = (0, *cuts, len(pieces))
    lean = [min(allowed(p.modes, recompute), key=lambda m: p.modes[m].kept_bytes) for p in pieces]  # noqa: B023
    found = []
    for rank in range(flow.ranks):
        spans = list(pairwise(place_of(bounds, flow, rank)[:-1]))[::2]
        found.append(rank_bytes([pieces[i:j] for i, j in spans], [lean[i:j] for i, j in spans], flow.on_rank(rank)))
    return cuts, max(found)


def _evenly(pieces: tuple[Piece, ...], flow: Flow, recompute: str) -> tuple[int, ...]:
    """The cuts with the fastest slowest stage, whatever memory there is, where every stage has something to train. Infeasible if not all
    can have."""
    busy, trained, count = _sums(pieces, recompute), [0, *accumulate(p.trains for p in pieces)], len(pieces)
    reached: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # placed -> (the slowest stage, where the last one began)
    for s in range(flow.stages):
        ends: dict[int, tuple[float, int]] = {}
        for j in range(s + 1, count - flow.stages + s + 2) if s < flow.stages - 1 else [count]:
            options = [
                (max(slowest, busy[j] - busy[i]), i) for i, (slowest, _) in reached[-1].items() if i < j and trained[i] < trained[j]
            ]
            if options:
                ends[j] = min(options)
        reached.append(ends)
    if count not in reached[-1]:
        raise Infeasible(f"stages: not every one of {flow.stages} stages of {count} segments can have something to train")
    cuts, end = [], count
    for s in range(flow.stages, 1, -1):
        end = reached[s][end][1]
        cuts.append(end)
    return tuple(reversed(cuts))


def _sums(pieces: tuple[Piece, ...], recompute: str) -> list[float]:
    """Seconds of a micro-batch before each piece, running again no more than must."""
    least = {p: min(p.modes[m].again_s for m in allowed(p.modes, recompute)) for p in dict.fromkeys(pieces)}
    return [0.0, *accumulate(p.forward_s + p.backward_s + least[p] for p in pieces)]


def partition_of_ranks(
    pieces: tuple[Piece, ...], *, flow: Flow, limit_bytes: float, recompute: str, step_s: StepTime, least_ends_s: float,
    worth_s: float = math.inf, cuts: tuple[int, ...] | None = None, over: Over | None = None, refused: Refused | None = None,
    known: KnownOfRanks | None = None,
) -> Partition | None:  # fmt: skip
    """The best stages and modes; None if no objective below worth_s is found. known: modes that were looked for before, with this flow.
    Other arguments as of `partition`. Raises Infeasible where all cuts were tried and none fits, OutOfBudget where those that were tried
    do not."""
    start = time.perf_counter()
    known = {} if known is None else known
    ranks = _Ranks(pieces, flow, limit_bytes, recompute, over or {}, refused or {}, known, step_s, least_ends_s, worth_s)
    least_s = flow.least_s(ranks.busy[-1])
    if least_s >= worth_s:
        return None
    done = cuts is not None
    if cuts is not None:
        ranks.price(cuts)
    else:
        even = _evenly(pieces, flow, recompute)
        ranks.price(even)
        ranks.move_cuts(even)
        done = ranks.try_all()
    done = done and not ranks.unproven
    best_s, best, modes = ranks.best
    if best is None and ranks.passed_over and done:
        return None
    if best is None or modes is None:
        text = f"stages: no cuts of {len(pieces)} segments into {flow.stages} stages fit into {limit_bytes / GIB:.2f} GiB"
        raise Infeasible(text) if done else OutOfBudget(text, least_s)
    bound = max(least_s, min(ranks.bound_s, best_s, worth_s)) if done else least_s
    if best_s >= worth_s and bound >= worth_s:
        return None
    outcome = Outcome(
        objective=best_s, bound=min(bound, best_s), gap=(best_s - min(bound, best_s)) / best_s if best_s else 0.0,
        seconds=time.perf_counter() - start, solver=UNSOLVED.solver, variables=0, constraints=0,
        status="solved" if done else "out of budget",
    )  # fmt: skip
    return Partition(cuts=best, modes=modes, outcome=outcome)


@dataclass
class _Ranks:
    """best: the fastest cuts and modes so far, without what the objective leaves out. bound_s: the fastest of all cuts that were
    priced, if nothing more than must ran again. worth_s: cuts that are no faster are not priced; passed_over: whether there were such.
    unproven: whether a rank is taken not to fit because the search for its modes found none in its budget."""

    pieces: tuple[Piece, ...]
    flow: Flow
    limit_bytes: float
    recompute: str
    over: Over
    refused: Refused
    known: KnownOfRanks
    step_s: StepTime
    least_ends_s: float
    worth_s: float = math.inf
    passed_over: bool = False
    unproven: bool = False
    best: tuple[float, tuple[int, ...] | None, tuple[int, ...] | None] = (math.inf, None, None)
    bound_s: float = math.inf
    _here: dict[tuple[object, ...], StageModes | None] = field(default_factory=dict)  # of these arguments
    _priced: set[tuple[int, ...]] = field(default_factory=set)
    _modes: int = MODES

    def __post_init__(self) -> None:
        self.may = {p: allowed(p.modes, self.recompute) for p in dict.fromkeys(self.pieces)}
        self.busy = _sums(self.pieces, self.recompute)
        self.trained = [0, *accumulate(p.trains for p in self.pieces)]

    def modes_of(self, bounds: tuple[int, ...], rank: int) -> StageModes | None:
        """Those of the pieces of a rank that run the least again and fit, None if none do."""
        flow, place = self.flow, place_of(bounds, self.flow, rank)
        held = flow.on_rank(rank)
        spans = [(bounds[s], bounds[s + 1]) for s in held.stages]
        stages = tuple(
            tuple(Run(piece=p, count=len(list(alike)), modes=self.may[p]) for p, alike in groupby(self.pieces[i:j])) for i, j in spans
        )
        room = self.limit_bytes - self.over.get(place, 0.0)
        refused = frozenset(self._counts(stages, modes) for modes in self.refused.get(place, ()))
        key = rank, room, refused, stages
        if key not in self._here:
            nodes = stage_account.NODES if self._modes > 0 else FEWER
            if (*key, nodes) not in self.known:
                self.known[*key, nodes] = self._look_for(RankAccount(stages=stages, on_rank=held), room, nodes, refused)
            found = self.known[*key, nodes]
            if isinstance(found, OutOfBudget):
                found, self.unproven = None, True
                self._modes -= nodes
            else:
                self._modes -= found.visited if found is not None else 0
            self._here[key] = found
        return self._here[key]

    @staticmethod
    def _look_for(account: RankAccount, room: float, nodes: int, refused: frozenset[Counts]) -> StageModes | OutOfBudget | None:
        try:
            return stage_modes(account, room, nodes=nodes, refused=refused)
        except OutOfBudget as budget:
            return budget

    @staticmethod
    def _counts(stages: tuple[tuple[Run, ...], ...], modes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        found, k = [], 0
        for run in (run for stage in stages for run in stage):
            here = modes[k : k + run.count]
            found.append(tuple(here.count(m) for m in run.modes))
            k += run.count
        return tuple(found)

    def price(self, cuts: tuple[int, ...]) -> float:
        """Seconds of a step with these cuts, infinite if they do not fit; kept if they are the best."""
        bounds = (0, *cuts, len(self.pieces))
        self._priced.add(cuts)
        modes, more_s = [0] * len(self.pieces), 0.0
        for rank in range(self.flow.ranks):
            found = self.modes_of(bounds, rank)
            if found is None:
                return math.inf
            more_s += found.again_s
            places = [k for s in self.flow.on_rank(rank).stages for k in range(bounds[s], bounds[s + 1])]
            at = iter(places)
            for may, counts in zip(self._runs(bounds, rank), found.counts, strict=True):
                for mode, n in zip(may, counts, strict=True):
                    for _ in range(n):
                        modes[next(at)] = mode
        chosen = tuple(modes)
        seconds = self.step_s(cuts, chosen) - self.least_ends_s
        if seconds < self.best[0]:
            self.best = seconds, cuts, chosen
        fastest = tuple(min(self.may[p], key=lambda m: p.modes[m].again_s) for p in self.pieces) if more_s else chosen
        self.bound_s = min(self.bound_s, seconds if fastest == chosen else self.step_s(cuts, fastest) - self.least_ends_s)
        return seconds

    def _runs(self, bounds: tuple[int, ...], rank: int) -> list[tuple[int, ...]]:
        """The modes that are allowed for each run of equal pieces of each stage of a rank."""
        stages = self.flow.on_rank(rank).stages
        return [self.may[p] for s in stages for p, _ in groupby(self.pieces[bounds[s] : bounds[s + 1]])]

    def move_cuts(self, cuts: tuple[int, ...]) -> None:
        """From there, one cut by one piece at a time, while that is faster or fits better."""
        left = MOVES
        here, here_s = cuts, self.best[0]
        moved = True
        while moved and left > 0:
            moved = False
            for k, by in ((k, by) for k in range(len(cuts)) for by in (-1, 1)):
                other = (*here[:k], here[k] + by, *here[k + 1 :])
                if left <= 0 or other in self._priced or not self._legal(other) or not self._could_do(self._least_s(other)):
                    continue
                left -= 1
                if (seconds := self.price(other)) < here_s:
                    here, here_s, moved = other, seconds, True

    def _legal(self, cuts: tuple[int, ...]) -> bool:
        return all(i < j and self.trained[i] < self.trained[j] for i, j in pairwise((0, *cuts, len(self.pieces))))

    def _could_do(self, least_s: float) -> bool:
        """Whether cuts whose step takes so long at least are worth a price."""
        if least_s >= self.worth_s:
            self.passed_over = True
        return least_s < min(self.best[0], self.worth_s)

    def _least_s(self, cuts: tuple[int, ...], stages: int | None = None, again_s: Mapping[int, float] | None = None) -> float:
        """No step with these cuts, or with these first ones, is faster. again_s: of a rank, what it must run again at least."""
        flow, bounds = self.flow, (0, *cuts, len(self.pieces))[: (stages or self.flow.stages) + 1]
        of_rank, first = [0.0] * flow.ranks, [-1.0] * flow.ranks
        for s, (i, j) in enumerate(pairwise(bounds)):
            rank = flow.rank_of[s]
            first[rank] = self.busy[i] if first[rank] < 0 else first[rank]
            of_rank[rank] += self.busy[j] - self.busy[i]
        for rank, seconds in (again_s or {}).items():
            of_rank[rank] += seconds
        evenly_s = flow.least_s(self.busy[-1] + sum((again_s or {}).values()))
        return max(evenly_s, *(max(a, 0.0) + flow.micro_batches * b for a, b in zip(first, of_rank, strict=True)))

    def try_all(self) -> bool:
        """Price all cuts that could be faster than the best ones. False if the nodes did not reach all of them."""
        count, stages, rank_of = len(self.pieces), self.flow.stages, self.flow.rank_of
        whole = {s for s in range(stages) if rank_of[s] not in rank_of[s + 1 :]}  # with which all stages of a rank are there
        nodes = NODES // count

        def place(s: int, made: tuple[int, ...], again_s: Mapping[int, float]) -> bool:
            nonlocal nodes
            i = made[-1] if made else 0
            last = s == stages - 1
            even = self.busy[i] + (self.busy[-1] - self.busy[i]) / (stages - s)
            ends = [count] if last else sorted(range(i + 1, count - stages + s + 2), key=lambda j: abs(self.busy[j] - even))
            for j in ends:
                nodes -= not last
                if nodes < 0:
                    return False
                if (last and made in self._priced) or self.trained[i] == self.trained[j]:
                    continue
                if not self._could_do(self._least_s((*made, j), s + 1, again_s)):
                    continue
                more = again_s
                if s in whole:
                    found = self.modes_of((0, *made, j), rank_of[s])
                    if found is None:
                        continue
                    more = {**again_s, rank_of[s]: max(0.0, found.again_s - found.slack_s)}
                    if not self._could_do(self._least_s((*made, j), s + 1, more)):
                        continue
                if last:
                    self.price(made)
                elif not place(s + 1, (*made, j), more):
                    return False
            return True

        return place(0, (), {})
