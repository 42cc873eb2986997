"""The memory of one rank that holds several stages, from the account of their pieces (stage_account.py) and the schedule's actions.

What the rank holds beside the pass that runs, of every stage (holds.Situation): the micro-batches that keep activations, and gradients
of parameters, once a backward pass has left them. The stage whose pass runs has its moments as a stage alone has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from autopar.planner.modes import Mode
from autopar.planner.stage_account import Critical, Run
from cost_models.holds import OnRank

__all__ = ["RankAccount"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAccount:
    """stages: the runs of each stage of the rank, in order."""

    stages: tuple[tuple[Run, ...], ...]
    on_rank: OnRank

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for stage in self.stages for run in stage)

    def bytes(self, counts: Sequence[Sequence[int]]) -> float:
        """The most of a step, if so many pieces of each run, of all stages in order, are in its modes."""
        bounds = (0, *accumulate(map(len, self.stages)))
        own = [_OneStage(runs, counts[a:b]) for runs, (a, b) in zip(self.stages, pairwise(bounds), strict=True)]
        most = sum(s.gradients + s.reduced for s in own)
        for now in self.on_rank.situations:
            beside = sum(n * s.whole for n, s in zip(now.held, own, strict=True))
            beside += sum(s.gradients for k, s in enumerate(own) if now.reduced[k] and k != now.stage)
            most = max(most, beside + own[now.stage].of_pass(now.pass_, accumulated=now.reduced[now.stage]))
        waiting = sum(f * s.received + b * s.sent for (f, b), s in zip(self.on_rank.waiting, own, strict=True))
        return sum(s.rest for s in own) + max(most + waiting + sum(s.passing for s in own), sum(s.update for s in own))

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
    """A stage whose pieces are in so many of their modes. whole: what a micro-batch keeps."""

    def __init__(self, runs: Sequence[Run], counts: Sequence[Sequence[int]]) -> None:
        def total(name: str) -> float:
            return float(sum(run.count * getattr(run.piece, name) for run in runs))

        self.rest, self.passing, self.update = total("rest_bytes"), total("passing_bytes"), total("update_bytes")
        self.gradients, self.reduced = total("gradient_bytes"), total("reduced_bytes")
        self.received, self.sent = runs[0].piece.received_bytes, runs[-1].piece.sent_bytes
        self._bound = self.received + self.sent
        pairs = zip(runs, counts, strict=True)
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
