"""The actions of a pipelined step, and what follows from their order alone.

An action is written `2F0`: stage 2, forward, micro-batch 0 (`2B0` its backward; `2W0` the gradients of its weights, where a schedule
makes these apart from those of activations), as in torch.distributed.pipelining. A step is one tuple of actions for each rank, in the order
in which the rank runs them. A rank may hold several stages, and which ones is read off its actions: stage is not rank.

From these tuples alone follow, in this module:
    validate      every stage runs every micro-batch once, on one rank, in an order that does not deadlock
    simulate      the time of the step, as events
and in exchanges.py and holds.py when ranks send and receive, and what each holds in memory meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "UNITS", "Action", "Event", "Pass", "Ranks", "ScheduleError", "Timeline", "alone", "order_of", "parse", "peaks",
    "rank_of_stages", "render", "simulate", "validate",
]  # fmt: skip

Pass = Literal["F", "B", "W"]
Ranks = tuple[tuple["Action", ...], ...]

_ACTION = re.compile(r"(\d+)([FBW])(\d+)")
UNITS: dict[Pass, int] = {"F": 1, "B": 2, "W": 1}  # of time, where only an order is wanted


class ScheduleError(ValueError):
    """A schedule that cannot run: an action missing, twice, a stage on two ranks, or one that waits for what comes later."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; prints and parses as `2F0`."""

    stage: int
    pass_: Pass
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.pass_}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; one is written like 2F0: stage 2, forward (or B, or W), micro-batch 0")
        pass_: Pass = "F" if match[2] == "F" else "B" if match[2] == "B" else "W"
        return cls(int(match[1]), pass_, int(match[3]))

    def needs(self, stages: int) -> tuple[Action, ...]:
        """The actions of this or other stages whose results it takes."""
        if self.pass_ == "W":
            return (Action(self.stage, "B", self.micro_batch),)
        if self.pass_ == "F":
            return (Action(self.stage - 1, "F", self.micro_batch),) if self.stage else ()
        own = Action(self.stage, "F", self.micro_batch)
        return (own, Action(self.stage + 1, "B", self.micro_batch)) if self.stage + 1 < stages else (own,)


def render(ranks: Sequence[Sequence[Action]]) -> str:
    """One line a rank: `0F0 0F1 0B0 0B1`."""
    return "\n".join(" ".join(map(str, actions)) for actions in ranks)


def parse(text: str) -> Ranks:
    """The reverse of render. Raises ScheduleError on what is not an action."""
    return tuple(tuple(map(Action.parse, line.split())) for line in text.splitlines() if line.strip())


def alone(ranks: Sequence[Sequence[Action]], passes: str) -> Ranks:
    """These passes alone: those of evaluation ("F"), or what is left when others have run."""
    return tuple(tuple(a for a in actions if a.pass_ in passes) for actions in ranks)


