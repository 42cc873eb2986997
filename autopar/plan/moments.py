"""Micro-batches: the axis whose ranks are moments.

Splitting a step into m micro-batches is typing the program with the batch S on an axis of m moments, parameters R, the
loss P, and no transition in between, because moments cannot exchange values. What depends on inputs alone may be
computed for the whole step beforehand, in the *prologue* (the count of labelled tokens). What cannot be typed so is not
split, and `NotSplittable` says which operator is the reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopar.catalog import strategies_of
from autopar.catalog.rule import is_random
from autopar.ir import I, Input, Layout, Op, P, Program, R, S, Strategy, TensorType, refs
from autopar.plan.shard import Assignment, alike, shard, view_of

__all__ = ["Moments", "NotSplittable", "batched_inputs", "derived_from_inputs", "split_into_moments"]

LOCAL_CODE_WITHOUT_EXCHANGE = frozenset({"mean_part"})


class NotSplittable(Exception):
    """The step cannot be split exactly into micro-batches; the message names the operator and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """body: the program of one micro-batch, whose inputs include the prologue's results (path ()). prologue: operators
    on the whole step's inputs; prologue_types: of their values."""

    body: Program
    prologue: tuple[Op, ...] = ()
    prologue_outputs: tuple[str, ...] = ()
    prologue_types: dict[str, TensorType] = dataclasses.field(default_factory=dict)


def batched_inputs(program: Program) -> frozenset[str]:
    """The inputs whose dim 0 is the batch."""
    size = program.batch_size
    return frozenset(x.value for x in program.inputs if size and program.types[x.value].shape[:1] == (size,))


def derived_from_inputs(program: Program) -> frozenset[str]:
    """The values that depend on inputs, constants and unchanging buffers alone: no parameter, no random number, no
    effect. They are cheap, and may be computed wherever they are needed."""
    mutable = {b.value for b in program.buffers if b.mutated} | {p.value for p in program.params}
    derived = {x.value for x in program.inputs} | {b.value for b in program.buffers if not b.mutated}
    for op in program.ops:
        operands = refs(op)
        if not is_random(op.target) and all(r in derived and r not in mutable for r in operands):
            derived |= {o for o in op.outputs if o is not None}
    return frozenset(derived)


def split_into_moments(program: Program, count: int) -> Moments:
    """One micro-batch of `count`. Raises NotSplittable."""
    if count == 1:
        return Moments(body=program)
    if program.mutations or any(b.mutated for b in program.buffers):
        changed = next(b.fqn for b in program.buffers if b.mutated or b.value == dict(program.mutations).get(b.value))
        raise NotSplittable(f"the step changes the buffer {changed!r} from the statistics of the whole batch")
    batched = batched_inputs(program)
    if not batched or (program.batch_size or 0) % count:
        raise NotSplittable(f"the batch of {program.batch_size} a rank does not divide into {count} micro-batches")
    derived = derived_from_inputs(program)
    whole: set[str] = set()  # values that the prologue makes
    for _ in range(1 + len(program.ops)):
        typed = _type(program, count, batched, derived, whole)
        if not isinstance(typed, str):
            return _split(program, count, typed, whole)
        whole.add(typed)
    raise AssertionError("every round moves one more value into the prologue")


