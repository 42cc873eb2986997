"""Repeated subgraphs, found by structure alone.

Candidates are the calls of modules (a call is a contiguous span of operators), the outermost repeats first, unless more repeats inside
of them (two equal towers of many layers). Spans that follow one another are candidates too, where no calls repeat (a flat nn.Sequential
repeats with a period of a few operators), and where something repeats between calls (a loop over lists of modules adds up the residual
stream itself): of these, whatever leaves fewest operators to be decided for themselves. Two candidates are instances of one block if
their operators, constants, shapes, dtypes, internal wiring and the roles of their external operands are equal; names of modules and
classes play no part. Constants of torch's operators that lie between 0 and 1 may differ (the rates of stochastic depth grow from layer to
layer): nothing asks more of them.

The first layer of a stack may make what all of its layers read (T5's position bias). If nothing repeats otherwise, `without_lead`
says how to put such operators before the stack.
"""

from __future__ import annotations

import dataclasses
import os.path
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from autopar.ir import Block, Op, Ref, Span, TensorType, call_text, nameless, refs

__all__ = ["find_blocks", "without_lead"]

_MIN_OPS = 3  # a shorter repeat (a lone linear layer) is not worth a class of its own
# Weights and instances of a period: one decision holds for all instances, and what one weight splits another should join.
_PERIODS = ((2, 2), (1, 3))
_MAX_PERIOD = 1024  # operators


@dataclass
class _Call:
    """A call of a module: the operators it stands for, and the calls inside it, in order."""

    start: int
    stop: int
    size: int = 0
    children: dict[str, _Call] = field(default_factory=dict)

    @property
    def span(self) -> Span | None:
        return Span(self.start, self.stop) if self.size == self.stop - self.start else None


@dataclass(frozen=True)
class _Instance:
    span: Span
    prefix: str
    external: tuple[str, ...]  # the values it reads from elsewhere, by first use


def find_blocks(
    ops: Sequence[Op], calls: Sequence[Sequence[str]], types: Mapping[str, TensorType], state: Mapping[str, object]
) -> tuple[Block, ...]:
    """The blocks of a program in order of their first operator.

    calls: for each operator the calls of modules it stands in, outermost first. state: the values that are parameters or
    buffers, each with what else must agree (trainable, mutated).
    """
    root = _Call(0, len(ops), len(ops))
    for index, stack in enumerate(calls):
        node = root
        for call in stack:
            child = node.children.get(call)
            if child is None:
                child = node.children[call] = _Call(index, index)
            child.stop, child.size = index + 1, child.size + 1
            node = child
    producer = {name: (i, k) for i, op in enumerate(ops) for k, name in enumerate(op.outputs) if name is not None}
    found: list[Block] = []
    like = _Likeness(ops, types, state)
    _search(root, like, producer, found)
    between = Counter(len(gap) for gap in _gaps(found, len(ops)) if gap.start > 0 and gap.stop < len(ops))
    if any(times > 1 for times in between.values()):
        found = _with_what_is_between(found, like, producer)
    for gap in _gaps(found, len(ops)):
        _search_periods(gap, like, producer, found)
    return tuple(sorted(found, key=lambda b: b.spans[0].start))


def _gaps(blocks: Sequence[Block], stop: int) -> list[Span]:
    """What lies between the instances of blocks, before the first of them, and behind the last."""
    taken = sorted((span for block in blocks for span in block.spans), key=lambda s: s.start)
    return [Span(*gap) for gap in zip([0, *(s.stop for s in taken)], [*(s.start for s in taken), stop], strict=True) if gap[0] < gap[1]]


