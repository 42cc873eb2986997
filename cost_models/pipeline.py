"""Pipeline schedules as data: a row says which actions each rank runs, in which order; the rest follows from the actions (actions.py).

A new schedule is one row of SCHEDULES. What it may state beside its actions, to be priced faster or bounded better, is checked against
the simulator by tests: a closed form of its time, how many micro-batches are in flight, the least that it can take.

With p ranks, v stages on each (virtual stages, where a schedule interleaves them: stage s is on rank s mod p), m micro-batches, f and b a
micro-batch's forward and backward through one of p equal parts of the model, c a transfer. Transfers are asynchronous, so they delay what
waits for them and nobody else:
    GPipe  (Huang et al. 2019):     (m + p - 1)(f + b) + 2(p - 1)c
    1F1B   (Narayanan et al. 2021): (m + p - 1)(f + b) + 2(p - 1)c, plus what the transfers cost in the steady state: there a
           stage waits for its neighbour once every (p - stage) micro-batches, a round trip that takes 2c more than the work in it
    interleaved 1F1B (the same, 2.2): m(f + b) + (p - 1)(f + b)/v for c = 0 and m a multiple of p; with transfers it is simulated
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_models.actions import Action, Ranks, alone, peaks, rank_of_stages, simulate
from cost_models.exchanges import Exchange, exchanges
from cost_models.holds import OnRank, situations
from cost_models.numbered import Fast, Path

__all__ = ["SCHEDULES", "Flow", "Schedule", "exchanged", "flow", "in_flight", "schedule", "simulate", "step_time_s"]

ClosedForm = Callable[[Sequence[float], Sequence[float], int, float], float]  # forwards, backwards, micro-batches, a transfer
ROUNDS = 4  # of p micro-batches: see Schedule.rounds
LONG = 40_000  # actions of a step that are simulated: the rounds behind them are taken to last as long as the last one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A row. actions: of (rank, ranks, stages on each rank, micro-batches), those of the rank, in order. several: a rank may hold several
    stages. rounds: of a schedule that does the same with every p micro-batches after the first ones, how many rounds of p, of the number
    of odd micro-batches, hold all that more of them would. closed_form: seconds where every rank holds one stage, at least those of the
    simulator; None: it is simulated. flights: of (stage, ranks, micro-batches), micro-batches in flight where every rank holds one stage;
    None: they are counted. filling: the share of a micro-batch's work on one of p ranks that the pipeline takes at least to fill and
    drain, beyond the micro-batches' own."""

    name: str
    actions: Callable[[int, int, int, int], Sequence[Action]]
    several: bool = False
    rounds: Callable[[int], int] | None = None
    closed_form: ClosedForm | None = None
    flights: Callable[[int, int, int], int] | None = None
    filling: Callable[[int, int], float] = lambda ranks, chunks: 0.0

    def least_s(self, work_s: float, ranks: int, chunks: int, micro_batches: int) -> float:
        """No step is priced below this. work_s: of one micro-batch through all stages."""
        return work_s * (micro_batches + self.filling(ranks, chunks)) / ranks


