"""ZeRO-3: parameters that rest in slices over dp and are gathered where they are used.

A gathered parameter lives as long as the operator that uses it. Autograd saves for backward only how to make it again
(`Dropped`). The order in which a step gathers is the same in every step, so the next parameter is gathered while the
present one is used. Gradients are reduce-scattered while backward goes on, one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.run.buckets import Bucket, Gathering, Reduction

__all__ = ["GatheredWhereUsed", "Orders"]

Orders = dict[bool, Sequence[str]]  # with gradients or without -> the parameters that a step gathered, in order


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


class GatheredWhereUsed:
    """The parameters of one step that are gathered where they are used.

    buckets: one for each, by name. orders: of earlier steps; this one's is added by `close`.
    """

    def __init__(self, buckets: Mapping[str, Bucket], orders: Orders) -> None:
        self._buckets, self._orders = buckets, orders
        self._grad = torch.is_grad_enabled()
        self._expected = orders.get(self._grad, ())
        self._order: list[str] = []
        self._ahead: tuple[str, Gathering] | None = None
        self._gathered: dict[int, tuple[StorageWeakRef, str]] = {}
        self._reducing: tuple[str, Reduction] | None = None
        self._grads: dict[str, Tensor] = {}

    def read(self, name: str, leaf: Tensor) -> Tensor:
        """The parameter as it is used; leaf: its part at rest, which says whether it has a gradient."""
        full: Tensor = _Use.apply(leaf, name, self)
        storage = full.untyped_storage()
        self._gathered[storage._cdata] = (StorageWeakRef(storage), name)
        return full

    def saving(self) -> AbstractContextManager[object]:
        """The context in which forward runs, so that autograd does not keep what was gathered."""
        if not (self._grad and self._buckets):
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def close(self) -> dict[str, Tensor]:
        """At the end of the step: name -> gradient of the part at rest."""
        self._take_ahead(None)
        self._finish_reduction()
        self._orders[self._grad] = self._order
        self._gathered.clear()
        return self._grads

    def _gather(self, name: str) -> Tensor:
        gathering = self._take_ahead(name) or self._buckets[name].gather()
        position = len(self._order)
        self._order.append(name)
        if self._expected[position : position + 1] == [name] and position + 1 < len(self._expected):
            following = self._expected[position + 1]
            self._ahead = (following, self._buckets[following].gather())
        return gathering.finish()[name]

    def _take_ahead(self, name: str | None) -> Gathering | None:
        """What is being gathered ahead, if it is this. Anything else is waited for, since its memory is being written."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] == name:
            return ahead[1] if ahead is not None else None
        ahead[1].finish()
        return None

    def _pack(self, tensor: Tensor) -> Tensor | Dropped:
        # the weak reference keeps the address of a freed storage from being given to another
        found = self._gathered.get(tensor.untyped_storage()._cdata)
        if found is None or not self._as_made(tensor, found[1]):
            return tensor
        name = found[1]
        return Dropped(name, self._version(name), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _as_made(self, tensor: Tensor, name: str) -> bool:
        """Whether strides say all there is to say of this view of a parameter: not so where it reads the storage as another dtype
        (view_as_complex), or is to be conjugated or negated when it is read."""
        return tensor.dtype == self._buckets[name].held[0].param.dtype and not (tensor.is_conj() or tensor.is_neg())

    def _unpack(self, saved: Tensor | Dropped) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self._version(saved.name) != saved.version:
            raise RuntimeError(f"parameter {saved.name} was changed between the forward and the backward pass that uses it")
        return self._gather(saved.name).as_strided(saved.size, saved.stride, saved.offset)

    def _version(self, name: str) -> int:
        return self._buckets[name].held[0].param._version

    def _reduce(self, name: str, grad: Tensor) -> None:
        self._finish_reduction()  # so that no more than one whole gradient waits to be sent
        self._reducing = (name, self._buckets[name].reduce({name: grad}))

    def _finish_reduction(self) -> None:
        if self._reducing is None:
            return
        name, reduction = self._reducing
        self._reducing = None
        part = reduction.finish()[name]
        self._grads[name] = self._grads[name] + part if name in self._grads else part
