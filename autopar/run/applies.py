"""Who applies autograd functions: `MyFunction.apply`, and what code has of it by another name (`f = MyFunction.apply`).

A name is bound to the method when the user's module is imported, so that another `torch.autograd.Function.apply` would not be asked. The
method stays therefore, and is given other code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

__all__ = ["Apply", "Function", "applied_by"]

Function = type[torch.autograd.Function]
Apply = Callable[..., Any]  # of the function and its arguments
_METHOD: Any = torch.autograd.Function.__dict__["apply"].__func__
_OWN = FunctionType(_METHOD.__code__, _METHOD.__globals__, _METHOD.__name__, _METHOD.__defaults__, _METHOD.__closure__)
_by: list[Callable[[Apply, Function, tuple[Any, ...], dict[str, Any]], Any]] = []  # the innermost is the last


class _Asks:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (its code becomes that of a method whose class is torch's)
        return __class__._applied(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821


def _applied(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], level: int | None = None) -> Any:
    level = len(_by) if level is None else level
    if not level:
        return _OWN(function, *args, **kwargs)

    def further(function: Function, *args: Any, **kwargs: Any) -> Any:
        return _applied(function, args, kwargs, level - 1)

    return _by[level - 1](further, function, args, kwargs)


@contextlib.contextmanager
def applied_by(by: Callable[[Apply, Function, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Inside, every application of an autograd function is that of `by`: it is given what applies a function otherwise (that of the context
    around this one), the function, its arguments and its keywords."""
    if not _by:
        torch.autograd.Function._applied = staticmethod(_applied)  # type: ignore[attr-defined]
        _METHOD.__code__ = _Asks.apply.__code__
    _by.append(by)
    try:
        yield
    finally:
        _by.remove(by)
        if not _by:
            _METHOD.__code__ = _OWN.__code__
            del torch.autograd.Function._applied  # type: ignore[attr-defined]