# ------------------------------------------------------------------------------------------------------------------ rows
def _gpipe(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards in the same order."""
    return [Action(rank, pass_, i) for pass_ in ("F", "B") for i in range(micro_batches)]


def _one_f_one_b(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
    """As many forwards as there are stages behind, then one forward and one backward in turn, then the backwards left."""
    warm = min(ranks - rank - 1, micro_batches)
    actions = [Action(rank, "F", i) for i in range(warm)]
    for i in range(micro_batches - warm):
        actions += [Action(rank, "F", warm + i), Action(rank, "B", i)]
    return actions + [Action(rank, "B", i) for i in range(micro_batches - warm, micro_batches)]


def _interleaved(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
    """Groups of micro-batches go through the rank's stages one stage after the other, and back in the other order; forwards are ahead of
    backwards by the stages behind this one, twice, and one group for each further stage on the rank (Megatron-LM's order). Groups are of p
    micro-batches, or evenly of a few more where p does not divide them."""
    groups = _groups(micro_batches, ranks)
    forward = [Action(c * ranks + rank, "F", i) for group in groups for c in range(chunks) for i in group]
    backward = [Action(c * ranks + rank, "B", i) for group in groups for c in reversed(range(chunks)) for i in group]
    warm = min(len(forward), 2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]))
    actions = forward[:warm]
    for one, back in zip(forward[warm:], backward, strict=False):
        actions += [one, back]
    return actions + backward[len(forward) - warm :]


def _groups(micro_batches: int, ranks: int) -> list[range]:
    count = max(1, micro_batches // ranks)
    size, more = divmod(micro_batches, count)
    starts = [k * size + min(k, more) for k in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]


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
    slowest_s = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
    unmatched_s = min(rest, stages - 1) * (max(forward_s) + max(backward_s) - slowest_s)
    transfers = 2 * (stages - 1) + 2 * (rest - -(-rest // stages))
    return sum(forward_s) + sum(backward_s) + rest * slowest_s + unmatched_s + transfers * p2p_s


SCHEDULES: dict[str, Schedule] = {
    row.name: row
    for row in (
        Schedule(
            name="gpipe", actions=_gpipe, closed_form=_gpipe_time_s, flights=lambda stage, ranks, m: m,
            filling=lambda ranks, chunks: ranks - 1,
        ),
        Schedule(
            name="1f1b", actions=_one_f_one_b, rounds=lambda odd: ROUNDS,
            closed_form=_one_f_one_b_time_s, flights=lambda stage, ranks, m: min(ranks - stage, m),
            filling=lambda ranks, chunks: ranks - 1,
        ),
        Schedule(
            name="interleaved", actions=_interleaved, several=True, rounds=lambda odd: odd + ROUNDS,
            filling=lambda ranks, chunks: (ranks - 1) / chunks,
        ),
    )
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- a schedule
@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """A schedule over so many ranks with so many stages on each, for so many micro-batches. rank_of: by stage; in_flight: by stage, the
    most micro-batches whose activations are held at once."""

    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    rank_of: tuple[int, ...]
    in_flight: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order."""
        return [s for s, of in enumerate(self.rank_of) if of == rank]

    @property
    def closed_form(self) -> bool:
        """Whether a step is priced by a closed form: the work of one micro-batch, and the others' on the slowest stage, at least."""
        return self.chunks == 1 and SCHEDULES[self.schedule].closed_form is not None

    def on_rank(self, rank: int) -> OnRank:
        """The stages that a rank holds, and what it holds of them while its passes run."""
        few = _like(self.schedule, self.ranks, self.micro_batches)
        return _situations(self.schedule, self.ranks, self.chunks, few, SCHEDULES[self.schedule])[rank]

    def step_time_s(self, forward_s: Sequence[float], backward_s: Sequence[float], p2p_s: float = 0.0) -> float:
        """Of these seconds by stage."""
        return step_time_s(self.schedule, forward_s, backward_s, self.micro_batches, p2p_s, self.ranks)

    def least_s(self, work_s: float) -> float:
        """No step is priced below this. work_s: of one micro-batch through all stages."""
        return SCHEDULES[self.schedule].least_s(work_s, self.ranks, self.chunks, self.micro_batches)

    def least_way_s(self, work_s: float, p2p_s: float) -> float:
        """No step without a closed form is priced below this: below what a micro-batch takes through all stages and back, nor below what
        passes wait for what is sent. work_s: of one micro-batch through all stages."""
        nothing = [0.0] * self.stages
        few = _simulated(self.schedule, self.ranks, self.chunks, self.micro_batches)
        waits_s = _fast(self.schedule, self.ranks, self.chunks, few, SCHEDULES[self.schedule]).makespan_s(nothing, nothing, p2p_s)
        return max(work_s + 2 * (self.stages - 1) * p2p_s, waits_s)

    def longest_path(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> Path | None:
        """The passes on a longest path of actions that wait for one another: no step of other seconds is priced below what these take.
        None where a step has a closed form, or is not simulated whole."""
        row, m = SCHEDULES[self.schedule], self.micro_batches
        if self.closed_form or _simulated(self.schedule, self.ranks, self.chunks, m) < m:
            return None
        return _fast(self.schedule, self.ranks, self.chunks, m, row).longest_path(forward_s, backward_s)


def _check(kind: str, ranks: int, chunks: int, micro_batches: int) -> None:
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind!r} is not one of {', '.join(SCHEDULES)}")
    if ranks < 1 or micro_batches < 1 or chunks < 1:
        raise ValueError(f"a schedule needs at least one stage and one micro-batch, found {ranks * chunks} and {micro_batches}")
    if chunks > 1 and not SCHEDULES[kind].several:
        raise ValueError(f"{kind} has one stage on each rank, not {chunks}")


def schedule(kind: str, ranks: int, micro_batches: int, chunks: int = 1) -> Ranks:
    """The actions of every rank, in order; chunks: stages on each. Raises ValueError on an unknown kind."""
    _check(kind, ranks, chunks, micro_batches)
    return tuple(tuple(SCHEDULES[kind].actions(rank, ranks, chunks, micro_batches)) for rank in range(ranks))


def flow(kind: str, ranks: int, micro_batches: int, chunks: int = 1) -> Flow:
    """Raises ValueError on an unknown kind."""
    _check(kind, ranks, chunks, micro_batches)
    row = SCHEDULES[kind]
    if chunks == 1 and row.flights is not None:
        places, flights = tuple(range(ranks)), tuple(row.flights(s, ranks, micro_batches) for s in range(ranks))
    else:
        places, flights = _counted(kind, ranks, chunks, _like(kind, ranks, micro_batches), row)
    return Flow(schedule=kind, ranks=ranks, chunks=chunks, micro_batches=micro_batches, rank_of=places, in_flight=flights)


def in_flight(kind: str, stage: int, stages: int, micro_batches: int) -> int:
    """Most micro-batches whose activations `stage` holds at once, where every rank has one stage: all of them in GPipe, at most
    stages - stage in 1F1B."""
    _check(kind, stages, 1, micro_batches)
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages}")
    return flow(kind, stages, micro_batches).in_flight[stage]


def step_time_s(
    kind: str, forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, p2p_s: float = 0.0, ranks: int | None = None
) -> float:
    """Seconds from the first forward to the last backward, without gradient reduction and optimizer.

    forward_s, backward_s: seconds of one micro-batch by stage; p2p_s: of one transfer between neighbours; ranks: by default as many as
    stages. GPipe is exact; 1F1B is exact when the stages are equal and an upper bound otherwise; a schedule without a closed form is
    simulated (a very long one as far as LONG says), and is priced at what equal stages would take at least, as 1F1B is. Raises
    ValueError on an unknown kind or unequal numbers of stages.
    """
    ranks = len(forward_s) if ranks is None else ranks
    chunks = len(forward_s) // ranks if ranks else 0
    _check(kind, ranks, chunks, micro_batches)
    if not len(forward_s) == len(backward_s) == ranks * chunks:
        raise ValueError(f"{len(forward_s)} forward and {len(backward_s)} backward times on {ranks} ranks")
    row = SCHEDULES[kind]
    if row.closed_form is not None and chunks == 1:
        return row.closed_form(forward_s, backward_s, micro_batches, p2p_s)
    few = _simulated(kind, ranks, chunks, micro_batches)
    total_s = _fast(kind, ranks, chunks, few, row).makespan_s(forward_s, backward_s, p2p_s)
    if few < micro_batches:
        fewer_s = _fast(kind, ranks, chunks, few - ranks, row).makespan_s(forward_s, backward_s, p2p_s)
        total_s += (total_s - fewer_s) * ((micro_batches - few) // ranks)
    return max(total_s, row.least_s(sum(forward_s) + sum(backward_s), ranks, chunks, micro_batches))


def _simulated(kind: str, ranks: int, chunks: int, micro_batches: int) -> int:
    """Of so many micro-batches, those that are simulated."""
    return _like(kind, ranks, micro_batches, LONG // (2 * ranks * ranks * chunks))


def _like(kind: str, ranks: int, micro_batches: int, least: int = 0) -> int:
    """So many micro-batches, or fewer of a schedule that goes in rounds. least: rounds, to which one is added for each odd micro-batch."""
    whole, odd = divmod(micro_batches, ranks)
    rounds = SCHEDULES[kind].rounds
    return micro_batches if rounds is None else min(whole, max(rounds(odd), least and odd + least)) * ranks + odd


# the row is part of each key, so that another one of the same name is another schedule
@functools.lru_cache(maxsize=64)
def _counted(kind: str, ranks: int, chunks: int, micro_batches: int, row: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    actions = schedule(kind, ranks, micro_batches, chunks)
    return rank_of_stages(actions), peaks(actions)


@functools.lru_cache(maxsize=16)
def _fast(kind: str, ranks: int, chunks: int, micro_batches: int, row: Schedule) -> Fast:
    return Fast(schedule(kind, ranks, micro_batches, chunks))


@functools.lru_cache(maxsize=64)
def _situations(kind: str, ranks: int, chunks: int, micro_batches: int, row: Schedule) -> tuple[OnRank, ...]:
    return situations(schedule(kind, ranks, micro_batches, chunks))


def exchanged(kind: str, ranks: int, micro_batches: int, chunks: int, passes: str) -> tuple[tuple[Exchange, ...], ...]:
    """As `exchanges.exchanges`, of these passes alone."""
    return exchanges(alone(schedule(kind, ranks, micro_batches, chunks), passes))
