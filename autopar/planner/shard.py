"""Program x one axis' assignment -> the program that each rank of that axis runs.

Axes compose: the result is a Program again, whose transitions are operators with rules of their own, so that the next
axis is laid over it in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from autopar.catalog import OpView, localized, needs_transition, transition_op
from autopar.catalog.determinism import varies
from autopar.catalog.rule import localizer_of
from autopar.ir import Block, Buffer, I, Input, Layout, Op, Param, Program, R, Ref, Repeat, Span, Strategy, TensorType, map_refs, refs

LeafT = TypeVar("LeafT", Input, Param, Buffer)

__all__ = ["Assignment", "shard", "view_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What was chosen on one axis of n ranks: a strategy for every operator (by its name), a layout for every leaf
    (inputs, parameters, buffers)."""

    axis: str
    n: int
    ops: Mapping[str, Strategy]
    leaves: Mapping[str, Layout]


WHOLE = frozenset({1})  # dims that are cut as they are, not group by group


def view_of(program: Program, op: Op, n: int, groups: frozenset[int] = WHOLE) -> OpView:
    """The operator as its rule sees it."""
    types = program.types
    return OpView(op, tuple(types[r] for r in refs(op)), tuple(types[o] for o in op.outputs if o is not None), n, groups)


def shard(program: Program, assignment: Assignment, *, final: Layout = I) -> Program:
    """The program of one rank: local types, local arguments, and a transition wherever an operator wants a value in
    another layout than it has. A transition is made once for each value and layout within a block instance (so that
    instances stay alike) and once outside of all blocks. final: the layout in which the loss is wanted."""
    return _Sharder(program, assignment).run(final)


