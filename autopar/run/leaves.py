"""What a step differentiates by: tensors with a hook each, which says when their gradient has come.

To make one takes a host as long as a small operator, for every parameter and step. So a step that is over leaves its own to the next one;
of two steps at once each has its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.run.buckets import Held
from autopar.run.plain import plainly

__all__ = ["Leaf", "Leaves", "leaf_of", "own_gradient"]

Arrived = Callable[[str], None]


class Leaf(NamedTuple):
    """told: in its one place who is told of the gradient; None of a leaf that tells nobody. A strong reference to a step would be a cycle
    through the leaf, which only the collector could free. of_a_step: its memory is a step's, not the parameter's."""

    tensor: Tensor
    told: list[weakref.WeakMethod[Arrived] | None] | None
    of_a_step: bool = False

    def tells(self, arrived: weakref.WeakMethod[Arrived] | None) -> bool:
        """Let it tell this one; False if it cannot."""
        if self.told is not None and arrived is not None:
            self.told[0] = arrived
        return (self.told is None) == (arrived is None)


def leaf_of(value: Tensor, name: str, arrived: weakref.WeakMethod[Arrived] | None, dtype: torch.dtype | None = None) -> Leaf:
    """The value, to be differentiated by. arrived: is called with the name when its gradient has come, if it is still there. dtype: of
    this, and of the sum over the value's uses; by default its own."""
    leaf = value.requires_grad_()
    if dtype is not None and dtype != leaf.dtype:
        leaf.grad_dtype = dtype
    if arrived is None:
        return Leaf(leaf, None)
    told: list[weakref.WeakMethod[Arrived] | None] = [arrived]

    def come(_: Tensor) -> None:
        method = told[0]
        if method is not None and (tell := method()) is not None:
            tell(name)

    leaf.register_post_accumulate_grad_hook(come)
    return Leaf(leaf, told)


def own_gradient(leaf: Tensor) -> None:
    """Give the gradient of a leaf memory that nothing else has. autograd lets a leaf have what a node of backward has returned, and adds to
    that in place, if no other tensor object is it: but where a node returns a view (C.own, a view of the user's), another leaf's gradient,
    or one that is sent, may be the same memory."""
    grad = leaf.grad
    if grad is not None and not grad.is_sparse and torch._C._storage_Use_Count(grad.untyped_storage()._cdata) > _ALONE:
        leaf.grad = grad.clone()


_ALONE = 2  # who use the memory of a tensor that no other has: itself, and the object that is asked for


class Leaves:
    """Those that no step has, by parameter. A step gives back what it takes when it is over."""

    def __init__(self) -> None:
        self._free: dict[str, Leaf] = {}
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, held: Held, arrived: weakref.WeakMethod[Arrived] | None) -> Leaf:
        """A view of a parameter that rests as it is used: what is written to one counts as written to the other."""
        name, param = held.spec.name, held.param
        free = self._one(name)
        if free is not None:
            with plainly():  # of a part, and of what the user may have given the parameter
                same = free.tensor.dtype == param.dtype and free.tensor.is_set_to(param)
            if same and free.tells(arrived):
                return free
        return leaf_of(held.local, name, arrived)

    def over(self, value: Tensor, name: str, arrived: weakref.WeakMethod[Arrived] | None, dtype: torch.dtype) -> Leaf:
        """One over a step's own memory. dtype: as leaf_of's."""
        free = self._one(name)
        if free is not None and free.of_a_step:
            leaf = free.tensor
            same = (leaf.dtype, leaf.device, leaf.grad_dtype) == (value.dtype, value.device, dtype)
            if same and type(value) is Tensor and free.tells(arrived):
                leaf.data = value
                return free
        return leaf_of(value, name, arrived, dtype)._replace(of_a_step=True)

    def give_back(self, leaves: Mapping[str, Leaf]) -> None:
        for name, leaf in leaves.items():
            leaf.tensor.grad = None
            if leaf.told is not None:
                leaf.told[0] = None
            if type(leaf.tensor) is Tensor and not leaf.tensor.is_meta:
                if leaf.of_a_step:
                    leaf.tensor.data = self._without_memory(leaf.tensor)
                self._free[name] = leaf

    def _one(self, name: str) -> Leaf | None:
        return self._free.pop(name, None)

    def _without_memory(self, tensor: Tensor) -> Tensor:
        key = tensor.dtype, tensor.device
        if key not in self._nothing:
            self._nothing[key] = tensor.detach().new_empty(0)
        return self._nothing[key]

    def clear(self) -> None:
        self._free.clear()
