"""Below what a step over several ranks can be, whatever its stages and modes: a linear program in which pieces can be divided.

    minimise   t + e
    pieces     the parts of each kind of piece, over stages and modes, come to as many as there are
    memory     what rests on a rank, and what its micro-batches keep in each situation (holds.Situation)     <= limit
    order      m x the stages of a rank, and the stages before its first one                                 <= t
    paths      the passes on a longest path of the schedule's actions, for stages as the last solution has them  <= t
    ends       what a rank brings together once a step, as far as its last micro-batch does not hide it      <= e

The paths are added one after the other: a step takes as long as any path of its actions. A plan's pieces are whole and in order, so that
its step is among what is minimised over, and every moment and term that is counted here is one of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.errors import Infeasible
from autopar.planner.exchange import LeastOnce
from autopar.planner.modes import Mode
from autopar.planner.solver import INFINITY, Linear, OutOfBudget, solve
from autopar.planner.stage_account import Piece, allowed
from cost_models.pipeline import Flow

__all__ = ["Ends", "Relaxed", "least_of_stages"]

PATHS = 6  # that are added
NEAR = 1e-3  # of the bound, by which a path must raise it
SAFE = 1e-6  # of the bound, and of the memory: what the solver's tolerances may be off by
Terms = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What brings gradients together and parameters back, once a step. of_piece: of the parameters that first appear in each piece; taken,
    overlaps_reduction, overlaps_gathers: as of exchange.Once."""

    of_piece: Sequence[LeastOnce]
    taken: float
    overlaps_reduction: bool
    overlaps_gathers: bool


class Relaxed(NamedTuple):
    """seconds: below which no stages and modes that fit come; infinite if none do. runs_again: whether something of the pieces must run
    again, or nothing fits."""

    seconds: float
    runs_again: bool


def least_of_stages(
    pieces: Sequence[Piece], flow: Flow, limit_bytes: float, recompute: str, ends: Ends, worth_s: float = math.inf
) -> Relaxed:  # fmt: skip
    """Of a pipeline of these pieces that fits into so many bytes, with what is done once a step after it. worth_s: that it is above this is
    enough to know."""
    return _Problem(pieces, flow, limit_bytes, recompute, ends).least(worth_s)


class _Part(NamedTuple):
    """A kind of piece on a stage in a mode, as a column."""

    column: int
    piece: Piece
    mode: Mode
    once: LeastOnce

    @property
    def backward_s(self) -> float:
        return self.piece.backward_s + self.mode.again_s

    @property
    def seconds(self) -> float:
        return self.piece.forward_s + self.backward_s


