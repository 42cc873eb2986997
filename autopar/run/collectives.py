"""Changes of layout over one mesh axis: the whole table, each an autograd function.

| from -> to   | function          | forward     | backward    |
|--------------|-------------------|-------------|-------------|
| I -> R       | copy_to           | nothing     | all-reduce  |
| I -> S       | split             | local slice | all-gather  |
| R -> S       | narrow            | local slice | pad         |
| S -> R       | all_gather        | all-gather  | reduce-scatter |
| S -> I       | gather            | all-gather  | local slice |
| P -> I       | all_reduce        | all-reduce  | nothing     |
| P -> R       | all_reduce_shared | all-reduce  | all-reduce  |
| P -> S       | reduce_scatter    | reduce-scatter | all-gather |
| S(d) -> S(e) | all_to_all        | all-to-all  | all-to-all  |
| S -> S       | regroup           | all-to-all  | all-to-all  |
| S -> P       | pad               | pad         | local slice |
| I -> P       | keep_one          | keep one    | nothing     |
| R -> P       | mask_one          | keep one    | keep one    |
| R -> I       | own               | nothing     | keep one    |

Each is the backward of the one that is its backward, so that gradients can be differentiated again.

"pad": the slice in its place, zeros elsewhere. "keep one": the value on rank 0 of the axis, zeros on the others. S has a
dim and groups (see `autopar.ir.Layout`). All work on tensors of any dtype (those without gradient too) and any strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.run import comm, record
from autopar.run.mesh import Axis
from autopar.run.slices import Span, cut, cut_spans, join, joined, local_slice, parted

__all__ = [
    "all_gather", "all_reduce", "all_reduce_shared", "all_to_all", "copy_to", "gather", "join", "keep_one", "local_slice",
    "mask_one", "moved", "narrow", "own", "pad", "reduce_scatter", "regroup", "split",
]  # fmt: skip

Move = Callable[[Tensor], Tensor]


# -------------------------------------------------------------------------------------------- the moves, without autograd
def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x, axis)


def _slice(x: Tensor, axis: Axis, dim: int, groups: int) -> Tensor:
    return cut(x, axis.size, dim, groups, axis.rank).contiguous()


def _gather(x: Tensor, axis: Axis, dim: int, groups: int) -> Tensor:
    return joined(comm.all_gather(x, axis), dim, groups)


def _scatter(x: Tensor, axis: Axis, dim: int, groups: int) -> Tensor:
    return comm.reduce_scatter(parted(x, axis.size, dim, groups), axis)


def _pad(x: Tensor, axis: Axis, dim: int, groups: int) -> Tensor:
    out = x.new_zeros((*x.shape[:dim], x.shape[dim] * axis.size, *x.shape[dim + 1 :]))
    segment = x.shape[dim] // groups
    out.unflatten(dim, (groups, axis.size, segment)).select(dim + 1, axis.rank).copy_(x.unflatten(dim, (groups, segment)))
    return out


def _keep(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x) if axis.rank == 0 else torch.zeros_like(x)


def _exchange(x: Tensor, axis: Axis, dim: int, groups: int, to_dim: int, to_groups: int) -> Tensor:
    parts = parted(x, axis.size, to_dim, to_groups)  # part j goes to rank j
    return joined(comm.all_to_all(parts, axis), dim, groups)


def _regroup(x: Tensor, axis: Axis, dim: int, groups: int, to_groups: int) -> Tensor:
    """Each rank sends every other the positions that both its old slice and the other's new slice have: ranges, which are copied without
    a list of positions that the device would have to be given."""
    n, me, size = axis.size, axis.rank, x.shape[dim] * axis.size
    held, wanted = ([cut_spans(((0, size),), n, g, j) for j in range(n)] for g in (groups, to_groups))
    rows = x.movedim(dim, 0)
    sent = [[rows[a : a + length] for a, _, length in _shared(held[me], wanted[j])] for j in range(n)]
    found = [[(b, length) for _, b, length in _shared(held[j], wanted[me])] for j in range(n)]
    sends, receives = [sum(map(len, parts)) for parts in sent], [sum(length for _, length in parts) for parts in found]
    got = comm.all_to_all(torch.cat([part for parts in sent for part in parts]), axis, sends=sends, receives=receives)
    pieces = got.split([length for parts in found for _, length in parts])
    starts = [b for parts in found for b, _ in parts]
    return torch.cat([pieces[k] for k in sorted(range(len(pieces)), key=starts.__getitem__)]).movedim(0, dim).contiguous()


def _shared(one: Sequence[Span], other: Sequence[Span]) -> list[tuple[int, int, int]]:
    """The ranges that two slices of a dim have in common, in order: where each begins in the one and in the other, and its length."""
    found = []
    at = 0
    for start, end in one:
        behind = 0
        for first, last in other:
            low, high = max(start, first), min(end, last)
            if low < high:
                found.append((at + low - start, behind + low - first, high - low))
            behind += last - first
        at += end - start
    return found


# ----------------------------------------------------------------------------------------------------------- transitions
class _Transition(torch.autograd.Function):
    """Run one move forward and another backward; of that, which is differentiated again, a third backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move, again: Move, line: int) -> Tensor:
        ctx.moves, ctx.line = (backward, again), line
        record.note_line(line)
        out = forward(x)
        record.note_line(0)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        move, again = ctx.moves
        if torch.is_grad_enabled():  # create_graph=True
            return _Transition.apply(grad, move, again, move, ctx.line), None, None, None, None
        record.note_line(ctx.line)
        out = move(grad)
        record.note_line(0)
        return out, None, None, None, None


