"""The memory of one stage from the account of its pieces, and the modes in which its pieces fit.

Beside what rests, a stage needs most at one of these moments (liveness.Liveness.peaks goes through them operator by operator):

    first     while backward of the first micro-batch is in piece k: what the others in flight keep, what pieces before k keep, what k
              needs, and the gradients of the pieces behind it
    later     the same with all gradients there, if there are several micro-batches
    forward   while a forward pass is in piece k
    end       all gradients, and the last bucket of them
    update    the optimizer's

Of equal pieces that follow one another those that keep least come first: what runs again late in the stage runs beside all that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy
from numpy.typing import NDArray

from autopar.planner.modes import Mode
from autopar.planner.solver import OutOfBudget
from cost_models.uncertainty import More

__all__ = [
    "NODES", "Account", "Accounted", "Counts", "Critical", "EveryStage", "Piece", "Run", "StageModes", "Step", "allowed", "stage_bytes",
    "stage_modes", "steps_of",
]  # fmt: skip

NODES = 1000  # of the search for the modes of one stage


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What lies between two places for cuts. forward_s, backward_s: of one micro-batch, nothing running again. rest_bytes: parameters and
    optimizer states of what first appears in it; passing_bytes: of them, beyond that while passes run; gradient_bytes: of them as backward
    makes them, reduced_bytes: of those that a reduction copies; update_bytes: of what the optimizer's update needs beside what rests.
    received_bytes, sent_bytes: of what a stage that begins or ends here holds for its neighbour and nothing else keeps. trains: it reads
    a trainable parameter. modes: in which it can run; in the first of them nothing runs again."""

    forward_s: float
    backward_s: float
    rest_bytes: float = 0.0
    passing_bytes: float = 0.0
    gradient_bytes: float = 0.0
    reduced_bytes: float = 0.0
    update_bytes: float = 0.0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    trains: bool = True
    modes: tuple[Mode, ...] = (Mode(name="none"),)

    def in_mode(self, mode: Mode) -> Piece:
        """The piece with this mode alone."""
        return replace(self, modes=(mode,))

    def with_more(self, more: More) -> Piece:
        """What is less certain counts for more than itself."""
        received, sent = self.received_bytes * (1 + more.saved), self.sent_bytes * (1 + more.saved)
        return replace(self, received_bytes=received, sent_bytes=sent, modes=tuple(m.with_more(more) for m in self.modes))

    @cached_property
    def _hash(self) -> int:
        return hash((self.forward_s, self.backward_s, self.rest_bytes, self.gradient_bytes, self.sent_bytes, self.trains, self.modes[:1]))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Equal pieces that follow one another. modes: those that are allowed, as indices of the piece's, the one that keeps least first."""

    piece: Piece
    count: int
    modes: tuple[int, ...]


def allowed(modes: Sequence[Mode], recompute: str) -> tuple[int, ...]:
    """The modes of a kind ('auto': any), as indices, the one that keeps least first; where a piece has none of the kind, the first one."""
    named = [k for k, m in enumerate(modes) if recompute in ("auto", m.name)]
    return tuple(sorted(named or [0], key=lambda k: (modes[k].kept_bytes, modes[k].again_s)))


class Critical(NamedTuple):
    """The moment that is most over a limit, whatever the mode of the piece in which it is: how many bytes too many it has, and how often a
    byte that a run does not keep counts there."""

    need: float
    weights: Sequence[float]


class Accounted(Protocol):
    """Runs of pieces that share the memory of a rank."""

    @property
    def runs(self) -> tuple[Run, ...]: ...

    def bytes(self, counts: Sequence[Sequence[int]]) -> float:
        """The most of a step, if so many pieces of each run are in its modes."""

    def critical(self, kept: Sequence[float], limit_bytes: float) -> Critical:
        """kept: bytes that each piece of a run keeps if nothing else runs again."""


class _Sums(NamedTuple):
    """Of a stage, whatever the modes. bound: what it holds for its neighbours."""

    bound: float
    rest: float
    passing: float
    gradients: float
    reduced: float
    update: float