class _Problem:
    """parts: by stage. t, e: columns."""

    def __init__(self, pieces: Sequence[Piece], flow: Flow, limit_bytes: float, recompute: str, ends: Ends) -> None:
        self.flow, self.limit_bytes, self.recompute, self.ends = flow, limit_bytes, recompute, ends
        self.received = min((p.received_bytes for p in pieces[1:]), default=0.0)
        self.sent = min((p.sent_bytes for p in pieces[:-1]), default=0.0)
        self.unit_bytes = max(1.0, abs(limit_bytes))
        self.unit_s = sum(p.forward_s + p.backward_s for p in pieces) or 1.0
        self.problem = Linear(name="relaxed stages")
        self.t, self.e = (self.problem.column(name, 1.0, upper=INFINITY) for name in "te")
        self.parts: list[list[_Part]] = [[] for _ in range(flow.stages)]
        places: dict[tuple[Piece, LeastOnce], list[int]] = {}
        for k, kind in enumerate(zip(pieces, ends.of_piece, strict=True)):
            places.setdefault(kind, []).append(k)
        for (p, once), at in places.items():
            self._kind(p, once, at, len(pieces))
        for rank in range(flow.ranks):
            stages = flow.stages_of(rank)
            self._memory(stages, self._held(rank))
            self._ends([part for s in stages for part in self.parts[s]])
        self._order()

    def _kind(self, p: Piece, once: LeastOnce, at: list[int], count: int) -> None:
        """Parts of the pieces that stand here, on the stages where one of them can be."""
        last, own = self.flow.stages - 1, Terms()
        stages = [s for s in range(last + 1) if any(s <= x <= count - 1 - last + s for x in at)]
        stages = [0] if at == [0] else [last] if at == [count - 1] else stages
        for s, m in itertools.product(stages, allowed(p.modes, self.recompute)):
            column = self.problem.column(f"part_{len(self.problem.names)}", upper=float(len(at)))
            self.parts[s].append(_Part(column, p, p.modes[m], once))
            own.append((column, 1.0))
        self.problem.row(f"pieces_{len(self.problem.rows)}", own, len(at), len(at))

    def _held(self, rank: int) -> list[tuple[Sequence[int], Sequence[bool]]]:
        """At the last piece of a stage in backward, by the stages of a rank: the micro-batches of which they keep something there, and
        whether there are gradients."""
        flow = self.flow
        if flow.chunks > 1:
            own = [now for now in flow.on_rank(rank).situations if now.pass_ == "B"]
            return [([n + (k == now.stage) for k, n in enumerate(now.held)], now.reduced) for now in own]
        held, m = flow.in_flight[rank], flow.micro_batches
        return [([held], [False]), *([([held if m > held else max(held - 1, 1)], [True])] if m > 1 else [])]

    def _memory(self, stages: Sequence[int], situations: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> None:
        last = self.flow.stages - 1

        def row(of: Callable[[_Part, int], float], bound: float = 0.0) -> None:
            """of: of a part on the k-th stage of the rank."""
            terms = [(x.column, of(x, k) / self.unit_bytes) for k, s in enumerate(stages) for x in self.parts[s]]
            most = (self.limit_bytes - bound) / self.unit_bytes * (1 + SAFE)
            self.problem.row(f"memory_{len(self.problem.rows)}", terms, -INFINITY, most)

        row(lambda x, k: x.piece.rest_bytes + x.piece.update_bytes)
        row(lambda x, k: x.piece.rest_bytes + x.piece.passing_bytes + x.piece.gradient_bytes + x.piece.reduced_bytes)
        for held, there in situations:

            def at_last(x: _Part, k: int, held: Sequence[int] = held, there: Sequence[bool] = there) -> float:
                rest_bytes = x.piece.rest_bytes + x.piece.passing_bytes + there[k] * x.piece.gradient_bytes
                return rest_bytes + held[k] * x.mode.kept_bytes

            bound = sum((n - 1) * ((s > 0) * self.received + (s < last) * self.sent) for s, n in zip(stages, held, strict=True) if n)
            row(at_last, bound)

    def _order(self) -> None:
        """What all stages together take, and each rank after what comes before it: before its first stage, or wherever there is a closed
        form, which says that of all stages."""
        flow, before = self.flow, self._sum_of([])
        whole = before if not flow.closed_form else self._sum_of([x for parts in self.parts for x in parts])
        firsts: dict[int, int] = {}
        for s, rank in enumerate(flow.rank_of):
            if rank not in firsts:
                firsts[rank] = whole if flow.closed_form else before
            before = self._sum_of(self.parts[s], before)
        more = flow.micro_batches - flow.closed_form
        for rank, first in firsts.items():
            own = [(x.column, more * x.seconds / self.unit_s) for s in flow.stages_of(rank) for x in self.parts[s]]
            self._row(self.t, [(first, 1.0), *own])
        self._row(self.t, [(before, flow.least_s(1.0))])

    def _sum_of(self, parts: Sequence[_Part], before: int | None = None) -> int:
        """A column that comes to the seconds of these parts, and to another one."""
        column = self.problem.column(f"sum_{len(self.problem.names)}", upper=INFINITY)
        beside = [] if before is None else [(before, 1.0)]
        terms = [*beside, *((x.column, x.seconds / self.unit_s) for x in parts), (column, -1.0)]
        self.problem.row(f"sum_{len(self.problem.rows)}", terms, 0.0, 0.0)
        return column

    def _ends(self, parts: Sequence[_Part]) -> None:
        """Of a rank, with and without what a pass hides of reductions and of gathers: the most of these."""
        ends, free = self.ends, 1.0 - self.ends.taken
        reductions = [(ends.taken, 0.0), (1.0, free)] if ends.overlaps_reduction else [(1.0, 0.0)]
        gathers = [(ends.taken, 0.0), (1.0, free)] if ends.overlaps_gathers else [(1.0, 0.0)]
        if not any(x.once.gathers_s for x in parts):
            gathers = gathers[:1]
        for (reduced, behind), (gathered, before) in itertools.product(reductions, gathers):
            terms = Terms()
            for x in parts:
                seconds = reduced * x.once.reduced_s + gathered * x.once.gathers_s + x.once.last_s
                terms.append((x.column, (seconds - behind * x.backward_s - before * x.piece.forward_s) / self.unit_s))
            if any(weight > 0 for _, weight in terms):
                self._row(self.e, terms)

    def _row(self, most: int, terms: Terms) -> None:
        """These terms come to no more than a column."""
        self.problem.row(f"most_{len(self.problem.rows)}", [*terms, (most, -1.0)], -INFINITY, 0.0)

    def least(self, worth_s: float) -> Relaxed:
        least, again = 0.0, False
        for _ in range(PATHS + 1):
            try:
                found = solve(self.problem)
            except Infeasible:
                return Relaxed(math.inf, True)
            except OutOfBudget:
                break
            before, least = least, max(least, found.outcome.bound)
            again = again or any(found.values[x.column] > SAFE for parts in self.parts for x in parts if x.mode.again_s > 0)
            solved = found.outcome.status == "solved" and before * (1 + NEAR) < least < worth_s / self.unit_s
            if not solved or not self._path(found.values):
                break
        return Relaxed(least * (1 - SAFE) * self.unit_s, again)

    def _path(self, values: Sequence[float]) -> bool:
        """Add the longest path of the actions of these stages; False where it is no longer than what is there."""
        forward = [sum(values[x.column] * x.piece.forward_s for x in parts) for parts in self.parts]
        backward = [sum(values[x.column] * x.backward_s for x in parts) for parts in self.parts]
        path = self.flow.longest_path(forward, backward)
        if path is None or path.seconds(forward, backward) <= values[self.t] * self.unit_s * (1 + NEAR):
            return False
        terms = Terms()
        for parts, f, b in zip(self.parts, path.forwards, path.backwards, strict=True):
            terms += [(x.column, (f * x.piece.forward_s + b * x.backward_s) / self.unit_s) for x in parts if f or b]
        self._row(self.t, terms)
        return True
