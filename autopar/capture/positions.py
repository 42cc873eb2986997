"""How far an iterator has got, told without advancing it."""

from __future__ import annotations

import gc
import operator
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autopar.capture.held import Taken, Value, is_plain
from autopar.capture.reach import is_foreign

__all__ = ["is_iterator", "position_of"]

_DEPTH = 8  # iterators and objects within one another
_FEW = 200  # items of a container that are looked at
_WHOLE = (torch.Tensor, nn.Module, FunctionType, MethodType, ModuleType, CodeType, type)  # told apart by identity
_CANNOT = (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError)  # what is raised where nothing can be told
ByValue = Callable[[Any], Value | None]


def is_iterator(value: object) -> bool:
    """Whether a value is a generator, or an iterator of Python's own kinds, apart from files."""
    cls = type(value)
    if not hasattr(cls, "__next__") or cls.__module__ == "_io":
        return False
    return isinstance(value, GeneratorType) or (is_foreign(cls.__module__) and not hasattr(value, "__dict__"))


def position_of(value: Any, by_value: ByValue) -> Taken | None:
    """What is another one where an iterator has been advanced; None where that cannot be told. by_value: tells apart what else it takes
    from."""
    try:
        return Taken(f"iterator ({type(value).__name__})", _position(value, by_value, _DEPTH))
    except _CANNOT:
        return None


def _position(value: Any, by_value: ByValue, depth: int) -> tuple[object, ...]:
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        held = [] if frame is None else gc.get_referents(value)  # its variables, and the iterators of its loops
        parts = [x for x in held if not isinstance(x, FrameType)]
        return "generator", -1 if frame is None else frame.f_lasti, *(_part(x, by_value, depth - 1) for x in parts)
    if hasattr(value, "__length_hint__") and (left := operator.length_hint(value, -1)) >= 0:
        return type(value).__name__, left
    _, *held = value.__reduce__()
    return type(value).__name__, *(_part(x, by_value, depth) for x in held)


def _part(value: Any, by_value: ByValue, depth: int) -> object:
    """What tells apart a part of an iterator: its position where it is one, what it holds where that is little, else which one it is."""
    if is_plain(value):
        return value
    if depth == 0 or isinstance(value, _WHOLE):
        return id(value), getattr(value, "_version", 0)
    if is_iterator(value):
        return _position(value, by_value, depth)
    if isinstance(value, tuple | list | deque):
        return len(value), *((_part(x, by_value, depth - 1) for x in value) if len(value) <= _FEW else ())
    if isinstance(value, dict):
        return len(value), *((_part(x, by_value, depth - 1) for x in value.values()) if len(value) <= _FEW else ())
    known = by_value(value)
    if known is not None:
        return known
    own = getattr(value, "__dict__", None)
    return id(value), _part(own, by_value, depth - 1) if isinstance(own, dict) else None
