"""The total norm of many tensors, for which torch.nn.utils.clip_grad_norm_ asks one after the other: of parts by one collective.

torch has no public place for this; `_get_total_norm` is the function that they all call (torch 2.11 to 2.13). Where another version has
none, the norms are asked for one by one, which is as right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from autopar.run.part import is_part
from autopar.run.reductions import norms

__all__ = ["norms_together"]

_NAME = "_get_total_norm"


def norms_together() -> None:
    """From now on, for this process; once."""
    plain = getattr(clip_grad, _NAME, None)
    if plain is not None:
        total = _of_parts(plain)
        setattr(clip_grad, _NAME, total)
        if getattr(utils, "get_total_norm", None) is plain:
            utils.get_total_norm = total


def _of_parts(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    @torch.no_grad()
    def total(tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, *options: Any, **named: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if any(map(is_part, given)):
            given = norms(given, float(norm_type))  # of which the norm is that of all
        return plain(given, norm_type, *options, **named)

    return total
