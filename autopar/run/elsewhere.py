"""Parameters that stand beside the registries of modules: in attributes of other objects, in lists, in closures, in globals."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from autopar.run.objects import is_tuple, tuple_of

__all__ = ["Standing", "exchanged"]


class Standing(Protocol):
    """Where something stands."""

    def now(self) -> Any: ...

    def put(self, value: Any) -> None: ...


@contextlib.contextmanager
def exchanged(places: Iterable[Standing], by: Mapping[int, object]) -> Iterator[None]:
    """Inside, others stand at these places, and in lists, dicts, tuples and sets there, instead of some objects. by: the id of each -> the
    other one. What the caller has put there since is left."""
    exchange = _Exchange(by)
    try:
        for place in places:
            exchange.put(place.now, place.put)
        yield
    finally:
        exchange.undo()


class _Exchange:
    def __init__(self, by: Mapping[int, object]) -> None:
        self._by = by
        self._done: list[tuple[Callable[[], object], Callable[[Any], object], object, object]] = []
        self._seen: set[int] = set()

    def put(self, now: Callable[[], object], put: Callable[[Any], object]) -> None:
        """now, put: read and write a place."""
        before = now()
        inside = self._other(before)
        if inside is not before:
            put(inside)
            self._done.append((now, put, before, inside))

    def undo(self) -> None:
        for now, put, before, inside in reversed(self._done):
            with contextlib.suppress(LookupError):
                if now() is inside:
                    put(before)

    def _other(self, value: Any) -> Any:
        """What stands in the place of a value: the same, unless it is an object that is exchanged, or cannot be changed and holds one."""
        if id(value) in self._by:
            return self._by[id(value)]
        if isinstance(value, functools.partial):
            args, keywords = self._other(value.args), {key: self._other(x) for key, x in value.keywords.items()}
            same = args is value.args and all(x is value.keywords[key] for key, x in keywords.items())
            return value if same else functools.partial(value.func, *args, **keywords)
        if is_tuple(value) or type(value) in (set, frozenset):
            others = [self._other(x) for x in value]
            same = all(a is b for a, b in zip(value, others, strict=True))
            return value if same else tuple_of(value, others) if is_tuple(value) else type(value)(others)
        if isinstance(value, weakref.ref) and (target := value()) is not None and (found := self._other(target)) is not target:
            return weakref.ref(found)
        if isinstance(value, (dict, list, deque)) and id(value) not in self._seen:
            self._seen.add(id(value))
            for key in list(value) if isinstance(value, dict) else range(len(value)):
                self.put(functools.partial(value.__getitem__, key), functools.partial(value.__setitem__, key))
        return value
