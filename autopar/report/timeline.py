"""The predicted step as events: what each pipeline rank does when, from the simulator of the schedule, and its memory meanwhile.

The ranks of a pipeline rank (those that differ on the other mesh axes) do the same at the same time. The memory is that of the plan's
account: its highest point is the plan's memory. 1F1B of unequal stages is priced by its closed form, which is at least what the simulator
finds: the step that is drawn may end a little before the one that is priced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.axes import LAYERS
from autopar.planner.memory_curve import RankCurve, StageCurve
from autopar.planner.plan import Plan
from cost_models.actions import Event
from cost_models.pipeline import schedule, simulate

__all__ = ["MOST_DRAWN", "Bar", "Level", "RankTimeline", "StepTimeline", "ranks_text", "timeline_of"]

MOST_DRAWN = 64  # pipeline ranks; of more, as many are drawn, evenly
FORWARD, BACKWARD, WEIGHTS, BEFORE, REDUCTION, UPDATE, STEADY = (
    "forward", "backward", "weights' gradients", "before the micro-batches", "gradient reduction", "optimizer", "micro-batches between",
)  # fmt: skip
_PASSES = {"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """What runs from start to end, in seconds of the step. stage, micro_batch: of a pass, else -1; passes: how many passes of micro-batches
    it stands for."""

    kind: str
    start_s: float
    end_s: float
    stage: int = -1
    micro_batch: int = -1
    passes: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """From this time on a rank holds so many bytes."""

    at_s: float
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """ranks: the first and the last of the ranks that do this."""

    rank: int
    ranks: tuple[int, int]
    stages: tuple[int, ...]
    bars: tuple[Bar, ...]
    memory: tuple[Level, ...]
    busy_s: float

    def few_bars(self, most: int) -> tuple[Bar, ...]:
        """At most about so many: of the passes the first and the last ones, and one bar for those between."""
        passes = [k for k, bar in enumerate(self.bars) if bar.micro_batch >= 0]
        if len(passes) <= most:
            return self.bars
        cut = passes[most // 2 : len(passes) - most // 2]
        first, last = self.bars[cut[0]], self.bars[cut[-1]]
        between = Bar(kind=STEADY, start_s=first.start_s, end_s=last.end_s, passes=len(cut))
        return (*self.bars[: cut[0]], between, *self.bars[cut[-1] + 1 :])

    def few_levels(self, most: int) -> tuple[Level, ...]:
        """At most about so many, each the highest of a stretch."""
        if len(self.memory) <= most:
            return self.memory
        n = len(self.memory)
        stretches = [self.memory[k * n // most : (k + 1) * n // most] for k in range(most)]
        return tuple(max(s, key=lambda level: level.nbytes) for s in stretches if s)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """makespan_s: of the pipeline's passes by the simulator; end_s: of the step that is drawn; step_time_s: that is priced. transfers:
    (sending rank, its action's end, receiving rank, its action's start, stage that sends, micro-batch, gradient)."""

    ranks: tuple[RankTimeline, ...]
    makespan_s: float
    end_s: float
    step_time_s: float
    transfers: tuple[tuple[int, float, int, float, int, int, bool], ...]

    @property
    def bubble(self) -> float:
        """Idle share of the pipeline's passes."""
        total = len(self.ranks) * self.makespan_s
        return 1.0 - sum(r.busy_s for r in self.ranks) / total if total else 0.0


