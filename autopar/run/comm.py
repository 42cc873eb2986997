"""Collectives on plain tensors: no autograd, any dtype, any strides, any backend.

The table of transitions (`collectives`) and the care of parameters (`buckets`) are written with these. Over an axis of
size 1 each of them is the identity. Where a backend cannot carry a dtype the tensor is carried as another: one that is
only moved as bytes, one that is summed as the dtype that `_summed_as` names. Nothing is tried and caught.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.run import record
from autopar.run.groups import started
from autopar.run.mesh import Axis
from cost_models.collectives import summed_by_gathering

__all__ = [
    "all_gather", "all_reduce", "all_reduce_", "all_to_all", "broadcast_", "exchange", "finish", "gather_flat", "reduce_scatter",
    "scatter_flat", "sums_by_gathering",
]  # fmt: skip

_INTO: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_CARRIED = frozenset(  # by NCCL and by gloo; gloo refuses int16 and the float8 types
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)


def _moved(x: Tensor) -> Tensor:
    """x, contiguous, as a tensor that a backend can move (its last dim is then longer)."""
    x = x.contiguous()
    if x.dtype in _CARRIED:
        return x
    return torch.view_as_real(x) if x.is_complex() else x.unsqueeze(-1).view(torch.uint8)


def _restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_moved`."""
    if x.dtype == dtype:
        return x
    return torch.view_as_complex(x) if dtype.is_complex else x.view(dtype).squeeze(-1)


def _summed_as(x: Tensor, *, fresh: bool) -> Tensor:
    """x, contiguous, as a tensor that a backend can sum; fresh: never x itself. TypeError if there is no exact way."""
    if x.dtype in (torch.bool, torch.int16):  # terms of a sum of which at most one is True; a sum that fits in int16
        return x.to(torch.int32, memory_format=torch.contiguous_format)
    if not (x.is_complex() or x.dtype in _CARRIED):
        raise TypeError(f"a partial value of dtype {x.dtype} cannot be summed over ranks")
    x = x.clone(memory_format=torch.contiguous_format) if fresh else x.contiguous()
    return torch.view_as_real(x) if x.is_complex() else x


