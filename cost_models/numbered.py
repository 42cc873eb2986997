"""The actions of a pipelined step by number: a step of 64 ranks has tens of thousands of them.

An action is named by its place among those of all ranks, a message by the action that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cost_models.actions import UNITS, Action, ScheduleError, rank_of_stages

__all__ = ["Fast", "Numbered", "Path"]


class Numbered:
    """actions: by number; of: the rank of each stage; ranks: the numbers of each rank's actions; needs: of each action those whose results
    it takes; message: of an action the message that it takes of another rank, or -1; to: of an action the rank that takes its result, or
    -1."""

    def __init__(self, ranks: Sequence[Sequence[Action]]) -> None:
        self.of = of = rank_of_stages(ranks)
        self.actions = [a for actions in ranks for a in actions]
        starts = [0]
        for actions in ranks:
            starts.append(starts[-1] + len(actions))
        self.ranks = [range(a, b) for a, b in zip(starts, starts[1:])]
        number = {(a.stage, a.pass_, a.micro_batch): k for k, a in enumerate(self.actions)}
        self.message, self.to = [-1] * len(self.actions), [-1] * len(self.actions)
        self.needs: list[tuple[int, ...]] = []
        for k, (stage, pass_, i) in enumerate(self.actions):
            own = number.get((stage, "F" if pass_ == "B" else "B", i), -1) if pass_ != "F" else -1
            source = stage - 1 if pass_ == "F" else stage + 1
            made = number.get((source, pass_, i), -1) if pass_ != "W" and 0 <= source < len(of) else -1
            self.needs.append(tuple(n for n in (own, made) if n >= 0))
            if made >= 0 and of[source] != of[stage]:
                self.message[k], self.to[made] = made, of[stage]

    def order(self) -> list[int]:
        """All actions in an order in which they can run, where what is not among them has run before. Raises ScheduleError naming each
        rank's stuck action if there is none."""
        done, found = bytearray(len(self.actions)), list[int]()
        position = [own.start for own in self.ranks]
        waits, moved = list(range(len(self.ranks))), True
        while waits and moved:
            left, before = [], len(found)
            for rank in waits:
                k, stop = position[rank], self.ranks[rank].stop
                while k < stop and all(done[n] for n in self.needs[k]):
                    done[k] = 1
                    found.append(k)
                    k += 1
                position[rank] = k
                if k < stop:
                    left.append(rank)
            waits, moved = left, len(found) > before
        if waits:
            stuck = ", ".join(str(self.actions[position[rank]]) for rank in waits)
            raise ScheduleError(f"the schedule deadlocks: {stuck} wait for actions that come later or never")
        return found

    def times(self) -> tuple[list[int], list[int]]:
        """When each action begins and ends if passes take their units of time and transfers none."""
        begins, ends, free = [0] * len(self.actions), [0] * len(self.actions), [0] * len(self.ranks)
        for k in self.order():
            stage, pass_, _ = self.actions[k]
            rank = self.of[stage]
            begins[k] = max(free[rank], *(ends[n] for n in self.needs[k])) if self.needs[k] else free[rank]
            free[rank] = ends[k] = begins[k] + UNITS[pass_]
        return begins, ends


class Path(NamedTuple):
    """How many passes of each stage are on a path of actions."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]

    def seconds(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
        """Of passes of these seconds, by stage."""
        pairs = ((self.forwards, forward_s), (self.backwards, backward_s))
        return sum(n * s for counts, seconds in pairs for n, s in zip(counts, seconds, strict=True))


class Fast:
    """The makespan of one step's actions for any seconds, without its events."""

    def __init__(self, ranks: Sequence[Sequence[Action]]) -> None:
        steps = Numbered(ranks)
        of, order = steps.of, steps.order()
        nothing = len(order)
        place = [nothing] * nothing
        for at, k in enumerate(order):
            place[k] = at
        before: dict[int, int] = {}
        self.stages = len(of)
        self._steps: list[tuple[int, int, int, bool]] = []  # duration, action before it on its rank, action that it waits for, transferred
        for at, k in enumerate(order):
            stage, pass_, _ = steps.actions[k]
            rank = of[stage]
            others = [n for n in steps.needs[k] if steps.actions[n].stage != stage]
            need = place[others[0]] if others else nothing
            kind = {"F": 0, "B": 1, "W": 2}[pass_]
            self._steps.append((kind * len(of) + stage, before.get(rank, nothing), need, steps.message[k] >= 0))
            before[rank] = at

    def makespan_s(self, forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float) -> float:
        return max(self._ends(forward_s, backward_s, p2p_s))

    def longest_path(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> Path:
        """Of actions that wait for one another, without transfers."""
        end = self._ends(forward_s, backward_s, 0.0)
        counts = [0] * 3 * self.stages
        nothing = len(self._steps)
        at = max(range(nothing), key=end.__getitem__, default=nothing)
        while at != nothing:
            d, before, need, _ = self._steps[at]
            counts[d] += 1
            at = before if end[before] >= end[need] else need
        return Path(tuple(counts[: self.stages]), tuple(counts[self.stages : 2 * self.stages]))

    def _ends(self, forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float) -> list[float]:
        """When each action ends, in an order in which they can run; the last one is that of nothing."""
        duration = [*forward_s, *backward_s, *[0.0] * self.stages]
        end = [0.0] * (len(self._steps) + 1)
        for k, (d, before, need, moved) in enumerate(self._steps):
            start, arrived = end[before], end[need] + p2p_s if moved else end[need]
            end[k] = (start if start >= arrived else arrived) + duration[d]
        return end
