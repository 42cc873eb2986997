"""Which inputs hold the batch in their first dim, where not all that have its size do.

A mask of [length, length], positions of [length] or weights of [classes] may be as long as the batch by chance. So each input is followed
alone: cut along its first dim, the operators' rules say along which dims everything after it is cut. Two inputs hold the same dim where
an operator takes both cut so together; they hold different ones where an operator takes one cut, but never both. One that is multiplied
with weights before that is left as it is: cutting it divides work (the other side of a contrast).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.catalog import OpView, strategies_of
from autopar.ir import Layout, Op, P, Ref, S, Strategy, TensorType, map_refs, refs

__all__ = ["batched_of", "may_be_confused"]

Reach = dict[str, set[Layout]]  # value -> how it can be cut


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
    import networkx  # takes a quarter of a second, and is seldom needed

    together: networkx.Graph[str] = networkx.Graph()
    together.add_nodes_from(same)
    apart: set[tuple[str, str]] = set()  # the first is cut where the second is whole
    for op, strategies in zip(ops, stated, strict=True):
        operands = refs(op)
        cut = [(k, v, x) for k, r in enumerate(operands) for v in same for x in sorted(reach[v].get(r, ()), key=str)]
        for (k, v, x), (j, w, y) in itertools.permutations(cut, 2):
            if k != j and v != w and any(s.inputs[k] == x for s in strategies):
                if any(s.inputs[k] == x and s.inputs[j] == y for s in strategies):
                    together.add_edge(v, w)
                else:
                    apart.add((v, w))
    groups = [frozenset(g) for g in networkx.connected_components(together)]
    # a batch stays the first dim of nearly everything, a length or a width does not
    batch = max(groups, key=lambda g: (max(sum(S(0) in cuts for cuts in reach[v].values()) for v in g), -min(map(same.index, g))))
    other = [g for g in groups if g != batch and any((a, b) in apart for a in batch for b in g)]
    follows = {value for v in batch for value in reach[v]}
    products = [op for op, strategies in zip(ops, stated, strict=True) if _is_product(strategies)]
    works = {v for v in same if any(reach[v].keys() & set(refs(op)) and not follows & set(refs(op)) for op in products)}
    return tuple(v for v in same if not any(v in g and not g & works for g in other))


def _is_product(strategies: Sequence[Strategy]) -> bool:
    """Whether an operator sums products of two operands."""
    return any(s.local is None and P in s.outputs and sum(x.is_shard for x in s.inputs) > 1 for s in strategies)


def _strategies(ops: Sequence[Op], types: Mapping[str, TensorType], n: int) -> list[tuple[Strategy, ...]]:
    """Of each operator those that cut something; equal operators are asked once."""
    known: dict[object, tuple[Strategy, ...]] = {}
    found = []
    for op in ops:
        ins, outs = tuple(types[r] for r in refs(op)), tuple(types[o] for o in op.outputs if o is not None)
        key = (repr(map_refs(dataclasses.replace(op, outputs=(), module="", source=""), lambda _: Ref(""))), ins, outs)
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
