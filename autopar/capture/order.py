"""One order for what code runs in no order of its own: a loop over a set of names takes another one in every process.

Code that makes something for each item of a set (a mask, rotary embeddings for each kind of layer) makes it of the inputs and of buffers
alone, one item after the other. Operators of that kind that follow one another are put in the order in which the loss reads them: so the
program, its names and its hash are the same in every process, and on every rank.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from autopar.capture.effects import changed_in_place
from autopar.capture.normalise import may_run_earlier
from autopar.capture.trace import Trace
from autopar.ir import Op, Ref, map_refs, refs
from autopar.run.region import REGION

__all__ = ["detached_at_once", "in_one_order"]

DETACH = "aten.detach.default"
T = TypeVar("T")
Mutations = tuple[tuple[str, str], ...]  # (buffer, the value that it becomes)


def in_one_order(trace: Trace, mutations: Mutations) -> tuple[Trace, Mutations]:
    """The trace in which operators on inputs and buffers alone that follow one another stand in the order in which the loss reads
    them, with the names that they would have had if the code ran so; and what buffers become."""
    ops = [t.op for t in trace.ops]
    read = _order_of_reading(ops, (trace.loss, *trace.returned, *(value for _, value in sorted(mutations))))
    order = list(range(len(ops)))
    for run in _runs(trace, ops):
        order[run.start : run.stop] = sorted(run, key=lambda k: (read.get(k, len(ops)), k))
    if order == sorted(order):
        return trace, mutations
    names = _names(ops, order)

    def renamed(values: Mapping[str, T]) -> dict[str, T]:
        return {names.get(value, value): x for value, x in values.items()}

    moved = []
    for traced in (trace.ops[k] for k in order):
        outputs = tuple(None if o is None else names[o] for o in traced.op.outputs)
        moved.append(traced.with_op(map_refs(traced.op, lambda name: Ref(names.get(name, name)), outputs=outputs)))
    changed = dataclasses.replace(
        trace, ops=tuple(moved), loss=names.get(trace.loss, trace.loss), returned=tuple(names.get(v, v) for v in trace.returned),
        metas=renamed(trace.metas), storages=renamed(trace.storages),
    )  # fmt: skip
    return changed, tuple((buffer, names.get(value, value)) for buffer, value in mutations)


def detached_at_once(trace: Trace) -> Trace:
    """The trace in which what is detached to be returned is so right behind the operator that makes it: the end of a forward detaches what
    its beginning has made (`self.hidden = tuple(h.detach() for h in hidden)`), and only what is differentiated goes between stages."""
    ops = list(trace.ops)
    made = {o: k for k, t in enumerate(ops) for o in t.op.outputs if o is not None}
    read = {r for t in ops for r in refs(t.op)}
    keys = [float(k) for k in range(len(ops))]
    for k, t in enumerate(ops):
        (of, *_), (to, *_) = (*refs(t.op), ""), t.op.outputs
        if t.op.target == DETACH and of in made and to in trace.returned and to not in read:
            keys[k] = made[of] + 0.5
    order = sorted(range(len(ops)), key=keys.__getitem__)
    return trace if order == sorted(order) else dataclasses.replace(trace, ops=tuple(ops[k] for k in order))


def _order_of_reading(ops: Sequence[Op], ends: Sequence[str]) -> dict[int, int]:
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


def _runs(trace: Trace, ops: Sequence[Op]) -> Iterator[range]:
    """Operators that follow one another, are computed of inputs, buffers and constants alone, and neither draw nor write, nor read what
    operators write to."""
    written = {buffer for op in ops for buffer in changed_in_place(op)}
    given = {*(x.value for x in trace.inputs), *(b.value for b in trace.buffers)} - written
    start = 0
    for k, op in enumerate(ops):
        if op.target != REGION and may_run_earlier(op) and given.issuperset(refs(op)):
            given.update(o for o in op.outputs if o is not None)
            continue
        if k - start > 1:
            yield range(start, k)
        start = k + 1
    if len(ops) - start > 1:
        yield range(start, len(ops))


def _names(ops: Sequence[Op], order: Sequence[int]) -> dict[str, str]:
    """Value -> its name where the operators stand in this order: those of one target have the same names as before, the first the first."""
    every: dict[object, list[tuple[str | None, ...]]] = defaultdict(list)
    for op in ops:
        every[op.target, tuple(o is None for o in op.outputs)].append(op.outputs)
    left = {kind: iter(names) for kind, names in every.items()}
    found: dict[str, str] = {}
    for op in (ops[k] for k in order):
        outputs = next(left[op.target, tuple(o is None for o in op.outputs)])
        found |= {old: new for old, new in zip(op.outputs, outputs, strict=True) if old is not None and new is not None}
    return found
