"""Micro-batches: the axis whose ranks are moments.

Splitting a step into m micro-batches is typing the program with the batch S on an axis of m moments, parameters R, the
loss P, and no transition in between, because moments cannot exchange values. What depends on inputs alone may be
computed for the whole step beforehand, in the *prologue*, and be given to every moment whole (R: the count of labelled
tokens) or in slices (S: a mask that was built by indexing the batch). What cannot be typed so is not split, and
`NotSplittable` says which operator is the reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopar.catalog import strategies_of
from autopar.catalog.rule import draws
from autopar.ir import I, Input, Layout, Op, P, Program, R, S, Strategy, TensorType, refs
from autopar.planner.shard import Assignment, alike, shard, view_of

__all__ = ["Moments", "NotSplittable", "batched_inputs", "by_samples", "derived_from_inputs", "split_into_moments"]

LOCAL_CODE_WITHOUT_EXCHANGE = frozenset({"mean_part"})
RANDOM_LOCAL_CODE = frozenset({"dropout", "attention"})


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
        if not draws(op) and all(r in derived and r not in mutable for r in operands):
            derived |= {o for o in op.outputs if o is not None}
    return frozenset(derived)


def split_into_moments(program: Program, count: int) -> Moments:
    """One micro-batch of `count`. Raises NotSplittable."""
    return Moments(body=program) if count == 1 else _split(program, count, *_typing(program, count))


def by_samples(program: Program, count: int) -> dict[str, Strategy]:
    """Operator -> how it runs on one of `count` parts of the batch without any exchange: of all that depends on a parameter, and of
    some that depend on inputs alone. Raises NotSplittable."""
    return dict(_typing(program, count)[0].ops)


def _typing(program: Program, count: int) -> tuple[Assignment, dict[str, Layout]]:
    """A typing over `count` moments, and what the prologue makes for it."""
    written = dict(program.mutations)
    changed = [b.fqn for b in program.buffers if b.mutated or b.value in written]
    if changed:
        raise NotSplittable(f"the step changes the buffer {changed[0]!r} from the statistics of the whole batch")
    batched = batched_inputs(program)
    if not batched or (program.batch_size or 0) % count:
        raise NotSplittable(f"the batch of {program.batch_size} a rank does not divide into {count} micro-batches")
    try:
        return _typed(program, count, batched, wide=True)
    except NotSplittable as first:
        try:
            return _typed(program, count, batched, wide=False)
        except NotSplittable:
            raise first from None


def _typed(program: Program, count: int, batched: frozenset[str], *, wide: bool) -> tuple[Assignment, dict[str, Layout]]:
    """wide: what is the same for all samples and is expanded to the size of the batch is taken to be one for each sample."""
    derived = derived_from_inputs(program)
    made: dict[str, Layout] = {}  # by the prologue
    for _ in range(1 + 2 * len(program.ops)):
        typed = _type(program, count, batched, derived, made, wide)
        if isinstance(typed, Assignment):
            return typed, made
        assert any(made.get(v) != x for v, x in typed.items()), "every round moves something into the prologue"
        made |= typed
    raise AssertionError("the prologue cannot grow for ever")


def _type(
    program: Program, count: int, batched: frozenset[str], derived: frozenset[str], made: dict[str, Layout], wide: bool
) -> Assignment | dict[str, Layout]:
    """A typing without transitions, or what the prologue must make besides."""
    layouts: dict[str, Layout] = {x.value: R for x in program.leaves}
    layouts |= {x.value: S(0) for x in program.inputs if x.value in batched} | made
    leaves = dict(layouts)
    chosen: dict[str, Strategy] = {}
    for op in program.ops:
        outputs = [o for o in op.outputs if o is not None]
        if outputs and all(o in made for o in outputs):
            continue
        have = tuple(layouts[r] for r in refs(op))
        usable = [s for s in _strategies(program, op, count, have) if s.inputs == have]
        over = [s for s in usable if s.outputs == (S(0),) and not any(x.is_shard for x in have)]
        if wide and over and len(program.types[op.name].shape) > 1 and program.types[op.name].shape[0] == program.batch_size:
            usable = over
        if wide and (per_sample := _per_sample(program, op, count, have, derived, made)):
            return per_sample
        if not usable:
            return _prologue_for(program, op, count, have, derived, made)
        best = min(usable, key=lambda s: [x.groups if x.is_shard else 0 for x in s.outputs])
        chosen[op.name] = best
        layouts |= {o: made.get(o, x) for o, x in zip(outputs, best.outputs, strict=True)}
    if layouts[program.loss] != P:
        raise NotSplittable(f"the loss is not a sum over samples (it is {layouts[program.loss]} over the micro-batches)")
    return Assignment(axis="time", n=count, ops=chosen, leaves=leaves)


def _per_sample(
    program: Program, op: Op, count: int, have: tuple[Layout, ...], derived: frozenset[str], made: dict[str, Layout]
) -> dict[str, Layout]:
    """Derived operands that hold a row for each sample though they were made for all at once (a mask that is added to a
    parameter's bias): the prologue gives them in slices, so that what a parameter joins is split too."""
    outputs = [o for o in op.outputs if o is not None]
    size = program.batch_size
    shapes = {v: program.types[v].shape for v in (*refs(op), *outputs)}
    if any(x.is_shard for x in have) or not outputs or outputs[0] in derived or shapes[outputs[0]][:1] != (size,):
        return {}
    rows = {r for r in refs(op) if r in derived and r not in made and shapes[r][:1] == (size,) and len(shapes[r]) > 1}
    for s in _strategies(program, op, count, have) if rows else ():
        moved = {r: want for r, want, x in zip(refs(op), s.inputs, have, strict=True) if want != x}
        if moved and s.outputs[0] == S(0) and all(r in rows and want == S(0) for r, want in moved.items()):
            return moved
    return {}


def _strategies(program: Program, op: Op, count: int, have: tuple[Layout, ...]) -> list[Strategy]:
    """Those of an operator that exchange nothing. An operator without operands makes the same at every moment."""
    groups = frozenset({1, *(x.groups for x in have if x.is_shard)})
    stated = strategies_of(view_of(program, op, count, groups))
    kept = [s for s in stated if not s.collective and I not in (*s.inputs, *s.outputs)]
    kept = [_without_axis(s) for s in kept if s.local is None or s.local in LOCAL_CODE_WITHOUT_EXCHANGE | RANDOM_LOCAL_CODE]
    if not refs(op):
        outputs = [o for o in op.outputs if o is not None]
        return [Strategy(inputs=(), outputs=(R,) * len(outputs)), *(s for s in kept if all(x.is_shard for x in s.outputs))]
    return kept


def _prologue_for(
    program: Program, op: Op, count: int, have: tuple[Layout, ...], derived: frozenset[str], made: dict[str, Layout]
) -> dict[str, Layout]:
    """What the prologue must make so that an operator can be typed: the fewest operands, all derived from inputs; else the
    operator's own results, if they derive from inputs. What is split by samples is split otherwise, for all its readers, only if
    nothing else serves. Raises NotSplittable."""
    operands = refs(op)
    lies = dict(zip(operands, have, strict=True))
    options: list[dict[str, Layout]] = []
    for s in _strategies(program, op, count, have):
        moved = {r: want for r, want, x in zip(operands, s.inputs, have, strict=True) if want != x}
        consistent = all(want == moved.get(r, x) for r, want, x in zip(operands, s.inputs, have, strict=True))
        if consistent and all(r in derived and r not in made and want != P for r, want in moved.items()):
            if any(x.is_shard for x in s.outputs) or not any(x.is_shard for x in have):
                options.append(moved)
    def turned(moved: dict[str, Layout]) -> bool:
        return any(lies[r].is_shard and want.is_shard for r, want in moved.items())

    best = min(options, key=lambda m: (turned(m), len(m), sorted(map(str, m.values()))), default=None)
    if best is not None and not turned(best):
        return best
    outputs = [o for o in op.outputs if o is not None]
    if outputs and all(o in derived for o in outputs) and not any(o in made for o in outputs):
        return dict.fromkeys(outputs, R)
    if best is not None:
        return best
    lay = ", ".join(map(str, have))
    raise NotSplittable(f"{op.target} (operands {lay} over the micro-batches) mixes samples at {op.source or op.module or 'the top level'}")


def _without_axis(s: Strategy) -> Strategy:
    """Random operators need no code of their own over moments: each draws anew."""
    return dataclasses.replace(s, local=None) if s.local in RANDOM_LOCAL_CODE else s


def _split(program: Program, count: int, typing: Assignment, made: dict[str, Layout]) -> Moments:
    whole = set(made) - {x.value for x in program.inputs}  # an input is there, and may be given to every moment as it is
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
    rank = _at_one_moment(body, typing)
    return Moments(
        body=rank.replace(batch_size=(program.batch_size or 0) // count),
        prologue=tuple(prologue),
        prologue_outputs=outputs,
        prologue_types={o: types[o] for op in prologue for o in op.outputs if o is not None},
    )


def _at_one_moment(body: Program, typing: Assignment) -> Program:
    """Shard over time; the loss stays P: the schedule adds the micro-batches' losses."""
    leaves = {x.value: typing.leaves.get(x.value, R) for x in body.leaves}
    rank = shard(body, dataclasses.replace(typing, leaves=leaves), final=P)
    assert all(not op.target.startswith("autopar.C.") or op.kwarg("axis") != "time" for op in rank.ops), "no transition over time"
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