@dataclass(frozen=True, kw_only=True)
class Account:
    """A stage. in_flight: micro-batches whose activations it holds."""

    runs: tuple[Run, ...]
    in_flight: int
    micro_batches: int

    @cached_property
    def _sums(self) -> _Sums:
        of = [(run.count, run.piece) for run in self.runs]
        return _Sums(
            bound=of[0][1].received_bytes + of[-1][1].sent_bytes,
            rest=sum(n * p.rest_bytes for n, p in of), passing=sum(n * p.passing_bytes for n, p in of),
            gradients=sum(n * p.gradient_bytes for n, p in of), reduced=sum(n * p.reduced_bytes for n, p in of),
            update=sum(n * p.update_bytes for n, p in of),
        )  # fmt: skip

    @cached_property
    def _groups(self) -> list[tuple[float, list[Mode]]]:
        """Of each run the gradients of a piece, and the modes that are allowed."""
        return [(run.piece.gradient_bytes, [run.piece.modes[k] for k in run.modes]) for run in self.runs]

    def bytes(self, counts: Sequence[Sequence[int]]) -> float:
        """The most of a step, if so many pieces of each run are in its modes."""
        sums, m, others = self._sums, self.micro_batches, self.in_flight - 1
        before, behind = 0.0, sums.gradients  # what the pieces before keep of a micro-batch; the gradients of those that follow
        forward = first = later = -math.inf  # the most of all pieces: beside what the whole stage keeps of the other micro-batches
        pairs = zip(self._groups, counts, strict=True)
        groups = [(grad, mode, c) for (grad, modes), of in pairs for mode, c in zip(modes, of, strict=True) if c]
        grad, end, c = groups.pop()  # the last piece of the stage stands alone: what it makes when it runs again holds what was sent
        if c > 1:
            groups.append((grad, end, c - 1))
        for each, mode, c in groups:
            kept, backward = mode.kept_bytes, mode.backward_bytes
            last = before + (c - 1) * kept
            forward = max(forward, last + mode.forward_bytes)
            first = max(first, before + backward + behind - each, last + backward + behind - c * each)
            later = max(later, last + mode.later_bytes)
            before, behind = before + c * kept, behind - c * each
        twice = self.runs[-1].piece.sent_bytes if end.again_s > 0 else 0.0
        forward = max(forward, before + end.forward_bytes)
        first = max(first, before + end.backward_bytes + behind - grad - twice)
        later = max(later, before + end.later_bytes - twice)
        whole = before + end.kept_bytes + sums.bound
        most = max(sums.gradients + sums.reduced, others * whole + forward, others * whole + sums.bound + first)
        if m > 1:
            base = (others if m > self.in_flight else max(others - 1, 0)) * whole + sums.gradients
            most = max(most, base + sums.bound + later)
            if m > 2 or m <= self.in_flight:
                most = max(most, base + forward)
        return sums.rest + max(most + sums.passing, sums.update)

    def critical(self, kept: Sequence[float], limit_bytes: float) -> Critical:
        """kept: bytes that each piece of a run keeps if nothing else runs again."""
        m, others = self.micro_batches, self.in_flight - 1
        bound = self.runs[0].piece.received_bytes + self.runs[-1].piece.sent_bytes
        whole = sum(n.count * x for n, x in zip(self.runs, kept, strict=True)) + bound
        rest = sum(r.count * (r.piece.rest_bytes + r.piece.passing_bytes) for r in self.runs)
        gradients = sum(r.count * r.piece.gradient_bytes for r in self.runs)
        found = Critical(0.0, [0.0] * len(self.runs))
        before, behind = 0.0, gradients
        for r, run in enumerate(self.runs):
            modes = [run.piece.modes[k] for k in run.modes]
            before += run.count * kept[r]
            behind -= run.count * run.piece.gradient_bytes
            last = before - kept[r]  # of the last piece of the run itself, nothing is counted but what it needs
            there = bound - (run.piece.sent_bytes if r == len(self.runs) - 1 and any(x.again_s > 0 for x in modes) else 0.0)
            options = [(others, others * whole + there + last + min(x.backward_bytes for x in modes) + behind)]
            if m > 1:
                fewer = others if m > self.in_flight else max(others - 1, 0)
                options.append((fewer, fewer * whole + there + last + min(x.later_bytes for x in modes) + gradients))
            for times, nbytes in options:
                if rest + nbytes - limit_bytes > found.need:
                    found = Critical(rest + nbytes - limit_bytes, [float(times + (k <= r)) for k in range(len(self.runs))])
        return found