# -------------------------------------------------------------------------------------------------------------- validity
def rank_of_stages(ranks: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The rank of each stage. Raises ScheduleError if one has none, or two."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if found.setdefault(action.stage, rank) != rank:
                raise ScheduleError(f"{action} is on rank {rank}, its stage is on rank {found[action.stage]}")
    missing = [s for s in range(max(found, default=-1) + 1) if s not in found]
    if missing:
        raise ScheduleError(f"no rank runs stage {missing[0]}")
    return tuple(found[s] for s in range(len(found)))


def order_of(ranks: Sequence[Sequence[Action]]) -> list[Action]:
    """All actions in an order in which they can run, where what is not among them has run before. Raises ScheduleError naming each rank's
    stuck action if there is none."""
    every = {a for actions in ranks for a in actions}
    stages = 1 + max((a.stage for a in every), default=-1)
    position, order = [0] * len(ranks), list[Action]()
    done = {need for a in every for need in a.needs(stages) if need not in every}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while position[rank] < len(actions) and done.issuperset(actions[position[rank]].needs(stages)):
                action = actions[position[rank]]
                done.add(action)
                order.append(action)
                position[rank] += 1
                moved = True
    stuck = [str(actions[at]) for actions, at in zip(ranks, position) if at < len(actions)]
    if stuck:
        raise ScheduleError(f"the schedule deadlocks: {', '.join(stuck)} wait for actions that come later or never")
    return order


def validate(ranks: Sequence[Sequence[Action]]) -> None:
    """Every stage runs every micro-batch forward and backward once (and its weights' gradients, if any does so apart), on one rank, in an
    order that does not deadlock. Raises ScheduleError."""
    seen: dict[Action, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if action in seen:
                raise ScheduleError(f"{action} runs twice, on ranks {seen[action]} and {rank}")
            seen[action] = rank
    stages = len(rank_of_stages(ranks))
    micro_batches = 1 + max((action.micro_batch for action in seen), default=-1)
    passes: tuple[Pass, ...] = ("F", "B", "W") if any(a.pass_ == "W" for a in seen) else ("F", "B")
    for stage in range(stages):
        missing = [str(a) for i in range(micro_batches) for p in passes if (a := Action(stage, p, i)) not in seen]
        if missing:
            raise ScheduleError(f"stage {stage} misses {', '.join(missing)}")
    order_of(ranks)


# ------------------------------------------------------------------------------------------------------------------ time
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An action and when it ran, in seconds from the beginning of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a simulated step does. By rank: idle_s of the makespan, and events. peak_in_flight: by stage, the most micro-batches whose
    activations are held."""

    makespan_s: float
    idle_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    events: tuple[tuple[Event, ...], ...]

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1."""
        return sum(self.idle_s) / (len(self.idle_s) * self.makespan_s) if self.makespan_s else 0.0


def simulate(
    ranks: Sequence[Sequence[Action]], forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float = 0.0,
    weights_s: Sequence[float] = (),
) -> Timeline:  # fmt: skip
    """Run a step as events. forward_s, backward_s: seconds of one micro-batch by stage; weights_s: of what W does, where a schedule has it
    apart from B. p2p_s: seconds of one transfer between ranks, which delays the receiver and occupies nobody (asynchronous send).

    Raises ScheduleError if the schedule is not valid, ValueError if the numbers of stages differ.
    """
    validate(ranks)
    of = rank_of_stages(ranks)
    if not len(of) == len(forward_s) == len(backward_s):
        raise ValueError(f"{len(of)} stages, {len(forward_s)} forward and {len(backward_s)} backward times")
    durations: dict[Pass, Sequence[float]] = {"F": forward_s, "B": backward_s, "W": weights_s or [0.0] * len(of)}
    events = _events(ranks, of, durations, p2p_s)
    makespan_s = max(e.end_s for own in events for e in own)
    return Timeline(
        makespan_s=makespan_s,
        idle_s=tuple(makespan_s - sum(durations[e.action.pass_][e.action.stage] for e in own) for own in events),
        peak_in_flight=peaks(ranks),
        events=tuple(map(tuple, events)),
    )


def _events(
    ranks: Sequence[Sequence[Action]], of: Sequence[int], durations: Mapping[Pass, Sequence[float]], p2p_s: float
) -> list[list[Event]]:
    end_s: dict[Action, float] = {}
    free_s = [0.0] * len(ranks)
    events: list[list[Event]] = [[] for _ in ranks]
    for action in order_of(ranks):
        rank = of[action.stage]
        arrival_s = [end_s[need] + (p2p_s if of[need.stage] != rank else 0.0) for need in action.needs(len(of)) if need in end_s]
        start_s = max([free_s[rank], *arrival_s])
        end_s[action] = free_s[rank] = start_s + durations[action.pass_][action.stage]
        events[rank].append(Event(action=action, start_s=start_s, end_s=end_s[action]))
    return events


def peaks(ranks: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """By stage, the most micro-batches whose activations are held at once."""
    stages = len(rank_of_stages(ranks))
    held, most = [0] * stages, [0] * stages
    for actions in ranks:
        frees: Pass = "W" if any(a.pass_ == "W" for a in actions) else "B"
        for a in actions:
            held[a.stage] += (a.pass_ == "F") - (a.pass_ == frees)
            most[a.stage] = max(most[a.stage], held[a.stage])
    return tuple(most)
