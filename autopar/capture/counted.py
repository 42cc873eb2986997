"""Counts that a forward keeps and does not read: `self.calls += 1`, `self.seen += len(x)`. A program need not know them; the parallel
module adds to them after a call what the original adds.

Whether a number is read is found out by a call of the model in which something stands in its place that can be added to, and tells of
all else that is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import CellType
from typing import Any, NamedTuple, NoReturn

from autopar.capture.export import FAILURES
from autopar.capture.held import ABSENT, Held, child, contents, put_back
from autopar.capture.state import Change, State
from autopar.run.outputs import found_in

__all__ = ["Count", "counts_between", "only_added_to"]


class Count(NamedTuple):
    """A number that each call of a model adds to. held: what holds it, under `key`; of a closure there is no key."""

    held: Held
    key: Any
    amount: int

    @property
    def path(self) -> str:
        return self.held.path if self.key is None else child(self.held, self.key)

    def now(self) -> Any:
        """What stands there; ABSENT for nothing."""
        found = contents(self.held.holder, None if self.key is None else frozenset({self.key}))
        return found if self.key is None else found.get(self.key, ABSENT)

    def put(self, value: object) -> None:
        keys = None if self.key is None else frozenset({self.key})
        put_back(self.held._replace(items=value if keys is None else {self.key: value}, keys=keys))

    def add(self) -> None:
        """As a call of the original does."""
        now = self.now()
        self.put(self.amount if now is ABSENT else now + self.amount)


class _Added:
    """Stands for a count while the model is called. What else is asked of it, of all that a number can do, is noted in `asked`."""

    def __init__(self, asked: set[str], path: str, amount: int = 0) -> None:
        self.asked, self.path, self.amount = asked, path, amount

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def __add__(self, other: object) -> _Added:
        return _Added(self.asked, self.path, self.amount + other) if type(other) is int else self._asked()

    def _asked(self, *_: object) -> NoReturn:
        self.asked.add(self.path)
        raise TypeError(f"{self.path} is read")

    __radd__ = __add__


for _name, _what in vars(int).items():
    if _name not in ("__new__", "__doc__", "__getattribute__", "__add__", "__radd__"):
        setattr(_Added, _name, _Added._asked if callable(_what) else property(_Added._asked))


def counts_between(start: State, first: State, second: State, traced: Sequence[Change]) -> list[Count]:
    """The whole numbers to which both calls, between three states, and the trace of a call add the same."""
    in_trace = {c.path: _grown(c.before, c.after) for c in traced}
    found = []
    for count in _numbers(second):
        before, between, after = (state.leaves.get(count.path, ABSENT) for state in (start, first, second))
        amount = _grown(between, after)
        if amount and amount == _grown(before, between) == in_trace.get(count.path):
            found.append(count._replace(amount=amount))
    return found


def _numbers(state: State) -> Iterator[Count]:
    for held in state.held:
        if isinstance(held.holder, CellType):
            if type(held.items) is int:
                yield Count(held, None, 0)
        elif isinstance(held.items, dict) and not held.table:
            yield from (Count(held, key, 0) for key, value in held.items.items() if type(value) is int)


def _grown(before: object, after: object) -> int | None:
    if type(after) is not int or not (before is ABSENT or type(before) is int):
        return None
    return after if before is ABSENT else after - before  # type: ignore[operator]


def only_added_to(counts: Sequence[Count], call: Callable[[], Any]) -> list[Count]:
    """Those that a call of the model, which gives what it returns, does not read, if there is no other among them."""
    asked: set[str] = set()
    for count in counts:
        count.put(_Added(asked, count.path))
    try:
        returned = [x for x in found_in(call()) if type(x) is _Added]
    except FAILURES:  # of what was read, the model's own code does
        return []
    now = [(count, count.now()) for count in counts]
    grown = [c for c, x in now if type(x) is _Added and (x.path, x.amount) == (c.path, c.amount)]
    return grown if grown == list(counts) and not asked and not returned else []
