"""The parameters as one step uses them, and what becomes of their gradients.

A step computes with *leaves*: detached views of the parameters at rest, or copies gathered from them. Their gradients
accumulate locally, over micro-batches too. A bucket's reduction starts as soon as the last gradient of the bucket has
arrived, and so overlaps with the rest of the backward pass; `Step.finish` waits for all of them and returns the gradients
of the parameters at rest, which the parallel module hands to autograd.

(Leaves, and not autograd nodes between parameter and use: autograd runs ready nodes latest-made first, so nodes made at
the start of a step would run, and communicate, only when the whole backward pass is over.)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

from autopar.run import comm
from autopar.run.buckets import Bucket, Gathering, Held, Reduction
from autopar.run.gathered import GatheredWhereUsed

__all__ = ["Step", "Weights", "buffers_kept"]

_buffers_kept: ContextVar[bool] = ContextVar("buffers_kept", default=False)


@contextlib.contextmanager
def buffers_kept() -> Iterator[None]:
    """In this context `w[buffer]` is a copy, so that updates of buffers are dropped."""
    token = _buffers_kept.set(True)
    try:
        yield
    finally:
        _buffers_kept.reset(token)


class Weights:
    """The parameters, buffers and constants of a stage by name, seen from a prefix: `w.at("layer.0")["weight"]`."""

    __slots__ = ("_prefix", "_step")

    def __init__(self, step: Step, prefix: str = "") -> None:
        self._step = step
        self._prefix = prefix

    def at(self, prefix: str) -> Weights:
        """The weights below prefix, which is relative to this one's."""
        return Weights(self._step, f"{self._prefix}{prefix}.")

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as it is used, in its local shape. KeyError if this stage does not hold it."""
        return self._step.read(self._prefix + name)


class Step:
    """The weights of one forward and backward pass of all micro-batches.

    held: canonical name -> parameter; names: every name (aliases too) -> canonical name; buffer: the current tensor of a
    buffer or constant by name. where_used: the parameters that are gathered where they are used. passes: how many backward
    passes (micro-batches) each gradient is the sum of. With gradients off (torch.no_grad) nothing is prepared for backward.
    """

    def __init__(
        self,
        *,
        held: Mapping[str, Held],
        names: Mapping[str, str],
        buffer: Callable[[str], Tensor],
        buckets: Sequence[Bucket],
        where_used: GatheredWhereUsed,
        passes: int = 1,
    ) -> None:
        self._held, self._names, self._buffer, self._where_used = held, names, buffer, where_used
        self._buckets = tuple(buckets)
        self._passes = passes
        self._grad = torch.is_grad_enabled()
        self._trains = frozenset(name for name, one in held.items() if one.trains)  # others may train in later steps
        self._leaves: dict[str, Tensor] = {}
        self._arrived: dict[str, int] = {}
        self._reductions: list[Reduction] = []
        # all gathers start now, in the order of use, and each is waited for when the first of its parameters is read
        self._gathering: dict[str, Gathering] = {}
        for bucket in reversed(self._buckets):
            if bucket.scattered:
                gathering = bucket.gather()
                self._gathering.update((one.spec.name, gathering) for one in bucket.held)

    # ------------------------------------------------------------------------------------------------------- forward
    def read(self, name: str) -> Tensor:
        canonical = self._names.get(name)
        if canonical is None:
            buffer = self._buffer(name)
            return buffer.clone() if _buffers_kept.get() else buffer
        leaf = self._leaf(canonical)
        if not self._held[canonical].gathered_when_used:
            return leaf
        return self._where_used.read(canonical, leaf)

    def _leaf(self, name: str) -> Tensor:
        if name not in self._leaves:
            gathering = self._gathering.get(name)
            found = gathering.finish() if gathering is not None else {name: self._held[name].local.detach()}
            for key, value in found.items():
                self._gathering.pop(key, None)
                self._leaves[key] = self._prepared(key, value)
        return self._leaves[name]

    def _prepared(self, name: str, value: Tensor) -> Tensor:
        if not (self._grad and name in self._trains):
            return value
        leaf = value.requires_grad_()
        step = weakref.ref(self)  # a strong one would be a cycle through the leaf, which only the collector could free

        def arrived(_: Tensor) -> None:
            if (alive := step()) is not None:
                alive._arrived[name] = alive._arrived.get(name, 0) + 1
                alive._start_reductions()

        leaf.register_post_accumulate_grad_hook(arrived)
        return leaf

    def saving(self) -> AbstractContextManager[object]:
        """The context to run forward in."""
        return self._where_used.saving()

    # ------------------------------------------------------------------------------------------------------ backward
    def _start_reductions(self, *, all_: bool = False) -> None:
        """Start the reductions of the buckets whose gradients have arrived, in order, so that all ranks start the same."""
        while len(self._reductions) < len(self._buckets):
            bucket = self._buckets[len(self._reductions)]
            ready = all(self._arrived.get(one.spec.name, 0) == self._passes and not one.late for one in bucket.held)
            if not (ready or all_):
                return
            grads: dict[str, Tensor] = {}
            for one in bucket.held:
                leaf = self._leaves.get(one.spec.name)
                if leaf is not None and leaf.grad is not None:
                    grads[one.spec.name] = leaf.grad
                    leaf.grad = None
            self._reductions.append(bucket.reduce(grads))

    def finish(self) -> dict[str, Tensor]:
        """At the end of the step: name -> the gradient of the parameter at rest, for those that have one."""
        of_parts = self._where_used.close()
        for gathering in {id(g): g for g in self._gathering.values()}.values():  # of parameters that nothing has read
            gathering.finish()
        self._gathering.clear()
        if not self._grad:
            return {}
        for name, grad in of_parts.items():
            self._leaf(name).grad = grad
        for name, held in self._held.items():
            if held.tied is not None and name in self._trains:
                leaf = self._leaf(name)
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
                elif not leaf.grad.is_contiguous():
                    leaf.grad = leaf.grad.contiguous()
                comm.all_reduce_(leaf.grad, held.tied)
        self._start_reductions(all_=True)
        found: dict[str, Tensor] = {}
        for reduction in self._reductions:
            found.update(reduction.finish())
        self._leaves.clear()
        return found
