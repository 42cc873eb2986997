"""Pipeline schedules as data: actions that print and parse, a validator, an event simulator, closed forms.

An action is written `2F0`: stage 2, forward, micro-batch 0 (`2B0` its backward), as in torch.distributed.pipelining. A schedule
is one tuple of actions a rank, in the order in which the rank runs them; the order alone decides everything, times come in only
in `simulate`. Rank r runs stage r. A new schedule is one entry of SCHEDULES.

Closed form, equal stages, p stages, m micro-batches, f and b a micro-batch's forward and backward, c a transfer. Transfers are
asynchronous, so they delay what waits for them and nobody else:
    GPipe  (Huang et al. 2019):     (m + p - 1)(f + b) + 2(p - 1)c
    1F1B   (Narayanan et al. 2021): (m + p - 1)(f + b) + 2(p - 1)c, plus what the transfers cost in the steady state: there a
           stage waits for its neighbour once every (p - stage) micro-batches, a round trip that takes 2c more than the work in it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CLOSED_FORMS",
    "SCHEDULES",
    "Action",
    "Event",
    "Kind",
    "ScheduleError",
    "Timeline",
    "in_flight",
    "parse",
    "render",
    "schedule",
    "simulate",
    "step_time_s",
    "validate",
]

Kind = Literal["gpipe", "1f1b"]
Ranks = tuple[tuple["Action", ...], ...]

_ACTION = re.compile(r"(\d+)([FB])(\d+)")


class ScheduleError(ValueError):
    """A schedule that cannot run: an action missing, twice, on the wrong rank, or waiting for one that comes later."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of one micro-batch through one stage; prints and parses as `2F0`."""

    stage: int
    pass_: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.pass_}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; one is written like 2F0: stage 2, forward (or B), micro-batch 0")
        return cls(int(match[1]), "F" if match[2] == "F" else "B", int(match[3]))

    def needs(self, stages: int) -> tuple[Action, ...]:
        """The actions of this or other stages whose results it takes."""
        if self.pass_ == "F":
            return (Action(self.stage - 1, "F", self.micro_batch),) if self.stage else ()
        own = Action(self.stage, "F", self.micro_batch)
        return (own, Action(self.stage + 1, "B", self.micro_batch)) if self.stage + 1 < stages else (own,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An action and when it ran, in seconds from the beginning of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a simulated step does. By stage: idle_s of the makespan, peak micro-batches whose activations are held, events."""

    makespan_s: float
    idle_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    events: tuple[tuple[Event, ...], ...]

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1."""
        return sum(self.idle_s) / (len(self.idle_s) * self.makespan_s) if self.makespan_s else 0.0


def _gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards in the same order."""
    return [Action(stage, pass_, i) for pass_ in ("F", "B") for i in range(micro_batches)]


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """As many forwards as there are stages behind, then one forward and one backward in turn, then the backwards left."""
    warm = min(stages - stage - 1, micro_batches)
    actions = [Action(stage, "F", i) for i in range(warm)]
    for i in range(micro_batches - warm):
        actions += [Action(stage, "F", warm + i), Action(stage, "B", i)]
    return actions + [Action(stage, "B", i) for i in range(micro_batches - warm, micro_batches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": _gpipe, "1f1b": _one_f_one_b}


def _check(kind: str, stages: int, micro_batches: int) -> None:
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind!r} is not one of {', '.join(SCHEDULES)}")
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"a schedule needs at least one stage and one micro-batch, found {stages} and {micro_batches}")


def schedule(kind: str, stages: int, micro_batches: int) -> Ranks:
    """The actions of every rank (rank = stage), in order. Raises ValueError on an unknown kind."""
    _check(kind, stages, micro_batches)
    return tuple(tuple(SCHEDULES[kind](stage, stages, micro_batches)) for stage in range(stages))


def render(ranks: Sequence[Sequence[Action]]) -> str:
    """One line a rank: `0F0 0F1 0B0 0B1`."""
    return "\n".join(" ".join(map(str, actions)) for actions in ranks)


def parse(text: str) -> Ranks:
    """The reverse of render. Raises ScheduleError on what is not an action."""
    return tuple(tuple(map(Action.parse, line.split())) for line in text.splitlines() if line.strip())


def _order(ranks: Sequence[Sequence[Action]]) -> list[Action]:
    """All actions in an order in which they can run. Raises ScheduleError naming each rank's stuck action if there is none."""
    stages, position, done, order = len(ranks), [0] * len(ranks), set[Action](), list[Action]()
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
    """Every stage runs every micro-batch forward and backward once, on its rank, in an order that does not deadlock.

    Raises ScheduleError.
    """
    seen: dict[Action, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if action in seen:
                raise ScheduleError(f"{action} runs twice, on ranks {seen[action]} and {rank}")
            if action.stage != rank:
                raise ScheduleError(f"{action} is on rank {rank}, its stage is on rank {action.stage}")
            seen[action] = rank
    micro_batches = 1 + max((action.micro_batch for action in seen), default=-1)
    for stage in range(len(ranks)):
        missing = [str(a) for i in range(micro_batches) for a in (Action(stage, "F", i), Action(stage, "B", i)) if a not in seen]
        if missing:
            raise ScheduleError(f"rank {stage} misses {', '.join(missing)}")
    _order(ranks)


def simulate(ranks: Sequence[Sequence[Action]], forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float = 0.0) -> Timeline:
    """Run a schedule as events. forward_s, backward_s: seconds of one micro-batch by stage. p2p_s: seconds of one transfer between
    neighbouring stages, which delays the receiver and occupies nobody (asynchronous send).

    Raises ScheduleError if the schedule is not valid, ValueError if the numbers of stages differ.
    """
    if not len(ranks) == len(forward_s) == len(backward_s):
        raise ValueError(f"{len(ranks)} ranks, {len(forward_s)} forward and {len(backward_s)} backward times")
    validate(ranks)
    stages = len(ranks)
    end_s: dict[Action, float] = {}
    free_s, busy_s, held, peak = [0.0] * stages, [0.0] * stages, [0] * stages, [0] * stages
    events: list[list[Event]] = [[] for _ in ranks]
    for action in _order(ranks):
        stage = action.stage
        arrival_s = [end_s[need] + (p2p_s if need.stage != stage else 0.0) for need in action.needs(stages)]
        start_s = max([free_s[stage], *arrival_s])
        duration_s = (forward_s if action.pass_ == "F" else backward_s)[stage]
        end_s[action] = free_s[stage] = start_s + duration_s
        busy_s[stage] += duration_s
        held[stage] += 1 if action.pass_ == "F" else -1
        peak[stage] = max(peak[stage], held[stage])
        events[stage].append(Event(action=action, start_s=start_s, end_s=end_s[action]))
    makespan_s = max(free_s)
    return Timeline(
        makespan_s=makespan_s,
        idle_s=tuple(makespan_s - busy for busy in busy_s),
        peak_in_flight=tuple(peak),
        events=tuple(map(tuple, events)),
    )


def in_flight(kind: str, stage: int, stages: int, micro_batches: int) -> int:
    """Most micro-batches whose activations `stage` holds at once: all of them in GPipe, at most stages - stage in 1F1B."""
    _check(kind, stages, micro_batches)
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages}")
    if kind == "gpipe":
        return micro_batches
    if kind == "1f1b":
        return min(stages - stage, micro_batches)
    held = peak = 0
    for action in SCHEDULES[kind](stage, stages, micro_batches):
        held += 1 if action.pass_ == "F" else -1
        peak = max(peak, held)
    return peak


def _gpipe_time_s(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, p2p_s: float) -> float:
    """Exact for any stages: two permutation flow shops of equal jobs, one after the other at the last stage."""
    work_s = sum(forward_s) + sum(backward_s) + (micro_batches - 1) * (max(forward_s) + max(backward_s))
    return work_s + 2 * (len(forward_s) - 1) * p2p_s


def _one_f_one_b_time_s(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, p2p_s: float) -> float:
    """Exact for equal stages, at least the simulator's time for unequal ones.

    Every micro-batch but one waits for the slowest stage. The longest path leaves the last stage, climbs j - 1 stages and comes
    back, which passes j micro-batches and 2(j - 1) transfers, j at most the number of stages: as few such trips as will do.
    Only while the pipeline fills and drains can one stage's forward and another's backward be what is waited for.
    """
    stages, rest = len(forward_s), micro_batches - 1
    slowest_s = max(f + b for f, b in zip(forward_s, backward_s))
    unmatched_s = min(rest, stages - 1) * (max(forward_s) + max(backward_s) - slowest_s)
    transfers = 2 * (stages - 1) + 2 * (rest - -(-rest // stages))
    return sum(forward_s) + sum(backward_s) + rest * slowest_s + unmatched_s + transfers * p2p_s


CLOSED_FORMS: dict[str, Callable[[Sequence[float], Sequence[float], int, float], float]] = {
    "gpipe": _gpipe_time_s,
    "1f1b": _one_f_one_b_time_s,
}


def step_time_s(kind: str, forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, p2p_s: float = 0.0) -> float:
    """Seconds from the first forward to the last backward, without gradient reduction and optimizer.

    forward_s, backward_s: seconds of one micro-batch by stage; p2p_s: of one transfer between neighbours. GPipe is exact; 1F1B is
    exact when the stages are equal and an upper bound otherwise; a schedule without a closed form is simulated.
    Raises ValueError on an unknown kind or unequal numbers of stages.
    """
    _check(kind, len(forward_s), micro_batches)
    if len(forward_s) != len(backward_s):
        raise ValueError(f"{len(forward_s)} forward and {len(backward_s)} backward times")
    if kind not in CLOSED_FORMS:
        return simulate(schedule(kind, len(forward_s), micro_batches), forward_s, backward_s, p2p_s).makespan_s
    return CLOSED_FORMS[kind](forward_s, backward_s, micro_batches, p2p_s)
