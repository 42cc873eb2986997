"""What a step differentiates by: tensors with a hook each, which says when their gradient has come.

To make one takes a host as long as a small operator, for every parameter and step. So a step that is over leaves the views of parameters
that rest whole to the next one; of two steps at once each has its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.run.buckets import Held

__all__ = ["Leaf", "Leaves", "leaf_of"]

Arrived = Callable[[str], None]


class Leaf(NamedTuple):
    """told: in its one place who is told of the gradient; None of a leaf that tells nobody. A strong reference to a step would be a cycle
    through the leaf, which only the collector could free."""

    tensor: Tensor
    told: list[weakref.WeakMethod[Arrived] | None] | None


def leaf_of(value: Tensor, name: str, arrived: weakref.WeakMethod[Arrived] | None) -> Leaf:
    """The value, to be differentiated by. arrived: is called with the name when its gradient has come, if it is still there."""
    if arrived is None:
        return Leaf(value.requires_grad_(), None)
    told: list[weakref.WeakMethod[Arrived] | None] = [arrived]

    def come(_: Tensor) -> None:
        method = told[0]
        if method is not None and (tell := method()) is not None:
            tell(name)

    leaf = value.requires_grad_()
    leaf.register_post_accumulate_grad_hook(come)
    return Leaf(leaf, told)


class Leaves:
    """Of parameters that rest whole on this rank, those that no step has."""

    def __init__(self) -> None:
        self._free: dict[str, Leaf] = {}

    def take(self, held: Held, arrived: weakref.WeakMethod[Arrived] | None) -> Leaf:
        """One for a step, which gives it back when it is over."""
        name, param = held.spec.name, held.param
        free = self._free.pop(name, None)
        if free is not None:
            with torch._C.DisableTorchFunctionSubclass():  # of a part, and of what the user may have given the parameter
                same = free.tensor.dtype == param.dtype and free.tensor.is_set_to(param)
            if same and (free.told is None) == (arrived is None):
                if free.told is not None:
                    free.told[0] = arrived
                return free
        return leaf_of(held.local, name, arrived)

    def give_back(self, leaves: Mapping[str, Leaf]) -> None:
        for name, leaf in leaves.items():
            leaf.tensor.grad = None
            if leaf.told is not None:
                leaf.told[0] = None
            if type(leaf.tensor) is Tensor and not leaf.tensor.is_meta:
                self._free[name] = leaf

    def clear(self) -> None:
        self._free.clear()
