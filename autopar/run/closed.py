"""Functions that hold tensors, by their closure, their defaults, or functools.partial: which these are, and the same over others; what code
is behind what can be called, and what it reads by name."""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["closed_tensors", "function_of", "is_named", "names_in", "over_tensors"]


def closed_tensors(function: Callable[..., Any]) -> tuple[Tensor, ...]:
    """The tensors that a function holds, also in tuples, lists, dicts and functions that it holds, each once."""
    found: dict[int, Tensor] = {}
    _over(function, lambda t: found.setdefault(id(t), t), {})
    return tuple(found.values())


def over_tensors(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """The same function over other tensors, in the order of `closed_tensors`."""
    others = {id(t): other for t, other in zip(closed_tensors(function), tensors, strict=True)}
    made: Callable[..., Any] = _over(function, lambda t: others[id(t)], {})
    return made


def _over(function: Any, other: Callable[[Tensor], Tensor], made: dict[int, Any]) -> Any:
    """A function that holds, in the place of each tensor, another one. made: what has been, which functions that hold each other share."""
    if id(function) in made:
        return made[id(function)]
    if isinstance(function, functools.partial):
        args, keywords = (_within(x, other, made) for x in (function.args, function.keywords))
        return functools.partial(_over(function.func, other, made), *args, **keywords)
    if not isinstance(function, FunctionType):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, closure=cells or None)
    made[id(function)] = copy
    for cell, own in zip(cells, function.__closure__ or (), strict=True):
        if own != CellType():  # it has been assigned
            cell.cell_contents = _within(own.cell_contents, other, made)
    copy.__defaults__ = _within(function.__defaults__, other, made)
    copy.__kwdefaults__ = _within(function.__kwdefaults__, other, made)
    return copy


def _within(value: Any, other: Callable[[Tensor], Tensor], made: dict[int, Any]) -> Any:
    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return other(x)
        holds = isinstance(x, functools.partial) or (isinstance(x, FunctionType) and (x.__closure__ or x.__defaults__ or x.__kwdefaults__))
        return _over(x, other, made) if holds else x

    return pytree.tree_map(leaf, value)


def function_of(called: Any) -> FunctionType | None:
    """The function whose code runs where something is called: that behind a partial, a method, or an object of the user's that can be
    called; None if there is none in Python."""
    while isinstance(called, functools.partial):
        called = called.func
    called = getattr(called, "__func__", called)
    found = called if isinstance(called, FunctionType) else inspect.getattr_static(type(called), "__call__", None)
    return found if isinstance(found, FunctionType) else None


def names_in(function: Any) -> set[str]:
    """The names by which a function, one inside of it, or one of the same file that it calls reads attributes, variables outside of it, and
    items."""
    found, left, seen = set[str](), [function], set[Any]()
    while left:
        one = left.pop()
        one = one if isinstance(one, CodeType) else function_of(one)
        code = getattr(one, "__code__", one)
        if not isinstance(code, CodeType) or code in seen:
            continue
        seen.add(code)
        found |= {*_loaded(code), *code.co_freevars, *(const for const in code.co_consts if isinstance(const, str))}
        left += [const for const in code.co_consts if isinstance(const, CodeType)]
        here = getattr(one, "__globals__", {})
        left += [x for name in code.co_names if isinstance(x := here.get(name), FunctionType) and x.__module__ == here.get("__name__")]
    return found


def _loaded(code: CodeType) -> set[str]:
    """The names that code loads, but for attributes of a `ctx`, which autograd gives it."""
    found, before = set[str](), ""
    for one in dis.get_instructions(code):
        if one.argval in code.co_names and before != "ctx":
            found.add(one.argval)
        before = one.argval if one.opname.startswith("LOAD_FAST") else ""
    return found


def is_named(place: str, names: set[str]) -> bool:
    """Whether code of these names may read what stands at a place: of an entry of a dict, by its key too."""
    container = place.partition(", which ")[0]
    keys = re.findall(r"\['(\w+)'\]", place)
    return not names.isdisjoint(re.findall(r"\w+", container.partition("[")[0])) and (not keys or not names.isdisjoint(keys))
