"""Counts that a forward keeps and does not read: `self.calls += 1`, `self.left -= len(x)`, `self.time += 0.1`. A program need not know
them; the parallel module adds to them after a call what the original adds.

Whether a number is read is found out by a call of the model in which something stands in its place that can be added to, and tells of
all else that is asked of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy

from autopar.capture.export import FAILURES
from autopar.capture.held import ABSENT, Place, places
from autopar.capture.numbers import may_stand
from autopar.capture.state import Change, State
from autopar.run.objects import is_tuple, tuple_of
from autopar.run.outputs import found_in

__all__ = ["Count", "counts_between", "not_read", "only_added_to"]


Number = int | float


class Count(NamedTuple):
    """A number that each call of a model adds to. seen: what it was before and after a call. amounts: what a call adds, one after the
    other."""

    place: Place
    seen: tuple[Number, Number] = (0, 0)
    amounts: tuple[Number, ...] = ()

    @property
    def path(self) -> str:
        return self.place.path

    def add(self) -> None:
        """As a call of the original does."""
        now = self.place.now()
        self.place.put(_after(0 if now is ABSENT else now, self.amounts))


def _after(number: Number, amounts: Sequence[Number]) -> Number:
    """One after the other, as rounding is."""
    for amount in amounts:
        number = number + amount
    return number


class _Added:
    """Stands for a count while the model is called. What else is asked of it, of all that a number can do, is noted in `asked`."""

    def __init__(self, asked: set[str], path: str, kind: type[Number], amounts: tuple[Number, ...] = ()) -> None:
        self.asked, self.path, self.kind, self.amounts = asked, path, kind, amounts

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.kind

    def __add__(self, other: object) -> _Added:
        if type(other) is int or (type(other) is float and self.kind is float):
            return _Added(self.asked, self.path, self.kind, (*self.amounts, other))
        return self._asked()

    def __sub__(self, other: object) -> _Added:
        return self + (-other if isinstance(other, int | float) else other)

    def _asked(self, *_: object) -> NoReturn:
        self.asked.add(self.path)
        raise TypeError(f"{self.path} is read")

    __radd__ = __add__


for _name, _what in {**vars(int), **vars(float)}.items():
    if _name not in ("__new__", "__doc__", "__getattribute__", "__add__", "__radd__", "__sub__"):
        setattr(_Added, _name, _Added._asked if callable(_what) else property(_Added._asked))


def counts_between(start: State, first: State, second: State, traced: Sequence[Change]) -> list[Count]:
    """The numbers that both calls, between three states, and the trace of a call change; whole ones by the same."""
    in_trace = {c.path: None if may_stand(c.after) else _grown(c.before, c.after) for c in traced}
    found = []
    for count in _numbers(second):
        before, between, after = (state.leaves.get(count.path, ABSENT) for state in (start, first, second))
        amounts = [_grown(between, after), _grown(before, between), in_trace.get(count.path)]
        whole = type(after) is int
        if all(amounts) and (not whole or len(set(amounts)) == 1):
            found.append(count._replace(seen=(between, after)))  # type: ignore[arg-type]
    return found


def _numbers(state: State) -> Iterator[Count]:
    yield from (Count(place) for value, place in places(state.held) if type(value) in (int, float))


def _grown(before: object, after: object) -> Number | None:
    if type(after) not in (int, float) or not (before is ABSENT or type(before) is type(after)):
        return None
    return after if before is ABSENT else after - before  # type: ignore[operator, return-value]


def not_read(paths: Collection[str], state: State, call: Callable[[], Any], taken: Callable[[], State]) -> frozenset[str]:
    """Of the places of numbers and arrays, those that a call of the model sets anew and does not read. state: of now; taken: gives that of
    another time."""
    asked: set[str] = set()
    stands: dict[str, Place] = {}

    def standing(value: Any, path: str, place: Place) -> Any:
        if is_tuple(value):
            items = tuple(standing(x, f"{path}[{k}]", place) for k, x in enumerate(value))
            return tuple_of(value, items) if any(map(operator.is_not, items, value)) else value
        if path not in paths or not isinstance(value, int | float | numpy.ndarray):
            return value
        stands[path] = place
        return _Added(asked, path, float)

    for value, place in [*places(state.held)]:
        stand = standing(value, place.path, place)
        if stand is not value:
            place.put(stand)
    try:
        if stands:
            call()
    except FAILURES:
        return frozenset()
    later = taken().leaves if stands else {}  # an object that holds one may be another
    stay = {path for path, place in stands.items() if any(type(x) is _Added for x in _members(later.get(place.path, ABSENT)))}
    return frozenset(path for path in stands if path not in asked | stay and type(later.get(path, ABSENT)) is not _Added)


def _members(value: object) -> tuple[object, ...]:
    return value if is_tuple(value) else (value,)


def only_added_to(counts: Sequence[Count], call: Callable[[], Any]) -> list[Count]:
    """Those that a call of the model, which gives what it returns, does not read, with what it adds to them, if there is no other among
    them."""
    asked: set[str] = set()
    for count in counts:
        count.place.put(_Added(asked, count.path, type(count.seen[1])))
    try:
        returned = [x for x in found_in(call()) if type(x) is _Added]
    except FAILURES:  # of what was read, the model's own code does
        return []
    now = [(count, count.place.now()) for count in counts]
    added = [(c, x.amounts) for c, x in now if type(x) is _Added and x.path == c.path]
    grown = [c._replace(amounts=amounts) for c, amounts in added if _after(c.seen[0], amounts) == c.seen[1]]
    return grown if len(grown) == len(counts) and not asked and not returned else []
