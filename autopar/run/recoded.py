"""Functions of torch's that are other ones for a while, also for code that has them by names of its own (`from torch.compiler import
is_compiling`): the function stays, and is given other code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

__all__ = ["answered_by", "as_it_was"]


def _asks(*args: Any, **kwargs: Any) -> Any:
    return _answer(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821  (a name where the function is defined, see below)


def as_it_was(function: FunctionType) -> FunctionType:
    """Another function with the code that it has now."""
    found = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


@contextlib.contextmanager
def answered_by(function: FunctionType, answer: Callable[..., Any]) -> Iterator[None]:
    """Inside, who calls the function calls `answer`, whose caller's caller it is. function: one that closes over nothing."""
    own, name = function.__code__, f"_autopar_{function.__name__}"
    before = function.__globals__.get(name)
    code = _asks.__code__.replace(co_names=tuple(name if x == "_answer" else x for x in _asks.__code__.co_names), co_name=own.co_name)
    function.__globals__[name] = answer
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = own
        if before is None:
            del function.__globals__[name]
        else:
            function.__globals__[name] = before
