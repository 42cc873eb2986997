"""What a call of the original leaves in attributes and containers, for the parallel module to leave after a call too: the numbers, strings
and lists that its code sets, and a LeftOut in the place of each tensor.

A cache is not left: a tensor that is made once, and what says that it is there. The program needs none, and the original makes it again
where it runs itself.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy
import torch

from autopar.capture.counted import Count
from autopar.capture.held import ABSENT, Held, Opaque, Place, child, is_in, is_leaf, is_plain, places, put_back, same
from autopar.capture.numbers import TracedArray, may_stand
from autopar.capture.reach import is_foreign, loaded_in
from autopar.capture.state import Change, State
from autopar.capture.walk import TABLES, WATCHED_HOOKS
from autopar.errors import CaptureError
from autopar.run.left_out import LeftOut
from autopar.run.objects import is_tuple, tuple_of

__all__ = ["Left", "is_read", "left_by", "of_a_module"]

_KEPT = object()  # what stays as it was
_STAYS = object()  # in a list: the tensor that stands there, which other calls may replace
_COMPUTED = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers of a trace


class Left:
    """held: attributes and containers, and what a call leaves in them. paths: where that is. owners: of containers, where they stand: the
    loop may have put another there, which the original would have filled, and where nothing stands a call makes the list to which it
    appends. counts: to which a call adds. appended: the paths of lists to which a call appends what it leaves."""

    def __init__(
        self, held: tuple[Held, ...], paths: frozenset[str], owners: Mapping[int, Place], counts: Sequence[Count],
        appended: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._held = [(one, owners.get(id(one.holder))) for one in held]
        self._owners = owners
        self._paths, self._counts, self._appended = paths, counts, appended
        self._given: dict[int, Any] = {}  # what was put last, by the place in `held`

    @property
    def left_out(self) -> frozenset[str]:
        """The places of tensors, and of numbers made of them."""
        return frozenset(path for held, _ in self._held for path in _left_out(held.items))

    @property
    def appended(self) -> frozenset[str]:
        """Those of them that a call appends to a list."""
        return frozenset(path for held, _ in self._held if held.path in self._appended for path in _left_out(held.items))

    def holds(self, path: str) -> bool:
        """Whether something is left at a path."""
        return path in self._paths

    def leaves_in(self, path: str) -> bool:
        """Whether something is left at a path, in it or around it."""
        return is_in(path, self._paths) or any(is_in(one, (path,)) for one in self._paths)

    def follow(self, state: State) -> None:
        """The loop may have put other objects where those were that held something."""
        there = {id(held.holder) for held in state.held}
        holders: dict[tuple[str, type], list[Any]] = {}
        for held in state.held:
            if not held.table:
                holders.setdefault((held.path, type(held.holder)), []).append(held.holder)

        def now(one: Held) -> Held:
            found = holders.get((one.path, type(one.holder)), [])
            return one if id(one.holder) in there or len(found) != 1 else one._replace(holder=found[0])

        def place(owner: Place | None) -> Place | None:
            if owner is None or id(owner.held.holder) in there:
                return owner
            moved = now(owner.held)
            return owner._replace(held=moved) if moved is not owner.held else None

        self._held = [(now(one), place(owner)) for one, owner in self._held]
        self._counts = [count._replace(place=count.place._replace(held=now(count.place.held))) for count in self._counts]

    def put(self, tensors: Mapping[str, torch.Tensor | LeftOut | int | float]) -> None:
        """tensors: of this call, numbers, and what stands for tensors, by their places."""
        for place, (held, owner) in enumerate(self._held):
            given = self._given.get(place)
            if given is None or tensors or not _alike(given, held.items):  # the loop may have changed what it was given
                given = self._given[place] = _anew(held.items, tensors)
            if owner is not None:
                owner = self._where_it_is(owner)
            now = held.holder if owner is None else owner.now()
            if now is ABSENT and owner is not None and held.path in self._appended:
                owner.put(now := [])
            there = held.holder if type(now) is not type(held.holder) else now
            if held.path in self._appended:
                there.extend(_anew(held.items, tensors))
                continue
            if type(given) is tuple and isinstance(there, (list, deque)):
                given = tuple(there[k] if x is _STAYS else x for k, x in enumerate(given))
            put_back(held._replace(holder=there, items=given))
        for count in self._counts:
            count.add()

    def _where_it_is(self, owner: Place) -> Place:
        """The same place in the dict that stands now where the one did in which it was."""
        above = self._owners.get(id(owner.held.holder))
        now = above.now() if above is not None else None
        return owner._replace(held=owner.held._replace(holder=now)) if type(now) is type(owner.held.holder) else owner


class _Record:
    """An object of a class of the user's, or a namespace, that each call makes: a copy of it is given these fields."""

    def __init__(self, like: Any, fields: Mapping[str, Any]) -> None:
        self.kind, self.fields = type(like), fields

    def made(self, fields: Mapping[str, Any]) -> Any:
        made: Any = object.__new__(self.kind) if self.kind is not SimpleNamespace else SimpleNamespace()
        vars(made).update(fields)
        return made


