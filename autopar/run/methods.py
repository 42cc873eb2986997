"""Methods of the user's model that call it (`fit`, `training_step`): called on what stands for the model, their calls run as planned.

Where torch looks for what `nn.Module.compile` has made of a call, of the one module, stands for the time of such a method what runs the
call instead. A call of `self.forward` alone, or of a submodule, is not seen so (`outside` is about those). A model with a method that
differentiates gradients again, which a planned call cannot, is left to do all of it by itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.run.plain import users_level

__all__ = ["CallsOfMethods"]

_PLACE = "_compiled_call_impl"  # of a module: what torch calls in the place of its hooks and its forward
Runs = Callable[[tuple[Any, ...], dict[str, Any]], bool]


class CallsOfMethods:
    """Of one model and what stands for it. runs: whether that runs a call with these arguments."""

    def __init__(self, original: nn.Module, stand_in: Callable[..., Any], runs: Runs) -> None:
        self._original, self._stand_in, self._runs = original, stand_in, runs
        self._known: dict[Any, Any] = {}  # function -> what is called for it
        self._told: set[str] = set()

    @property
    def caught(self) -> bool:
        """Whether calls of the original are run by what stands for it, as of now."""
        found = self._original.__dict__.get(_PLACE)
        return found is not None and getattr(found, "__func__", None) is CallsOfMethods._call

    def watched(self, attribute: Any) -> Any:
        """The attribute of the original; of a method of the user's, one under which calls of the original are run so."""
        function = getattr(attribute, "__func__", None)
        own = isinstance(attribute, types.MethodType) and attribute.__self__ is self._original
        if not own or not isinstance(function, types.FunctionType) or self._differentiates_twice:
            return attribute
        if function.__module__.startswith("torch.") or inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            return attribute
        if function not in self._known:

            @functools.wraps(function)
            def method(*args: Any, **kwargs: Any) -> Any:
                with self.under_way():
                    return function(*args, **kwargs)

            self._known[function] = method
        return types.MethodType(self._known[function], self._original)

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, a call of the original with gradients is one of what stands for it."""
        there = self._original.__dict__
        if there.get(_PLACE) is not None or self._differentiates_twice:  # it is so already, or torch.compile's
            yield
            return
        there[_PLACE] = self._call
        try:
            yield
        finally:
            there.pop(_PLACE, None)

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """Inside, the original is as it was."""
        there = self._original.__dict__
        caught = there.pop(_PLACE, None)
        try:
            yield
        finally:
            if caught is not None:
                there[_PLACE] = caught

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._runs(args, kwargs):
            return self._stand_in(*args, **kwargs)
        return self._original._call_impl(*args, **kwargs)

    @functools.cached_property
    def _differentiates_twice(self) -> bool:
        """Whether code of the model's classes names the argument by which torch is asked for that."""
        kinds = [kind for kind in type(self._original).__mro__ if not kind.__module__.startswith("torch.")]
        members = (getattr(value, "__func__", value) for kind in kinds for value in vars(kind).values())
        functions = (inspect.unwrap(member) for member in members if callable(member))
        return any(_names(function.__code__, "create_graph") for function in functions if isinstance(function, types.FunctionType))

    def tell(self, text: str) -> None:
        """A warning, once."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(f"{type(self._original).__name__} {text}", stacklevel=users_level())


def _names(code: types.CodeType, word: str) -> bool:
    """Whether code, or a function that it makes, has a name, or a keyword of a call."""
    inside = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    keywords = (word in x for x in code.co_consts if isinstance(x, tuple))
    return word in code.co_names or any(keywords) or any(_names(one, word) for one in inside)
