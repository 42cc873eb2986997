"""When the ranks of a pipelined step send and receive, in an order that is the same at both ends of every pair of ranks.

It follows from the actions (actions.py) alone. A step of 64 ranks has 65,000 of them, so that they are numbered here: an action by its
place among those of all ranks, a message by the action that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.actions import UNITS, Action, Ranks, ScheduleError, rank_of_stages

__all__ = ["Exchange", "Numbered", "Posted", "exchanges"]

Posted = list[list[tuple[list[int], list[int]]]]  # of each rank, before each action and behind the last: what it sends, and receives


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a rank sends and receives at once, before one of its actions or behind the last one. A message is named by the action that made
    it."""

    sends: tuple[Action, ...] = ()
    receives: tuple[Action, ...] = ()


class Numbered:
    """The actions of a step by number. of: the rank of each stage; ranks: the numbers of each rank's actions; message: of an action the
    message that it takes of another rank, or -1; to: of an action the rank that takes its result, or -1."""

    def __init__(self, ranks: Sequence[Sequence[Action]]) -> None:
        self.of = of = rank_of_stages(ranks)
        self.actions = [a for actions in ranks for a in actions]
        starts = [0]
        for actions in ranks:
            starts.append(starts[-1] + len(actions))
        self.ranks = [range(a, b) for a, b in zip(starts, starts[1:])]
        self.number = {a: k for k, a in enumerate(self.actions)}
        self.message, self.to = [-1] * len(self.actions), [-1] * len(self.actions)
        for k, (stage, pass_, i) in enumerate(self.actions):
            source = stage - 1 if pass_ == "F" else stage + 1
            if pass_ != "W" and 0 <= source < len(of) and of[source] != of[stage]:
                made = self.number[Action(source, pass_, i)]
                self.message[k], self.to[made] = made, of[stage]

    def posted(self) -> Posted:
        """A result is sent as soon as it is there. It is received when it is needed, if that has the same order at both ends of every pair
        of ranks and cannot deadlock even where a send waits for its receive; else when it is sent, by the order of a step whose passes
        take their units of time: any two events of that order are in it for all ranks, so that the first one left can always happen."""
        found = self._when_needed()
        return found if self._meet(found) else self._when_sent()

    def _when_needed(self) -> Posted:
        streams: dict[tuple[int, int], list[int]] = {}  # (from, to) -> messages, as they are sent
        place = [0] * len(self.actions)
        for rank, own in enumerate(self.ranks):
            for k in own:
                if self.to[k] >= 0:
                    stream = streams.setdefault((rank, self.to[k]), [])
                    place[k] = len(stream)
                    stream.append(k)
        arrived = dict.fromkeys(streams, 0)
        found: Posted = []
        for rank, own in enumerate(self.ranks):
            here: list[tuple[list[int], list[int]]] = []
            last: list[int] = []
            for k in own:
                message, receives = self.message[k], list[int]()
                if message >= 0:
                    pair = self.of[self.actions[message].stage], rank
                    done, until = arrived[pair], place[message] + 1
                    if until > done:
                        receives, arrived[pair] = streams[pair][done:until], until
                here.append((last, receives))
                last = [k] if self.to[k] >= 0 else []
            here.append((last, []))
            found.append(here)
        return found

    def _meet(self, found: Posted) -> bool:
        """Whether all ranks come to their end if each waits in every exchange until both ends of all of it are there."""
        position = [0] * len(found)
        sending, receiving = bytearray(len(self.actions)), bytearray(len(self.actions))
        waits = list(range(len(found)))
        while waits:
            left = []
            moved = False
            for rank in waits:
                own, at = found[rank], position[rank]
                while at < len(own):
                    sends, receives = own[at]
                    for m in sends:
                        sending[m] = 1
                    for m in receives:
                        receiving[m] = 1
                    if not all(receiving[m] for m in sends) or not all(sending[m] for m in receives):
                        break
                    at += 1
                moved |= at > position[rank]
                position[rank] = at
                if at < len(own):
                    left.append(rank)
            if not moved:
                return False
            waits = left
        return True

    def _when_sent(self) -> Posted:
        starts, ends = self._times()
        events = [(s, 1, k) for k, s in enumerate(starts)] + [(ends[k], 0, k) for k, to in enumerate(self.to) if to >= 0]
        events.sort(key=lambda e: (e[0], e[1], self.actions[e[2]]))
        found: Posted = [[([], []) for _ in range(len(own) + 1)] for own in self.ranks]
        position = [0] * len(found)
        of, actions, to = self.of, self.actions, self.to
        for _, begins, k in events:
            here = of[actions[k].stage]
            if begins:
                position[here] += 1
            else:
                found[here][position[here]][0].append(k)
                found[to[k]][position[to[k]]][1].append(k)
        return found

    def _times(self) -> tuple[list[int], list[int]]:
        """When each action begins and ends if passes take their units of time and transfers none."""
        stages, number = len(self.of), self.number
        needs = [[n for need in a.needs(stages) if (n := number.get(need, -1)) >= 0] for a in self.actions]
        begins, ends = [0] * len(needs), [-1] * len(needs)
        position, free = [own.start for own in self.ranks], [0] * len(self.ranks)
        moved = True
        while moved:
            moved = False
            for rank, own in enumerate(self.ranks):
                k = position[rank]
                while k < own.stop:
                    start = free[rank]
                    for n in needs[k]:
                        end = ends[n]
                        if end < 0:
                            break
                        start = max(start, end)
                    else:
                        begins[k] = start
                        free[rank] = ends[k] = start + UNITS[self.actions[k].pass_]
                        k, moved = k + 1, True
                        continue
                    break
                position[rank] = k
        stuck = [str(self.actions[at]) for own, at in zip(self.ranks, position) if at < own.stop]
        if stuck:
            raise ScheduleError(f"the schedule deadlocks: {', '.join(stuck)} wait for actions that come later or never")
        return begins, ends


def exchanges(ranks: Ranks | Sequence[Sequence[Action]]) -> tuple[tuple[Exchange, ...], ...]:
    """For each rank one before each of its actions, and one behind the last: see `Numbered.posted`."""
    steps = Numbered(ranks)
    actions = steps.actions
    return tuple(
        tuple(Exchange(sends=tuple(actions[m] for m in sends), receives=tuple(actions[m] for m in receives)) for sends, receives in own)
        for own in steps.posted()
    )
