"""How far rounding alone moves a model: the original's own training, with every weight and input moved by its last bit.

Where that is further than a comparison tolerates, the model is badly conditioned: no two orders of the same sums agree, and a
difference of that size says nothing of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import lift_to_float64, to_float64
from autopar.copies import copied
from autopar.dropout import without_dropout
from autopar.reference import Errors, Original, Reference, errors_of
from autopar.verify_rank import Found

__all__ = ["RUNS", "is_as_far", "move", "rounding_of"]

RUNS = 3
_AS_FAR = 10.0  # one order of sums may be that much less lucky than the moved weights of a few runs


def is_as_far(error: float, moved: float) -> bool:
    """Whether rounding alone, which moved the original by so much, may be all that an error is."""
    return math.isfinite(error) and error <= _AS_FAR * moved


def rounding_of(ref: Reference) -> Errors | None:
    """The largest errors of three trainings of the original, in float64 on this process, each of whose parameters and floating inputs
    is one unit in the last place larger or smaller. None if such a training fails."""
    try:
        return _largest([_moved(ref, Generator().manual_seed(k)) for k in range(RUNS)])
    except RuntimeError:  # the original has run; a condition on values that goes the other way may not
        return None


def _moved(ref: Reference, random: Generator) -> Errors:
    model = to_float64(copied(ref.model))
    move(model, random)
    batches = tuple(pytree.tree_map_only(Tensor, lambda leaf: _input(leaf, random), batch) for batch in ref.batches)
    with lift_to_float64(), without_dropout():
        original = Original(model, batches, ref.loss, ref.captured)
        losses = tuple(original.step(0, k) for k in range(len(ref.losses)))
        state, buffers = _cloned(model, ref.parameters), _cloned(model, ref.buffers)
        later = tuple(original.later(call) for call in ref.later)
    found = Found(
        losses=losses, gradients=original.gradients, state=state, buffers=buffers, later=later, final=_cloned(model, ref.final), parts={}
    )
    return errors_of(ref, found, ref.later)


@torch.no_grad()
def move(model: nn.Module, random: Generator) -> None:
    """Make each number of its parameters one unit in the last place larger or smaller."""
    for parameter in model.parameters():
        parameter.copy_(_by_a_bit(parameter, random))


def _cloned(model: nn.Module, names: Any) -> dict[str, Tensor]:
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: held[name].detach().clone() for name in names if name in held}


def _input(tensor: Tensor, random: Generator) -> Tensor:
    """A mask, a count, or a class in floating numbers stays what it is."""
    return tensor if not tensor.is_floating_point() or bool((tensor == tensor.round()).all()) else _by_a_bit(tensor, random)


def _by_a_bit(tensor: Tensor, random: Generator) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(_by_a_bit(torch.view_as_real(tensor), random))
    if not tensor.is_floating_point():
        return tensor
    up = torch.rand(tensor.shape, generator=random) < 0.5
    return torch.nextafter(tensor, torch.where(up, math.inf, -math.inf).to(tensor.dtype))


def _largest(found: Sequence[Errors]) -> Errors:
    values: dict[str, Any] = {}
    for kind in found[0].by_kind():
        largest = max(found, key=lambda errors: errors.by_kind()[kind])
        values |= {name: getattr(largest, name) for name in (kind, f"{kind}_at") if hasattr(largest, name)}
    return Errors(**values)
