"""What is computed when it is first asked for, by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Kind", "Reading", "Unreadable"]

T = TypeVar("T")
Kind = tuple[bool, bool]  # calls in training mode, and with gradients


class Unreadable(RuntimeError):
    """What a call did not compute cannot be computed any more."""


class Reading(Generic[T]):
    """Call it for what a call returns and leaves beside its loss: collective the first time. compute: computes that; it is given why, in
    words."""

    def __init__(self, compute: Callable[[str], T]) -> None:
        self._compute = compute
        self._found: T | str | None = None

    def __call__(self, why: str = "is read") -> T:
        if self._found is None:
            try:
                self._found = self._compute(why)
            except Unreadable as error:
                self._found = str(error)
        if isinstance(self._found, str):
            raise Unreadable(self._found)
        return self._found