def moved(x: Tensor, backward: Move, *, forward: Move = _same, again: Move | None = None) -> Tensor:
    """A linear move that no emitted module states, by default one that changes nothing, to be differentiated as often as is wished.
    backward: of it; again: of that, by default the move itself, as of every move and its transpose."""
    return _Transition.apply(x, forward, backward, again or forward, 0)


def _apply(x: Tensor, axis: Axis, forward: Move, backward: Move) -> Tensor:
    return x if axis.size == 1 else _Transition.apply(x, forward, backward, forward, record.line(2))


def copy_to(x: Tensor, axis: Axis, *, sums: torch.dtype | None = None) -> Tensor:
    """I -> R. sums: the dtype in which gradients are added, by default their own."""
    return _apply(x, axis, _same, lambda g: _sum(g.to(sums or g.dtype), axis).to(g.dtype))


def split(x: Tensor, axis: Axis, dim: int, groups: int = 1) -> Tensor:
    """I -> S(dim, groups)."""
    return _apply(x, axis, lambda v: _slice(v, axis, dim, groups), lambda g: _gather(g, axis, dim, groups))


def narrow(x: Tensor, axis: Axis, dim: int, groups: int = 1) -> Tensor:
    """R -> S(dim, groups)."""
    return _apply(x, axis, lambda v: _slice(v, axis, dim, groups), lambda g: _pad(g, axis, dim, groups))


def all_gather(x: Tensor, axis: Axis, dim: int, groups: int = 1, *, sums: torch.dtype | None = None) -> Tensor:
    """S(dim, groups) -> R. sums: as of copy_to."""
    return _apply(
        x, axis, lambda v: _gather(v, axis, dim, groups), lambda g: _scatter(g.to(sums or g.dtype), axis, dim, groups).to(g.dtype)
    )


def gather(x: Tensor, axis: Axis, dim: int, groups: int = 1) -> Tensor:
    """S(dim, groups) -> I."""
    return _apply(x, axis, lambda v: _gather(v, axis, dim, groups), lambda g: _slice(g, axis, dim, groups))


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """P -> I."""
    return _apply(x, axis, lambda v: _sum(v, axis), _same)


def all_reduce_shared(x: Tensor, axis: Axis) -> Tensor:
    """P -> R."""
    return _apply(x, axis, lambda v: _sum(v, axis), lambda g: _sum(g, axis))


def reduce_scatter(x: Tensor, axis: Axis, dim: int, groups: int = 1) -> Tensor:
    """P -> S(dim, groups)."""
    return _apply(x, axis, lambda v: _scatter(v, axis, dim, groups), lambda g: _gather(g, axis, dim, groups))


def all_to_all(x: Tensor, axis: Axis, dim: int, groups: int, to_dim: int, to_groups: int) -> Tensor:
    """S(dim, groups) -> S(to_dim, to_groups), of another dim. ValueError if the dims are equal (see `regroup`)."""
    if dim == to_dim:
        raise ValueError(f"all_to_all is between two dims, and both are {dim}; use regroup")
    return _apply(
        x, axis, lambda v: _exchange(v, axis, dim, groups, to_dim, to_groups), lambda g: _exchange(g, axis, to_dim, to_groups, dim, groups)
    )


def regroup(x: Tensor, axis: Axis, dim: int, groups: int, to_groups: int) -> Tensor:
    """S(dim, groups) -> S(dim, to_groups)."""
    return _apply(x, axis, lambda v: _regroup(v, axis, dim, groups, to_groups), lambda g: _regroup(g, axis, dim, to_groups, groups))


def pad(x: Tensor, axis: Axis, dim: int, groups: int = 1) -> Tensor:
    """S(dim, groups) -> P."""
    return _apply(x, axis, lambda v: _pad(v, axis, dim, groups), lambda g: _slice(g, axis, dim, groups))


def keep_one(x: Tensor, axis: Axis) -> Tensor:
    """I -> P."""
    return _apply(x, axis, lambda v: _keep(v, axis), _same)


def mask_one(x: Tensor, axis: Axis) -> Tensor:
    """R -> P."""
    return _apply(x, axis, lambda v: _keep(v, axis), lambda g: _keep(g, axis))


def own(x: Tensor, axis: Axis) -> Tensor:
    """R -> I."""
    return _apply(x, axis, _same, lambda g: _keep(g, axis))
