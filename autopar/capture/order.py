"""One order for what code runs in no order of its own: a loop over a set of names takes another one in every process.

Code that does the same for each item of a set (rotary embeddings for each kind of layer) traces to the same operators in any order, but for
what they read. Of operators of one line in one module, the one that the loss reads first comes first: so the program, its names and its
hash are the same in every process, and on every rank.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from autopar.capture.effects import changed_in_place
from autopar.capture.normalise import may_run_earlier
from autopar.capture.trace import Trace, Traced
from autopar.ir import Op, Ref, map_refs, refs
from autopar.run.region import REGION

__all__ = ["in_one_order"]

T = TypeVar("T")
Mutations = tuple[tuple[str, str], ...]  # (buffer, the value that it becomes)


def in_one_order(trace: Trace, mutations: Mutations) -> tuple[Trace, Mutations]:
    """The trace in which operators of one line, module and target stand in the order in which the loss reads them, each under the name of
    the one in whose place it stands; and what buffers become. The trace itself where some would then stand before what they read."""
    ops = [t.op for t in trace.ops]
    first = _first_read(ops, (trace.loss, *trace.returned, *(value for _, value in sorted(mutations))))
    source = list(range(len(ops)))  # place -> the operator that stands there
    for places in _alike(ops):
        reached = [k for k in places if k in first]
        for place, k in zip(reached, sorted(reached, key=first.__getitem__), strict=True):
            source[place] = k
    if source == sorted(source):
        return trace, mutations
    names = {old: new for place, k in enumerate(source) for old, new in zip(ops[k].outputs, ops[place].outputs, strict=True) if old and new}
    moved = [_placed(trace.ops[k], trace.ops[place], names) for place, k in enumerate(source)]
    if not _in_order(moved, trace):
        return trace, mutations

    def renamed(values: Mapping[str, T]) -> dict[str, T]:
        return {names.get(value, value): x for value, x in values.items()}

    changed = dataclasses.replace(
        trace, ops=tuple(moved), loss=names.get(trace.loss, trace.loss), returned=tuple(names.get(v, v) for v in trace.returned),
        metas=renamed(trace.metas), storages=renamed(trace.storages),
    )  # fmt: skip
    return changed, tuple((buffer, names.get(value, value)) for buffer, value in mutations)


def _first_read(ops: Sequence[Op], ends: Sequence[str]) -> dict[int, int]:
    """Operator -> its place in the order in which values are asked for: operands before what reads them, the first operand first."""
    made = {o: k for k, op in enumerate(ops) for o in op.outputs if o is not None}
    found: dict[int, int] = {}
    pending: list[tuple[int, bool]] = []
    for end in ends:
        pending += [(made[end], False)] if end in made else []
        while pending:
            k, after = pending.pop()
            if k in found:
                continue
            if after:
                found[k] = len(found)
                continue
            pending.append((k, True))
            pending += [(made[r], False) for r in reversed(refs(ops[k])) if r in made and made[r] not in found]
    return found


def _alike(ops: Sequence[Op]) -> Iterator[list[int]]:
    """The places of operators of one line, module and target, of which the order does not count for what they compute."""
    changed = {buffer for op in ops for buffer in changed_in_place(op)}
    found: dict[object, list[int]] = defaultdict(list)
    for k, op in enumerate(ops):
        if op.source and op.target != REGION and may_run_earlier(op) and changed.isdisjoint(refs(op)):
            found[op.target, op.module, op.source, tuple(o is None for o in op.outputs)].append(k)
    return (places for places in found.values() if len(places) > 1)


def _placed(traced: Traced, place: Traced, names: Mapping[str, str]) -> Traced:
    """An operator in the place of another."""
    op = map_refs(traced.op, lambda name: Ref(names.get(name, name)), outputs=place.op.outputs)
    return Traced(op=op, calls=place.calls, autocast=traced.autocast)


def _in_order(ops: Sequence[Traced], trace: Trace) -> bool:
    """Whether each operator stands behind what it reads."""
    there = set(trace.given)
    for traced in ops:
        if not there.issuperset(refs(traced.op)):
            return False
        there.update(o for o in traced.op.outputs if o is not None)
    return True