def without_lead(
    ops: Sequence[Op], calls: Sequence[tuple[str, ...]], state: Mapping[str, object], movable: Callable[[Op], bool]
) -> tuple[list[int], list[tuple[str, ...]]]:
    """The order of the operators (as indices), and the calls that each then stands in, when what is made inside a call from parameters,
    unchanging buffers and constants alone, and is read outside of it, is made before it. movable: whether an operator may run earlier."""
    fixed = {name for name, role in state.items() if role != ("buffer", True)}
    start: dict[tuple[str, ...], int] = {}
    maker: dict[str, int] = {}
    left: dict[int, int] = {}  # operator that is moved -> how many of its calls it stays in
    for index, (op, stack) in enumerate(zip(ops, calls, strict=True)):
        for depth in range(1, len(stack) + 1):
            start.setdefault(stack[:depth], index)
        for made in [maker[r] for r in refs(op) if r in maker]:
            common = len(os.path.commonprefix([calls[made], stack]))
            if common < len(calls[made]):
                left[made] = min(common, left.get(made, common))
        if movable(op) and all(r in fixed for r in refs(op)):
            outputs = [o for o in op.outputs if o is not None]
            fixed.update(outputs)
            maker |= dict.fromkeys(outputs, index)
    for index in sorted(left, reverse=True):
        pending = [index]
        while pending:
            reader = pending.pop()
            for made in [maker[r] for r in refs(ops[reader]) if r in maker]:
                inside = calls[made][: left[reader] + 1] == calls[reader][: left[reader] + 1]
                if inside and left.get(made, len(calls[made])) > left[reader]:
                    left[made] = left[reader]
                    pending.append(made)
    place = [start[stack[: left[i] + 1]] if i in left else i for i, stack in enumerate(calls)]
    order = sorted(range(len(ops)), key=lambda i: (place[i], i not in left, i))
    return order, [calls[i][: left.get(i)] for i in order]


class _Likeness:
    """Of spans of a program: what is equal where their operators, constants but for rates, shapes, dtypes, internal wiring and the roles of
    their external operands are."""

    def __init__(self, ops: Sequence[Op], types: Mapping[str, TensorType], state: Mapping[str, object]) -> None:
        self.ops, self.types, self.state = ops, types, state
        self._texts: dict[str, str] = {}  # of a call, without the rates in it
        self._kinds: dict[Hashable, int] = {}
        self._kind_of: dict[int, int] = {}

    def of(self, span: Span) -> tuple[Hashable, tuple[str, ...]]:
        """That, and the values that the span reads from elsewhere in order of first use."""
        number: dict[str, int] = {}  # of values of the span; negative for others
        external: list[str] = []
        made = 0
        found: list[Hashable] = []
        for op in self.inside(span):
            for r in refs(op):
                if r not in number:
                    external.append(r)
                    number[r] = -len(external)
            by_rows = None if op.by_rows is None else str(op.by_rows)
            results = tuple([None if o is None else self.types.get(o) for o in op.outputs])
            found += (self._text(op), tuple([number[r] for r in refs(op)]), results, op.multi, op.no_grad, by_rows)
            for o in op.outputs:
                if o is not None:
                    number[o] = made
                made += 1
        given = tuple([(self.types[r], self.state.get(r)) for r in external])
        return (tuple(found), given), tuple(external)

    def inside(self, span: Span) -> Sequence[Op]:
        return self.ops[span.start : span.stop]

    def numbers(self, span: Span) -> list[int]:
        """Of each operator of it, equal where operators are equal but for wiring."""
        for k in range(span.start, span.stop):
            if k not in self._kind_of:
                self._kind_of[k] = self._kinds.setdefault(self.of(Span(k, k + 1))[0], len(self._kinds))
        return [self._kind_of[k] for k in range(span.start, span.stop)]

    def _text(self, op: Op) -> str:
        """The target and the arguments of a call."""
        exact = call_text(op)
        if exact not in self._texts:
            plain = nameless(op)
            rates = op.target.startswith("aten.")
            self._texts[exact] = repr((op.target, _without_rates(plain.args), _without_rates(plain.kwargs))) if rates else exact
        return self._texts[exact]


def _without_rates(arg: object) -> object:
    if isinstance(arg, tuple):
        return tuple([_without_rates(x) for x in arg])
    return _RATE if _is_rate(arg) else arg


_RATE = Ref("rate")  # which is the name of no operand of a nameless operator


def _is_rate(arg: object) -> bool:
    return isinstance(arg, float) and 0 < arg < 1


