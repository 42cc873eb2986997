"""Batch norms with momentum=None, whose running statistics are means over all batches: torch takes the number of batches into Python to
weigh a batch by its inverse. In a trace that inverse is a tensor, so that one program is right for every batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["weighed_by_tensors"]

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@contextlib.contextmanager
def weighed_by_tensors() -> Iterator[None]:
    """Inside, batch norms that train with momentum=None count and weigh their batches in tensors."""
    with contextlib.ExitStack() as patches:
        for kind in _KINDS:
            patches.enter_context(mock.patch.object(kind, "forward", _forward_of(kind.forward)))
        yield


def _forward_of(forward: Any) -> Any:
    def weighed(norm: Any, x: Tensor) -> Tensor:
        counts = norm.momentum is None and norm.training and norm.running_mean is not None and norm.num_batches_tracked is not None
        return _cumulative(norm, x) if counts else forward(norm, x)

    return weighed


def _cumulative(norm: Any, x: Tensor) -> Tensor:
    """What torch computes of x [N, C, *], with the same writes to the buffers."""
    norm._check_input_dim(x)
    dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    count = x.numel() // x.shape[1]
    norm.num_batches_tracked.add_(1)
    with torch.no_grad():
        share = 1 / norm.num_batches_tracked.to(norm.running_mean.dtype)
        exact = x.to(norm.running_mean.dtype)
        mean = exact.mean(dims)
        variance = (exact - mean.view(shape)).square().sum(dims) / (count - 1)
        norm.running_mean.add_((mean - norm.running_mean) * share)
        norm.running_var.add_((variance - norm.running_var) * share)
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