class _Sharder:
    def __init__(self, program: Program, assignment: Assignment) -> None:
        self.program, self.assignment = program, assignment
        self.axis, self.n = assignment.axis, assignment.n
        self.layouts: dict[str, Layout] = dict(assignment.leaves)
        self.local: dict[tuple[TensorType, Layout], TensorType] = {}  # types, made once
        self.types: dict[str, TensorType] = {v: self._local(program.types[v], layout) for v, layout in self.layouts.items()}
        self.ops: list[Op] = []
        self.made: dict[tuple[str, Layout, object], str] = {}
        self.entered: dict[tuple[str, object], str] = {}  # what stands for a value within a block instance
        self.names = set(program.types)
        self.sums = {p.value: p.rests for p in program.params if p.rests is not None}

    def run(self, final: Layout) -> Program:
        program = self.program
        spans = [(b, k, span) for b, block in enumerate(program.blocks) for k, span in enumerate(block.spans)]
        segment_of = {i: (b, k) for b, k, span in spans for i in range(span.start, span.stop)}
        entering = self._entering(spans)
        starts: dict[tuple[int, int], int] = {}
        stops: dict[tuple[int, int], int] = {}
        begins: list[int] = []  # of each operator, with what is made for it before
        for index, op in enumerate(program.ops):
            segment = segment_of.get(index)
            begins.append(len(self.ops))
            if segment is not None and segment not in starts:
                for value, (usual, consumer) in entering.get(segment, {}).items():
                    self.entered[value, segment] = self._as(value, usual, None, consumer)
                starts[segment] = len(self.ops)
            self._emit(op, segment)
            if segment is not None:
                stops[segment] = len(self.ops)
        begins.append(len(self.ops))
        loss = self._as(program.loss, final, None)
        mutations = tuple((b, self._as(v, self.layouts[b], None)) for b, v in program.mutations)
        blocks = tuple(
            dataclasses.replace(b, spans=tuple(Span(starts[i, k], stops[i, k]) for k in range(len(b.spans))))
            for i, b in enumerate(program.blocks)
        )
        return program.replace(
            ops=tuple(self.ops),
            types=self.types,
            loss=loss,
            mutations=mutations,
            blocks=alike(blocks, self.ops),
            repeats=tuple(Repeat(Span(begins[x.span.start], begins[x.span.stop]), x.times) for x in program.repeats),
            inputs=tuple(self._leaf(x) for x in program.inputs),
            params=tuple(self._agreed(self._leaf(x)) for x in program.params),
            buffers=tuple(self._leaf(x) for x in program.buffers),
            layouts={**program.layouts, self.axis: self.layouts},
        )

    def _entering(self, spans: list[tuple[int, int, Span]]) -> dict[tuple[int, int], dict[str, tuple[Layout, Op]]]:
        """(block, instance) -> the values that enter it in another layout than they enter most of its siblings, where that makes a
        difference (what the embedding makes, where the others read what a layer made), that layout, and who reads them first. They are
        brought into it before the instance begins: inside, the instances would no longer be alike."""
        program, ops = self.program, self.program.ops
        layout = dict(self.assignment.leaves)
        for op in ops:
            layout |= zip([o for o in op.outputs if o is not None], self.assignment.ops[op.name].outputs, strict=True)
        found: dict[tuple[int, int], dict[str, tuple[Layout, Op]]] = {}
        times = {k: x.times for x in program.repeats for k in range(x.span.start, x.span.stop)}
        for b, block in enumerate(program.blocks):
            first = block.spans[0]
            inside = {o for op in ops[first.start : first.stop] for o in op.outputs}  # instances are wired alike
            for j in range(len(first)):
                same = [ops[span.start + j] for span in block.spans]
                for i, wanted in enumerate(zip(*(self.assignment.ops[op.name].inputs for op in same), strict=True)):
                    values = [refs(op)[i] for op in same]
                    if values[0] in inside:
                        continue
                    pairs = zip(values, wanted, strict=True)
                    made = [layout[v] if needs_transition(layout[v], want, program.types[v]) else None for v, want in pairs]
                    if len(set(made)) > 1:
                        usual = _most([layout[v] for v in values], [times.get(span.start, 1) for span in block.spans])
                        for k, v in enumerate(values):
                            if needs_transition(layout[v], usual, program.types[v]):
                                found.setdefault((b, k), {}).setdefault(v, (usual, same[k]))
        return found

    @functools.cached_property
    def _differs(self) -> bool:
        """Whether ranks run on all of it what does not give the same bits each time."""
        whole = (op for op in self.program.ops if any(layout in (I, R) for layout in self.assignment.ops[op.name].outputs))
        return any(varies(op, self.program.types) for op in whole)

    def _agreed(self, param: Param) -> Param:
        if self.layouts[param.value] != I or not param.trainable or not self._differs:
            return param
        return dataclasses.replace(param, agreed=(*param.agreed, self.axis))

    def _leaf(self, leaf: LeafT) -> LeafT:
        return dataclasses.replace(leaf, layouts=(*leaf.layouts, (self.axis, self.layouts[leaf.value])))

    def _local(self, t: TensorType, layout: Layout) -> TensorType:
        if not layout.is_shard:
            return t
        if (t, layout) not in self.local:
            self.local[t, layout] = TensorType(layout.local_shape(t.shape, self.n), t.dtype, t.grad)
        return self.local[t, layout]

    def _emit(self, op: Op, segment: object) -> None:
        strategy, types = self.assignment.ops[op.name], self.program.types
        read = tuple([self._as(r, want, segment, op) for r, want in zip(refs(op), strategy.inputs, strict=True)])
        operands = iter(read)
        renamed = op if read == refs(op) else map_refs(op, lambda _: Ref(next(operands)))
        outputs = [o for o in op.outputs if o is not None]
        for output, layout in zip(outputs, strategy.outputs, strict=True):
            self.layouts[output] = layout
            self.types[output] = self._local(types[output], layout)
        if strategy.local is None and localizer_of(op.target) is None:
            self.ops.append(renamed)
            return
        view = OpView(renamed, tuple(types[r] for r in refs(op)), tuple(types[o] for o in outputs), self.n, WHOLE)
        for local in localized(view, strategy, self.axis):
            for part in local.outputs:
                if part is not None and part not in self.types:
                    self.types[part], self.layouts[part] = self.types[op.name], self.layouts[op.name]
                    self.names.add(part)
            self.ops.append(local)

    def _as(self, value: str, want: Layout, segment: object, consumer: Op | None = None) -> str:
        """The name of `value` in layout `want`, by a transition if it lies otherwise."""
        t = self.program.types[value]
        value = self.entered.get((value, segment), value) if self.entered else value
        have = self.layouts[value]
        if have is want or not needs_transition(have, want, t):
            return value
        key = (value, want, segment)
        if key not in self.made:
            stem = f"{value}_{self.axis}_{want.kind.value.lower()}{want.dim if want.is_shard else ''}"
            name = stem
            count = 1
            while name in self.names:
                count += 1
                name = f"{stem}_{count}"
            self.names.add(name)
            op = transition_op(value, have, want, self.axis, name, self.sums.get(value))
            module, source = (consumer.module, consumer.source) if consumer is not None else ("", "")
            self.ops.append(dataclasses.replace(op, module=module, source=source))
            self.types[name], self.layouts[name] = self._local(t, want), want
            self.made[key] = name
        return self.made[key]


def _most(layouts: list[Layout], times: list[int]) -> Layout:
    """The layout that there is most often, each so many times; of several the one that comes last."""
    count = Counter[Layout]()
    for layout, n in zip(reversed(layouts), reversed(times), strict=True):
        count[layout] += n
    return count.most_common(1)[0][0]


def alike(blocks: tuple[Block, ...], ops: list[Op] | tuple[Op, ...]) -> tuple[Block, ...]:
    """The blocks whose instances still correspond operator by operator; others are no longer blocks."""
    kept = []
    for block in blocks:
        shapes = [tuple((o.target, len(o.outputs), len(refs(o))) for o in ops[s.start : s.stop]) for s in block.spans]
        if all(shape == shapes[0] for shape in shapes):
            kept.append(block)
    return tuple(kept)
