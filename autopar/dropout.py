"""Dropout that does nothing, on both sides of a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.run.recoded import answered_by

__all__ = ["without_dropout"]


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout does nothing inside, in attention too."""
    attention = F.scaled_dot_product_attention

    def plain(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *more: Any, **rest: Any
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *more, **rest)

    def same(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(answered_by(getattr(F, name), same))
        stack.enter_context(mock.patch.object(torch, "dropout", same))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", plain))
        yield
