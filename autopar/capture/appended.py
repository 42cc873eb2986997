"""Lists and deques to which a forward, or a hook on a layer, appends and which no code of a call reads: activations that are looked at
after it, losses on the way. To a program they are empty before each call; the parallel module appends what a call has put there.

Whether a list is read is found out by a call of the model in which something stands in its place to which can be appended, and which tells
of all else that is asked of it.

A list that the first call makes under a key of a dict (`seen[name].append(x)` of a defaultdict(list)) is as one that was there and empty.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CellType
from typing import Any, NamedTuple, NoReturn

from autopar.capture.export import FAILURES
from autopar.capture.held import Place, places
from autopar.capture.state import State
from autopar.errors import CaptureError

__all__ = ["Appended", "appended_between", "emptied", "only_appended_to"]


class Appended(CaptureError):
    """The model is to be captured with these lists empty. made: those of them that a call makes, and where."""

    def __init__(self, lists: Sequence[list[Any]], made: Sequence[tuple[Place, list[Any]]] = ()) -> None:
        super().__init__("each call appends to a list")
        self.lists, self.made = tuple(lists), tuple(made)


class Grown(NamedTuple):
    """A list to which each call appends so many items. places: all that hold it, as far as can be seen. made: by the first call."""

    items: list[Any]
    places: tuple[Place, ...]
    more: int
    made: bool = False


class _Stand:
    """Stands for a list while the model is called. asked: set where anything else is asked of it, of all that a list can do."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.asked = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return list

    def append(self, item: object) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __iadd__(self, items: Any) -> _Stand:
        self.items += items
        return self

    def _asked(self, *_: object, **__: object) -> NoReturn:
        self.asked = True
        raise TypeError("the list is read")


for _name in vars(list):
    if _name not in ("__new__", "__init__", "__doc__", "__getattribute__", "__class_getitem__", "append", "extend", "__iadd__"):
        setattr(_Stand, _name, _Stand._asked)


@contextlib.contextmanager
def emptied(lists: Sequence[list[Any]], made: Sequence[tuple[Place, list[Any]]]) -> Iterator[None]:
    """Inside, they are empty. made: those that a call makes, and where: there they are, inside."""
    before = [list(items) for items in lists]
    there = [(place, place.now()) for place, _ in made]
    try:
        for items in lists:
            items.clear()
        for place, items in made:
            place.put(items)
        yield
    finally:
        for place, value in there:
            place.put(value)
        for items, held in zip(lists, before, strict=True):
            items.clear()
            items.extend(held)


def appended_between(start: State, first: State, second: State) -> list[Grown]:
    """The lists to which both calls, between three states, append as many items, or which the first makes so."""
    before, between = ({id(held.holder): held.items for held in state.held} for state in (start, first))
    found = []
    for held in second.held:
        if type(held.holder) not in (list, deque) or id(held.holder) not in before or id(held.holder) not in between:
            continue
        states = before[id(held.holder)], between[id(held.holder)], held.items
        most = held.holder.maxlen if isinstance(held.holder, deque) else None
        more = _more(*states[:2], most)
        if more and more == _more(*states[1:], most) and (places := _places(second, held.holder)):
            found.append(Grown(held.holder, places, more))
    return [*found, *_made(start, first, second)]


def _more(before: tuple[Any, ...], now: tuple[Any, ...], most: int | None) -> int:
    """How many items were appended; 0 if something else was done. most: of them all, if it is a deque that has room for so many."""
    more = len(now) - len(before)
    if most is not None and len(now) == most:  # which left as many out as it had no room for
        starts = (k for k in range(max(1, more), most + 1) if all(map(operator.is_, before[len(before) + k - most :], now)))
        return next(starts, 0)
    return more if more > 0 and all(map(operator.is_, before, now)) else 0


def _made(start: State, first: State, second: State) -> Iterator[Grown]:
    """The lists that the first call makes in dicts that hold nothing else."""
    there = {id(held.holder) for held in start.held}
    between, later = ({id(held.holder): held.items for held in state.held} for state in (first, second))
    for one in first.held:
        if one.table or one.keys is not None or not isinstance(one.holder, dict) or id(one.holder) not in there:
            continue
        found = []
        for key, value in one.items.items():
            if type(value) is list and id(value) not in there:
                then, now = between.get(id(value), ()), later.get(id(value), ())
                if then and len(now) == 2 * len(then) and all(map(operator.is_, then, now)):
                    found.append(Grown(value, (Place(one, key),), len(then), made=True))
        if len(found) == len(one.items):
            yield from found


def _places(state: State, items: list[Any]) -> tuple[Place, ...]:
    """Where a list stands; () if that is a class, an object without a dict or another list too: the loop may put another there unseen."""
    found = tuple(place for value, place in places(state.held) if value is items)
    containers = (held.items for held in state.held if isinstance(held.items, tuple) and not isinstance(held.holder, CellType))
    unseen = any(x is items for container in containers for x in container)
    return found if not unseen and all(isinstance(place.held.holder, (dict, CellType)) for place in found) else ()


def only_appended_to(grown: Sequence[Grown], call: Callable[[], Any]) -> Appended | None:
    """The lists of which a call of the model reads none, and to which it appends as many items."""
    if not grown:
        return None
    stands = [_Stand() for _ in grown]
    for one, stand in zip(grown, stands, strict=True):
        for place in one.places:
            place.put(stand)
    try:
        call()
    except FAILURES:  # of what was read, the model's own code does
        return None
    for one, stand in zip(grown, stands, strict=True):
        stays = all(place.now() is stand for place in one.places)
        if stand.asked or not stays or len(stand.items) != one.more:
            return None
    return Appended([one.items for one in grown], [(one.places[0], one.items) for one in grown if one.made])
