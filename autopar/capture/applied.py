"""What user's code does that autograd alone sees: autograd functions that it applies, hooks that it registers on tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Function", "applied_by", "hooks_told"]

Function = type[torch.autograd.Function]
Calls = Callable[[Function, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def applied_by(call: Calls) -> Iterator[None]:
    """Inside, autograd functions that are neither torch's nor of this package are applied by `call`: it is given the function, what applies
    it, and its arguments."""
    before = torch.autograd.Function.__dict__["apply"]

    def applied(cls: Function, *args: Any, **kwargs: Any) -> Any:
        apply = before.__get__(None, cls)
        return apply(*args, **kwargs) if cls.__module__.startswith(("torch.", "autopar.")) else call(cls, apply, args, kwargs)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]


@contextlib.contextmanager
def hooks_told(tell: Callable[[Callable[..., Any]], None]) -> Iterator[None]:
    """Inside, `tell` is given each hook that is registered on a tensor, before it is."""
    register = Tensor.register_hook

    def registered(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        tell(hook)
        return register(tensor, hook)

    Tensor.register_hook = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = register  # type: ignore[method-assign]