def _type(program: Program, count: int, batched: frozenset[str], derived: frozenset[str], whole: set[str]) -> Assignment | str:
    """A typing without transitions, or the next value that the prologue must make."""
    layouts: dict[str, Layout] = {x.value: S(0) if x.value in batched else R for x in program.inputs}
    layouts |= {x.value: R for x in (*program.params, *program.buffers)} | dict.fromkeys(whole, R)
    leaves = dict(layouts)
    chosen: dict[str, Strategy] = {}
    for op in program.ops:
        if op.outputs and all(o in whole for o in op.outputs if o is not None):
            continue
        have = tuple(layouts[r] for r in refs(op))
        groups = frozenset({1, *(x.groups for x in have if x.is_shard)})
        fitting = [
            s for s in strategies_of(view_of(program, op, count, groups)) if s.inputs == have and not s.collective and I not in (*s.inputs, *s.outputs)
        ]
        usable = [_without_axis(op, s) for s in fitting if s.local in LOCAL_CODE_WITHOUT_EXCHANGE or s.local is None or is_random(op.target)]
        if not refs(op):
            usable = [s for s in usable if s.outputs[0] == R] or [Strategy(inputs=(), outputs=(R,) * len(op.outputs))]
        if not usable:
            movable = [r for r in refs(op) if r in derived and layouts[r] != R and r not in whole and r not in batched]
            movable += [r for r in refs(op) if r in derived and r in batched]
            if movable and movable[0] not in batched:
                return movable[0]
            own = next((o for o in op.outputs if o is not None), None)
            if own in derived and own not in whole:
                return str(own)
            lay = ", ".join(map(str, have))
            raise NotSplittable(f"{op.target} (operands {lay} over the micro-batches) mixes samples at {op.source or op.module or 'the top level'}")
        best = min(usable, key=lambda s: [x.groups if x.is_shard else 0 for x in s.outputs])
        chosen[op.name] = best
        layouts |= {o: x for o, x in zip([o for o in op.outputs if o is not None], best.outputs, strict=True)}
    if layouts[program.loss] != P:
        raise NotSplittable(f"the loss is not a sum over samples (it is {layouts[program.loss]} over the micro-batches)")
    leaves = {v: x for v, x in leaves.items()}
    return Assignment(axis="time", n=count, ops=chosen, leaves=leaves)


def _without_axis(op: Op, s: Strategy) -> Strategy:
    """Random operators need no code of their own over moments: each draws anew."""
    return dataclasses.replace(s, local=None) if is_random(op.target) else s


def _split(program: Program, count: int, typing: Assignment, whole: set[str]) -> Moments:
    needed = set(whole)
    prologue: list[Op] = []
    for op in reversed(program.ops):
        if any(o in needed for o in op.outputs):
            prologue.append(op)
            needed |= set(refs(op))
    prologue.reverse()
    kept, outputs = _live(program, whole)
    extra = tuple(Input(value=v, path=()) for v in outputs)
    body = program.replace(ops=tuple(program.ops[k] for k in kept), inputs=(*program.inputs, *extra), blocks=_kept_blocks(program, kept))
    types = dict(program.types)
    rank = shard_loss_free(body, typing, count)
    return Moments(
        body=rank.replace(batch_size=(program.batch_size or 0) // count),
        prologue=tuple(prologue),
        prologue_outputs=outputs,
        prologue_types={o: types[o] for op in prologue for o in op.outputs if o is not None},
    )


def shard_loss_free(body: Program, typing: Assignment, count: int) -> Program:
    """Shard over time; the loss stays P: the schedule adds the micro-batches' losses."""
    leaves = {x.value: typing.leaves.get(x.value, R) for x in (*body.inputs, *body.params, *body.buffers)}
    before = len(body.ops)
    rank = shard(body, dataclasses.replace(typing, leaves=leaves), final=P)
    assert all(not op.target.startswith("autopar.C.") or op.kwarg("axis") != "time" for op in rank.ops), "no transition over time"
    assert len(rank.ops) >= before and count > 1
    return rank


def _live(program: Program, whole: set[str]) -> tuple[list[int], tuple[str, ...]]:
    """Indices of the operators that the body needs when the prologue makes `whole`, and which of `whole` it reads."""
    needed = {program.loss}
    kept: list[int] = []
    for index in reversed(range(len(program.ops))):
        op = program.ops[index]
        outputs = {o for o in op.outputs if o is not None}
        if outputs & needed and not outputs <= whole:
            kept.append(index)
            needed |= set(refs(op))
    return kept[::-1], tuple(v for v in program.types if v in whole and v in needed)


def _kept_blocks(program: Program, kept: list[int]) -> tuple:  # type: ignore[type-arg]
    position = {index: k for k, index in enumerate(kept)}
    moved = []
    for block in program.blocks:
        spans = []
        for span in block.spans:
            inside = [position[i] for i in range(span.start, span.stop) if i in position]
            if not inside:
                break
            spans.append(type(span)(inside[0], inside[-1] + 1))
        if len(spans) == len(block.spans):
            moved.append(dataclasses.replace(block, spans=tuple(spans)))
    return alike(tuple(moved), [program.ops[k] for k in kept])
