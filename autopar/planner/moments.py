"""Micro-batches: the axis whose ranks are moments.

Splitting a step into m micro-batches is typing the program with the batch S on an axis of m moments, parameters R, the
loss P, and no transition in between, because moments cannot exchange values. What depends on inputs alone may be
computed for the whole step beforehand, in the *prologue*, and be given to every moment whole (R: the count of labelled
tokens) or in slices (S: a mask that was built by indexing the batch). What cannot be typed so is not split, and
`NotSplittable` says which operator is the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.axes import TIME
from autopar.catalog import OpView, strategies_of
from autopar.catalog.rule import draws
from autopar.ir import Block, I, Input, Layout, Op, P, Program, R, Ref, Repeat, S, Span, Strategy, TensorType, call_text, map_refs, refs
from autopar.planner.shard import Assignment, alike, shard, view_of

__all__ = ["Moments", "NotSplittable", "batched_inputs", "by_samples", "derived_from_inputs", "given", "split_into_moments"]

LOCAL_CODE_WITHOUT_EXCHANGE = frozenset({"mean_part", "number_part"})
RANDOM_LOCAL_CODE = frozenset({"dropout", "attention", "draw"})


class NotSplittable(Exception):
    """The step cannot be split exactly into micro-batches; the message names the operator and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """body: the program of one micro-batch, whose inputs include the prologue's results (path ()). prologue: operators
    on the whole step's inputs; prologue_types: of their values."""

    body: Program
    prologue: tuple[Op, ...] = ()
    prologue_outputs: tuple[str, ...] = ()
    prologue_types: dict[str, TensorType] = field(default_factory=dict)


def batched_inputs(program: Program) -> frozenset[str]:
    """The inputs whose dim 0 is the batch."""
    size, known = program.batch_size, program.batched
    same = [x for x in program.inputs if size and program.types[x.value].shape[:1] == (size,)]
    return frozenset(x.value for x in same if known is None or x.value in known or not x.path)


def _is_of_the_batch(program: Program, buffer: str) -> bool:
    """Whether what a step makes of a buffer depends on inputs."""
    known = {x.value for x in program.inputs}
    for op in program.ops:
        if not known.isdisjoint(refs(op)):
            known |= {o for o in op.outputs if o is not None}
            known |= {r for r in refs(op) if r == buffer and r not in dict(program.mutations)}  # which the operator itself changes
    return dict(program.mutations).get(buffer, buffer) in known


def derived_from_inputs(program: Program) -> frozenset[str]:
    """The values that depend on inputs, constants and unchanging buffers alone: no parameter, no random number, no
    effect, no gradient to an input. They are cheap, and may be computed wherever they are needed."""
    return _before_the_parameters(program, draws_too=False)


def _before_the_parameters(program: Program, *, draws_too: bool) -> frozenset[str]:
    """draws_too: random numbers as well, which may be drawn once, before the step."""
    mutable = {b.value for b in program.buffers if b.mutated} | {p.value for p in program.params}
    derived = {x.value for x in program.inputs} | {b.value for b in program.buffers if not b.mutated}
    for op in program.ops:
        operands = refs(op)
        outputs = [o for o in op.outputs if o is not None]
        differentiated = any(program.types[o].grad for o in outputs)  # through inputs that require a gradient
        if not differentiated and (draws_too or not draws(op)) and all(r in derived and r not in mutable for r in operands):
            derived |= set(outputs)
    return frozenset(derived)


def split_into_moments(program: Program, count: int) -> Moments:
    """One micro-batch of `count`. Raises NotSplittable."""
    return _drawn_beforehand(program) if count == 1 else _split(program, count, _typing(program, count))


def by_samples(program: Program, count: int) -> dict[str, Strategy]:
    """Operator -> how it runs on one of `count` parts of the batch without any exchange: of all that depends on a parameter, and of
    some that depend on inputs alone. Raises NotSplittable."""
    return dict(_typing(program, count).ops)


