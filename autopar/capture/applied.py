"""What user's code does that autograd alone sees: autograd functions that it applies, hooks that it registers on tensors."""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Function", "applied_by", "hooks_told", "only_computes"]

Function = type[torch.autograd.Function]
Calls = Callable[[Function, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def applied_by(call: Calls) -> Iterator[None]:
    """Inside, autograd functions that are neither torch's (but for those of its distributions, whose operators have no gradients by
    themselves, where gradients are wanted) nor of this package are applied by `call`: it is given the function, what applies it, and its arguments."""
    before = torch.autograd.Function.__dict__["apply"]

    def applied(cls: Function, *args: Any, **kwargs: Any) -> Any:
        apply = before.__get__(None, cls)
        if cls.__module__.startswith("torch.distributions."):
            as_it_is = not torch.is_grad_enabled()
        else:
            as_it_is = cls.__module__.startswith(("torch.", "autopar."))
        return apply(*args, **kwargs) if as_it_is else call(cls, apply, args, kwargs)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]


@contextlib.contextmanager
def hooks_told(tell: Callable[[Tensor, Callable[..., Any]], None]) -> Iterator[None]:
    """Inside, `tell` is given each tensor and the hook that is registered on it, before it is."""
    register, again = Tensor.register_hook, False  # torch asks modes of functions, and what is there, once more

    def registered(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        nonlocal again
        if again:
            return register(tensor, hook)
        again = True
        try:
            tell(tensor, hook)
            return register(tensor, hook)
        finally:
            again = False

    Tensor.register_hook = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = register  # type: ignore[method-assign]


_KNOWN = frozenset((*dir(Tensor), *dir(torch), *dir(F), *dir(nn), "F", "torch"))
_LEAVES = ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "STORE_SLICE")


def only_computes(hook: Callable[..., Any]) -> bool:
    """Whether a hook does nothing but give a gradient that it computes: it uses operators of torch alone, none in place, and leaves
    nothing anywhere. Not every one that does so is known."""
    code = getattr(hook, "__code__", None)
    if not isinstance(code, CodeType) or any(isinstance(const, CodeType) for const in code.co_consts):
        return False
    if any(name not in _KNOWN or (name.endswith("_") and not name.endswith("__")) for name in code.co_names):
        return False
    made = list(dis.get_instructions(code))
    gives_nothing = not code.co_names and not any(i.opname.startswith(("BINARY", "UNARY")) for i in made)
    return not gives_nothing and not any(i.opname.startswith(_LEAVES) for i in made)
