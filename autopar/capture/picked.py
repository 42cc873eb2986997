"""What is picked of each sample: `h[torch.arange(len(h)), last]`, of rows that are numbered in order.

An index may read any row, so that nothing of it can be split by samples. Where it reads each sample's own, it is a gather along the second
dim, which ranks and micro-batches do for their samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.capture.causal import Known
from autopar.capture.trace import Trace
from autopar.ir import Arg, Op, Ref, refs

__all__ = ["with_picks_of_samples"]

INDEX = "aten.index.Tensor"
MOST = 1 << 20  # numbers of rows that are looked at


def with_picks_of_samples(trace: Trace) -> Trace:
    """The trace, in which such indexes are gathers."""
    known: Known | None = None
    ops = []
    for traced in trace.ops:
        op = traced.op
        if op.target == INDEX and isinstance(op.args[1], tuple) and len(op.args[1]) == 2 and None not in op.args[1]:
            known = known or Known(trace)
            if _numbers_rows(op, trace, known):
                ops += [traced.with_op(each) for each in _gathered(op, trace)]
                continue
        ops.append(traced)
    return dataclasses.replace(trace, ops=tuple(ops)) if len(ops) > len(trace.ops) else trace


def _numbers_rows(op: Op, trace: Trace, known: Known) -> bool:
    """Whether the first of two indexes is, for each element of what is picked, the number of its row."""
    x, rows, places = refs(op)
    whole, first, second = (trace.metas[r] for r in (x, rows, places))
    integers = (torch.int64, torch.int32)
    if len(whole.shape) < 2 or first.dtype not in integers or second.dtype not in integers or math.prod(first.shape) > MOST:
        return False
    shape = _picked(op, trace)
    if not shape or shape[0] != whole.shape[0] or not known.is_known(rows):
        return False
    found: Tensor = known.whole(rows)
    return torch.equal(found.broadcast_to(shape), torch.arange(shape[0]).view(-1, *(1,) * (len(shape) - 1)).expand(shape))


def _picked(op: Op, trace: Trace) -> tuple[int, ...]:
    """The shape of the indexes: the leading dims of what is picked."""
    out, whole = trace.metas[op.name], trace.metas[refs(op)[0]]
    return tuple(out.shape[: len(out.shape) - len(whole.shape) + 2])


def _gathered(op: Op, trace: Trace) -> Iterator[Op]:
    """The operators that pick the same. An index counts from the end where it is negative, which a gather does not."""
    x, _, places = map(Ref, refs(op))
    shape, (size, *rest) = _picked(op, trace), trace.metas[x.name].shape[1:]
    count, name = math.prod(shape[1:]), op.name

    def make(what: str, target: str, *args: Arg) -> Op:
        return dataclasses.replace(op, target=target, args=args, kwargs=(), outputs=(trace.names.fresh(f"{name}_{what}"),))

    if trace.metas[places.name].dtype != torch.int64:
        yield (cast := make("places", "aten.to.dtype", places, torch.int64))
        places = Ref(cast.name)
    yield (negative := make("from_the_end", "aten.lt.Scalar", places, 0))
    yield (counted := make("counted", "aten.add.Tensor", places, size))
    yield (place := make("place", "aten.where.self", Ref(negative.name), Ref(counted.name), places))
    yield (own := make("own", "aten.expand.default", Ref(place.name), shape))
    yield (column := make("column", "aten.reshape.default", Ref(own.name), (shape[0], count, *(1,) * len(rest))))
    yield (index := make("index", "aten.expand.default", Ref(column.name), (shape[0], count, *rest)))
    yield (found := make("picked", "aten.gather.default", x, 1, Ref(index.name)))
    yield dataclasses.replace(op, target="aten.reshape.default", args=(Ref(found.name), (*shape, *rest)), kwargs=())