def _fields(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that has no others than those in its dict, and is made by them; None of anything else."""
    kind = type(value)
    if kind is not SimpleNamespace and (is_foreign(kind.__module__) or kind.__module__.startswith("autopar.")):
        return None
    made_so = kind is SimpleNamespace or getattr(kind, "__new__", None) is getattr(object, "__new__", None)
    is_other = isinstance(value, (type, torch.nn.Module, torch.Tensor, dict, list, tuple, set, frozenset, str, int, float, bytes))
    return vars(value) if made_so and not is_other and hasattr(value, "__dict__") and not callable(value) else None


def _left_out(value: Any) -> Iterator[str]:
    if type(value) is LeftOut:
        yield vars(value)["_path"]
    if type(value) is _Record:
        value = value.fields
    for x in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ():
        yield from _left_out(x)


def _anew(value: Any, tensors: Mapping[str, Any]) -> Any:
    """The same in new containers, with tensors and numbers in the place of what stands for them."""
    if type(value) is LeftOut:
        return tensors.get(vars(value)["_path"], value)
    if type(value) in (dict, OrderedDict):
        return type(value)((k, _anew(x, tensors)) for k, x in value.items())
    if type(value) is _Record:
        return value.made({name: _anew(x, tensors) for name, x in value.fields.items()})
    if is_tuple(value):
        return tuple_of(value, (_anew(x, tensors) for x in value))
    if type(value) is deque:
        return deque((_anew(x, tensors) for x in value), value.maxlen)
    return type(value)(_anew(x, tensors) for x in value) if type(value) in (list, set) else value


def _alike(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if type(a) is not type(b) or type(b) not in (dict, OrderedDict, deque, list, tuple, set):
        return a is b
    if isinstance(b, set):
        return bool(a == b)
    if isinstance(b, dict):
        return list(a) == list(b) and _alike(list(a.values()), list(b.values()))
    return len(a) == len(b) and all(map(_alike, a, b))


def left_by(
    start: State, first: State, second: State, written: Sequence[str], traced: Iterable[Change], counts: Sequence[Count],
    appended: frozenset[str], *, numbers: Collection[str], once: frozenset[str], moved: frozenset[str] = frozenset(),
) -> Left:  # fmt: skip
    """start, first: before and after a call of the original. written: the paths at which each call leaves a tensor of its own. traced: what
    the trace of a call changed: a number that is another there is computed from values of the inputs. counts: to which it adds. appended:
    the paths of lists to which it appends. numbers: the places of those that it makes of tensors, and of arrays. once: what the first call
    changes, and later ones keep. moved: where it leaves numbers that follow from numbers, as the program has them. Where it registers
    hooks, none of this is left: the hooks are not, and it may say that they are there."""
    counted = moved | {c.path for c in counts}
    comparison = _Comparison(start, first, second, written, {c.path: c.after for c in traced}, counted, numbers, appended)
    if any(path.rpartition(".")[2] in WATCHED_HOOKS for path in once):
        comparison.stays(once)
    held = tuple(comparison.held())
    owners = {
        id(value): place
        for value, place in places(first.held)
        if isinstance(place.held.holder, (dict, CellType)) and isinstance(value, (list, dict, deque))
    }
    return Left(held, frozenset(comparison.paths), owners, counts, appended)


class _Comparison:
    def __init__(
        self, start: State, first: State, second: State, written: Sequence[str], traced: Mapping[str, object], counted: frozenset[str],
        numbers: Collection[str], appended: frozenset[str],
    ) -> None:  # fmt: skip
        self._numbers, self._appended = numbers, appended
        self._later = {(id(held.holder), held.keys): held.items for held in second.held}
        self._start, self._first, self._written, self._traced, self._counted = start, first, written, traced, counted
        self._where = {id(_object(first.leaves[path])): path for path in written if path in first.leaves}
        made = {c.path for c in start.changes(first) if isinstance(c.after, (torch.Tensor, Opaque))}
        self._caches = not made <= set(written)
        self._stays = frozenset[str]()
        self.paths: set[str] = set()

    def stays(self, paths: frozenset[str]) -> None:
        """What a call changes there is not left."""
        self._stays = paths

    def held(self) -> Iterator[Held]:
        before = {(id(held.holder), held.keys): held for held in self._start.held}
        for held in self._first.held:
            known = before.get((id(held.holder), held.keys))
            if known is None or held.table or isinstance(held.holder, FunctionType):
                continue
            if isinstance(held.holder, (CellType, ContextVar)):
                new = held.path not in self._counted and (held.items is not known.items or self._is_computed(held.path))
                value = self._left(held.items, held.path) if new else _KEPT
                if is_plain(value) or type(value) in (LeftOut, tuple):
                    self.paths.add(held.path)
                    yield Held(held.path, held.holder, value)
            elif isinstance(held.items, dict):
                changed = self._entries(held, known)
                if changed:
                    yield Held(held.path, held.holder, changed, frozenset(changed))
            elif isinstance(held.items, frozenset):
                if held.items != known.items and all(map(is_plain, held.items)) and self._follows(held.path):
                    self.paths.add(held.path)
                    yield Held(held.path, held.holder, held.items)
            elif isinstance(held.items, tuple) and (list(map(id, held.items)) != list(map(id, known.items)) or self._computes(held)):
                if (items := self._items(held, known)) is not None:
                    self.paths.add(held.path)
                    yield Held(held.path, held.holder, items)

    def _entries(self, held: Held, known: Held) -> dict[Any, Any]:
        there = {k: v for k, v in held.items.items() if k not in TABLES and k != "training"}
        changed = {k: v for k, v in there.items() if known.items.get(k, ABSENT) is not v or self._is_computed(child(held, k))}
        apart = self._counted | self._stays
        made = {key: value for key, value in changed.items() if value is not ABSENT and child(held, key) not in apart}
        left = {key: self._left(value, child(held, key)) for key, value in made.items()}
        if not isinstance(held.holder, type):
            left |= dict.fromkeys(known.items.keys() - held.items.keys(), ABSENT)
        for key in [key for key, value in left.items() if value is _KEPT and self._is_anew(held, key)]:
            left[key] = self._lost(child(held, key), held.items[key])
        found = {key: value for key, value in left.items() if value is not _KEPT}
        self.paths |= {child(held, key) for key in found}
        return found

    def _items(self, held: Held, known: Held) -> tuple[Any, ...] | None:
        """What is left in a list that calls change; None for a cache."""
        before = set(map(id, known.items))
        paths = [child(held, i) for i in range(len(held.items))]
        made = [path in self._written or self._is_computed(path) for path in paths]  # though what stood there may stand elsewhere now
        stays = [id(value) in before and not own for value, own in zip(held.items, made, strict=True)]
        pairs = zip_longest(held.items, known.items[: len(held.items)])
        kept = [_STAYS if a is b and isinstance(a, torch.Tensor) else a for a, b in pairs]
        left = [old if stay else self._left(x, path) for x, path, stay, old in zip(held.items, paths, stays, kept, strict=True)]
        if not any(map(self._is_written, paths)) and any(value is _KEPT for value in left):
            if held.path not in self._appended:
                return None
            place = next(k for k, value in enumerate(left) if value is _KEPT)
            self._lost(paths[place], held.items[place])
        return tuple(LeftOut(path) if value is _KEPT else value for value, path in zip(left, paths, strict=True))

    def _left(self, value: Any, path: str) -> Any:
        if isinstance(value, numpy.ndarray) and type(_object(self._traced.get(path))) is TracedArray:
            return LeftOut(path)
        if id(value) in self._where:
            return LeftOut(path if path in self._written else self._where[id(value)])
        if is_leaf(value) or (is_plain(value) and same(self._first.leaves.get(path, ABSENT), value)):
            return self._plain(value, path)
        if _is_of_the_model(value):
            return value
        inner: list[Any] = []
        if type(value) in (list, deque) or is_tuple(value):
            inner = [self._left(x, f"{path}[{i}]") for i, x in enumerate(value)]
        elif type(value) in (dict, OrderedDict):
            held = Held(path, value, value)
            inner = [self._left(x, child(held, key)) for key, x in value.items()]
        elif type(value) in (set, frozenset) and all(map(is_plain, value)) and self._follows(path):
            return type(value)(value)
        elif (fields := _fields(value)) is not None:
            inner = [self._left(x, f"{path}.{name}") for name, x in fields.items()]
        else:
            return LeftOut(path) if self._is_written(path) else _KEPT
        if any(x is _KEPT for x in inner):
            return LeftOut(path) if self._is_written(path) else _KEPT
        if isinstance(value, dict):
            return type(value)(zip(value, inner, strict=True))
        if is_tuple(value):
            return tuple_of(value, inner)
        return type(value)(inner) if isinstance(value, (list, deque)) else _Record(value, dict(zip(_fields(value) or (), inner)))

    def _is_anew(self, held: Held, key: Any) -> bool:
        """Whether each call puts another object there, which is no number."""
        later = self._later.get((id(held.holder), held.keys))
        value = held.items[key]
        return isinstance(later, dict) and not is_plain(value) and later.get(key, value) is not value

    def _lost(self, path: str, value: object) -> Any:
        """What stands in the place of an object that each call makes and the parallel module cannot: an attribute that nothing in the model
        reads says so when it is used. CaptureError for another place."""
        if of_a_module(path):
            return _KEPT if is_read(path, self._start) else LeftOut(path)
        raise CaptureError(
            f"each call leaves an object ({type(value).__name__}) in {path}, which no program makes\n  what to do: leave tensors there, in "
            f"lists, dicts, named tuples or dataclasses"
        )

    def _plain(self, value: object, path: str) -> object:
        if not same(self._first.leaves.get(path, ABSENT), value):
            return _KEPT
        if self._is_computed(path):
            return LeftOut(path)
        if same(self._start.leaves.get(path, ABSENT), value):
            return value
        if path not in self._traced:  # a submodule that runs as it is written sets it itself, from its part of the batch
            return _KEPT if is_read(path, self._start) else LeftOut(path)
        if not same(self._traced[path], value):
            return LeftOut(path)
        return _KEPT if self._caches and is_read(path, self._start) else value

    def _computes(self, held: Held) -> bool:
        return any(self._is_computed(child(held, i)) for i in range(len(held.items)))

    def _is_computed(self, path: str) -> bool:
        """Whether a call leaves a number there that it has computed from values, whatever that was before."""
        left, here = self._traced.get(path), self._first.leaves.get(path, ABSENT)
        stands = may_stand(left) and (isinstance(left, float) or not same(left, here))  # else it is large by itself, as hashes are
        if path in self._numbers or stands:
            return is_plain(here)
        return isinstance(left, Opaque) and isinstance(left.value, _COMPUTED) and is_plain(here)

    def _follows(self, path: str) -> bool:
        """Whether what a set holds after the call is there after the trace of it too, and is no mark of a cache."""
        traced = same(self._traced.get(path, ABSENT), self._first.leaves.get(path))
        return traced and not (self._caches and is_read(path, self._start))

    def _is_written(self, path: str) -> bool:
        return any(is_in(written, (path,)) for written in self._written)


def of_a_module(path: str) -> bool:
    """Whether a path is that of an attribute. What a closure or a global is given, something else reads there."""
    return " " not in path.partition("[")[0]


def is_read(path: str, state: State) -> bool:
    """Whether code of the forward may read what stands at a path."""
    names = set(re.findall(r"\w+", path.rpartition(".")[2]))
    return any(not names.isdisjoint(loaded_in(function.__code__)) for function in state.reached.functions)


def _is_of_the_model(value: object) -> bool:
    """Whether it is a method of a module, or a function that closes over nothing, as one that a call puts in the place of another."""
    if isinstance(value, MethodType):
        return isinstance(value.__self__, torch.nn.Module)
    return isinstance(value, FunctionType) and value.__closure__ is None


def _object(leaf: object) -> object:
    return leaf.value if isinstance(leaf, Opaque) else leaf
