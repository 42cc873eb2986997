"""Stages and modes of a whole model: where the pipeline is cut, and what of each piece runs again in backward.

    minimise   (m - 1) t + sum_k (f_k + b_k + again_k)              (the pipeline's closed form: fill, drain, slowest stage)
    slowest    t >= sum_{k in s} (f_k + b_k + again_k)              for every stage s
    memory     stage_bytes(the pieces of s in their modes) <= limit for every stage s                               stage_account
    part       every stage has something to train

m: micro-batches; again_k: seconds that the mode of piece k costs. What a stage [i, j) must run again to fit is a small choice of its own:
how many pieces of each run of equal ones are in which mode (`stage_modes`). Given a limit on t, the cuts that run the least again
are a shortest path over (stages, pieces), and of these those with the smallest t; the limit is then lowered below the t that was found,
until nothing better can come. A run of 100 equal layers is as easy as one of 10.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import Infeasible
from autopar.planner.modes import Mode
from autopar.planner.solver import Outcome
from autopar.planner.stage_account import Account, Counts, Piece, Run, allowed, stage_modes

__all__ = ["UNSOLVED", "Over", "Partition", "Place", "Refused", "least_bytes", "partition"]

GIB = float(2**30)
GAP = 1e-5  # relative, to which the cuts are proven
ROUNDS = 400  # limits on the slowest stage that are tried for one candidate
UNSOLVED = Outcome(objective=0.0, bound=0.0, gap=0.0, seconds=0.0, solver="none", variables=0, constraints=0)  # of stages as given
NODES = 2000  # places of cuts that are looked at around the best ones
StepTime = Callable[[tuple[int, ...], tuple[int, ...]], float]  # of cuts and modes
Place = tuple[int, ...]  # of a stage: its first piece, the first one behind it, its number; of several: of each, and the rank
Over = Mapping[Place, float]  # bytes
Refused = Mapping[Place, Collection[tuple[int, ...]]]  # modes of its pieces


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
) -> Partition | None:
    """The best stages and modes. recompute: 'none', 'selective', 'full' (each where a piece has such a mode) or 'auto'. worth_s: an
    objective that is not below it is of no use; None if there is no other. cuts: where they are decided already. rounds: how often the
    limit on the slowest stage may be lowered; beyond it the answer is out of budget, with its bound. over: what certain stages need
    beyond what their pieces say; refused: modes of certain stages that are known not to fit. step_s: of cuts and modes, with the terms
    that the objective leaves out, which come to least_ends_s at least: of cuts that could be as good as the best ones those with the
    fastest step are taken (`_Stages.nearby`). Raises Infeasible when nothing fits into limit_bytes."""
    start = time.perf_counter()
    spans = _Stages(pieces, stages, in_flight, micro_batches, limit_bytes, recompute, cuts, over or {}, refused or {})
    total_s = spans.busy[-1]
    rest = micro_batches - 1
    evenly_s = max(total_s / stages, max(b - a for a, b in zip(spans.busy, spans.busy[1:], strict=False)))

    def objective(path: _Path) -> float:
        return rest * path.slowest_s + total_s + path.again_s

    best: _Path | None = None
    if cuts is None and spans.least_bytes() > limit_bytes:
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
    """What each stage [i, j) takes, worked out when it is first asked for. slack_s: by how much one stage's modes may be slower than the
    best ones, where their search was cut short."""

    pieces: Sequence[Piece]
    stages: int
    in_flight: Sequence[int]
    micro_batches: int
    limit_bytes: float
    recompute: str
    pinned: Sequence[int] | None
    over: Over
    refused: Refused
    slack_s: float = 0.0
    busy: list[float] = field(default_factory=lambda: [0.0])
    trained: list[int] = field(default_factory=lambda: [0])
    _known: dict[tuple[object, ...], tuple[float, tuple[tuple[int, ...], ...]] | None] = field(default_factory=dict)
    _placed: dict[tuple[int, int, int], tuple[float, tuple[tuple[int, ...], ...]] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds: dict[Piece, int] = {}
        self.kind = [kinds.setdefault(p, len(kinds)) for p in self.pieces]
        self.of_kind = list(kinds)
        self.may = [allowed(p.modes, self.recompute) for p in self.of_kind]
        self.lean = [_leanest([p.modes[m] for m in may]) for p, may in zip(self.of_kind, self.may, strict=True)]
        for p, kind in zip(self.pieces, self.kind, strict=True):
            least_s = min(p.modes[m].again_s for m in self.may[kind])
            self.busy.append(self.busy[-1] + p.forward_s + p.backward_s + least_s)
            self.trained.append(self.trained[-1] + p.trains)
        self.run_end = list(range(1, len(self.pieces) + 1))
        for k in range(len(self.pieces) - 2, -1, -1):
            if self.kind[k] == self.kind[k + 1]:
                self.run_end[k] = self.run_end[k + 1]

    def runs(self, i: int, j: int) -> tuple[tuple[int, int], ...]:
        """(kind, how many) of the pieces [i, j) in their order."""
        found = []
        while i < j:
            stop = min(j, self.run_end[i])
            found.append((self.kind[i], stop - i))
            i = stop
        return tuple(found)

    def account(self, runs: Sequence[tuple[int, int]], s: int) -> Account:
        return Account(
            runs=tuple(Run(piece=self.of_kind[k], count=n, modes=self.may[k]) for k, n in runs), in_flight=self.in_flight[s],
            micro_batches=self.micro_batches,
        )  # fmt: skip

    def again(self, i: int, j: int, s: int) -> tuple[float, tuple[tuple[int, ...], ...]] | None:
        """The least that stage s must run again if it is [i, j), beyond what its pieces must in any case: seconds, and for each run of
        equal pieces how many are in which of the allowed modes. None if it cannot fit."""
        place = (i, j, s)
        if place not in self._placed:
            runs, over = self.runs(i, j), self.over.get(place, 0.0)
            account = self.account(runs, s)
            refused = frozenset(_counts(account, modes) for modes in self.refused.get(place, ()))
            key = (self.in_flight[s], over, refused, runs)
            if key not in self._known:
                found = stage_modes(account, self.limit_bytes - over, refused=refused)
                self._known[key] = None if found is None else (found.again_s, found.counts)
                self.slack_s = max(self.slack_s, 0.0 if found is None else found.slack_s)
            self._placed[place] = self._known[key]
        return self._placed[place]

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
        return _Path(again_s, slowest_s, tuple(reversed(cuts)))

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
                if self.trained[j] == self.trained[i] or (again := self.again(i, j, s)) is None:
                    continue
                if least_s + again[0] >= best_s:
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
            again = self.again(i, j, s)
            assert again is not None, "a stage of a path fits"
            for run, counts in zip(self.account(self.runs(i, j), s).runs, again[1], strict=True):
                found += [m for m, n in zip(run.modes, counts, strict=True) for _ in range(n)]
        return tuple(found)

    def least_bytes(self) -> float:
        leanest: dict[int, float] = {0: 0.0}  # pieces placed -> the fullest of the stages so far
        known: dict[tuple[object, ...], float] = {}
        for s in range(self.stages):
            ends: dict[int, float] = {}
            for j in range(s + 1, len(self.pieces) + 1) if s < self.stages - 1 else [len(self.pieces)]:
                best = math.inf
                for i in range(j - 1, s - 1, -1):
                    runs = self.runs(i, j)
                    key = (self.in_flight[s], runs)
                    if key not in known:
                        known[key] = self._lean(runs, s)
                    if known[key] >= best:
                        break
                    if i in leanest:
                        best = min(best, max(leanest[i], known[key]))
                if best < math.inf:
                    ends[j] = best
            leanest = ends
        return leanest.get(len(self.pieces), math.inf)

    def _lean(self, runs: Sequence[tuple[int, int]], s: int) -> float:
        """Below what a stage of these pieces takes in any modes."""
        lean = tuple(Run(piece=self.of_kind[k].in_mode(self.lean[k]), count=n, modes=(0,)) for k, n in runs)
        return Account(runs=lean, in_flight=self.in_flight[s], micro_batches=self.micro_batches).bytes([(n,) for _, n in runs])


def _leanest(modes: Sequence[Mode]) -> Mode:
    """The least of every figure."""
    return Mode(
        name="leanest", again_s=min(m.again_s for m in modes), kept_bytes=min(m.kept_bytes for m in modes),
        forward_bytes=min(m.forward_bytes for m in modes), backward_bytes=min(m.backward_bytes for m in modes),
        later_bytes=min(m.later_bytes for m in modes),
    )  # fmt: skip