@dataclass(kw_only=True, slots=True)
class _Typing:
    """A typing over `count` moments. made: what the prologue makes, in which layout; drawn: random numbers that it draws once
    for all moments and stages, in the layout in which they lie unless another is asked for. wanted: what depends on a parameter and is the
    same for all samples, but is made for each sample because one that reads it takes it so. shared: operands (operator, index) that
    are the same at every moment where terms of a sum are wanted: each moment adds its equal part of them. whole: an operator that mixes
    rows may do so on all of them at every moment, for not all that is as large as the batch is one."""

    program: Program
    count: int
    early: frozenset[str]
    producer: dict[str, tuple[Op, int]]
    whole: bool = False
    layouts: dict[str, Layout] = field(default_factory=dict)
    ops: dict[str, Strategy] = field(default_factory=dict)
    made: dict[str, Layout] = field(default_factory=dict)
    drawn: dict[str, Layout] = field(default_factory=dict)
    wanted: dict[str, Layout] = field(default_factory=dict)
    shared: dict[tuple[str, int], None] = field(default_factory=dict)
    known: dict[tuple[object, ...], list[Strategy]] = field(default_factory=dict)  # of operators that are equal but for names


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """What must be different for an operator to be typed."""

    made: Mapping[str, Layout] = field(default_factory=dict)
    wanted: Mapping[str, Layout] = field(default_factory=dict)
    shared: tuple[tuple[str, int], ...] = ()

    def joined(self, other: _Change) -> _Change:
        return _Change(made={**self.made, **other.made}, wanted={**self.wanted, **other.wanted}, shared=(*self.shared, *other.shared))


def _typing(program: Program, count: int) -> _Typing:
    """Dims are followed from the inputs through the operators; nothing is taken for the batch because of its size."""
    written = dict(program.mutations)
    changed = [b for b in program.buffers if b.mutated or b.value in written]
    if changed and all(b.parameter for b in changed):
        raise NotSplittable(f"the step changes the frozen parameter {changed[0].fqn!r}, once for all of the batch")
    if changed:
        buffer = next(b for b in changed if not b.parameter)
        how = "from the statistics of the whole batch" if _is_of_the_batch(program, buffer.value) else "once for all of the batch"
        raise NotSplittable(f"the step changes the buffer {buffer.fqn!r} {how}")
    batched = batched_inputs(program)
    if not batched or (program.batch_size or 0) % count:
        raise NotSplittable(f"the batch of {program.batch_size} a rank does not divide into {count} micro-batches")
    producer = {o: (op, k) for op in program.ops for k, o in enumerate(x for x in op.outputs if x is not None)}
    early = _before_the_parameters(program, draws_too=True)
    # any typing is exact: where the inputs that hold the batch do not do, those that are as long as the batch are tried
    as_long = frozenset(x.value for x in program.inputs if program.types[x.value].shape[:1] == (program.batch_size,))
    first: NotSplittable | None = None
    for inputs, whole in itertools.product(dict.fromkeys((batched, as_long)), (False, True)):
        try:
            return _typed(_Typing(program=program, count=count, early=early, producer=producer, whole=whole), inputs)
        except NotSplittable as e:
            first = first or e
    assert first is not None
    raise first


def _typed(typing: _Typing, batched: frozenset[str]) -> _Typing:
    ops = typing.program.ops
    place = {op.name: k for k, op in enumerate(ops)}
    typing.layouts = {x.value: S(0) if x.value in batched else R for x in typing.program.leaves}
    start = 0  # what lies before it is typed
    for _ in range(1 + 3 * len(ops)):
        change = _type(typing, start)
        if change is None:
            return typing
        before = len(typing.wanted) + len(typing.shared), dict(typing.made)
        typing.made |= change.made
        typing.wanted |= change.wanted
        typing.shared |= dict.fromkeys(change.shared)
        assert before != (len(typing.wanted) + len(typing.shared), typing.made), "every round changes something"
        made = [typing.producer.get(v) for v in (*change.made, *change.wanted)]
        start = min([*(place[x[0].name] if x is not None else 0 for x in made), *(place[name] for name, _ in change.shared)])
        typing.layouts |= typing.made
        for op in ops[start:]:
            typing.ops.pop(op.name, None)
    raise AssertionError("the changes cannot go on for ever")


