"""What an assignment of one mesh axis costs, by terms: computation, communication, memory; of the whole axis, or of one operator beside its
neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.ir import Strategy
from autopar.planner.axis import AxisProblem, change_cost, changes_of, exchange_s, group_cost, local_bytes
from autopar.planner.choices import Group, Source

__all__ = ["Chosen", "Reads", "Terms", "own_terms", "reads_of", "terms_of", "timed"]

Chosen = Callable[[str], Strategy]
Reads = Mapping[tuple[str, int], Source]  # (operator, operand) -> what it reads there


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """compute_s: of operators; communication_s: collectives inside of operators, changes of layout, and the reductions of gradients, as if
    nothing hid them; memory_bytes: what is kept for backward, and parameters. Of a rank, forward and backward."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    memory_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s

    def __add__(self, other: Terms) -> Terms:
        return Terms(
            compute_s=self.compute_s + other.compute_s, communication_s=self.communication_s + other.communication_s,
            memory_bytes=self.memory_bytes + other.memory_bytes,
        )  # fmt: skip

    def __sub__(self, other: Terms) -> Terms:
        return Terms(
            compute_s=self.compute_s - other.compute_s, communication_s=self.communication_s - other.communication_s,
            memory_bytes=self.memory_bytes - other.memory_bytes,
        )  # fmt: skip


def timed(problem: AxisProblem) -> AxisProblem:
    """The same choices at their time alone, with the reductions of gradients."""
    return dataclasses.replace(
        problem, work_first=False, memory_price_s_per_byte=0.0, state_price_s_per_byte=0.0, sync_price_s_per_byte=0.0, sync_params=True
    )


def reads_of(problem: AxisProblem) -> Reads:
    """The same for every assignment of the axis, so that it is built once for all that are priced."""
    return {(e.consumer, e.operand): e.source for e in problem.choices.edges}


def terms_of(problem: AxisProblem, chosen: Chosen, reads: Reads) -> Terms | None:
    """Of everything on the axis; None if a value cannot be laid as it is read."""
    own = timed(problem)
    total, kept = Terms(), dict[object, int]()
    for key, group in problem.choices.groups.items():
        s = chosen(key)
        total += _seconds(own, group, s) + Terms(memory_bytes=_parameter_bytes(own, group, s))
        kept |= _kept(own, group, s, reads)
    for _, have, want, t, times in changes_of(problem, chosen):
        cost = change_cost(own, have, want, t, times)
        if cost is None:
            return None
        total += Terms(communication_s=cost)
    return total + Terms(memory_bytes=sum(kept.values()))


def own_terms(problem: AxisProblem, group: Group, s: Strategy, chosen: Chosen, reads: Reads) -> Terms | None:
    """Of one operator under a strategy, with the layouts of its operands and results changed from and to what its neighbours have now, and
    with its parameters as it reads them. None if they cannot be changed so."""
    own = timed(problem)
    total = _seconds(own, group, s) + Terms(memory_bytes=sum(_kept(own, group, s, reads).values()))
    done: set[object] = set()
    for e in problem.choices.edges:
        if group.key not in (e.consumer, e.source.group):
            continue
        want = (s if e.consumer == group.key else chosen(e.consumer)).inputs[e.operand]
        maker = problem.choices.groups[e.source.group]
        if maker.key in problem.params:  # rests as it is read
            rests = Strategy(inputs=(), outputs=(want,))
            total += _seconds(own, maker, rests) + Terms(memory_bytes=_parameter_bytes(own, maker, rests))
            continue
        have = (s if maker.key == group.key else chosen(maker.key)).outputs[e.source.output]
        if (e.source, have, want) in done:  # what several read so is brought there once
            continue
        done.add((e.source, have, want))
        cost = change_cost(own, have, want, maker.outs[e.source.output], e.count)
        if cost is None:
            return None
        total += Terms(communication_s=cost)
    return total


def _seconds(own: AxisProblem, group: Group, s: Strategy) -> Terms:
    seconds = group_cost(own, group, s)
    if group.op is None:  # the reduction of its gradient
        return Terms(communication_s=seconds)
    exchanged = group.times * sum(exchange_s(own, group, s))
    return Terms(compute_s=seconds - exchanged, communication_s=exchanged)


def _kept(own: AxisProblem, group: Group, s: Strategy, reads: Reads) -> dict[object, int]:
    """What an operator keeps for backward on a rank -> bytes; a value under its source and layout, so that several who keep it count once.
    Parameters are there anyway."""
    counts, found = group.counts, dict[object, int]()
    if counts is None or group.op is None:
        return found
    for k in counts.saved_inputs:
        source = reads[group.key, k]
        if source.group not in own.params:
            found[source, s.inputs[k]] = group.times * local_bytes(group.ins[k], s.inputs[k], own.n)
    for k in counts.saved_outputs:
        found[Source(group.key, k), s.outputs[k]] = group.times * local_bytes(group.outs[k], s.outputs[k], own.n)
    if counts.saved_other_bytes:
        found[group.key] = group.times * counts.saved_other_bytes // (own.n if s.splits_work else 1)
    return found


def _parameter_bytes(own: AxisProblem, group: Group, s: Strategy) -> int:
    return group.times * local_bytes(group.outs[0], s.outputs[0], own.n) if group.key in own.params else 0
