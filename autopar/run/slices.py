"""The parts of a tensor that the ranks of one axis hold in layout S(dim, groups), and back. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ir import Layout

__all__ = ["Span", "cut", "cut_spans", "join", "joined", "local_slice", "parted"]

Span = tuple[int, int]  # start and end of a range of a dim


def local_slice(tensor: Tensor, layout: Layout, index: int, n: int) -> Tensor:
    """What rank `index` of n holds of a global tensor: a view where groups == 1. Not S: the tensor itself.

    Raises ValueError if the dim cannot be divided so.
    """
    return cut(tensor, n, layout.dim, layout.groups, index) if layout.is_shard else tensor


def join(tensors: Sequence[Tensor], layout: Layout) -> Tensor:
    """The global tensor from what the ranks hold, in their order: the inverse of local_slice. Not S: the first of them."""
    return joined(torch.stack(tuple(tensors)), layout.dim, layout.groups) if layout.is_shard else tensors[0]


def cut(x: Tensor, n: int, dim: int, groups: int, index: int) -> Tensor:
    """[*global] -> [*local]: slice `index` of n of every segment of dim."""
    _check(x, n, dim, groups)
    size = x.shape[dim] // n
    if groups == 1:
        return x.narrow(dim, index * size, size)
    return x.unflatten(dim, (groups, n, size // groups)).select(dim + 1, index).flatten(dim, dim + 1)


def cut_spans(spans: Sequence[Span], n: int, groups: int, index: int) -> tuple[Span, ...]:
    """`cut` of a dim that is made of these ranges of the whole: the ranges of the slice, in its order."""
    piece = sum(end - start for start, end in spans) // (groups * n)
    found: list[Span] = []
    for group in range(groups):
        first = (group * n + index) * piece
        at = 0
        for start, end in spans:
            low, high = max(first, at), min(first + piece, at + end - start)
            if low < high:
                if found and found[-1][1] == start + low - at:
                    found[-1] = (found[-1][0], start + high - at)
                else:
                    found.append((start + low - at, start + high - at))
            at += end - start
    return tuple(found)


def joined(x: Tensor, dim: int, groups: int = 1) -> Tensor:
    """[n, *local] -> [*global]."""
    n, *local = x.shape
    if groups == 1:  # of which a host has many
        rows = x if dim == 0 else x.movedim(0, dim)
    else:
        rows = x.unflatten(dim + 1, (groups, local[dim] // groups)).movedim(0, dim + 1)  # [..., groups, n, k, ...]
    return rows.reshape(*local[:dim], n * local[dim], *local[dim + 1 :])


def parted(x: Tensor, n: int, dim: int, groups: int = 1) -> Tensor:
    """[*global] -> [n, *local]: the inverse of `joined`; a view where groups == 1."""
    _check(x, n, dim, groups)
    if groups == 1:
        shape = x.shape
        rows = x.view(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])
        return rows if dim == 0 else rows.movedim(dim, 0)
    return x.unflatten(dim, (groups, n, x.shape[dim] // (groups * n))).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def _check(x: Tensor, n: int, dim: int, groups: int) -> None:
    if x.shape[dim] % (groups * n):
        raise ValueError(f"dim {dim} of a tensor of shape {tuple(x.shape)} cannot be cut into {groups} groups of {n} slices")
