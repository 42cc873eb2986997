"""What user's code does that autograd alone sees: autograd functions that it applies, hooks that it registers on tensors."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.utils.hooks import BackwardHook

from autopar.run import applies
from autopar.run.alone import written
from autopar.run.applies import Apply, Function
from autopar.run.region_modules import AsAutograd

__all__ = [
    "Function", "Kept", "applied_by", "backward_hooks_made_by", "backward_hooks_told", "hooks_told", "keeping_what_runs_again",
    "only_computes", "traced_as_kept",
]  # fmt: skip

Calls = Callable[[Function, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def applied_by(call: Calls) -> contextlib.AbstractContextManager[None]:
    """Inside, autograd functions that are neither torch's nor of this package are applied by `call`: it is given the function, what applies
    it, and its arguments. So are those of torch's distributions, whose operators have no gradients, where gradients are wanted."""

    def applied(apply: Apply, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.__module__.startswith("torch.distributions."):
            as_it_is = not torch.is_grad_enabled()
        else:
            as_it_is = function.__module__.startswith(("torch.", "autopar."))
        return apply(function, *args, **kwargs) if as_it_is else call(written(function), functools.partial(apply, function), args, kwargs)

    return applies.applied_by(applied)


@contextlib.contextmanager
def without_own_no_grad(function: Function) -> Iterator[None]:
    """Inside, torch.no_grad does nothing where the forward of this function itself uses it, as checkpointing written by hand does around
    what it runs again in backward. What it calls has its own."""
    code, enter, leave = getattr(function.forward, "__code__", None), torch.no_grad.__enter__, torch.no_grad.__exit__

    def entered(context: Any) -> None:
        if sys._getframe(1).f_code is not code:
            enter(context)

    def left(context: Any, *error: Any) -> None:
        if sys._getframe(1).f_code is not code:
            leave(context, *error)

    torch.no_grad.__enter__, torch.no_grad.__exit__ = entered, left  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.no_grad.__enter__, torch.no_grad.__exit__ = enter, leave  # type: ignore[method-assign]


_RUN_AGAIN: ContextVar[frozenset[Function]] = ContextVar("functions whose backward runs their forward again", default=frozenset())


@contextlib.contextmanager
def keeping_what_runs_again(functions: frozenset[Function]) -> Iterator[None]:
    """Inside, what these functions run in their forward is traced as if autograd had seen it, where their backward would run it again."""
    token = _RUN_AGAIN.set(functions)
    try:
        yield
    finally:
        _RUN_AGAIN.reset(token)


def traced_as_kept() -> contextlib.AbstractContextManager[None]:
    """Around a call that is traced: see `keeping_what_runs_again`."""
    functions = _RUN_AGAIN.get()

    def kept(cls: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Kept(cls)(*args, **kwargs) if cls in functions else apply(*args, **kwargs)

    return applied_by(kept) if functions else contextlib.nullcontext()


class Kept(AsAutograd):
    """As autograd would differentiate the forward of a function if that did not hide from it what it runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with without_own_no_grad(self.function):
            return super().forward(*args, **kwargs)


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


class _Passed:
    """In the place of torch's BackwardHook: nothing around a call of a module."""

    def setup_input_hook(self, args: Any) -> Any:
        return args

    def setup_output_hook(self, result: Any) -> Any:
        return result


@contextlib.contextmanager
def backward_hooks_made_by(make: Callable[[nn.Module, Sequence[Any], Sequence[Any], Callable[[], Any]], Any]) -> Iterator[None]:
    """Inside, `make` is given each module with full backward hooks that is called, these, and its pre-hooks, and what gives what would be
    made otherwise; it gives what has the methods of torch's BackwardHook, or None for nothing. (There is no public way to see them.)"""
    torchs: Any = of_modules
    before = torchs.BackwardHook

    def made(module: nn.Module, hooks: Sequence[Any], pre_hooks: Sequence[Any]) -> Any:
        otherwise = _Passed if before is BackwardHook else functools.partial(before, module, hooks, pre_hooks)
        return make(module, hooks, pre_hooks, otherwise) or _Passed()

    torchs.BackwardHook = made
    try:
        yield
    finally:
        torchs.BackwardHook = before


@contextlib.contextmanager
def backward_hooks_told(tell: Callable[[nn.Module, Sequence[Any]], None]) -> Iterator[None]:
    """Inside, `tell` is given each module with full backward hooks that is called, and these; torch makes nothing of them."""

    def make(module: nn.Module, hooks: Sequence[Any], before: Sequence[Any], otherwise: Callable[[], Any]) -> Any:
        tell(module, (*before, *hooks))
        return otherwise()

    with backward_hooks_made_by(make):
        yield


_WRITES = ("__i", "__set", "__del", "set_", "save", "seed", "manual_seed", "backward", "register", "retain", "distributed", "futures")
_READS = ("__int__", "__index__", "__invert__", "__iter__")
_KNOWN = frozenset(
    name for name in (*dir(Tensor), *dir(torch), *dir(F), *dir(nn), "F", "torch") if not name.startswith(_WRITES) or name in _READS
)
_LEAVES = ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "STORE_SLICE")


def only_computes(hook: Callable[..., Any]) -> bool:
    """Whether a hook does nothing but give a gradient that it computes: it uses operators of torch alone, none in place, and leaves
    nothing anywhere. Not every one that does so is known."""
    code = getattr(hook, "__code__", None)
    if not isinstance(code, CodeType) or any(isinstance(const, CodeType) for const in code.co_consts):
        return False
    if any(name not in _KNOWN or (name.endswith("_") and not name.endswith("__")) for name in code.co_names):
        return False
    if any(isinstance(const, tuple) and "out" in const for const in code.co_consts):  # the names of keyword arguments
        return False
    made = list(dis.get_instructions(code))
    gives_nothing = not code.co_names and not any(i.opname.startswith(("BINARY", "UNARY")) for i in made)
    return not gives_nothing and not any(i.opname.startswith(_LEAVES) for i in made)
