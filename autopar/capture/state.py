"""What a model holds beside the tensors in its registries, and what the code of its forward and its loss reads elsewhere: attributes
of modules and of their classes, containers and objects behind them, closures, defaults and globals.

A State is a picture of all that. Two pictures say what changed between them, and the first can be put back.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import CellType, MethodType
from typing import Any

import torch
from torch import nn

from autopar.capture.attributes import Asked
from autopar.capture.by_value import Mark
from autopar.capture.held import ABSENT, KEPT, Held, Opaque, Value, child, describe, put_back, same
from autopar.capture.kept import visit_kept
from autopar.capture.reach import Reached, Reads, Search
from autopar.capture.walk import CODE, DEPTH, Walk
from autopar.run import hooks

__all__ = ["Change", "State"]


@dataclass(frozen=True, slots=True)
class Change:
    """What stands at a path before and after; ABSENT for nothing."""

    path: str
    before: object
    after: object

    def __str__(self) -> str:
        if isinstance(self.before, torch.Tensor) and self.before is self.after:
            return f"{self.path}, written in place or given another requires_grad"
        return f"{self.path} from {describe(self.before)} to {'another ' if self._alike else ''}{describe(self.after)}"

    @property
    def of_numbers(self) -> bool:
        """Whether a number is another number of its kind now."""
        return type(self.before) in (int, float) and type(self.after) is type(self.before)

    @property
    def _alike(self) -> bool:
        return self.before is not ABSENT and describe(self.before) == describe(self.after)


@dataclass(frozen=True, slots=True)
class State:
    """leaves: path -> value. versions: marks of the plain tensors among them. held: every container, with
    its contents. arrays: those of numpy, queues and the like, which are compared by what they hold. reached: the code that was looked at.
    buffers: the names of the buffers that hold a tensor; of others that do later, the tensors are leaves. reads: what code may read, if
    nothing else is in the picture; None if all is. attributes: of parameters and buffers, those that are in it. kept: where results are
    that functions keep."""

    leaves: Mapping[str, object]
    versions: Mapping[str, Mark]
    held: tuple[Held, ...]
    arrays: tuple[Any, ...]
    reached: Reached
    buffers: frozenset[str]
    reads: Reads | None = None
    attributes: tuple[Asked, ...] = ()
    kept: tuple[str, ...] = ()

    @staticmethod
    def take(model: nn.Module, loss: object = None, since: State | None = None, attributes: tuple[Asked, ...] = ()) -> State:
        """since: an earlier State of the same model and loss, to be compared with this one."""
        if since is not None:
            return _with_code(_walked(model, loss, since.buffers, since.reads, since.attributes), since.reached)
        buffers = frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))
        hooks_of_all = [hook for found in hooks.of_all_modules().values() for hook in found.values()]
        others = [*(() if loss is None else (loss,)), *hooks_of_all]
        search, walk = Search(model, others), _walked(model, loss, buffers, None, attributes)
        known: dict[int, object] = {}
        new = walk.found
        while True:  # objects that are found have methods, which read other objects
            known |= new
            search.follow(new.values())
            with_code = walk.copy()
            state = _with_code(with_code, search.found)
            new = {k: v for k, v in with_code.found.items() if k not in known}
            if not new:
                return state

    def of_what_is_read(self, model: nn.Module, loss: object = None) -> State:
        """The same picture of what code may read, and of the functions there: to be watched."""
        reads = Reads(self.reached, {x for x in self.leaves.values() if isinstance(x, str)})
        return _with_code(_walked(model, loss, self.buffers, reads, self.attributes), self.reached)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The plain tensors, by path."""
        return {path: x for path, x in self.leaves.items() if isinstance(x, torch.Tensor)}

    def object_at(self, path: str) -> object:
        """What stands at a path, itself; ABSENT for nothing."""
        leaf = self.leaves.get(path, ABSENT)
        if isinstance(leaf, Opaque):
            return leaf.value
        return next((x for x, at in _objects(self.held) if at == path), leaf) if isinstance(leaf, Value) else leaf

    def changes(self, later: State) -> list[Change]:
        """What differs in a later state: other values, other tensors, tensors written in place."""
        found = []
        for path, before in self.leaves.items():
            after = later.leaves.get(path, ABSENT)
            if not same(before, after) or self.versions.get(path) != later.versions.get(path):
                found.append(Change(path, before, after))
        found += [Change(path, ABSENT, after) for path, after in later.leaves.items() if path not in self.leaves]
        some = tuple({*self.kept} ^ {*later.kept})  # a result that is kept now, or is no more: the function gives it where it is asked
        return [change for change in found if not change.path.startswith(some)] if some else found

    def grown_in(self, later: State) -> frozenset[str]:
        """Where a later state differs: of what is in a list, or in a container that is new, that container."""
        known = {held.path for held in self.held}
        grown = [held.path for held in later.held if isinstance(held.holder, list | deque) or held.path not in known]
        found = set()
        for path in (change.path for change in self.changes(later)):
            around = [outer for outer in grown if outer and path.startswith((f"{outer}[", f"{outer}."))]
            found.add(min(around, key=len, default=path))
        return frozenset(found)

    def with_kept(self, later: State) -> State:
        """The same with the results that functions have kept since."""
        new = tuple(path for path in later.kept if path not in self.kept)
        if not new:
            return self
        known = {id(held.holder) for held in self.held}
        leaves = {path: x for path, x in later.leaves.items() if path.startswith(new)}
        held = [x for x in later.held if x.table == KEPT or (x.path.startswith(new) and id(x.holder) not in known)]
        before = [x for x in self.held if x.table != KEPT]
        return replace(self, leaves={**self.leaves, **leaves}, held=(*before, *held), kept=(*self.kept, *new))

    def restore(self) -> None:
        """Every container holds again what it held."""
        for held in self.held:
            put_back(held)


