"""The memory of one rank that holds several stages, from the account of their pieces (stage_account.py) and the schedule's actions.

What the rank holds beside the pass that runs, of every stage (holds.Situation): the micro-batches that keep activations, and gradients
of parameters, once a backward pass has left them. The stage whose pass runs has its moments as a stage alone has.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from autopar.planner.modes import Mode
from autopar.planner.stage_account import Counts, Critical, Run
from cost_models.holds import OnRank

__all__ = ["RankAccount"]


@dataclass(frozen=True, kw_only=True)
class RankAccount:
    """stages: the runs of each stage of the rank, in order."""

    stages: tuple[tuple[Run, ...], ...]
    on_rank: OnRank

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for stage in self.stages for run in stage)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return (0, *accumulate(map(len, self.stages)))

    @cached_property
    def _own(self) -> list[_OneStage]:
        return [_OneStage(runs) for runs in self.stages]

    @cached_property
    def _beside(self) -> list[float]:
        """In each situation: the gradients of the stages whose pass does not run."""
        gradients = [s.gradients for s in self._own]
        return [sum(g for k, g in enumerate(gradients) if now.reduced[k] and k != now.stage) for now in self.on_rank.situations]

    @cached_property
    def _fixed(self) -> tuple[float, float, float, float]:
        """Whatever the modes: what rests; beyond it while passes run, what waits for its pass included; at the end; in the update."""
        own = self._own
        waiting = sum(f * s.received + b * s.sent for (f, b), s in zip(self.on_rank.waiting, own, strict=True))
        end = sum(s.gradients + s.reduced for s in own)
        return sum(s.rest for s in own), waiting + sum(s.passing for s in own), end, sum(s.update for s in own)

    def bytes(self, counts: Sequence[Sequence[int]]) -> float:
        """The most of a step, if so many pieces of each run, of all stages in order, are in its modes."""
        pairs = zip(self._own, pairwise(self._bounds), strict=True)
        own = [s.in_modes(tuple(map(tuple, counts[a:b]))) for s, (a, b) in pairs]
        whole = [s.whole for s in own]
        rest, passing, most, update = self._fixed
        for now, gradients in zip(self.on_rank.situations, self._beside, strict=True):
            beside = gradients + sum(map(operator.mul, now.held, whole))
            most = max(most, beside + own[now.stage].of_pass(now.pass_, accumulated=now.reduced[now.stage]))
        return rest + max(most + passing, update)

    def critical(self, kept: Sequence[float], limit_bytes: float) -> Critical:
        """kept: bytes that each piece of a run keeps if nothing else runs again. The moments at the last piece of each run."""
        runs = self.runs
        place = [(k, r) for k, stage in enumerate(self.stages) for r in range(len(stage))]
        rest = sum(r.count * (r.piece.rest_bytes + r.piece.passing_bytes) for r in runs)
        gradients = [sum(r.count * r.piece.gradient_bytes for r in stage) for stage in self.stages]
        wholes = [s[0].piece.received_bytes + s[-1].piece.sent_bytes for s in self.stages]
        for (k, _), run, each in zip(place, runs, kept, strict=True):
            wholes[k] += run.count * each
        found = Critical(0.0, [0.0] * len(runs))
        for now in self.on_rank.situations:
            if now.pass_ != "B":
                continue
            beside = sum(n * w for n, w in zip(now.held, wholes, strict=True))
            beside += sum(g for k, g in enumerate(gradients) if now.reduced[k] and k != now.stage)
            before, behind = 0.0, gradients[now.stage]
            for (k, r), run, each in zip(place, runs, kept, strict=True):
                if k != now.stage:
                    continue
                modes = [run.piece.modes[m] for m in run.modes]
                before, behind = before + run.count * each, behind - run.count * run.piece.gradient_bytes
                if now.reduced[k]:
                    own = min(x.later_bytes for x in modes) + gradients[k]
                else:
                    own = min(x.backward_bytes for x in modes) + behind
                need = rest + beside + before - each + own - limit_bytes
                if need > found.need:
                    counted = [float(now.held[q] + (q == k and x <= r)) for q, x in place]
                    found = Critical(need, counted)
        return found


class _OneStage:
    """A stage, whatever the modes of its pieces."""

    def __init__(self, runs: Sequence[Run]) -> None:
        def total(name: str) -> float:
            return float(sum(run.count * getattr(run.piece, name) for run in runs))

        self.runs = runs
        self.rest, self.passing, self.update = total("rest_bytes"), total("passing_bytes"), total("update_bytes")
        self.gradients, self.reduced = total("gradient_bytes"), total("reduced_bytes")
        self.received, self.sent = runs[0].piece.received_bytes, runs[-1].piece.sent_bytes
        self._known: dict[Counts, _InModes] = {}

    def in_modes(self, counts: Counts) -> _InModes:
        if counts not in self._known:
            self._known[counts] = _InModes(self, counts)
        return self._known[counts]


class _InModes:
    """A stage whose pieces are in so many of their modes. whole: what a micro-batch keeps."""

    def __init__(self, stage: _OneStage, counts: Counts) -> None:
        self.gradients, self._bound = stage.gradients, stage.received + stage.sent
        pairs = zip(stage.runs, counts, strict=True)
        groups = [(run, run.piece.modes[k], c) for run, of in pairs for k, c in zip(run.modes, of, strict=True) if c]
        self.whole = self._bound + sum(c * mode.kept_bytes for _, mode, c in groups)
        run, mode, c = groups.pop()  # the last piece of the stage stands alone: what it makes when it runs again holds what was sent
        self._groups: list[tuple[Run, Mode, int]] = [*groups, *([(run, mode, c - 1)] if c > 1 else []), (run, mode, 1)]
        self._known: dict[tuple[str, bool], float] = {}

    def of_pass(self, pass_: str, *, accumulated: bool) -> float:
        """The most of a pass beside what other micro-batches keep. accumulated: the stage's gradients are there already."""
        key = pass_, accumulated
        if key not in self._known:
            self._known[key] = self._forward(accumulated) if pass_ == "F" else self._backward(accumulated)
        return self._known[key]

    def _forward(self, accumulated: bool) -> float:
        most, before = 0.0, 0.0
        for _, mode, c in self._groups:
            most = max(most, before + (c - 1) * mode.kept_bytes + mode.forward_bytes)
            before += c * mode.kept_bytes
        return most + (self.gradients if accumulated else 0.0)

    def _backward(self, accumulated: bool) -> float:
        most, before, behind = 0.0, 0.0, self.gradients
        for g, (run, mode, c) in enumerate(self._groups, start=1):
            p = run.piece
            there = self._bound - (p.sent_bytes if g == len(self._groups) and mode.again_s > 0 else 0.0)
            last = before + (c - 1) * mode.kept_bytes
            if accumulated:
                most = max(most, self.gradients + there + last + mode.later_bytes)
            else:
                first = there + before + mode.backward_bytes + behind - p.gradient_bytes
                most = max(most, first, there + last + mode.backward_bytes + behind - c * p.gradient_bytes)
            before, behind = before + c * mode.kept_bytes, behind - c * p.gradient_bytes
        return most
