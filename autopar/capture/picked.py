"""What is picked of each sample, or written to it: `h[torch.arange(len(h)), last]`, of rows that are numbered in order.

An index may read any row, so that nothing of it can be split by samples. Where it reads each sample's own, it is a gather along the second
dim, and where it writes to it, a scatter, which ranks and micro-batches do for their samples. What does not depend on inputs stays as it
is, and so does what would take a larger index than there is.
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

INDEX, PUT = "aten.index.Tensor", "aten.index_put.default"
MOST = 1 << 20  # numbers of rows that are looked at


def with_picks_of_samples(trace: Trace) -> Trace:
    """The trace, in which such indexes are gathers and scatters."""
    known: Known | None = None
    of_inputs = {x.value for x in trace.inputs}
    ops = []
    for traced in trace.ops:
        op = traced.op
        if of_inputs.isdisjoint(refs(op)):
            ops.append(traced)
            continue
        of_inputs |= {o for o in op.outputs if o is not None}
        if op.target in (INDEX, PUT) and isinstance(op.args[1], tuple) and len(op.args[1]) == 2 and None not in op.args[1]:
            known = known or Known(trace)
            if _numbers_rows(op, trace, known):
                ops += [traced.with_op(each) for each in _of_samples(op, trace)]
                continue
        ops.append(traced)
    return dataclasses.replace(trace, ops=tuple(ops)) if len(ops) > len(trace.ops) else trace


def _indexes(op: Op) -> tuple[Ref, Ref, Ref]:
    """What is indexed, and by what."""
    assert isinstance(op.args[1], tuple), op
    x, rows, places = op.args[0], *op.args[1]
    assert isinstance(x, Ref) and isinstance(rows, Ref) and isinstance(places, Ref), op
    return x, rows, places


def _numbers_rows(op: Op, trace: Trace, known: Known) -> bool:
    """Whether the first of two indexes is, for each element, the number of its row. Of what is written one place of each row."""
    x, rows, places = _indexes(op)
    whole, first, second = (trace.metas[r.name] for r in (x, rows, places))
    integers = (torch.int64, torch.int32)
    if len(whole.shape) < 2 or first.dtype not in integers or second.dtype not in integers or math.prod(first.shape) > MOST:
        return False
    shape = torch.broadcast_shapes(first.shape, second.shape)
    if not shape or shape[0] != whole.shape[0] or not known.is_known(rows.name):
        return False
    count = math.prod(shape[1:])
    if (tuple(second.shape) != tuple(shape) and count > whole.shape[1]) or (op.target == PUT and (count != 1 or _adds(op))):
        return False
    found: Tensor = known.whole(rows.name)
    numbers = torch.arange(shape[0], device=found.device).view(-1, *(1,) * (len(shape) - 1))
    return torch.equal(found.broadcast_to(shape), numbers.expand(shape))


def _adds(op: Op) -> bool:
    return bool(op.args[3] if len(op.args) > 3 else op.kwarg("accumulate", False))


def _of_samples(op: Op, trace: Trace) -> Iterator[Op]:
    """The operators that do the same. An index counts from the end where it is negative, which a gather does not."""
    x, rows, places = _indexes(op)
    whole, first, second = (trace.metas[r.name] for r in (x, rows, places))
    shape, (size, *rest) = tuple(torch.broadcast_shapes(first.shape, second.shape)), whole.shape[1:]
    each, name = (shape[0], math.prod(shape[1:])), op.name

    def make(what: str, target: str, *args: Arg) -> Op:
        return dataclasses.replace(op, target=target, args=args, kwargs=(), outputs=(trace.names.fresh(f"{name}_{what}"),))

    if second.dtype != torch.int64:
        yield (cast := make("places", "aten.to.dtype", places, torch.int64))
        places = Ref(cast.name)
    yield (negative := make("from_the_end", "aten.lt.Scalar", places, 0))
    yield (counted := make("counted", "aten.add.Tensor", places, size))
    yield (place := make("place", "aten.where.self", Ref(negative.name), Ref(counted.name), places))
    yield (own := make("own", "aten.expand.default", Ref(place.name), shape))
    yield (column := make("column", "aten.reshape.default", Ref(own.name), (*each, *(1,) * len(rest))))
    yield (index := make("index", "aten.expand.default", Ref(column.name), (*each, *rest)))
    if op.target == PUT:
        yield (value := make("value", "aten.expand.default", op.args[2], (*shape, *rest)))
        yield (written := make("written", "aten.reshape.default", Ref(value.name), (*each, *rest)))
        yield dataclasses.replace(op, target="aten.scatter.src", args=(x, 1, Ref(index.name), Ref(written.name)), kwargs=())
    else:
        yield (found := make("picked", "aten.gather.default", x, 1, Ref(index.name)))
        yield dataclasses.replace(op, target="aten.reshape.default", args=(Ref(found.name), (*shape, *rest)), kwargs=())
