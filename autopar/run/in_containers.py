"""Parameters that attributes hold beside the registries of modules: `self.scales = [self.first, self.second]`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["exchanged"]

_REGISTRIES = frozenset(vars(nn.Module()))  # of parameters, buffers, modules and hooks
_CONTAINERS = (dict, list, deque, tuple)


@contextlib.contextmanager
def exchanged(modules: Iterable[nn.Module], by: Mapping[int, object]) -> Iterator[None]:
    """Inside, others stand in attributes, and in lists, dicts and tuples of these, in the place of objects. by: the id of each -> the other
    one. What the caller has put there since is left."""
    done: list[tuple[Any, Any, object, object]] = []  # container, key, before, inside
    seen: set[int] = set()

    def other(value: Any) -> Any:
        """What stands in the place of a value: the same, unless it is an object that is exchanged or a tuple that has one."""
        if id(value) in by:
            return by[id(value)]
        if type(value) not in _CONTAINERS or id(value) in seen:
            return value
        seen.add(id(value))
        if isinstance(value, tuple):
            found = tuple(map(other, value))
            return found if any(a is not b for a, b in zip(value, found, strict=True)) else value
        for key, x in list(value.items() if isinstance(value, dict) else enumerate(value)):
            put(value, key, x)
        return value

    def put(container: Any, key: Any, value: Any) -> None:
        if (now := other(value)) is not value:
            done.append((container, key, value, now))
            container[key] = now

    for module in modules:
        for name, value in list(vars(module).items()):
            if name not in _REGISTRIES:
                put(vars(module), name, value)
    try:
        yield
    finally:
        for container, key, before, inside in reversed(done):
            with contextlib.suppress(LookupError):
                if container[key] is inside:
                    container[key] = before
