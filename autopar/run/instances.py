"""The objects of a class that the process holds, found by the collector of garbage."""

from __future__ import annotations

import gc
from typing import TypeVar

__all__ = ["instances"]

T = TypeVar("T")
_FEW = 32  # classes, whose referrers are found sooner than all objects are looked at


def instances(kind: type[T]) -> list[T]:
    """Those of the class and of all derived from it. An object refers to its class."""
    kinds: list[type] = [kind]
    for one in kinds:
        kinds += one.__subclasses__()
    of = frozenset(kinds)
    return [x for x in (gc.get_referrers(*kinds) if len(kinds) < _FEW else gc.get_objects()) if type(x) in of]
