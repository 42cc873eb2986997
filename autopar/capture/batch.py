"""Which size the batch has, and which inputs hold it in their first dim.

Where first dims differ, each size is taken for the batch in turn, and what is then cut is counted: with a batch nearly everything is, with
the number of layers of a state, the length of a sentence or the number of classes little or nothing.

Not all that have its size hold it: a mask of [length, length], positions of [length] or weights of [classes] may be as long as the batch by
chance. So each input is followed alone: cut along its first dim, the operators' rules say along which dims everything after it is cut. Two
inputs hold the same dim where an operator takes both cut so together; they hold different ones where an operator takes one cut, but never
both. One that is multiplied with weights before that is left as it is: cutting it divides work (the other side of a contrast).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from autopar.catalog import OpView, strategies_of
from autopar.ir import Layout, Op, P, S, Strategy, TensorType, call_text, refs

__all__ = ["batch_size_of", "batched_of", "may_be_confused", "samples_of"]

Reach = dict[str, set[Layout]]  # value -> how it can be cut


def batch_size_of(ops: Sequence[Op], types: Mapping[str, TensorType], inputs: Sequence[str]) -> tuple[int | None, tuple[str, ...]]:
    """The size of the batch, and what the user should know of the choice. None if no input has dims, or several sizes and none that cuts
    anything that is trained."""
    first = {v: types[v].shape[0] for v in inputs if types[v].shape}
    sizes = list(dict.fromkeys(first.values()))
    if len(sizes) < 2:
        return next(iter(sizes), None), ()
    made = {o for op in ops for o in op.outputs if o is not None}
    weights = {r for op in ops for r in refs(op)} - made - set(inputs)
    stated = [
        [s for s in strategies if not any(x.is_shard and r in weights for r, x in zip(refs(op), s.inputs, strict=True))]
        for op, strategies in zip(ops, _strategies(ops, types, 1), strict=True)
    ]
    trained = [o for op in ops for o in op.outputs if o is not None and types[o].grad]
    around: dict[str, list[int]] = defaultdict(list)
    for k, op in enumerate(ops):
        for v in {*refs(op), *(o for o in op.outputs if o is not None)}:
            around[v].append(k)
    if 1 in sizes and sum((1 in types[v].shape) + (types[v].shape[:1] == (1,)) for v in trained) > len(trained):
        return 1, ()  # which is never cut, and is followed by its size
    found = dict.fromkeys(sizes, 0)
    for value, size in first.items():
        cuts = _together(value, ops, stated, around)
        found[size] = max(found[size], sum((v in cuts) + (S(0) in cuts.get(v, ())) for v in trained))
    best = max(sizes, key=lambda size: found[size])
    said = f"inputs: their first dims have the sizes {', '.join(map(str, sizes))}"
    if not found[best]:
        return None, (f"{said}; none of them is seen to be the batch, so no plan divides it",)
    doubted = any(2 * found[size] > found[best] for size in sizes if size != best)
    return best, (f"{said}; {best} is taken to be the global batch",) if doubted else ()


def may_be_confused(types: Mapping[str, TensorType], size: int) -> bool:
    """Whether another dim than a first one has the size of the batch."""
    return any(size in t.shape[1:] for t in types.values())


def batched_of(ops: Sequence[Op], types: Mapping[str, TensorType], inputs: Sequence[str], size: int | None) -> tuple[str, ...]:
    """The inputs whose first dim is the batch: those of its size, without those whose first dim is seen to be another one."""
    same = tuple(v for v in inputs if size and types[v].shape[:1] == (size,))
    if len(same) < 2 or size is None or size < 2 or not may_be_confused(types, size):
        return same
    stated = _strategies(ops, types, next(n for n in range(2, size + 1) if size % n == 0))
    reach = {v: _reach(v, ops, stated) for v in same}
    together = {v: frozenset({v}) for v in same}  # of each, those that hold the same dim
    apart: set[tuple[str, str]] = set()  # the first is cut where the second is whole
    for op, strategies in zip(ops, stated, strict=True):
        operands = refs(op)
        cut = [(k, v, x) for k, r in enumerate(operands) for v in same for x in sorted(reach[v].get(r, ()), key=str)]
        for (k, v, x), (j, w, y) in itertools.permutations(cut, 2):
            if k != j and v != w and any(s.inputs[k] == x for s in strategies):
                if any(s.inputs[k] == x and s.inputs[j] == y for s in strategies):
                    together |= dict.fromkeys(group := together[v] | together[w], group)
                else:
                    apart.add((v, w))
    groups = list(dict.fromkeys(together.values()))
    # a batch stays the first dim of nearly everything, a length or a width does not
    batch = max(groups, key=lambda g: (max(sum(S(0) in cuts for cuts in reach[v].values()) for v in g), -min(map(same.index, g))))
    other = [g for g in groups if g != batch and any((a, b) in apart for a in batch for b in g)]
    follows = {value for v in batch for value in reach[v]}
    products = [op for op, strategies in zip(ops, stated, strict=True) if _is_product(strategies)]
    works = {v for v in same if any(reach[v].keys() & set(refs(op)) and not follows & set(refs(op)) for op in products)}
    return tuple(v for v in same if not any(v in g and not g & works for g in other))


def samples_of(
    values: Iterable[str], ops: Sequence[Op], types: Mapping[str, TensorType], batched: Sequence[str], n: int
) -> dict[str, Layout]:
    """How these values are cut where the inputs that hold the batch are cut among n ranks; those that are not are left out."""
    values = [v for v in values if any(size and size % n == 0 for size in types[v].shape)]
    stated = _strategies(ops, types, n) if values else []
    reach = [_reach(start, ops, stated) for start in (batched if values else ())]
    cuts = {v: {x for found in reach for x in found.get(v, ())} for v in values}
    return {v: min(found, key=lambda x: (x.dim, x.groups)) for v, found in cuts.items() if found}


def _is_product(strategies: Sequence[Strategy]) -> bool:
    """Whether an operator sums products of two operands."""
    return any(s.local is None and P in s.outputs and sum(x.is_shard for x in s.inputs) > 1 for s in strategies)


def _strategies(ops: Sequence[Op], types: Mapping[str, TensorType], n: int) -> list[tuple[Strategy, ...]]:
    """Of each operator those that cut something; equal operators are asked once."""
    known: dict[object, tuple[Strategy, ...]] = {}
    found = []
    for op in ops:
        ins, outs = tuple(types[r] for r in refs(op)), tuple(types[o] for o in op.outputs if o is not None)
        key = (call_text(op), op.multi, op.no_grad, ins, outs)
        if key not in known:
            known[key] = tuple(s for s in strategies_of(OpView(op, ins, outs, n, frozenset({1}))) if s.splits_work)
        found.append(known[key])
    return found


def _reach(start: str, ops: Sequence[Op], stated: Sequence[tuple[Strategy, ...]]) -> Reach:
    """How everything is cut if this input is cut along its first dim."""
    found: Reach = defaultdict(set)
    found[start].add(S(0))
    for op, strategies in zip(ops, stated, strict=True):
        operands = refs(op)
        if not any(r in found for r in operands):
            continue
        outputs = [o for o in op.outputs if o is not None]
        for s in strategies:
            if any(x.is_shard and r in found and x in found[r] for r, x in zip(operands, s.inputs, strict=True)):
                for o, x in zip(outputs, s.outputs, strict=True):
                    if x.is_shard:
                        found[o].add(x)
    return dict(found)


def _together(start: str, ops: Sequence[Op], stated: Sequence[Sequence[Strategy]], around: Mapping[str, Sequence[int]]) -> Reach:
    """What is cut if an input is cut along its first dim: all that an operator cuts with what is cut already. around: value -> the
    operators that read or make it."""
    found: Reach = defaultdict(set, {start: {S(0)}})
    left = [(start, S(0))]
    while left:
        value, layout = left.pop()
        for k in around[value]:
            values = [*refs(ops[k]), *(o for o in ops[k].outputs if o is not None)]
            for s in stated[k]:
                lie = list(zip(values, (*s.inputs, *s.outputs), strict=True))
                if (value, layout) in lie:
                    new = [(v, x) for v, x in lie if x.is_shard and x not in found[v]]
                    left += new
                    for v, x in new:
                        found[v].add(x)
    return {v: cuts for v, cuts in found.items() if cuts}
