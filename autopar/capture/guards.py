"""What capture froze, watched: is it still as it was when the model was captured?

A call of the module must not pay for it: `changed` compares identities, entry by entry in C, and looks at values only where an
identity differs. Kept out: training modes (`modes`), requires_grad, and the contents of the model's registries of parameters and buffers,
of which only the names are watched, and which of them hold nothing.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from itertools import repeat
from types import CellType
from typing import Any

import torch
from torch import nn

from autopar.capture.answers import NONE, Answers, Given, Whole
from autopar.capture.attributes import Asked
from autopar.capture.by_value import by_value, mark_of
from autopar.capture.held import ABSENT, EMPTY, KEPT, LEFT_OUT, Held, Opaque, Taken, child, is_in, keys_of, order_of, places, same, value_of
from autopar.capture.left import Left, is_read
from autopar.capture.reach import compares_objects
from autopar.capture.said import Sayings
from autopar.capture.state import Change, State
from autopar.capture.walk import REGISTRIES, TABLES, WATCHED_HOOKS
from autopar.run.asked import NAMES
from autopar.run.closed import is_named
from autopar.run.grad_mode import GradMode, as_called
from autopar.run.left_out import LeftOut
from autopar.run.varying import NONE as NONE_VARIES
from autopar.run.varying import AsPlaced, Varied

__all__ = ["Guards"]

_SETTINGS = {
    name: getattr(torch, name)
    for name in ("get_default_dtype", "are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "get_num_threads")
}  # of the process, which a forward may ask for
_SAID = 3  # changes that a message names
_UNWATCHED = TABLES | {"training"}


class Guards:
    """The picture of a model and its loss at the moment of capture. asks: whether their code may ask which inputs are one tensor, and the
    names of what it may ask of each (`run.asked`). varied: the numbers that the program takes as inputs. moved: where only numbers have
    changed when `changed` was asked last, their places."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, state: State) -> None:
        self._model, self._loss, self._state = model, loss, state
        self._ignored, self._settled = frozenset[str](), dict[str, Change]()
        self._mode: GradMode | None = None
        self._told = NONE
        self._given: Mapping[str, str] = {}
        self._modes_set: tuple[tuple[nn.Module, bool], ...] = ()
        self._left: Left | None = None
        self._sayings = Sayings()
        self.varied = NONE_VARIES
        self.moved: frozenset[str] = frozenset()
        self.made: tuple[Change, ...] = ()  # what a first call made and later ones keep and read, if there are tensors of that
        self._modules = list(model.modules())
        asked = state.reached.names | state.reached.asked | {"get_default_dtype"}
        self._answers = [(ask, ask()) for name, ask in _SETTINGS.items() if name in asked]
        if "geterr" in asked and (numpy := sys.modules.get("numpy")) is not None:
            self._answers.append((numpy.geterr, numpy.geterr()))
        names = self._read_names = state.reached.names | state.reached.asked
        self.asks = any(compares_objects(f.__code__) for f in state.reached.functions), NAMES & names
        self._index(state)

    @staticmethod
    def take(model: nn.Module, loss: Callable[..., Any] | None = None, state: State | None = None) -> Guards:
        """All that the forward and the loss may read beside parameters, buffers and inputs, as it is now. state: of both now, if there is
        one."""
        return Guards(model, loss, (state or State.take(model, loss)).of_what_is_read(model, loss))

    def follow(self, written: Iterable[str], settled: Iterable[Change], left: Left) -> None:
        """What the forward itself changes is no change. written: what each call makes anew. settled: what the first call made and others
        keep: it may be as it was before that call, or as it was after; a tensor may be another. left: what a call leaves, to be left by the
        program too; of that, what no code reads may be anything."""
        settled = list(settled)
        kept = tuple(c for c in settled if is_read(c.path, self._state))
        self.made = kept if any(isinstance(c.after, torch.Tensor) for c in kept) else ()
        anything = {c.path for c in settled if isinstance(c.after, (torch.Tensor, Opaque))}
        anything |= {c.path for c in settled if left.holds(c.path) and not is_read(c.path, self._state)}
        self._ignored |= {*written, *anything}
        self._settled |= {c.path: c for c in settled if c.path not in anything}
        self._left = left
        self._index(self._state)

    def vary(self, varied: Varied) -> None:
        """Numbers and tensors that the program takes as inputs: what stands there is no change by itself."""
        self.varied = varied
        self._ignored |= varied.around
        self._index(self._state)

    def fills(self, paths: Collection[str]) -> None:
        """Dicts in which calls make lists, and nothing else."""
        if paths:
            self._ignored |= set(paths)
            self._index(self._state)

    def stand_again(self, paths: Collection[str]) -> None:
        """Collections, references and functions given arguments that stood in these places while the model was captured, and held whole
        parameters, are those again that hold the parts."""
        if paths:
            later = State.take(self._model, self._loss, self._state)
            other = {path: leaf for path, leaf in self._state.leaves.items() if not is_in(path.partition("{")[0], paths)}
            here = {path: leaf for path, leaf in later.leaves.items() if is_in(path.partition("{")[0], paths)}
            self._state = replace(self._state, leaves=other | here)
            self._index(later)

    def read(self, attributes: tuple[Asked, ...]) -> None:
        """The user's attributes of parameters and buffers that the forward asks for."""
        if attributes:
            self._state = State.take(self._model, self._loss, attributes=attributes).of_what_is_read(self._model, self._loss)
            self._index(self._state)

    def set_modes(self, modes: tuple[tuple[nn.Module, bool], ...]) -> None:
        """The modules whose training mode a call sets to another, and to which."""
        self._modes_set = modes

    def answered(self, answers: Answers) -> None:
        """What the forward asks of the model's own parameters and buffers, and of its inputs, and was told. What functions kept of that for
        later calls is watched from now on."""
        self._told = answers
        if self._state.reached.caches:
            kept = self._state.with_kept(State.take(self._model, self._loss, self._state))
            if kept is not self._state:
                self._state = kept
                self._index(kept)

    def written(self, whole: Whole) -> dict[str, torch.Tensor]:
        """Collective: what a call writes to parameters before it uses them, whole, by name. whole: as of `changed`."""
        return self._told.written(whole)

    def ask_for(self, mode: GradMode) -> None:
        """The model's code asks whether gradients are wanted, and was told so."""
        self._mode = mode

    def said(self, sayings: Sayings) -> None:
        """What calls print and log."""
        self._sayings = sayings

    def given(self, names: Mapping[str, str], numbers: Collection[str], arrays: Collection[str]) -> None:
        """The places of tensors, of numbers and of arrays that the forward leaves, and the outputs of the program that they are. numbers:
        places of these and of arrays; arrays: of arrays alone."""
        self._given, self._numbers_left, self._arrays_left = names, frozenset(numbers), frozenset(arrays)

    def place(self, path: str) -> str | None:
        """The output of the program that the forward leaves at a path."""
        return self._given.get(path)

    @property
    def leaves(self) -> frozenset[str]:
        """The places at which the forward leaves a tensor that the program does not give."""
        return frozenset[str]() if self._left is None else self._left.left_out - self._given.keys() - self._numbers_left

    def leave(self, outputs: Mapping[str, torch.Tensor], unread: Callable[[str], torch.Tensor] | None = None) -> None:
        """After a call: what the forward leaves in attributes and containers is there, and what it prints and logs is said. outputs: of
        the program, by name. unread: computes what is left at a place, when it is read."""
        self._sayings.again()
        for module, mode in self._modes_set:
            module.training = mode
        if self._left is not None:
            found = {path: outputs[name] for path, name in self._given.items() if name in outputs}
            left: dict[str, Any] = {path: self._as_left(path, t) for path, t in found.items()}
            if unread is not None:
                left |= {path: LeftOut(path, functools.partial(unread, path)) for path in self.leaves}
            self._left.put(left)

    def _as_left(self, path: str, tensor: torch.Tensor) -> Any:
        if path in self._arrays_left:
            return tensor.detach().numpy()
        return tensor.item() if path in self._numbers_left else tensor

    def reads(self, name: str) -> bool:
        """Whether code of the model may read what has a name: an attribute, a global, a key."""
        return name in self._read_names

    def modes(self) -> tuple[bool, ...]:
        """The training flag of every module, now."""
        return tuple([m.training for m in self._modules])

    def changed(self, whole: Whole | None = None, given: Given | None = None) -> str | None:
        """None if everything is as it was; else what changed, from what to what. Collective, where the forward asks for values of its
        state. whole: gives a parameter or buffer by its name; without it the model holds them whole. given: the inputs of a call, of the
        global batch; without it they are as they were."""
        self.moved = frozenset()
        if (said := self._answers_changed(whole, given)) is not None:
            return said
        if self._mode is not None and self._mode != (called := as_called()):
            return f"whether gradients are wanted, which its forward asks for: from {self._mode} to {called}"
        for ask, before in self._answers:
            if (now := ask()) != before:
                name = f"{ask.__module__.partition('.')[0]}.{ask.__name__}()"
                return f"{name}, on which what its forward computes may depend: from {before} to {now}"
        if self._same_objects():
            return None
        later = State.take(self._model, self._loss, self._state)
        found = [change for change in self._state.changes(later) if self._counts(change)]
        if all(change.of_numbers for change in found):
            self.moved = frozenset(change.path for change in found)
        if not found:  # equal values, in other objects
            self._index(later)
            if self._left is not None:
                self._left.follow(later)
            return self._numbers_stand(later)
        more = f" and {len(found) - _SAID} more" if len(found) > _SAID else ""
        return "; ".join(map(str, found[:_SAID])) + more

    def set_otherwise(self, names: set[str]) -> str | None:
        """What the loop has set since the last call of what code of these names may read, in words; None for nothing."""
        if self._same_objects():
            return None
        changes = self._state.changes(State.take(self._model, self._loss, self._state))
        return next((str(c) for c in changes if self._counts(c) and is_named(c.path, names)), None)

    # ---------------------------------------------------------------------------------------------------------- private
    def _answers_changed(self, whole: Whole | None, given: Given | None) -> str | None:
        asked = self._told
        return asked.changed_of(self._model) if whole is None else asked.changed(whole, given)

    def _numbers_stand(self, later: State) -> str | None:
        """What the program takes as inputs is where it stands now. What of it is gone, in words; None if nothing is."""
        if not self.varied.of_all.places:
            return None
        now: dict[str, AsPlaced] = {place.path: place for _, place in places(later.held)}
        if gone := self.varied.gone(now):
            return f"{gone}, which is there no more"
        self.varied = self.varied.where(now)
        return None

    def _counts(self, change: Change) -> bool:
        if change.after is LEFT_OUT or (isinstance(change.before, Taken) and isinstance(change.after, Taken)):
            return False
        path = change.path
        settled = self._settled.get(path)
        if settled is not None and (same(change.after, settled.after) or same(change.after, settled.before)):
            return False
        return not is_in(path, self._ignored)

    def _same_objects(self) -> bool:
        return (
            list(map(len, self._containers)) == self._lengths
            and all(map(operator.is_, map(dict.get, self._dicts, self._keys, repeat(ABSENT)), self._values))
            and list(map(operator.is_, map(dict.get, self._registries, self._names, repeat(ABSENT)), repeat(None))) == self._empty
            and all(map(dict.__contains__, self._registries, self._names))
            and all(map(operator.is_, map(operator.getitem, self._lists, self._positions), self._elements))
            and all(map(operator.is_, map(_content, self._cells), self._cell_contents))
            and list(map(mark_of, self._tensors)) == self._versions
            and all(map(operator.is_, map(getattr, self._owners, self._attributes, repeat(ABSENT)), self._attribute_values))
            and all(map(operator.eq, self._sets, self._members))
            and list(map(keys_of, self._ordered)) == self._orders
            and list(map(by_value, self._arrays)) == self._held_by_them
            and all(one.value is value for one, value in self._of_tensors)
        )

    def _index(self, state: State) -> None:
        """Lays what is watched out in flat lists."""
        self._containers: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._registries: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._lists: list[Any] = []
        self._positions: list[int] = []
        self._elements: list[Any] = []
        self._cells: list[CellType | ContextVar[Any]] = []
        self._cell_contents: list[Any] = []
        self._owners: list[Any] = []
        self._sets: list[Any] = []
        self._members: list[frozenset[Any]] = []
        self._ordered: list[dict[Any, Any]] = []
        self._orders: list[tuple[Any, ...]] = []
        self._attributes: list[str] = []
        self._attribute_values: list[Any] = []
        self._of_tensors = [(one, one.value) for one in state.attributes]
        # whose contents others look at; those of modules that a loss or an attribute holds are watched as what else stands there
        self._of_the_model = {id(vars(module)[table]) for module in self._model.modules() for table in REGISTRIES[:2]}
        for held in state.held:
            if held.table != KEPT:
                self._add(held)
        for held in self._state.held:  # of what functions kept: what they keep no more, they may make anew
            if held.table == KEPT:
                self._add(held._replace(items={key: dict.get(held.holder, key, ABSENT) for key in held.items}))
        self._lengths = list(map(len, self._containers))
        self._empty = [registry.get(name, ABSENT) is None for registry, name in zip(self._registries, self._names, strict=True)]
        self._tensors: list[torch.Tensor] = [state.tensors[path] for path in state.versions]
        self._versions = list(state.versions.values())
        self._arrays = state.arrays
        self._held_by_them = list(map(by_value, self._arrays))

    def _add(self, held: Held) -> None:
        holder, items = held.holder, held.items
        if held.table == EMPTY or held.path in self._ignored:
            return
        if isinstance(holder, (CellType, ContextVar)):
            self._cells.append(holder)
            self._cell_contents.append(items)
        elif isinstance(holder, type):
            pairs = [(k, v) for k, v in items.items() if child(held, k) not in self._ignored]
            own = gc.get_referents(vars(holder))[0]  # as it is there: to ask the class would ask descriptors
            self._dicts += [own] * len(pairs)
            self._keys += [k for k, _ in pairs]
            self._values += [v for _, v in pairs]
            self._containers.append(own)
        elif isinstance(items, dict) and not isinstance(holder, dict):
            found = [(k, getattr(holder, k, ABSENT)) for k in items if child(held, k) not in self._ignored]
            pairs = [(k, v) for k, v in found if getattr(holder, k, ABSENT) is v]  # not so of what is made where it is asked for
            self._owners += [holder] * len(pairs)
            self._attributes += [k for k, _ in pairs]
            self._attribute_values += [v for _, v in pairs]
        elif isinstance(items, dict):
            if held.table in REGISTRIES[:2]:
                self._registries += [holder] * len(items)
                self._names += list(items)
                items = {} if id(holder) in self._of_the_model else items
            elif held.table and held.table not in (*WATCHED_HOOKS, "_modules", KEPT):
                return
            pairs = [(k, v) for k, v in items.items() if held.keys is not None or k not in _UNWATCHED]
            if self._ignored:
                pairs = [(k, v) for k, v in pairs if child(held, k) not in self._ignored]
            self._dicts += [holder] * len(pairs)
            self._keys += [k for k, _ in pairs]
            self._values += [v for _, v in pairs]
            if held.keys is None:
                self._containers.append(holder)
            if (order := order_of(held)) is not None:
                self._ordered.append(holder)
                self._orders.append(order.keys)
        elif isinstance(items, tuple):
            self._containers.append(holder)
            self._lists += [holder] * len(items)
            self._positions += range(len(items))
            self._elements += items
        else:
            self._sets.append(holder)
            self._members.append(items)


def _content(cell: CellType | ContextVar[Any]) -> object:
    if isinstance(cell, ContextVar):
        return value_of(cell)
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT
