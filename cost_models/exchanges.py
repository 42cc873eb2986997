"""When the ranks of a pipelined step send and receive, in an order that is the same at both ends of every pair of ranks.

It follows from the actions (actions.py) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.actions import Action, Ranks
from cost_models.numbered import Numbered

__all__ = ["Exchange", "Posted", "exchanges", "posted"]

Posted = list[list[tuple[list[int], list[int]]]]  # of each rank, before each action and behind the last: what it sends, and receives


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a rank sends and receives at once, before one of its actions or behind the last one. A message is named by the action that made
    it."""

    sends: tuple[Action, ...] = ()
    receives: tuple[Action, ...] = ()


def posted(steps: Numbered) -> Posted:
    """A result is sent as soon as it is there. It is received when it is needed, if that has the same order at both ends of every pair
    of ranks and cannot deadlock even where a send waits for its receive; else when it is sent, by the order of a step whose passes
    take their units of time: any two events of that order are in it for all ranks, so that the first one left can always happen."""
    found = _when_needed(steps)
    return found if _meet(steps, found) else _when_sent(steps)


def _when_needed(steps: Numbered) -> Posted:
    streams: dict[tuple[int, int], list[int]] = {}  # (from, to) -> messages, as they are sent
    place = [0] * len(steps.actions)
    for rank, own in enumerate(steps.ranks):
        for k in own:
            if steps.to[k] >= 0:
                stream = streams.setdefault((rank, steps.to[k]), [])
                place[k] = len(stream)
                stream.append(k)
    arrived = dict.fromkeys(streams, 0)
    found: Posted = []
    for rank, own in enumerate(steps.ranks):
        here: list[tuple[list[int], list[int]]] = []
        last: list[int] = []
        for k in own:
            message, receives = steps.message[k], list[int]()
            if message >= 0:
                pair = steps.of[steps.actions[message].stage], rank
                done, until = arrived[pair], place[message] + 1
                if until > done:
                    receives, arrived[pair] = streams[pair][done:until], until
            here.append((last, receives))
            last = [k] if steps.to[k] >= 0 else []
        here.append((last, []))
        found.append(here)
    return found


def _meet(steps: Numbered, found: Posted) -> bool:
    """Whether all ranks come to their end if each waits in every exchange until both ends of all of it are there."""
    position = [0] * len(found)
    sending, receiving = bytearray(len(steps.actions)), bytearray(len(steps.actions))
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


def _when_sent(steps: Numbered) -> Posted:
    starts, ends = steps.times()
    count = len(steps.actions)
    by_name = sorted(range(count), key=steps.actions.__getitem__)
    place = [0] * count
    for at, k in enumerate(by_name):
        place[k] = at
    events = [(2 * start + 1) * count + at for start, at in zip(starts, place)]  # its time, whether it begins, and its action, as a number
    events += [2 * ends[k] * count + place[k] for k, to in enumerate(steps.to) if to >= 0]
    events.sort()
    found: Posted = [[([], []) for _ in range(len(own) + 1)] for own in steps.ranks]
    position = [0] * len(found)
    of, actions, to = steps.of, steps.actions, steps.to
    for event in events:
        begins, k = event // count % 2, by_name[event % count]
        here = of[actions[k].stage]
        if begins:
            position[here] += 1
        else:
            found[here][position[here]][0].append(k)
            found[to[k]][position[to[k]]][1].append(k)
    return found


def exchanges(ranks: Ranks | Sequence[Sequence[Action]]) -> tuple[tuple[Exchange, ...], ...]:
    """For each rank one before each of its actions, and one behind the last: see `posted`."""
    steps = Numbered(ranks)
    actions = steps.actions
    return tuple(
        tuple(Exchange(sends=tuple(actions[m] for m in sends), receives=tuple(actions[m] for m in receives)) for sends, receives in own)
        for own in posted(steps)
    )