def _type(typing: _Typing, start: int) -> _Change | None:
    """Type every operator from there on, without transitions; or what must change first. Raises NotSplittable."""
    program, layouts = typing.program, typing.layouts
    for op in program.ops[start:]:
        outputs = [o for o in op.outputs if o is not None]
        if outputs and all(o in typing.made or o in typing.drawn for o in outputs):
            layouts |= {o: typing.made.get(o, typing.drawn.get(o, R)) for o in outputs}
            continue
        have = tuple(P if layouts[r] == R and (op.name, k) in typing.shared else layouts[r] for k, r in enumerate(refs(op)))
        usable = [s for s in _strategies(typing, op, have) if s.inputs == have and _gives(s, outputs, typing.wanted)]
        best = min(usable, key=lambda s: [x.groups if x.is_shard else 0 for x in s.outputs], default=None)
        if outputs and draws(op) and all(o in typing.early for o in outputs):
            typing.drawn |= zip(outputs, best.outputs if best is not None else [R] * len(outputs), strict=True)
            layouts |= {o: typing.drawn[o] for o in outputs}
            continue
        if best is None:
            return _needs(typing, op, have)
        typing.ops[op.name] = best
        layouts |= {o: typing.made.get(o, x) for o, x in zip(outputs, best.outputs, strict=True)}
    if layouts[program.loss] == R:
        raise NotSplittable("the loss does not depend on the batch")
    if layouts[program.loss] != P:
        raise NotSplittable(f"the loss is not a sum over samples (it is {layouts[program.loss]} over the micro-batches)")
    return None


def _gives(s: Strategy, outputs: Sequence[str], wanted: Mapping[str, Layout]) -> bool:
    return all(wanted.get(o, x) == x for o, x in zip(outputs, s.outputs, strict=True))


def _strategies(typing: _Typing, op: Op, have: tuple[Layout, ...]) -> list[Strategy]:
    """Those of an operator that exchange nothing. An operator without operands makes the same at every moment."""
    view = view_of(typing.program, op, typing.count, frozenset({1, *(x.groups for x in have if x.is_shard)}))
    key = call_text(op), view.ins, view.outs, view.groups
    if key not in typing.known:
        typing.known[key] = _without_exchange(view)
    return typing.known[key]


def _without_exchange(view: OpView) -> list[Strategy]:
    stated = strategies_of(view)
    kept = [s for s in stated if not s.collective and I not in (*s.inputs, *s.outputs)]
    kept = [_without_axis(s) for s in kept if s.local is None or s.local in LOCAL_CODE_WITHOUT_EXCHANGE | RANDOM_LOCAL_CODE]
    if view.op.kwarg("counts"):  # of the elements that speak against a condition: each moment asks for its own
        kept.append(Strategy(inputs=(R, P), outputs=(R,)))
    if not refs(view.op):
        same = [] if draws(view.op) else [Strategy(inputs=(), outputs=(R,) * len(view.outs))]
        return [*same, *(s for s in kept if all(x.is_shard for x in s.outputs))]
    return kept


def _needs(typing: _Typing, op: Op, have: tuple[Layout, ...]) -> _Change:
    """What must change so that an operator can be typed: the least of its operands; else the prologue makes its results, if they derive
    from inputs. What is split by samples is split otherwise, for all its readers, only if nothing else serves. Raises NotSplittable."""
    outputs = [o for o in op.outputs if o is not None]
    early = bool(outputs) and all(o in typing.early and o not in typing.made for o in outputs)
    options: list[tuple[bool, int, list[str], _Change]] = []
    for s in _strategies(typing, op, have):
        mixes = any(x.is_shard for x in have) and not any(x.is_shard for x in s.outputs) and not _adds_up(s, have)
        if not _gives(s, outputs, typing.wanted) or (mixes and not (typing.whole and set(s.inputs) == {R})):
            continue
        change = _for_operands(typing, op, have, s, {})
        if change is not None:
            turned = any(x.is_shard and want.is_shard and want != x for want, x in zip(s.inputs, have, strict=True))
            moved = {**change.made, **change.wanted}
            options.append((turned, len(moved) + len(change.shared), sorted(map(str, moved.values())), change))
    best = min(options, key=lambda o: o[:3], default=None)
    if best is not None and not best[0]:
        return best[3]
    if early:
        return _Change(made=dict.fromkeys(outputs, R))
    if best is not None:
        return best[3]
    lay = ", ".join(map(str, have))
    raise NotSplittable(f"{op.target} (operands {lay} over the micro-batches) mixes samples at {op.source or op.module or 'the top level'}")


def _adds_up(s: Strategy, have: tuple[Layout, ...]) -> bool:
    """Whether a strategy takes all that is split as it lies, and gives terms of a sum over samples: of a loss, whose other operands are
    made for each sample."""
    split = [(x, want) for x, want in zip(have, s.inputs, strict=True) if x.is_shard]
    return all(x == want for x, want in split) and all(x == P for x in s.outputs) and P not in s.inputs


def _for_operands(
    typing: _Typing, op: Op, have: tuple[Layout, ...], s: Strategy, known: dict[tuple[str, Layout], _Change | None]
) -> _Change | None:
    """What must change so that the operator's operands lie as a strategy wants them; None if they cannot."""
    change = _Change()
    lies: dict[str, Layout] = {}
    for k, (r, want, x) in enumerate(zip(refs(op), s.inputs, have, strict=True)):
        if want == x:
            if x != P and lies.setdefault(r, x) != x:
                return None
            continue
        if want == P:
            if x != R or not typing.program.types[r].dtype.is_floating_point:
                return None
            change = change.joined(_Change(shared=((op.name, k),)))
            continue
        reached = _reach(typing, r, want, known)
        if reached is None or lies.setdefault(r, want) != want:
            return None
        change = change.joined(reached)
    return change


def _reach(typing: _Typing, value: str, want: Layout, known: dict[tuple[str, Layout], _Change | None]) -> _Change | None:
    """What must change so that a value lies otherwise: the prologue makes it, or its operator makes it for each sample from operands
    that are the same for all, or that lie otherwise too (or for all, if an input is no batch after all). None if it cannot."""
    key = (value, want)
    if key in known:
        return known[key]
    known[key] = None
    if value in typing.made or value in typing.wanted:
        return None
    op, index = typing.producer.get(value, (None, 0))
    early, lies = value in typing.early, typing.layouts[value]
    found = []
    turned = {lies.is_shard, want.is_shard} == {True, False} and P not in (lies, want)
    if op is not None and turned and not (early and draws(op)):
        have = tuple(typing.layouts[r] for r in refs(op))
        outputs = [o for o in op.outputs if o is not None]
        for s in _strategies(typing, op, have):
            if s.outputs[index] == want and _gives(s, outputs, typing.wanted):
                change = _for_operands(typing, op, have, s, known)
                if change is not None and not change.shared:
                    found.append(change.joined(_Change(wanted={value: want})))
    if early:
        found.append(_Change(made={value: want}))
    types = typing.program.types
    known[key] = min(found, key=lambda c: (sum(types[v].nbytes for v in c.made), len(c.made) + len(c.wanted)), default=None)
    return known[key]


def _without_axis(s: Strategy) -> Strategy:
    """Random operators need no code of their own over moments: each draws anew."""
    return dataclasses.replace(s, local=None) if s.local in RANDOM_LOCAL_CODE else s


def _drawn_beforehand(program: Program) -> Moments:
    """The step as it is, with random numbers that depend on inputs alone drawn before it, so that all stages have the same."""
    early = _before_the_parameters(program, draws_too=True)
    drawing = [op for op in program.ops if draws(op) and all(o in early for o in op.outputs if o is not None)]
    if not drawing:
        return Moments(body=program)
    found = _with_prologue(program, {o for op in drawing for o in op.outputs if o is not None})
    layouts = {**program.layouts, TIME: dict.fromkeys(found.prologue_outputs, R)}
    return dataclasses.replace(found, body=found.body.replace(layouts=layouts))


