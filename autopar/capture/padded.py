"""nn.TransformerEncoder in evaluation without gradients, or frozen: torch leaves padding out of what it computes, so that padded positions
of its result are zero, where they are not in training. It asks for values of the mask, and whether gradients are wanted; here both follow
from operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

__all__ = ["left_out_as_evaluated"]


@contextlib.contextmanager
def left_out_as_evaluated(wanted: Callable[[], bool]) -> Iterator[None]:
    """Inside, encoders that would leave padding out in a call without gradients give zeros there. wanted: is asked then, and says whether
    the call wants gradients."""
    forward: Any = nn.TransformerEncoder.forward

    def evaluated(
        encoder: Any, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None, is_causal: bool | None = None
    ) -> Tensor:
        found: Tensor = forward(encoder, src, mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal)
        if src_key_padding_mask is None or not _may_leave_out(encoder, src, mask) or (_has_gradients(encoder, src) and wanted()):
            return found
        padded = src_key_padding_mask if src_key_padding_mask.dtype == torch.bool else src_key_padding_mask != 0
        at_the_end = ~(padded[:, :-1] & ~padded[:, 1:]).any() if getattr(encoder, "mask_check", True) else padded.new_ones(())
        zeros = found.new_zeros((1, 1, found.shape[-1]))
        return torch.where((padded & at_the_end)[..., None], zeros if encoder.norm is None else encoder.norm(zeros), found)

    with mock.patch.object(nn.TransformerEncoder, "forward", evaluated):
        yield


def _has_gradients(encoder: Any, src: Tensor) -> bool:
    """Whether it would have gradients in a call that wants them."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in (src, *encoder.layers[0].parameters()))


def _may_leave_out(encoder: Any, src: Tensor, mask: Tensor | None) -> bool:
    """Whether torch would, if no gradients are wanted, and all padding is at the end of samples."""
    allowed = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    return allowed and getattr(encoder, "use_nested_tensor", False) and not encoder.layers[0].training and src.dim() == 3 and mask is None
