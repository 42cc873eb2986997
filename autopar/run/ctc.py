"""CTC loss as one operator, of each sample: torch's own has results whose sizes depend on values, which no graph holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

__all__ = ["ctc_loss"]


@library.custom_op("autopar_operators::ctc_loss", mutates_args=())
def _ctc(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    return _torchs(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity).clone()


def _torchs(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)


@_ctc.register_fake
def _(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    log_probs, *rest = ctx.saved_tensors
    with torch.enable_grad():
        x = log_probs.detach().requires_grad_()
        (found,) = torch.autograd.grad(_torchs(x, *rest, *ctx.settings), x, grad)
    return (found, *(None,) * 5)


_ctc.register_autograd(_backward, setup_context=_set_up)


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.ctc_loss by this operator, and what torch does of its results. Lengths may be numbers, too."""
    given = input_lengths, target_lengths
    frames, labels = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device="cpu") for x in given)
    losses: Tensor = _ctc(log_probs, targets, frames, labels, blank, zero_infinity)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction != "mean":
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return (losses / labels.to(losses.device, losses.dtype).clamp_min(1)).mean()
