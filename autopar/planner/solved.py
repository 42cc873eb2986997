"""An axis of a program as it was solved, and what of that holds for another program of the same operators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.catalog import needs_transition, strategies_of
from autopar.ir import Layout, Op, Program, S, Strategy, refs
from autopar.planner.axis import can_change
from autopar.planner.problems import axis_leaves
from autopar.planner.shard import Assignment, view_of
from autopar.planner.solver import Outcome

__all__ = ["Solved", "restricted"]


@dataclass(frozen=True, slots=True)
class Solved:
    """An axis of a program, and what was chosen for it."""

    program: Program
    assignment: Assignment
    outcome: Outcome


def restricted(known: Solved, body: Program) -> Assignment | None:
    """What was chosen for another program that has all of this one's operators, for these; None where a strategy is none of this program's
    own, so that it would not be sound here. Operators whose results are single numbers may be others (the loss of a micro-batch is a part
    of that of all) and take what they read as it lies. A program of a micro-batch has leaves that the one of a whole batch makes: they lie
    as they are made there, if they can, or are brought from where they lie to where they are read. A dim into which samples are merged is
    cut within each of them, of which there are others here."""
    found = _taken(known.assignment, known.program, body)
    samples = known.program.batch_size, body.batch_size
    if found is None and all(samples) and (other := _of_samples(known.assignment, *samples)) is not None:  # type: ignore[arg-type]
        found = _taken(other, known.program, body)
    return found


def _of_samples(chosen: Assignment, had: int, has: int) -> Assignment | None:
    """The assignment whose dims of so many segments for each sample are of as many samples as there are now; None if it has none."""
    known: dict[Strategy, Strategy] = {}

    def layout(x: Layout) -> Layout:
        return S(x.dim, x.groups // had * has) if x.groups > 1 and x.groups % had == 0 else x

    def strategy(s: Strategy) -> Strategy:
        if s not in known:
            known[s] = dataclasses.replace(s, inputs=tuple(map(layout, s.inputs)), outputs=tuple(map(layout, s.outputs)))
        return known[s]

    ops = {name: strategy(s) for name, s in chosen.ops.items()}
    if had == has or all(a == b for a, b in known.items()):
        return None
    return dataclasses.replace(chosen, ops=ops, leaves={v: layout(x) for v, x in chosen.leaves.items()})


def _taken(chosen: Assignment, whole: Program, body: Program) -> Assignment | None:
    """An assignment of the whole for a program of some of its operators, as of `restricted`."""
    n, ops, lie = chosen.n, dict[str, Strategy](), dict(chosen.leaves)
    for op in body.ops:
        known = chosen.ops.get(op.name)
        s = known if known is not None and _is_one(known, body, op, n) else _as_they_lie(body, op, n, lie)
        if s is None:
            return None
        ops[op.name] = s
        lie |= zip((o for o in op.outputs if o is not None), s.outputs, strict=True)
    names = {x.value for x in body.leaves}
    if names == set(chosen.leaves):
        return dataclasses.replace(chosen, ops=ops)
    made = {
        o: x for op in whole.ops
        for o, x in zip((o for o in op.outputs if o is not None), chosen.ops[op.name].outputs, strict=True)
    }  # fmt: skip
    may, leaves = axis_leaves(body, chosen.axis, n), dict[str, Layout]()
    for v in names:
        x = chosen.leaves.get(v, made.get(v))
        leaves[v] = x if x is not None and x in may.get(v, (x,)) else may[v][0]
    for op in body.ops:
        for r, want in zip(refs(op), ops[op.name].inputs, strict=True):
            if r in leaves and r not in chosen.leaves:
                change = leaves[r], want, body.types[r]
                if needs_transition(*change) and not can_change(*change, n):
                    return None
    return dataclasses.replace(chosen, ops=ops, leaves=leaves)


def _is_one(s: Strategy, body: Program, op: Op, n: int) -> bool:
    """Whether it is one of the operator's strategies."""
    groups = frozenset({1, *(x.groups for x in (*s.inputs, *s.outputs) if x.is_shard)})
    return s in strategies_of(view_of(body, op, n, groups))


def _as_they_lie(body: Program, op: Op, n: int, lie: Mapping[str, Layout]) -> Strategy | None:
    """How an operator whose results are single numbers takes its operands as they lie; None of any other."""
    if any(math.prod(body.types[o].shape) > 1 for o in op.outputs if o is not None) or any(r not in lie for r in refs(op)):
        return None
    for s in strategies_of(view_of(body, op, n)):
        if not any(needs_transition(lie[r], want, body.types[r]) for r, want in zip(refs(op), s.inputs, strict=True)):
            return s
    return None
