"""Sums, means and maxima of bags of equal sizes, as one operator of each bag: torch's own has the bags as bounds in one row of indices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

__all__ = ["embedding_bag"]


@library.custom_op("autopar_operators::embedding_bag", mutates_args=())
def _bags(weight: Tensor, indices: Tensor, weights: Tensor | None, mode: str, padding_idx: int | None) -> Tensor:
    return _torchs(weight, indices, weights, mode, padding_idx).clone()


def _torchs(weight: Tensor, indices: Tensor, weights: Tensor | None, mode: str, padding_idx: int | None) -> Tensor:
    return F.embedding_bag(indices, weight, mode=mode, per_sample_weights=weights, padding_idx=padding_idx)


@_bags.register_fake
def _(weight: Tensor, indices: Tensor, weights: Tensor | None, mode: str, padding_idx: int | None) -> Tensor:
    return weight.new_empty(indices.shape[0], weight.shape[1])


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.settings = inputs[3:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, indices, weights = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    with torch.enable_grad():
        weight = weight.detach().requires_grad_(wanted[0])
        weights = None if weights is None else weights.detach().requires_grad_(wanted[1])
        of = [x for x, needed in zip((weight, weights), wanted, strict=True) if needed]
        found = iter(torch.autograd.grad(_torchs(weight, indices, weights, *ctx.settings), of, grad))
    first, second = (next(found) if needed else None for needed in wanted)
    return (first, None, second, None, None)


_bags.register_autograd(_backward, setup_context=_set_up)


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.embedding_bag of indices [N, n] by this operator. NotImplemented for bags of other sizes than one another, for
    weights that it writes to, and for gradients that are sparse or scaled by how often a row is used."""
    if input.dim() != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    found: Tensor = _bags(weight, input, per_sample_weights, mode, padding_idx)
    return found
