"""What is made of the whole batch once a step, before its micro-batches: its seconds, and the bytes that stay until the step ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.axes import BATCH, TIME
from autopar.ir import TensorType, refs
from autopar.measure import Pricer
from autopar.planner.rank import Rank

__all__ = ["prologue_bytes", "prologue_parts_s", "prologue_s"]


def prologue_bytes(rank: Rank) -> int:
    """Of the results that the micro-batches read, whole or in slices."""
    moments = rank.moments
    known = {**moments.body.types, **moments.prologue_types}  # constants that are cut over time are made by nobody
    return sum(_whole(rank, v, known).nbytes for v in moments.prologue_outputs)


def prologue_s(rank: Rank, pricer: Pricer) -> float:
    """The device's time, or the host's to issue it, whichever is longer."""
    return max(prologue_parts_s(rank, pricer))


def prologue_parts_s(rank: Rank, pricer: Pricer) -> tuple[float, float]:
    """The device's time, and the host's to issue it. Nothing of it is differentiated. Found once for a rank and its prices."""
    moments = rank.moments
    if not moments.prologue:
        return 0.0, 0.0
    known = rank.in_prologue.setdefault(pricer, {})  # which is of one mesh
    if rank.micro_batches not in known:
        known[rank.micro_batches] = _parts_s(rank, pricer)
    return known[rank.micro_batches]


def _parts_s(rank: Rank, pricer: Pricer) -> tuple[float, float]:
    moments = rank.moments
    known = {**moments.body.types, **moments.prologue_types}
    read = {r for op in moments.prologue for r in refs(op)} | set(moments.prologue_types)
    program = moments.body.replace(types={v: _whole(rank, v, known) for v in read})
    costs = [pricer.op(op, program) for op in moments.prologue]
    return sum(c.forward_s for c in costs), sum(c.host_s[0] for c in costs)


def _whole(rank: Rank, value: str, types: Mapping[str, TensorType]) -> TensorType:
    """The type of a value of the whole step: as the micro-batches read it, all together. Of a batch of another size than the program's,
    whose micro-batches were made for another split, what has a first dim for its samples is taken to have that for the other batch too."""
    body, (ranks, made_for) = rank.moments.body, rank.made_for
    part = body.layouts.get(BATCH, {}).get(value)
    layout = body.layouts.get(TIME, {}).get(value)
    t, dim, times = types[value], 0, 1.0
    if layout is not None and layout.is_shard and value in body.types:
        t, dim, times = body.types[value], layout.dim, rank.micro_batches
    elif t.shape and t.shape[0] % ((body.batch_size or 1) * made_for) == 0:
        times = rank.micro_batches / made_for * (1.0 if part is None or part.is_shard else rank.mesh.over("batch") / ranks)
    return dataclasses.replace(t, shape=tuple(round(n * times) if d == dim else n for d, n in enumerate(t.shape)))
