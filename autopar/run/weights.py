"""The parameters as one step uses them, and what becomes of their gradients.

A step computes with *leaves*: detached views of the parameters at rest, or copies gathered from them. (A parameter that is cast before it
is used is cast once a step: every read gives the lower copy, and adds its gradient to that of a leaf in the dtype of rest.) Their gradients
accumulate locally, over micro-batches too, or are reduce-scattered in the backward pass of each and accumulate in parts. A bucket's
reduction starts as soon as the last gradient of the bucket has arrived, and so overlaps with the rest of the backward pass;
`Step.finish` waits for all of them and returns the gradients of the parameters at rest, which the parallel module hands to autograd.

(Leaves, and not autograd nodes between parameter and use: autograd runs ready nodes latest-made first, so nodes made at
the start of a step would run, and communicate, only when the whole backward pass is over.)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from autopar.run import comm
from autopar.run.buckets import Bucket, Computes, Gathering, Held, Reduction, add_parts
from autopar.run.gathered import GatheredWhereUsed
from autopar.run.leaves import Arrived, Leaf, Leaves, own_gradient

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


class Source(Protocol):
    """Where the tensors of a stage are read."""

    def read(self, name: str) -> Tensor:
        """As it is used, in its local shape. KeyError if the stage does not hold it."""


class Weights:
    """The parameters, buffers and constants of a stage by name, seen from a prefix: `w.at("layer.0")["weight"]`. step: a Step, or another
    source of them."""

    __slots__ = ("_prefix", "_step")

    def __init__(self, step: Source, prefix: str = "") -> None:
        self._step = step
        self._prefix = prefix

    def at(self, prefix: str) -> Weights:
        """The weights below prefix, which is relative to this one's. Below several, "norms.3, layers.3", they are named by its number and
        their name below it: "1.weight"."""
        paths = [f"{self._prefix}{path}." for path in prefix.split(", ")]
        return Weights(self._step, *paths) if len(paths) == 1 else _BelowSeveral(self._step, paths)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as it is used, in its local shape. KeyError if this stage does not hold it."""
        return self._step.read(self._prefix + name)


class _BelowSeveral(Weights):
    __slots__ = ("_paths",)

    def __init__(self, step: Source, paths: Sequence[str]) -> None:
        super().__init__(step)
        self._paths = paths

    def __getitem__(self, name: str) -> Tensor:
        number, _, rest = name.partition(".")
        return self._step.read(self._paths[int(number)] + rest)


def _places(buckets: Sequence[Bucket]) -> dict[str, int]:
    """In which of them each parameter is."""
    return {one.spec.name: k for k, bucket in enumerate(buckets) for one in bucket.held}