def _split(program: Program, count: int, typing: _Typing) -> Moments:
    # an input is there, and may be given to every moment as it is
    found = _with_prologue(program, {*typing.drawn, *typing.made} - {x.value for x in program.inputs})
    rank = _at_one_moment(*_with_parts(found.body, typing))
    return dataclasses.replace(found, body=rank.replace(batch_size=(program.batch_size or 0) // count))


def given(program: Program, paths: Mapping[str, tuple[str | int, ...]]) -> tuple[Program, tuple[str, ...]]:
    """The program that takes these of its values as inputs, under these paths, instead of making them; and which of them it reads."""
    kept, read = _live(program, set(paths))
    extra = tuple(Input(value=v, path=paths[v]) for v in read)
    ops = tuple(_without_outputs(program.ops[k], paths) for k in kept)
    blocks, repeats = _kept_blocks(program, kept)
    return program.replace(ops=ops, inputs=(*program.inputs, *extra), blocks=blocks, repeats=repeats), read


def _without_outputs(op: Op, names: Collection[str]) -> Op:
    left = tuple(None if o in names else o for o in op.outputs)
    return op if left == op.outputs else dataclasses.replace(op, outputs=left)


def _with_prologue(program: Program, whole: set[str]) -> Moments:
    """The program whose prologue makes `whole`."""
    needed = set(whole)
    prologue: list[Op] = []
    for op in reversed(program.ops):
        if any(o in needed for o in op.outputs):
            prologue.append(op)
            needed |= set(refs(op))
    prologue.reverse()
    body, outputs = given(program, dict.fromkeys(whole, ()))
    return Moments(
        body=body,
        prologue=tuple(prologue),
        prologue_outputs=outputs,
        prologue_types={o: program.types[o] for op in prologue for o in op.outputs if o is not None},
    )


def _with_parts(body: Program, typing: _Typing) -> tuple[Program, Assignment]:
    """The body in which shared operands are divided by the number of moments before they are read."""
    ops: list[Op] = []
    chosen, types = {}, dict(body.types)
    position: list[int] = []
    begins: list[int] = []  # of each operator, with the parts that it reads
    for op in body.ops:
        begins.append(len(ops))
        parts: dict[int, str] = {}
        typed, _ = typing.producer[op.name]  # which may have results that the prologue makes
        results = [o for o in typed.outputs if o is not None]
        strategy = typing.ops[typed.name]
        lies = tuple(x for o, x in zip(results, strategy.outputs, strict=True) if o in op.outputs)
        chosen[op.name] = strategy if len(lies) == len(results) else dataclasses.replace(strategy, outputs=lies)
        for k, r in enumerate(refs(op)):
            if (typed.name, k) in typing.shared:
                parts[k] = part = _fresh(f"{r}_part", types)
                types[part] = types[r]
                chosen[part] = Strategy(inputs=(R,), outputs=(P,))
                ops.append(dataclasses.replace(op, target="aten.div.Tensor", args=(Ref(r), typing.count), kwargs=(), outputs=(part,)))
        operands = iter(parts.get(k, r) for k, r in enumerate(refs(op)))
        position.append(len(ops))
        ops.append(map_refs(op, lambda _, operands=operands: Ref(next(operands))) if parts else op)  # type: ignore[misc]
    position.append(len(ops))
    begins.append(len(ops))
    blocks = [dataclasses.replace(b, spans=tuple(Span(position[s.start], position[s.stop]) for s in b.spans)) for b in body.blocks]
    repeats = tuple(Repeat(Span(begins[x.span.start], begins[x.span.stop]), x.times) for x in body.repeats)
    leaves = {x.value: typing.layouts.get(x.value, R) for x in body.leaves}
    body = body.replace(ops=tuple(ops), types=types, blocks=alike(tuple(blocks), ops), repeats=repeats)
    return body, Assignment(axis=TIME, n=typing.count, ops=chosen, leaves=leaves)


def _fresh(wish: str, taken: Mapping[str, object]) -> str:
    return next(name for k in itertools.count() if (name := f"{wish}_{k}" if k else wish) not in taken)


def _at_one_moment(body: Program, typing: Assignment) -> Program:
    """Shard over time; the loss stays P: the schedule adds the micro-batches' losses."""
    rank = shard(body, typing, final=P)
    assert all(not op.target.startswith("autopar.C.") or op.kwarg("axis") != TIME for op in rank.ops), "no transition over time"
    return rank


def _live(program: Program, whole: set[str]) -> tuple[list[int], tuple[str, ...]]:
    """Indices of the operators that the body needs when `whole` is given to it, and which of `whole` it reads."""
    mutable = {b.value for b in program.buffers if b.mutated}
    needed = {program.loss, *program.outputs, *(v for _, v in program.mutations)}
    needed |= {o for op in program.ops if mutable & set(refs(op)) for o in op.outputs if o is not None}
    kept: list[int] = []
    for index in reversed(range(len(program.ops))):
        op = program.ops[index]
        outputs = {o for o in op.outputs if o is not None}
        if (outputs & needed) - whole:
            kept.append(index)
            needed |= set(refs(op))
    return kept[::-1], tuple(v for v in program.types if v in whole and v in needed)


def _kept_blocks(program: Program, kept: list[int]) -> tuple[tuple[Block, ...], tuple[Repeat, ...]]:
    """The blocks and the repeats of a program of which only some operators are left."""
    position = {index: k for k, index in enumerate(kept)}

    def left(span: Span) -> Span | None:
        inside = [position[i] for i in range(span.start, span.stop) if i in position]
        return Span(inside[0], inside[-1] + 1) if inside else None

    moved = []
    for block in program.blocks:
        spans = [span for s in block.spans if (span := left(s)) is not None]
        if len(spans) == len(block.spans):
            moved.append(dataclasses.replace(block, spans=tuple(spans)))
    repeats = tuple(Repeat(span, x.times) for x in program.repeats if (span := left(x.span)) is not None)
    return alike(tuple(moved), [program.ops[k] for k in kept]), repeats
