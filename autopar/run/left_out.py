"""Attributes in which each forward of the original leaves a tensor that no forward reads: attention weights to look at, the last hidden
state. The parallel module does not leave them, and what is old there must not be taken for new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

__all__ = ["LeftOut", "leave_out"]


class LeftOut:
    """Stands where the original would have left a tensor; using it raises AttributeError that says what to do."""

    def __init__(self, path: str) -> None:
        self.__dict__["_path"] = path

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AttributeError(
            f"{self.__dict__['_path']}: the original's forward leaves a tensor there, and the parallel module does not. Return the tensor "
            f"from forward, and compile with outputs='all'"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(x for x in args if isinstance(x, cls))._refuse()

    __getitem__ = __iter__ = __len__ = __float__ = __int__ = __bool__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = __format__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __repr__(self) -> str:
        return f"<{self.__dict__['_path']}: not left by the parallel module>"


def leave_out(model: nn.Module, paths: Sequence[str]) -> None:
    """Put a LeftOut at each path that is there already: an attribute of a module ('a.last'), or what is in one ("a.kept['k'][0]")."""
    modules = dict(model.named_modules())
    for path in paths:
        owner, bracket, inside = path.partition("[")
        owner, _, name = owner.rpartition(".")
        module = modules.get(owner)
        if module is None or name not in module.__dict__:
            continue
        holder: Any = module.__dict__
        keys = [name, *(k for k in f"{bracket}{inside}"[1:-1].split("][") if bracket)]
        for k in keys[:-1]:
            holder = _at(holder, k)
        if isinstance(holder, (dict, list)):
            for key in _keys(holder):
                if key == name if holder is module.__dict__ else repr(key) == keys[-1]:
                    holder[key] = LeftOut(path)


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder))) if isinstance(holder, (list, tuple)) else []


def _at(holder: Any, text: str) -> Any:
    """What a container holds under the key that is written so; None if it does not."""
    return next((holder[key] for key in _keys(holder) if text in (key, repr(key))), None)
