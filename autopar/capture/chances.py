"""Conditions on random numbers that no draw can change: `if torch.rand([]) < self.layerdrop`, where layerdrop is 0.

Uniform draws are in [0, 1). Where the bound is outside of that the answer is known, and a trace is given it; the bound is a number of the
module, which guards watch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Chances"]

_DRAWS = frozenset({torch.rand, torch.rand_like})
_ALWAYS: Mapping[str, Callable[[float], bool | None]] = {  # whether u < bound for each u in [0, 1), and so on; None: for some
    "lt": lambda bound: True if bound >= 1 else False if bound <= 0 else None,
    "le": lambda bound: True if bound >= 1 else False if bound < 0 else None,
    "gt": lambda bound: True if bound < 0 else False if bound >= 1 else None,
    "ge": lambda bound: True if bound <= 0 else False if bound >= 1 else None,
}
_ASKS = frozenset({"__bool__", "item", "is_nonzero"})


class Chances:
    """Of one trace. Tensors are kept alive, so that their ids are theirs."""

    def __init__(self) -> None:
        self._drawn: dict[int, Tensor] = {}
        self._known: dict[int, tuple[Tensor, bool]] = {}

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A function was called."""
        if func in _DRAWS and isinstance(result, Tensor) and "out" not in kwargs:
            self._drawn[id(result)] = result
        always = _ALWAYS.get(getattr(func, "__name__", "").strip("_"))
        if always is None or len(args) != 2 or kwargs or not isinstance(args[1], int | float) or id(args[0]) not in self._drawn:
            return
        if (answer := always(args[1])) is not None and self._drawn[id(args[0])]._version == 0:
            self._known[id(result)] = result, answer

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool | None:
        """What a function that asks for a value gives, where no draw changes it."""
        if getattr(func, "__name__", "") not in _ASKS or id(args[0]) not in self._known:
            return None
        result, answer = self._known[id(args[0])]
        return answer if result._version == 0 and result.numel() == 1 else None