def _summed_from(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(x) if dtype.is_complex else x.to(dtype)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[*shape] on each of n ranks -> [n, *shape], the same on all."""
    if axis.size == 1:
        return x.unsqueeze(0)
    moved = _moved(x)
    out = moved.new_empty((axis.size, *moved.shape))
    record.entered(record.ALL_GATHER, axis.name)
    _INTO(out.view(-1), moved.view(-1), group=axis.group)
    record.left()
    return _restored(out, x.dtype)


def sums_by_gathering(x: Tensor, axis: Axis) -> bool:
    """Whether `all_reduce` gathers the terms, and each rank adds them up, in the order of the ranks."""
    return axis.held is not None and axis.held.gloo and summed_by_gathering(x.nbytes, axis.size)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, as a new tensor (x itself if the axis has size 1)."""
    if axis.size == 1:
        return x
    few = sums_by_gathering(x, axis)
    summed = _summed_as(x, fresh=not few)
    record.entered(record.ALL_REDUCE, axis.name)
    if few:
        terms = summed.new_empty((axis.size, *summed.shape))
        _INTO(terms.view(-1), summed.view(-1), group=axis.group)
        summed = terms.sum(0, dtype=summed.dtype)
    else:
        dist.all_reduce(summed, group=axis.group)
    record.left()
    return _summed_from(summed, x.dtype)


def all_reduce_(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, wait: bool = True) -> dist.Work | None:
    """Reduce x, which is contiguous and of a carried dtype, in place. wait=False: returns the work to wait for."""
    if axis.size == 1:
        return None
    record.entered(record.ALL_REDUCE, axis.name)
    work = dist.all_reduce(x, op=op, group=axis.group, async_op=not wait)
    record.left()
    return None if wait else _started(work)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[n, *shape] -> [*shape]: rank i gets the sum over the ranks of x[i]."""
    if axis.size == 1:
        return x.squeeze(0)
    summed = _summed_as(x, fresh=False)
    out = summed.new_empty(summed.shape[1:])
    record.entered(record.REDUCE_SCATTER, axis.name)
    _SCATTER(out.view(-1), summed.view(-1), group=axis.group)
    record.left()
    return _summed_from(out, x.dtype)


def gather_flat(out: Tensor, x: Tensor, axis: Axis) -> dist.Work:
    """Start an all-gather of the flat x into the flat out [n * numel of x]."""
    record.entered(record.ALL_GATHER, axis.name)
    work = _INTO(out, x, group=axis.group, async_op=True)
    record.left()
    return _started(work)


def scatter_flat(out: Tensor, x: Tensor, axis: Axis) -> dist.Work:
    """Start a reduce-scatter of the flat x [n * numel of out] into the flat out."""
    record.entered(record.REDUCE_SCATTER, axis.name)
    work = _SCATTER(out, x, group=axis.group, async_op=True)
    record.left()
    return _started(work)


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> list[dist.Work]:
    """Start to send tensors to global ranks of the axis, and to receive into tensors from them: the works in this order, or one for all.
    gloo sends the host's memory alone, so that what lies on a GPU goes through it."""
    by_host = axis.held is not None and axis.held.gloo
    landing = [torch.empty_like(t, device="cpu") if by_host and t.is_cuda else t for t, _ in receives]
    ops = [dist.P2POp(dist.isend, t.cpu() if by_host and t.is_cuda else t, rank, axis.group) for t, rank in sends]
    ops += [dist.P2POp(dist.irecv, t, rank, axis.group) for t, (_, rank) in zip(landing, receives, strict=True)]
    record.entered(record.EXCHANGE, axis.name)  # which may find out that the other rank has gone
    works: list[dist.Work] = dist.batch_isend_irecv(ops)
    record.left()
    for k, (landed, (t, _)) in enumerate(zip(landing, receives, strict=True), len(sends)):
        if landed is not t:
            works[k] = _ThroughHost(works[k], landed, t)
    return works


class _ThroughHost(dist.Work):
    """Copies what has arrived on the host to where it is wanted."""

    def __init__(self, work: dist.Work, landed: Tensor, wanted: Tensor) -> None:
        super().__init__()
        self._work, self._landed, self._wanted = work, landed, wanted

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: object = None) -> bool:
        self._work.wait()
        self._wanted.copy_(self._landed)
        return True


def finish(work: dist.Work, kind: int, axis: str) -> None:
    """Wait for a collective that was started. kind: a name of `record`; axis: the name of the axis."""
    record.entered(kind, axis)
    work.wait()
    record.left()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a started collective has work to wait for"
    return started(work)


def all_to_all(x: Tensor, axis: Axis, *, sends: list[int] | None = None, receives: list[int] | None = None) -> Tensor:
    """x [m, ...]: its dim 0 is cut into one part for each rank, of `sends` rows each (equal parts without it); the result
    has the parts that the ranks sent here, in their order, of `receives` rows each."""
    if axis.size == 1:
        return x
    moved = _moved(x)
    rows = sum(receives) if receives is not None else len(moved)
    out = moved.new_empty((rows, *moved.shape[1:]))
    record.entered(record.ALL_TO_ALL, axis.name)
    dist.all_to_all_single(out, moved, receives, sends, group=axis.group)
    record.left()
    return _restored(out, x.dtype)


def broadcast_(x: Tensor, source: int, axis: Axis) -> Tensor:
    """Overwrite the contiguous x with that of global rank `source` of the axis."""
    if axis.size > 1:
        record.entered(record.BROADCAST, axis.name)
        dist.broadcast(_moved(x), source, group=axis.group)
        record.left()
    return x