def timeline_of(plan: Plan) -> StepTimeline:
    """The step of a plan. A plan of before, which states no transfer times, is drawn without them; one without curves, without memory."""
    ranks, each = plan.mesh[LAYERS], plan.gpus // plan.mesh[LAYERS]
    account = plan.account
    before_s, transfer_s = (account.before_s, account.transfer_s) if account else (0.0, 0.0)
    actions = schedule(plan.schedule, ranks, plan.micro_batches, plan.virtual_stages)
    made = simulate(actions, [s.forward_s for s in plan.stages], [s.backward_s for s in plan.stages], transfer_s)
    passes_end_s = before_s + made.makespan_s
    reduced_s = passes_end_s + plan.gradient_sync_s
    end_s = reduced_s + plan.optimizer_s
    found = []
    for r, events in enumerate(made.events):
        bars = [Bar(kind=BEFORE, start_s=0.0, end_s=before_s)] if before_s else []
        bars += [
            Bar(
                kind=_PASSES[e.action.pass_], start_s=before_s + e.start_s, end_s=before_s + e.end_s, stage=e.action.stage,
                micro_batch=e.action.micro_batch,
            )
            for e in events
        ]  # fmt: skip
        bars += [Bar(kind=REDUCTION, start_s=passes_end_s, end_s=reduced_s)] if plan.gradient_sync_s else []
        bars += [Bar(kind=UPDATE, start_s=reduced_s, end_s=end_s)] if plan.optimizer_s else []
        stages = tuple(s for s, of in enumerate(plan.rank_of) if of == r)
        curve = account.curves[r] if account and len(account.curves) == ranks and len(account.curves[r].stages) == len(stages) else None
        times = before_s, passes_end_s, reduced_s, end_s
        most = plan.memory_bytes[stages[0]] if len(stages) > 1 else None  # its units are counted with whatever pass may come next
        levels = tuple(_levels(curve, stages, events, times, most)) if curve else ()
        found.append(
            RankTimeline(
                rank=r, ranks=(r * each, (r + 1) * each - 1), stages=stages, bars=tuple(bars), memory=levels,
                busy_s=math.fsum(e.end_s - e.start_s for e in events),
            )
        )  # fmt: skip
    return StepTimeline(
        ranks=tuple(found), makespan_s=made.makespan_s, end_s=end_s, step_time_s=plan.step_time_s,
        transfers=tuple(_transfers(made.events, plan.rank_of, before_s)),
    )  # fmt: skip


def _levels(
    curve: RankCurve, stages: Sequence[int], events: Sequence[Event], times: tuple[float, float, float, float], most: int | None
) -> Iterator[Level]:
    """The memory of a rank from event to event, as planner.liveness counts it. times: the end of what is before the passes, of the passes,
    the reduction and the step; most: the plan's own figure, where that is finer than what is kept of the curve."""
    before_s, passes_end_s, reduced_s, end_s = times
    index = {stage: k for k, stage in enumerate(stages)}
    held, reduced = [0] * len(stages), [False] * len(stages)
    left = [sum(e.action.pass_ == "B" and index[e.action.stage] == k for e in events) for k in range(len(stages))]

    def beside() -> int:
        kept = sum(n * s.kept_bytes for n, s in zip(held, curve.stages, strict=True))
        gradients = [s.gradient_bytes if n else s.left_bytes for n, s in zip(left, curve.stages, strict=True)]
        return kept + sum(g for some, g in zip(reduced, gradients, strict=True) if some)

    def level(at_s: float, alive: int) -> Level:
        nbytes = curve.total_bytes(curve.rest_bytes + curve.waiting_bytes + alive)
        return Level(at_s=at_s, nbytes=nbytes if most is None else min(nbytes, most))

    yield level(0.0, 0)
    for event in events:
        k, pass_ = index[event.action.stage], event.action.pass_
        own = curve.stages[k]
        held[k] -= pass_ == "B"
        base, seconds = beside(), event.end_s - event.start_s
        left[k] -= pass_ == "B"
        points = _points(own, pass_, reduced[k], left[k] == 0)
        for n, nbytes in enumerate(points):
            yield level(before_s + event.start_s + seconds * n / len(points), base + nbytes)
        held[k] += pass_ == "F"
        reduced[k] |= pass_ == "B"
        yield level(before_s + event.end_s, beside())
    if curve.ends_bytes:
        yield Level(at_s=passes_end_s, nbytes=curve.total_bytes(curve.rest_bytes + curve.ends_bytes))
    yield Level(at_s=reduced_s, nbytes=curve.total_bytes(curve.update_bytes))
    yield Level(at_s=end_s, nbytes=curve.total_bytes(curve.rest_bytes))


def _points(own: StageCurve, pass_: str, accumulated: bool, last: bool) -> Sequence[int]:
    if pass_ == "F":
        return own.forward
    if pass_ == "W":
        return [0]
    return own.first if not accumulated else own.last if last else own.later


def _transfers(
    events: Sequence[Sequence[Event]], rank_of: Sequence[int], before_s: float
) -> Iterator[tuple[int, float, int, float, int, int, bool]]:
    starts = {e.action: (r, e) for r, own in enumerate(events) for e in own}
    for action, (r, event) in starts.items():
        for need in action.needs(len(rank_of)):
            sender, sent = starts[need]
            if sender != r and need.pass_ == action.pass_:
                yield sender, before_s + sent.end_s, r, before_s + event.start_s, need.stage, need.micro_batch, action.pass_ == "B"


def ranks_text(ranks: tuple[int, int]) -> str:
    """'rank 3', 'ranks 0-15'."""
    return f"rank {ranks[0]}" if ranks[0] == ranks[1] else f"ranks {ranks[0]}-{ranks[1]}"
