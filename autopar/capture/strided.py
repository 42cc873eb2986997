"""Tensor.as_strided by what it reads instead of by where that lies: on a rank a value may lie otherwise in memory than in the trace.

The dims of a dense tensor are digits of a place in its memory, the slowest first. A dim that the result has as it is, and whose digit no
other dim of the result changes, is kept; between these, memory is one long dim, over which the other dims are windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.capture.source import running_line
from autopar.errors import CaptureError

__all__ = ["as_strided"]

Dim = tuple[int, int]  # size and stride


@dataclass(slots=True)
class _Run:
    """`extent` units of `unit` elements each, one after the other in memory. dims: which dims of the result go over it, the slowest first;
    of one that is kept that one."""

    unit: int
    extent: int
    kept: bool
    dims: list[int] = field(default_factory=list)


def as_strided(input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """The values of torch.as_strided of a dense tensor, by permute, reshape and unfold. CaptureError for what reads beyond the tensor, or
    begins elsewhere."""
    wanted = [(int(n), int(s)) for n, s in zip(size, stride, strict=True)]
    strides = [int(s) for s in input.stride()]
    order = sorted((d for d, n in enumerate(input.shape) if n != 1), key=lambda d: -strides[d])
    own = [(int(input.shape[d]), strides[d]) for d in order]
    dense = all(s == math.prod(n for n, _ in own[k + 1 :]) for k, (_, s) in enumerate(own))
    reach = sum((n - 1) * s for n, s in wanted)
    if not dense or storage_offset not in (None, 0) or not reach < input.numel() or 0 in size or any(s < 0 for _, s in wanted):
        raise CaptureError(
            f"the forward reads memory beside a tensor (as_strided of {list(input.shape)} with strides {strides}), which lies "
            f"otherwise on several ranks\n  at {running_line()}\n  what to do: index the tensor, or use unfold"
        )
    runs = _runs(own, wanted)
    ones = [d for d, n in enumerate(input.shape) if n == 1]
    x = input.permute(*order, *ones).reshape([run.extent for run in runs])
    at: list[int] = []  # which dim of the result each dim of x is
    behind: list[int] = []  # the same of those that are appended
    for run in runs:
        if run.kept:
            at += run.dims
            continue
        if not run.dims:
            x = x.select(len(at), 0)
            continue
        steps = [wanted[d][1] // run.unit for d in run.dims]
        reaches = [1 + sum((wanted[d][0] - 1) * s for d, s in zip(run.dims[k:], steps[k:], strict=True)) for k in range(len(steps) + 1)]
        x = x.narrow(len(at), 0, reaches[0])
        for k, step in enumerate(steps):
            x = x.unfold(len(at) if k == 0 else -1, reaches[k + 1], step)
        x = x.squeeze(-1)
        at.append(run.dims[0])
        behind += run.dims[1:]
    places = [*at, *behind]
    x = x.permute([places.index(d) for d in range(len(wanted)) if d in places])
    return x.reshape([n if d in places else 1 for d, (n, _) in enumerate(wanted)]).expand(torch.Size(size))


def _runs(own: Sequence[Dim], wanted: Sequence[Dim]) -> list[_Run]:
    """own: of a dense tensor, the slowest first. All dims of the result that go over memory are in one of them."""
    moving = [d for d, (n, s) in enumerate(wanted) if n != 1 and s]
    kept = {k: wanted.index(digit) for k, digit in enumerate(own) if wanted.count(digit) == 1}
    while True:
        runs: list[_Run] = []
        for k, (n, s) in enumerate(own):
            if k in kept:
                runs.append(_Run(s, n, True, [kept[k]]))
            elif runs and not runs[-1].kept:
                runs[-1] = _Run(s, runs[-1].extent * n, False)
            else:
                runs.append(_Run(s, n, False))
        runs = runs or [_Run(1, 1, False)]
        if (stride := _fill(runs, wanted, [d for d in moving if d not in kept.values()])) is None:
            return runs
        faster, slower = [k for k in kept if own[k][1] <= stride], [k for k in kept if own[k][1] > stride]
        del kept[min(faster) if faster else max(slower)]


def _fill(runs: Sequence[_Run], wanted: Sequence[Dim], dims: Sequence[int]) -> int | None:
    """Put dims of the result in the runs that they go over. The stride of one that goes over none, or beyond it; None if none does."""
    for d in sorted(dims, key=lambda d: -wanted[d][1]):
        stride = wanted[d][1]
        run = next((r for r in runs if not r.kept and r.unit <= stride < r.unit * r.extent and stride % r.unit == 0), None)
        if run is None:
            return stride
        run.dims.append(d)
        if sum((wanted[k][0] - 1) * (wanted[k][1] // run.unit) for k in run.dims) >= run.extent:
            return stride
    return None