def _objects(held: Iterable[Held]) -> Iterator[tuple[object, str]]:
    for one in held:
        if isinstance(one.holder, CellType | ContextVar):
            yield from _with_members(one.items, one.path)
        elif isinstance(one.items, dict | tuple):
            for key, value in one.items.items() if isinstance(one.items, dict) else enumerate(one.items):
                yield from _with_members(value, child(one, key))


def _with_members(value: object, path: str) -> Iterator[tuple[object, str]]:
    yield value, path
    if isinstance(value, tuple):  # which are not held
        for k, member in enumerate(value):
            yield from _with_members(member, f"{path}[{k}]")


def _walked(
    model: nn.Module, loss: object, buffers: frozenset[str], reads: Reads | None, attributes: tuple[Asked, ...]
) -> Walk:
    """Over the model, these attributes of its tensors, what its loss is bound to, and hooks."""
    walk = Walk(model, buffers, reads, attributes)
    walk.model()
    for number, part in enumerate(_bound(loss)):
        walk.visit("loss" if not number else f"loss's part {number}", part, DEPTH)
    watched = hooks.of_all_modules()
    for name, table in hooks.tables().items():
        path = f"the hooks of all modules ({name[1:]})"
        walk.held.append(Held(path, table, dict(table)))
        walk.leaves[path] = Value(f"{len(watched[name])} hooks", tuple(map(id, watched[name].values())))
    return walk


def _with_code(walk: Walk, code: Reached) -> State:
    """The picture of that, and of what the code reads elsewhere."""
    walk.code(code)
    if (code.names | code.asked) & {"environ", "getenv"}:
        walk.visit("os.environ", vars(os.environ)["_data"], DEPTH)
    visit_kept(walk, code)
    return State(
        walk.leaves, walk.versions, tuple(walk.held), tuple(walk.arrays), code, walk.buffers, walk.reads, walk.attributes, tuple(walk.kept)
    )  # fmt: skip


def _bound(loss: Any) -> list[object]:
    """The objects that a loss function is bound to."""
    if isinstance(loss, functools.partial):
        return [*_bound(loss.func), list(loss.args), loss.keywords]
    if isinstance(loss, MethodType):
        return [loss.__self__]
    return [] if loss is None or isinstance(loss, CODE) else [loss]
