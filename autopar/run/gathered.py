"""Parameters that rest in slices and are gathered where they are used.

They are gathered in *units*: the parameters of one block, which the manifest states. A unit is there from its first use until
another one is used; autograd saves for backward only how to make a parameter again (`Dropped`). The order in which a step
gathers units is the same in every step, so the next one is gathered while the present one is used. Gradients are
reduce-scattered by unit while backward goes on, one unit at a time, or kept whole until the end of the step, as their row says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.run.buckets import Bucket, Computes, Gathering, Reduction, add_parts
from autopar.run.saved import itself

__all__ = ["GatheredWhereUsed", "Orders", "Units"]

Orders = dict[bool, list[int]]  # with gradients or without -> the units that a step gathered, in order


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor saved for backward that is a view of a gathered parameter: how to make it again."""

    name: str
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Use(torch.autograd.Function):
    """A parameter at rest -> the parameter. Its gradient does not go through autograd (see `_reduce`)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, name: str, owner: GatheredWhereUsed) -> Tensor:
        ctx.name, ctx.owner = name, owner
        return owner._gather(name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.owner._reduce(ctx.name, grad)
        return None, None, None


class Units:
    """The units of a module. buckets: of each; unit_of, held: by the name of a parameter."""

    def __init__(self, buckets: Sequence[Sequence[Bucket]]) -> None:
        self.buckets = buckets
        self.unit_of = {one.spec.name: k for k, unit in enumerate(buckets) for bucket in unit for one in bucket.held}
        self.held = {one.spec.name: one for unit in buckets for bucket in unit for one in bucket.held}


class GatheredWhereUsed:
    """The parameters of one step that are gathered where they are used.

    orders: of earlier steps; this one's is added by `close`. computes: which are cast before they are gathered.
    """

    def __init__(self, units: Units, orders: Orders, computes: Computes) -> None:
        self._units, self._orders, self._computes = units, orders, computes
        self._grad = torch.is_grad_enabled()
        self._gradients = [sum(one.trains for bucket in unit for one in bucket.held) for unit in units.buckets]  # of each unit
        self._expected = orders.get(self._grad, ())
        self._order: list[int] = []
        self._present: dict[str, Tensor] = {}  # the unit in use
        self._ahead: tuple[int, list[Gathering]] | None = None
        self._leaves: dict[str, Tensor] = {}  # what rests of those that were read, which counts what is written to the parameter
        self._gathered: dict[int, tuple[StorageWeakRef, str]] = {}
        self._arrived: tuple[int, dict[str, Tensor]] = (-1, {})  # a unit, and the gradients of it that are there
        self._reductions: list[Reduction] = []
        self._grads: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}  # gradients that are reduced at the end of the step

    def read(self, name: str, leaf: Tensor) -> Tensor:
        """The parameter as it is used; leaf: its part at rest, which says whether it has a gradient."""
        self._leaves[name] = leaf
        full: Tensor = _Use.apply(leaf, name, self)
        storage = full.untyped_storage()
        self._gathered[storage._cdata] = (StorageWeakRef(storage), name)
        return full

    def saving(self) -> AbstractContextManager[object]:
        """The context in which forward runs, so that autograd does not keep what was gathered."""
        if not (self._grad and self._units.buckets):
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def close(self) -> dict[str, Tensor]:
        """At the end of the step: name -> gradient, of the part at rest or, where it was not reduced, whole."""
        self._present = {}
        self._take_ahead(None)
        self._start_reduction()
        self._finish_reduction()
        self._orders[self._grad] = self._order
        self._gathered.clear()
        self._leaves.clear()
        return self._grads | self._whole

    # ------------------------------------------------------------------------------------------------------- parameters
    def _gather(self, name: str) -> Tensor:
        """The whole parameter, as a tensor of its own over memory that its unit shares."""
        if name not in self._present:
            self._present = {}  # before there is another
            self._present = self._next_unit(self._units.unit_of[name])
        return self._present[name].detach()

    def _next_unit(self, unit: int) -> dict[str, Tensor]:
        gatherings = self._take_ahead(unit) or self._gathering(unit)
        found = {name: full for gathering in gatherings for name, full in gathering.finish().items()}
        del gatherings  # and what they were gathered into, if that is not what is used
        position = len(self._order)
        self._order.append(unit)
        if self._expected[position : position + 1] == [unit] and position + 1 < len(self._expected):
            following = self._expected[position + 1]
            self._ahead = (following, self._gathering(following))
        return found

    def _gathering(self, unit: int) -> list[Gathering]:
        return [bucket.gather(self._computes) for bucket in self._units.buckets[unit]]

    def _take_ahead(self, unit: int | None) -> list[Gathering] | None:
        """What is being gathered ahead, if it is this. Anything else is waited for, since its memory is being written."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] == unit:
            return ahead[1] if ahead is not None else None
        for gathering in ahead[1]:
            gathering.finish()
        return None

    def _pack(self, tensor: Tensor) -> Tensor | Dropped:
        # the weak reference keeps the address of a freed storage from being given to another
        found = self._gathered.get(tensor.untyped_storage()._cdata)
        if found is None or not self._as_made(tensor, found[1]):
            return itself(tensor)
        name = found[1]
        return Dropped(name, self._leaves[name]._version, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _as_made(self, tensor: Tensor, name: str) -> bool:
        """Whether strides say all there is to say of this view of a parameter: not so where it reads the storage as another dtype
        (view_as_complex), or is to be conjugated or negated when it is read."""
        used = self._computes.get(name, self._leaves[name].dtype)
        return tensor.dtype == used and not (tensor.is_conj() or tensor.is_neg())

    def _unpack(self, saved: Tensor | Dropped) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self._leaves[saved.name]._version != saved.version:
            raise RuntimeError(f"parameter {saved.name} was changed between the forward and the backward pass that uses it")
        return self._gather(saved.name).as_strided(saved.size, saved.stride, saved.offset)

    # -------------------------------------------------------------------------------------------------------- gradients
    def _reduce(self, name: str, grad: Tensor) -> None:
        if name in self._computes:
            grad = grad.to(self._units.held[name].dtype)
        if not self._units.held[name].reduced_by_pass:
            self._whole[name] = self._whole[name] + grad if name in self._whole else grad
            return
        unit = self._units.unit_of[name]
        if self._arrived[0] != unit:
            self._start_reduction()
            self._arrived = (unit, {})
        there = self._arrived[1]
        there[name] = there[name] + grad if name in there else grad
        if len(there) == self._gradients[unit]:
            self._start_reduction()

    def _start_reduction(self) -> None:
        (unit, grads), self._arrived = self._arrived, (-1, {})
        if not grads:
            return
        self._finish_reduction()  # so that no more than one unit waits to be sent
        self._reductions = [bucket.reduce(grads) for bucket in self._units.buckets[unit]]

    def _finish_reduction(self) -> None:
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            add_parts(self._grads, reduction.finish())
