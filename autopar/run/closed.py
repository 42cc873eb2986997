"""Functions that hold tensors, by their closure, their defaults, or functools.partial: which these are, and the same over others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["closed_tensors", "over_tensors"]


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