def _search(call: _Call, like: _Likeness, producer: Mapping[str, tuple[int, int]], found: list[Block]) -> None:
    children = sorted(call.children.items(), key=lambda item: item[1].start)
    classes: dict[Hashable, list[_Instance]] = {}
    lengths = Counter(len(child.span) for _, child in children if child.span is not None)
    for path, child in children:
        span = child.span
        if span is not None and len(span) >= _MIN_OPS and lengths[len(span)] > 1:
            same, external = like.of(span)
            classes.setdefault(same, []).append(_Instance(span, path.partition("@")[0], external))
    repeated: set[int] = set()
    looked_into: dict[int, list[Block]] = {}
    by_start = {child.start: child for _, child in children if child.span is not None and len(child.span) >= _MIN_OPS}
    for instances in classes.values():
        for group in _same_wiring(instances, producer):
            if len(group) < 2:
                continue
            inner = list[Block]()
            _search(by_start[group[0].span.start], like, producer, inner)
            if len(group) * _apart(group[0].span, inner) < len(group[0].span):  # there is more that repeats inside of each
                looked_into[group[0].span.start] = inner
                continue
            found.append(Block(spans=tuple(i.span for i in group), prefixes=tuple(i.prefix for i in group)))
            repeated.update(i.span.start for i in group)
    for _, child in children:
        if child.start in looked_into:
            found += looked_into[child.start]
        elif child.start not in repeated or child.span is None:
            _search(child, like, producer, found)


def _apart(span: Span, blocks: Sequence[Block]) -> int:
    """Operators of a span of which each is decided for itself, where there are these blocks in it."""
    return len(span) - _saved(blocks)


def _with_what_is_between(blocks: list[Block], like: _Likeness, producer: Mapping[str, tuple[int, int]]) -> list[Block]:
    """The blocks; or, in the place of some, such of spans that follow one another, which hold these and what lies between them, and leave
    fewer operators to be decided for themselves."""
    whole = Span(0, len(like.ops))

    def in_place(instances: Sequence[_Instance]) -> list[Block]:
        over = Span(instances[0].span.start, instances[-1].span.stop)
        return [_block(instances), *(left for block in blocks if (left := _outside(block, over)) is not None)]

    def saved(instances: Sequence[_Instance]) -> int:
        more = _saved(in_place(instances)) - _saved(blocks)
        return more if more >= len(instances) - 1 else 0  # an operator of each, at least: else calls are easier to read

    while instances := _longest_period(whole, like, producer, saved):
        blocks = in_place(instances)
    return blocks


def _outside(block: Block, over: Span) -> Block | None:
    """The block without its instances in a span; None if fewer than two are left."""
    left = [k for k, span in enumerate(block.spans) if span.stop <= over.start or over.stop <= span.start]
    return Block(spans=tuple(block.spans[k] for k in left), prefixes=tuple(block.prefixes[k] for k in left)) if len(left) > 1 else None


def _block(instances: Sequence[_Instance]) -> Block:
    return Block(spans=tuple(i.span for i in instances), prefixes=tuple(i.prefix for i in instances))


def _saved(blocks: Sequence[Block]) -> int:
    """For how many operators what is decided for others holds."""
    return sum((len(block.spans) - 1) * len(block.spans[0]) for block in blocks)


def _search_periods(gap: Span, like: _Likeness, producer: Mapping[str, tuple[int, int]], found: list[Block]) -> None:
    """Blocks of spans that follow one another inside a gap: those that save most, then those before and after them."""
    if instances := _longest_period(gap, like, producer, lambda one: _saved([_block(one)])):
        found.append(_block(instances))
        for rest in (Span(gap.start, instances[0].span.start), Span(instances[-1].span.stop, gap.stop)):
            _search_periods(rest, like, producer, found)


