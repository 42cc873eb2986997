"""What a picture of a model consists of: containers with what they hold, values that are compared by a copy, what stands for others."""

from __future__ import annotations

import enum
import operator
import re
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

__all__ = [
    "ABSENT", "EMPTY", "EXACTLY", "KEPT", "LEFT_OUT", "REGISTERED", "SIMPLE", "Held", "Opaque", "Order", "Place", "Shape", "Taken", "Value",
    "child", "contents", "describe", "is_in", "is_leaf", "is_plain", "keys_of", "order_of", "places", "put_back", "same",
    "shown_key", "value_of", "without_ids",
]  # fmt: skip

SIMPLE = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.Size, enum.Enum, range,
)  # fmt: skip

EXACTLY = frozenset({type(None), bool, int, float, str, torch.dtype, torch.Size})  # the usual ones, which are faster to tell

_IDS = re.compile(r" (0x[0-9a-f]+|\d{9,})\b")  # of objects, in the paths of what they are keys of

KEPT = "kept"  # the table of a Held of what a cache of a function keeps, which is not put back
EMPTY = "empty"  # the table of a Held of several tables of a module, none of which holds anything


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


class _Registered:
    def __repr__(self) -> str:
        return "a parameter or buffer of the model"


class _LeftOut:
    def __repr__(self) -> str:
        return "nothing that the parallel module leaves"


ABSENT = _Absent()
LEFT_OUT = _LeftOut()
REGISTERED = _Registered()


@dataclass(frozen=True, slots=True)
class Shape:
    """A container or an object, apart from what it holds."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.size}" if self.size >= 0 else self.kind


@dataclass(frozen=True, slots=True)
class Value:
    """What is compared by a copy of its value: the state of a random generator, a small array, a set."""

    kind: str
    value: object

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, slots=True)
class Taken(Value):
    """How far something has got that is another with each time that something is taken from it: an iterator, a generator of random
    numbers. A forward that takes from one is refused, so that to any other it is the same."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The order of the keys of a dict. Of a dict that has other keys, its Shape and its items tell."""

    keys: tuple[object, ...]

    def __str__(self) -> str:
        return f"{len(self.keys)} keys in an order"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Order) and (self.keys == other.keys or set(self.keys) != set(other.keys))

    def __hash__(self) -> int:
        return hash(frozenset(self.keys))


@dataclass(frozen=True, slots=True)
class Opaque:
    """What cannot be compared but by identity."""

    value: object

    def __str__(self) -> str:
        return type(self.value).__name__


class Held(NamedTuple):
    """One container as it was. path: ends with a dot where its items are attributes. items: its contents. keys: those that are looked
    at, of a dict; None for all. table: which of the tables of a module it is ('_buffers', '_forward_hooks'), if it is one; EMPTY for
    several of them, which are the holder and hold nothing."""

    path: str
    holder: Any
    items: Any
    keys: frozenset[str] | None = None
    table: str = ""


class Place(NamedTuple):
    """Where something stands in a container. key: under which; None of a closure, which holds one thing."""

    held: Held
    key: Any

    @property
    def path(self) -> str:
        return self.held.path if self.key is None else child(self.held, self.key)

    @property
    def around(self) -> str:
        return self.path

    def moved(self, now: Mapping[str, Any]) -> Place | None:
        """The same place in the container that stands now where this one's did. now: by their paths."""
        return now.get(self.path)

    def now(self) -> Any:
        """What stands there; ABSENT for nothing."""
        found = contents(self.held.holder, None if self.key is None else frozenset({self.key}))
        return found if self.key is None else found.get(self.key, ABSENT)

    def put(self, value: object) -> None:
        keys = None if self.key is None else frozenset({self.key})
        put_back(self.held._replace(items=value if keys is None else {self.key: value}, keys=keys))


def places(held: Iterable[Held]) -> Iterator[tuple[Any, Place]]:
    """What closures hold, and what stands under a key or an attribute that is no table of a module, each with its place."""
    for one in held:
        if isinstance(one.holder, CellType):
            yield one.items, Place(one, None)
        elif isinstance(one.items, dict) and not one.table:
            yield from ((value, Place(one, key)) for key, value in one.items.items())


def child(held: Held, key: Any) -> str:
    """The path of one of the items of a container."""
    if held.keys is not None and isinstance(held.holder, dict):
        return f"{key} of {held.path}"
    if isinstance(held.holder, type):
        return f"{held.path}.{key}"
    return f"{held.path}{key}" if held.path.endswith(".") or not held.path else f"{held.path}[{shown_key(key)}]"


def is_in(path: str, roots: Collection[str]) -> bool:
    """Whether a place is one of these, or in one of them."""
    return path in roots or any(path.startswith((f"{root}[", f"{root}.")) for root in roots)


def same(a: object, b: object) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if isinstance(a, Opaque) and isinstance(b, Opaque):
        return a.value is b.value or (isinstance(a.value, MethodType) and a.value == b.value)
    return bool(a == b) or (a != a and b != b)


def describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = str(value) if isinstance(value, (Shape, Value, Order, Opaque)) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def value_of(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return ABSENT


_FEW = 200  # keys of which the order is looked at
_PLAIN_DICTS = frozenset({dict, OrderedDict})


def contents(holder: Any, keys: frozenset[str] | None = None) -> Any:
    """A shallow copy of what a container holds."""
    if type(holder) is dict and keys is None:
        return holder.copy()
    if isinstance(holder, ContextVar):
        return value_of(holder)
    if isinstance(holder, CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return ABSENT
    if isinstance(holder, FunctionType):
        return {"__defaults__": holder.__defaults__, "__kwdefaults__": holder.__kwdefaults__, "__code__": holder.__code__}
    if isinstance(holder, type):
        return {k: v for k, v in vars(holder).items() if not k.startswith("__")}
    if keys is not None and not isinstance(holder, dict):
        return {k: getattr(holder, k, ABSENT) for k in keys}
    if isinstance(holder, dict):
        if keys is not None:
            return {k: dict.get(holder, k, ABSENT) for k in keys}
        if isinstance(holder, OrderedDict) and dict.__len__(holder) > 1:  # dict.items knows nothing of its order
            return {key: dict.__getitem__(holder, key) for key in keys_of(holder)}
        return dict(dict.items(holder)) if dict.__len__(holder) else {}  # an OrderedDict's items are slow, and most tables are empty
    return frozenset(set.__iter__(holder)) if isinstance(holder, set) else tuple(_base(holder).__iter__(holder))


def _base(holder: Any) -> Any:
    """The container of Python that an object is: its methods are called, not what a subclass makes of them (loads on access)."""
    return next(base for base in (OrderedDict, dict, list, tuple, deque, set, frozenset) if isinstance(holder, base))


def order_of(held: Held) -> Order | None:
    """The order of a dict of a few keys that are compared by value; None of attributes, registries and all else."""
    if not isinstance(held.items, dict) or held.keys is not None or held.table or not held.path or held.path.endswith("."):
        return None
    if not isinstance(held.holder, dict) or not 1 < len(held.items) <= _FEW:
        return None
    return Order(tuple(held.items)) if all(map(is_plain, held.items)) else None


def keys_of(holder: dict[Any, Any]) -> tuple[Any, ...]:
    """As they are in order, whatever a subclass makes of that."""
    return tuple(OrderedDict.__iter__(holder) if isinstance(holder, OrderedDict) else dict.__iter__(holder))


def put_back(held: Held) -> None:
    """The container holds again what is written there; of a Held with keys, under these."""
    holder, items = held.holder, held.items
    if held.table == KEPT:
        return
    if held.table == EMPTY:
        for table in holder if any(holder) else ():
            table.clear()
        return
    if type(holder) in _PLAIN_DICTS and held.keys is None and len(holder) == len(items):
        if all(map(operator.is_, map(dict.get, repeat(holder), items, repeat(ABSENT)), items.values())) and _in_order(held):
            return
    now = contents(holder, held.keys)
    if isinstance(holder, (CellType, ContextVar)):
        if now is not items and items is not ABSENT:
            holder.set(items) if isinstance(holder, ContextVar) else setattr(holder, "cell_contents", items)
        return
    if isinstance(items, dict):
        if len(now) == len(items) and all(now.get(k, ABSENT) is v for k, v in items.items()) and _in_order(held):
            return
        if not isinstance(holder, dict):
            for key in now.keys() - items.keys() if held.keys is None else ():
                delattr(holder, key)
            for key, value in items.items():
                if now.get(key, ABSENT) is not value:
                    delattr(holder, key) if value is ABSENT else setattr(holder, key, value)
            return
        base = _base(holder)
        if held.keys is None:
            base.clear(holder)
        for key in [k for k in now if items.get(k, ABSENT) is ABSENT and held.keys is not None]:
            base.pop(holder, key, None)
        for key, value in items.items():
            if value is not ABSENT:
                base.__setitem__(holder, key, value)
        return
    if len(now) == len(items) and (now == items if isinstance(items, frozenset) else all(a is b for a, b in zip(now, items))):
        return
    base = _base(holder)
    base.clear(holder)
    base.update(holder, items) if isinstance(holder, set) else base.extend(holder, items)


def _in_order(held: Held) -> bool:
    order = order_of(held)
    return order is None or order.keys == keys_of(held.holder)


def is_leaf(value: object) -> bool:
    """Whether it is compared as a whole: what is plain, but a tuple of numbers, which calls may make of tensors."""
    return is_plain(value) and not (type(value) is tuple and any(type(x) in (int, float) for x in value))


def is_plain(value: object) -> bool:
    """Whether it is compared by its value: a number, a string, None, a dtype, a tuple of such."""
    return type(value) in EXACTLY or isinstance(value, SIMPLE) or (type(value) is tuple and all(isinstance(x, SIMPLE) for x in value))


def shown_key(key: object) -> str:
    return repr(key) if isinstance(key, (str, int, float, bool, tuple, type(None))) else f"a {type(key).__name__} {id(key)}"


def without_ids(path: str) -> str:
    """A path as every process has it, in which objects that are keys are not told apart."""
    return _IDS.sub("", path)