def stage_bytes(pieces: Sequence[Piece], modes: Sequence[int], in_flight: int, micro_batches: int) -> float:
    """The most that a stage of these pieces in these modes needs at any moment."""
    runs = tuple(Run(piece=p, count=1, modes=(m,)) for p, m in zip(pieces, modes, strict=True))
    return Account(runs=runs, in_flight=in_flight, micro_batches=micro_batches).bytes([(1,)] * len(runs))


class EveryStage:
    """`Account.bytes` of every stage [i, j) of some pieces at once, each piece in one mode."""

    def __init__(self, pieces: Sequence[Piece], modes: Sequence[Mode], micro_batches: int, *, first: bool = False) -> None:
        """first: only of stages that begin with the first piece."""

        def each(values: Sequence[float]) -> NDArray[numpy.float64]:
            return numpy.array([*values], dtype=numpy.float64)

        def total(values: Sequence[float]) -> NDArray[numpy.float64]:
            """Of the pieces of a stage: by its first piece and the first behind it."""
            sums = before(values)
            return sums[None, :] - sums[:rows, None]

        def before(values: Sequence[float]) -> NDArray[numpy.float64]:
            return numpy.concatenate(([0.0], numpy.cumsum(each(values))))

        def most(values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
            """The most of the pieces of a stage."""
            found = numpy.full((rows, count + 1), -numpy.inf)
            found[:count, 1:] = numpy.maximum.accumulate(numpy.where(inside, values[None, :], -numpy.inf), axis=1)
            return found

        count = len(pieces)
        rows = 1 if first else count + 1
        self.micro_batches = micro_batches
        none = numpy.arange(count + 1)[None, :] <= numpy.arange(rows)[:, None]
        inside = ~none[:count, 1:]
        kept = before([m.kept_bytes for m in modes])
        gradient = before([p.gradient_bytes for p in pieces])
        sent = each([p.sent_bytes for p in pieces])
        again = numpy.where(each([m.again_s for m in modes]) > 0, sent, 0.0)
        bound = numpy.zeros((rows, count + 1))
        bound[:count, 1:] = each([p.received_bytes for p in pieces])[:rows, None] + sent[None, :]
        fixed = total([p.rest_bytes + p.passing_bytes for p in pieces])
        gradients = total([p.gradient_bytes for p in pieces])
        self.whole = total([m.kept_bytes for m in modes]) + bound
        forward = most(kept[:-1] + each([m.forward_bytes for m in modes])) - kept[:rows, None]

        def backward(values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
            """Of values beside what is kept before: the last piece, if it runs again, makes what was sent."""
            found = numpy.full((rows, count + 1), -numpy.inf)
            found[:, 1:] = numpy.maximum(most(values)[:, :-1], (values - again)[None, :])
            return found + bound - kept[:rows, None]

        behind = backward(kept[:-1] + each([m.backward_bytes for m in modes]) - gradient[1:]) + gradient[None, :]
        later = backward(kept[:-1] + each([m.later_bytes for m in modes])) + gradients
        self.first = fixed + numpy.maximum(forward, behind)
        self.later = fixed + (numpy.maximum(later, forward + gradients) if micro_batches > 2 else later)
        self.last = fixed + numpy.maximum(later, forward + gradients)  # the same where all micro-batches are in flight
        end = gradients + total([p.reduced_bytes for p in pieces])
        update = total([p.rest_bytes + p.update_bytes for p in pieces])
        self.least = numpy.where(none, numpy.inf, numpy.maximum(fixed + end, update))

    def bytes(self, in_flight: int) -> NDArray[numpy.float64]:
        """By the first piece and the first one behind; infinite where there is no stage. in_flight: as of an account."""
        m, others = self.micro_batches, in_flight - 1
        found = others * self.whole
        if m > in_flight:
            found += numpy.maximum(self.first, self.later)
        elif m > 1:
            found = numpy.maximum(found + self.first, max(others - 1, 0) * self.whole + self.last)
        else:
            found += self.first
        return numpy.maximum(found, self.least, out=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageModes:
    """again_s: seconds of what runs again, beyond the least of each piece's modes; counts: of each run, how many pieces are in which of its
    modes; slack_s: by how much that may be slower than the best, where the search was cut short; visited: nodes that it took."""

    again_s: float
    counts: tuple[tuple[int, ...], ...]
    slack_s: float = 0.0
    visited: int = 0


Counts = tuple[tuple[int, ...], ...]  # of each run, how many of its pieces are in which of its allowed modes


def stage_modes(account: Accounted, limit_bytes: float, nodes: int = NODES, refused: frozenset[Counts] = frozenset()) -> StageModes | None:
    """The fastest modes with which a stage fits; None if there are none. Branch and bound over how many pieces of each run are in which
    mode, from what steps along the runs' convex hulls give, the cheapest byte first. refused: that are known not to fit. Raises OutOfBudget
    where the nodes found none that fit."""
    return _Search(account, limit_bytes, nodes, refused).best()


class Step(NamedTuple):
    """From one mode of a run's lower hull over (bytes freed, seconds) to the next one: seconds more, bytes fewer, of each piece."""

    run: int
    source: int
    target: int
    seconds: float
    nbytes: float


def steps_of(number: int, run: Run, fastest: int) -> list[Step]:
    """Of a run with this number, from one of its modes on; the cheapest byte first."""
    kept = [run.piece.modes[m].kept_bytes for m in run.modes]
    seconds = [run.piece.modes[m].again_s for m in run.modes]
    steps, at = list[Step](), fastest
    while True:
        ahead = [k for k in range(len(kept)) if kept[k] < kept[at] and seconds[k] >= seconds[at]]
        if not ahead:
            return steps
        then = min(ahead, key=lambda k: ((seconds[k] - seconds[at]) / (kept[at] - kept[k]), kept[k]))
        steps.append(Step(number, at, then, seconds[then] - seconds[at], kept[at] - kept[then]))
        at = then


class _Search:
    def __init__(self, account: Accounted, limit_bytes: float, nodes: int, refused: frozenset[Counts]) -> None:
        self.account, self.limit_bytes, self.nodes, self.refused = account, limit_bytes, nodes, refused
        self.extra = []  # of each run: seconds of each mode beyond the fastest one
        for run in account.runs:
            seconds = [run.piece.modes[m].again_s for m in run.modes]
            self.extra.append([s - min(seconds) for s in seconds])
        self.freed: list[list[float]] = []  # of each run: weighted bytes that a piece of it frees in each mode
        self.whole: list[tuple[int, float, float]] = []  # steps of all pieces of a run: its number, seconds, weighted bytes
        self.counts = [[0] * len(run.modes) for run in account.runs]  # that are looked at
        self.visited = 0
        self.found: tuple[float, tuple[tuple[int, ...], ...]] | None = None

    def best(self) -> StageModes | None:
        runs = self.account.runs
        fastest = [max(k for k, s in enumerate(e) if s == 0) for e in self.extra]
        counts = [[run.count if k == fast else 0 for k in range(len(run.modes))] for run, fast in zip(runs, fastest, strict=True)]
        if self.account.bytes(counts) <= self.limit_bytes and tuple(map(tuple, counts)) not in self.refused:
            return StageModes(again_s=0.0, counts=tuple(map(tuple, counts)))
        if all(len(run.modes) == 1 for run in runs):
            return None
        steps = [step for r, run in enumerate(runs) for step in steps_of(r, run, fastest[r])]
        self.steps = sorted(steps, key=lambda x: (x.seconds / x.nbytes, x.run))
        self._along_the_hulls(counts)
        kept = [run.piece.modes[run.modes[fast]].kept_bytes for run, fast in zip(runs, fastest, strict=True)]
        self.need, self.weights = self.account.critical(kept, self.limit_bytes)
        self.freed = [self._freed(r) for r in range(len(runs))]
        whole = [(x.run, x.seconds * runs[x.run].count, self.weights[x.run] * x.nbytes * runs[x.run].count) for x in self.steps]
        self.whole = [x for x in whole if x[2]]
        least_s = self._least_s(0, runs[0].count, self.need)
        if math.isinf(least_s):
            return None
        if self.found is None or self.found[0] > least_s * (1 + 1e-9):
            self._take(0, 0, runs[0].count, 0.0, self.need)
        if self.found is None:
            if self.visited > self.nodes:
                raise OutOfBudget("no modes of a stage were found that fit", least_s)
            return None
        slack_s = max(0.0, self.found[0] - least_s) if self.visited > self.nodes else 0.0
        return StageModes(again_s=self.found[0], counts=self.found[1], slack_s=slack_s, visited=self.visited)

    def _along_the_hulls(self, counts: list[list[int]]) -> None:
        """The first that fits, of what steps along the hulls give one after the other."""
        runs = self.account.runs
        total = sum(runs[step.run].count for step in self.steps)

        def after(taken: int) -> list[list[int]]:
            found = [list(c) for c in counts]
            for step in self.steps:
                n = min(taken, runs[step.run].count)
                found[step.run][step.source] -= n
                found[step.run][step.target] += n
                taken -= n
            return found

        low, high = 1, total
        while low < high:
            middle = (low + high) // 2
            if self.account.bytes(after(middle)) <= self.limit_bytes:
                high = middle
            else:
                low = middle + 1
        best = after(low)
        self._offer(best, sum(n * s for of, extra in zip(best, self.extra, strict=True) for n, s in zip(of, extra, strict=True)))

    def _offer(self, counts: Sequence[Sequence[int]], seconds: float) -> None:
        if (self.found is None or seconds < self.found[0]) and self.account.bytes(counts) <= self.limit_bytes:
            as_tuple = tuple(map(tuple, counts))
            self.found = self.found if as_tuple in self.refused else (seconds, as_tuple)

    def _least_s(self, run: int, left: int, need: float) -> float:
        """Below the seconds of what comes to `need` bytes, of so many pieces of this run and of all behind it, parts of pieces included."""
        found = 0.0
        for number, seconds, nbytes in self.whole if need > 0 else ():
            if number < run:
                continue
            if number == run:
                part = left / self.account.runs[run].count
                seconds, nbytes = seconds * part, nbytes * part
            if need <= nbytes:
                return found + seconds * need / nbytes
            found, need = found + seconds, need - nbytes
        return found if need <= 0 else math.inf

    def _take(self, r: int, k: int, left: int, seconds: float, need: float) -> None:
        """Decide how many pieces of run r are in its k-th mode, the others being in later ones."""
        runs = self.account.runs
        self.visited += 1
        if self.visited > self.nodes:
            return
        if r == len(runs):
            self._offer(self.counts, seconds)
            return
        least_s = seconds + self._least_s(r, left, need)
        if math.isinf(least_s) or (self.found is not None and least_s >= self.found[0] * (1 - 1e-12)):
            return
        counts, extra, freed = self.counts[r], self.extra[r], self.freed[r]
        if k == len(counts) - 1:
            counts[k] = left
            self._take(r + 1, 0, runs[r + 1].count if r + 1 < len(runs) else 0, seconds + extra[k] * left, need - freed[k] * left)
            return
        most = left
        if self.found is not None and extra[k] > 0:
            most = min(left, math.ceil((self.found[0] - seconds) / extra[k]))
        for n in range(most, -1, -1):
            counts[k] = n
            self._take(r, k + 1, left - n, seconds + extra[k] * n, need - freed[k] * n)

    def _freed(self, r: int) -> list[float]:
        kept = [self.account.runs[r].piece.modes[m].kept_bytes for m in self.account.runs[r].modes]
        most = max((n for n, s in zip(kept, self.extra[r], strict=True) if s == 0), default=0.0)
        return [self.weights[r] * (most - n) for n in kept]