def _longest_period(
    gap: Span, like: _Likeness, producer: Mapping[str, tuple[int, int]], saved: Callable[[Sequence[_Instance]], int]
) -> list[_Instance]:
    """Of what follows one another in a gap in equal parts, the parts that save most, and of these the shortest; none if none save anything.
    saved: how many operators, at most those of all parts but one."""
    ops, types, state = like.ops, like.types, like.state
    inside = numpy.array(like.numbers(gap))
    runs = [(period, *run) for period in range(2, min(len(gap) // 2, _MAX_PERIOD) + 1) for run in _runs(inside, period)]
    runs.sort(key=lambda run: (-(run[2] - run[2] % run[0]), run[0]))
    for weights, least in _PERIODS:
        best, most = list[_Instance](), 0
        for period, start, length in runs:
            if length - length % period <= most:
                break
            candidates = range(gap.start + start, gap.start + start + length % period + 1)
            first = next((k for k in candidates if any(r in state for r in refs(ops[k]))), candidates[0])  # at a weight, where possible
            part = ops[first : first + period]
            read = [[r for r in refs(op) if state.get(r) == ("param", True) and len(types[r].shape) > 1] for op in part]
            if sum(map(bool, read)) < weights:
                continue
            instances = _instances(first, period, length // period + 1, like, producer)
            if len(instances) >= least and (found := saved(instances)) > most:
                best, most = instances, found
        if best:
            return best
    return []


def _runs(alike: NDArray[numpy.int64], period: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the runs, of a period or longer, of operators that are alike those a period later."""
    same = numpy.concatenate(([False], alike[:-period] == alike[period:], [False]))
    edges = numpy.flatnonzero(same[1:] != same[:-1])
    for start, stop in edges.reshape(-1, 2).tolist():
        if stop - start >= period:
            yield start, stop - start


def _instances(start: int, period: int, count: int, like: _Likeness, producer: Mapping[str, tuple[int, int]]) -> list[_Instance]:
    """The longest chain among `count` spans: instances of one block, each of which takes the same operands from the one before."""
    longest: list[_Instance] = []
    chain: list[_Instance] = []
    first: Hashable = None  # what is equal of the chain
    wired: tuple[tuple[int, int] | None, ...] = ()
    for span in [Span(start + k * period, start + (k + 1) * period) for k in range(count)]:
        same, external = like.of(span)
        instance = _Instance(span, like.ops[span.start].module, external)
        taken = _taken(instance, chain[-1], producer) if chain else ()
        if any(taken) and same == first and (len(chain) == 1 or taken == wired):
            chain, wired = [*chain, instance], taken
        else:
            chain, first = [instance], same
        longest = max(longest, chain, key=len)
    pairs = zip(longest, [*longest[1:], *longest[-2:-1]], strict=False)
    return [dataclasses.replace(x, prefix=_own_path(x, other, like) or x.prefix) for x, other in pairs]


def _own_path(instance: _Instance, other: _Instance, like: _Likeness) -> str:
    """The modules with weights that an instance has and another one has not: 'layers.3', or 'norms.3, layers.3'; '' if there are none."""
    found: dict[str, None] = {}
    for own, theirs in zip(like.inside(instance.span), like.inside(other.span), strict=True):
        path = own.module.split(".")
        shared = len(os.path.commonprefix([path, theirs.module.split(".")]))
        if shared < len(path) and any(r in like.state for r in refs(own)):
            found[".".join(path[: shared + 1])] = None
    return ", ".join(found)


def _taken(instance: _Instance, before: _Instance, producer: Mapping[str, tuple[int, int]]) -> tuple[tuple[int, int] | None, ...]:
    """Of each value that an instance reads from elsewhere, which result of the one before it that is, if it is one."""
    made = [producer.get(value, (-1, 0)) for value in instance.external]
    return tuple((index - before.span.start, output) if index in before.span else None for index, output in made)


def _same_wiring(instances: Sequence[_Instance], producer: Mapping[str, tuple[int, int]]) -> list[list[_Instance]]:
    """Groups of instances that take the same operands from the instance right before them.

    An instance that does not follow another one directly (the first of a stack) takes all its operands from elsewhere, and
    belongs to the first group.
    """
    groups: dict[tuple[tuple[int, int] | None, ...], list[_Instance]] = {}
    free: list[_Instance] = []
    before: _Instance | None = None
    for instance in instances:
        taken = _taken(instance, before, producer) if before is not None else ()
        if any(taken):
            groups.setdefault(taken, []).append(instance)
        else:
            free.append(instance)
        before = instance
    merged = list(groups.values()) or [[]]
    merged[0] = sorted([*free, *merged[0]], key=lambda i: i.span.start)
    return merged