class Step:
    """The weights of one forward and backward pass of all micro-batches.

    held: canonical name -> parameter; names: every name (aliases too) -> canonical name; buffer: the current tensor of a
    buffer or constant by name. computes: which are cast before they are used. of_a_pass: the buckets that are reduced in every backward
    pass. where_used: the parameters that are gathered where they are used. leaves: those that no step has. passes: how many micro-batches
    each gradient is the sum of, over the stages of this rank that use the parameter. With gradients off (torch.no_grad) nothing is prepared
    for backward.
    """

    def __init__(
        self,
        *,
        held: Mapping[str, Held],
        names: Mapping[str, str],
        buffer: Callable[[str], Tensor],
        computes: Computes,
        buckets: Sequence[Bucket],
        of_a_pass: Sequence[Bucket] = (),
        where_used: GatheredWhereUsed,
        leaves: Leaves,
        passes: int = 1,
    ) -> None:
        self._held, self._names, self._buffer, self._computes, self._where_used = held, names, buffer, computes, where_used
        self._buckets, self._of_a_pass = tuple(buckets), tuple(of_a_pass)
        self._passes = {name: passes * len(one.stages) for name, one in held.items()}
        self._bucket_of, self._left = _places(self._buckets), [sum(self._passes[h.spec.name] for h in b.held) for b in buckets]
        self._grad = torch.is_grad_enabled()
        self._trains = frozenset(name for name, one in held.items() if one.trains)  # others may train in later steps
        self._free = leaves
        arrived: Arrived = self._arrived
        waits = any(bucket.reduces for bucket in (*self._buckets, *self._of_a_pass))
        self._told = weakref.WeakMethod(arrived) if waits else None  # who is told that a gradient has come, if any waits for it
        self._borrowed: dict[str, Leaf] = {}
        self._leaves: dict[str, Tensor] = {}
        self.begins_from = 1.0  # a backward pass that runs inside of the call
        self.first_stage = 0  # of which anything is differentiated by: what those behind it are given needs gradients
        self._owned = set[str]()  # leaves whose gradient's memory nothing else has
        self._started = 0  # of the step's buckets
        self._await(self._of_a_pass)
        self._reductions: list[Reduction] = []
        self._going: Reduction | None = None  # of a bucket of a pass
        self._late: dict[str, Tensor] = {}  # gradients that are kept outside of their leaves until the end of the step
        # all gathers start now, in the order of use, and each is waited for when the first of its parameters is read
        self._gathering: dict[str, Gathering] = {}
        for bucket in reversed((*self._of_a_pass, *self._buckets)):
            if bucket.gathers:
                gathering = bucket.gather(computes)
                self._gathering.update((one.spec.name, gathering) for one in bucket.held)

    # ------------------------------------------------------------------------------------------------------- forward
    def read(self, name: str) -> Tensor:
        canonical = self._names.get(name)
        if canonical is None:
            buffer = self._buffer(name)
            return buffer.clone() if _buffers_kept.get() else buffer
        leaf = self._leaf(canonical)
        return self._where_used.read(canonical, leaf) if self._held[canonical].gathered_when_used else leaf

    def _leaf(self, name: str) -> Tensor:
        if name in self._leaves:
            return self._leaves[name]
        gathering, held = self._gathering.get(name), self._held[name]
        if gathering is None and self._trains_now(name) and self._lower(name) is None:
            self._borrowed[name] = borrowed = self._free.take(held, self._told)
            self._leaves[name] = borrowed.tensor
            return borrowed.tensor
        found = gathering.finish() if gathering is not None else {name: held.local}
        for key, value in found.items():
            self._gathering.pop(key, None)
            self._leaves[key] = self._prepared(key, value)
        return self._leaves[name]

    def _lower(self, name: str) -> torch.dtype | None:
        """The dtype to which a parameter is cast here before it is used."""
        return None if self._held[name].gathered_when_used else self._computes.get(name)

    def _trains_now(self, name: str) -> bool:
        return self._grad and name in self._trains

    def _prepared(self, name: str, value: Tensor) -> Tensor:
        """What stages are given for a value: in the dtype in which it is used, with gradients in that in which the parameter rests."""
        held, lower = self._held[name], self._lower(name)
        rests = value.dtype if held.zero is None else held.dtype  # it may have been gathered in the lower one
        used = value if lower is None else value.to(lower)
        if not self._trains_now(name):
            return used
        self._borrowed[name] = borrowed = self._free.over(used, name, self._told, rests)
        return borrowed.tensor

    def saving(self) -> AbstractContextManager[object]:
        """The context to run forward in."""
        return self._where_used.saving()

    # ------------------------------------------------------------------------------------------------------ backward
    def begin_pass(self, stage: int) -> None:
        """The backward pass of a micro-batch through one stage of this rank begins."""
        self._await(tuple(b for b in self._of_a_pass if stage in b.stages))

    def _await(self, due: tuple[Bucket, ...]) -> None:
        """Buckets of which a pass is to reduce each: in which each parameter is, and how many gradients of each have not arrived."""
        self._due, self._due_of, self._due_left = due, _places(due), [len(b.held) for b in due]
        self._started_of_pass, self._fresh = 0, set[str]()  # buckets whose reduction has begun, gradients that have arrived

    def end_pass(self) -> None:
        """That pass has ended."""
        self._own_gradients()
        self._reduce_of_pass(whatever=True)
        self._finish_going()  # whose gradients would be whole through the next forward pass

    def _arrived(self, name: str) -> None:
        """A gradient of this pass. Reductions start when the last one of a bucket has arrived."""
        self._own(name)
        whole = False
        if name in self._due_of and name not in self._fresh:
            self._due_left[self._due_of[name]] -= 1
            whole = not self._due_left[self._due_of[name]]
        self._fresh.add(name)
        if name in self._bucket_of:
            self._left[self._bucket_of[name]] -= 1
            whole = whole or not self._left[self._bucket_of[name]]
        if whole:
            self._start_reductions()

    def _own(self, name: str) -> None:
        """Let a gradient that has come be added to, and reduced, where it is."""
        if name not in self._owned:
            own_gradient(self._leaves[name])
            self._owned.add(name)

    def _own_gradients(self) -> None:
        """The same for all of leaves that tell nobody."""
        if self._told is None and len(self._owned) < len(self._borrowed):
            for name, leaf in self._borrowed.items():
                if leaf.tensor.grad is not None:
                    self._own(name)

    def _reduce_of_pass(self, *, whatever: bool = False) -> bool:
        """Start the reductions of the pass, in order, so that all ranks start the same: of buckets whose gradients have arrived, or
        whatever has. Whether all of them have begun."""
        for k in range(self._started_of_pass, len(self._due)):
            bucket = self._due[k]
            if not (whatever or (not bucket.late and not self._due_left[k])):
                return False
            self._finish_going()  # so that no more than one bucket waits to be sent
            self._going = bucket.reduce(self._taken(bucket))
            self._started_of_pass += 1
        return True

    def _start_reductions(self, *, whatever: bool = False) -> None:
        """The same, then those of the step, whose gradients come last in their last pass."""
        if not self._reduce_of_pass(whatever=whatever):
            return
        for k in range(self._started, len(self._buckets)):
            bucket = self._buckets[k]
            if not (whatever or (not bucket.late and not self._left[k])):
                return
            if self._reductions:
                self._reductions[-1].go_on()
            self._reductions.append(bucket.reduce(self._taken(bucket)))
            self._started += 1

    def _taken(self, bucket: Bucket) -> dict[str, Tensor]:
        """The gradients of a bucket, which nothing else keeps."""
        found: dict[str, Tensor] = {}
        for one in bucket.held:
            name, leaf = one.spec.name, self._leaves.get(one.spec.name)
            if bucket.late and name in self._late:
                found[name] = self._late.pop(name)
            elif leaf is not None and leaf.grad is not None:
                found[name] = leaf.grad
                leaf.grad = None
                self._owned.discard(name)
        return found

    def _finish_going(self) -> None:
        going, self._going = self._going, None
        if going is not None:
            add_parts(self._late, going.finish())

    def finish(self) -> dict[str, Tensor]:
        """At the end of the step: name -> the gradient of the parameter at rest, for those that have one."""
        of_used = self._where_used.close()
        for gathering in {id(g): g for g in self._gathering.values()}.values():  # of parameters that nothing has read
            gathering.finish()
        self._gathering.clear()
        if not self._grad:
            return {}
        self._own_gradients()
        self._reduce_of_pass(whatever=True)
        self._finish_going()
        self._late.update(of_used)
        for name, held in self._held.items():
            if held.tied is not None and name in self._trains:
                leaf = self._leaves.get(name)
                grad = self._late.get(name, None if leaf is None else leaf.grad)
                whole = (held.no_gradient() if grad is None else grad.contiguous()).to(held.reduce_dtype)
                if whole is grad and name in of_used:  # it may be that of another parameter too, as backward gave it to both
                    whole = whole.clone()
                comm.all_reduce_(whole, held.tied)
                self._late[name] = whole.to(held.dtype)
        self._start_reductions(whatever=True)
        found: dict[str, Tensor] = {}
        while self._reductions:  # what has travelled in another dtype than it rests in goes bucket by bucket
            found.update(self._reductions.pop(0).finish())
        self._leaves.clear()
        self._free.give_back(self._borrowed)
        self._borrowed.clear()
        return found
