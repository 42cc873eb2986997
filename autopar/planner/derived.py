"""Which values hold the batch, for the data axis, which splits what derives from it, and for the others, which leave it whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from autopar.capture.batch import may_be_confused
from autopar.ir import L, Layout, Op, Program, S, Strategy

__all__ = ["Edge", "Source", "Stated", "derived_only", "not_over", "rows_of"]

Stated = Callable[[str, Set[int]], tuple[Strategy, ...]]
"""The strategies of an operator, given the group counts of the shards that reach it."""


class Source(NamedTuple):
    """Result `output` of a group."""

    group: str
    output: int


@dataclass(frozen=True, slots=True)
class Edge:
    """Operand `operand` of a group reads this source; count: in how many members."""

    source: Source
    consumer: str
    operand: int
    count: int


def derived_only(
    ops: Mapping[str, Op],
    edges: tuple[Edge, ...],
    stated: Stated,
    leaf_layouts: Mapping[str, tuple[Layout, ...]],
    rows: Mapping[Source, bool] | None = None,
) -> tuple[dict[str, tuple[Strategy, ...]], Mapping[Source, set[Layout]]]:
    """The strategies whose shards can be reached from the split inputs without a change of dim, and those shards. rows: the
    values with a row for each sample; whether they have a gradient. They may be cut where they are made, or, without a
    gradient, at no cost after it."""
    rows = rows or {}
    reached: dict[Source, set[Layout]] = defaultdict(set)
    for source, grad in rows.items():
        if not grad:
            reached[source].add(S(0))
    for v, layouts in leaf_layouts.items():
        reached[Source(v, 0)] |= {x for x in layouts if x.is_shard}
    incoming: dict[str, list[Edge]] = defaultdict(list)
    for e in edges:
        incoming[e.consumer].append(e)
    kept: dict[str, tuple[Strategy, ...]] = {}
    for _ in range(2):  # the second round follows a repeated block's output into its own input
        for name in ops:
            good = []
            reads = [(e.operand, reached[e.source]) for e in incoming[name]]
            for s in stated(name, {x.groups for _, known in reads for x in known}):
                shards = [(x, known) for k, known in reads if (x := s.inputs[k]).is_shard]
                derived = any(x in known for x, known in shards)
                made = not shards and all(x == L or (x == S(0) and Source(name, k) in rows) for k, x in enumerate(s.outputs))
                if derived or made or (not shards and not any(x.is_shard for x in s.outputs)):
                    good.append(s)
                    for k, x in enumerate(s.outputs):
                        if x.is_shard:
                            reached[Source(name, k)].add(x)
            kept[name] = tuple(good)
    return kept, reached


def rows_of(
    program: Program,
    ops: Mapping[str, Op],
    edges: tuple[Edge, ...],
    stated: Stated,
    leaf_layouts: Mapping[str, tuple[Layout, ...]],
) -> dict[Source, bool]:
    """Results with a row for each sample -> whether they have a gradient; with one, those of two dims or more. Their first dim has the
    size of the batch; where others have it too, by chance, they are those that are cut together with something that derives from
    the batch."""
    rows: dict[Source, bool] = {}
    for name, op in ops.items():
        for k, o in enumerate(x for x in op.outputs if x is not None):
            t = program.types[o]
            if len(t.shape) > (1 if t.grad else 0) and t.shape[0] == program.batch_size:
                rows[Source(name, k)] = t.grad
    if not rows or not may_be_confused(program.types, program.batch_size or 0):
        return rows
    found = {name: stated(name, set()) for name in ops}
    reached = derived_only(ops, edges, lambda name, _: found[name], leaf_layouts)[1]
    batch = _with_the_batch(ops, edges, found, reached)
    return {source: grad for source, grad in rows.items() if source in batch}


def _with_the_batch(
    ops: Mapping[str, Op], edges: tuple[Edge, ...], found: Mapping[str, tuple[Strategy, ...]], reached: Mapping[Source, set[Layout]]
) -> set[Source]:
    """The results that are cut along their first dim where an operator cuts what derives from the batch, or others of these."""
    incoming: dict[str, list[Edge]] = defaultdict(list)
    for e in edges:
        incoming[e.consumer].append(e)
    batch = {source for source, cuts in reached.items() if S(0) in cuts}
    for _ in range(2):  # the second round follows a repeated block's input to the output before it
        for name in reversed(list(ops)):
            reads = [(e.operand, e.source, reached.get(e.source, ())) for e in incoming[name]]
            for s in found[name]:
                cut = [(x, source, known) for k, source, known in reads if (x := s.inputs[k]).is_shard]
                if not cut:
                    continue
                joined = any(x in known for x, _, known in cut)
                if joined or any(x == S(0) and Source(name, k) in batch for k, x in enumerate(s.outputs)):
                    batch |= {source for x, source, _ in cut if x == S(0)}
    return batch


def not_over(
    batch: Mapping[Source, set[Layout]], name: str, strategies: tuple[Strategy, ...], incoming: list[Edge]
) -> tuple[Strategy, ...]:
    """Those that do not split the batch."""

    reads = [(e.operand, batch[e.source]) for e in incoming if batch.get(e.source)]
    makes = {k: batch[made] for k in range(len(strategies[0].outputs) if strategies else 0) if batch.get(made := Source(name, k))}
    if not reads and not makes:
        return strategies
    return tuple(
        s for s in strategies if not (any(s.inputs[k] in x for k, x in reads) or any(s.outputs[k] in x for k, x in makes.items()))
    )
