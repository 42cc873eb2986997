"""What stands where each forward of the original leaves a tensor that no forward reads: attention weights to look at, an auxiliary loss.
The parallel module does not leave it, and what is old there must not be taken for new."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["LeftOut"]


class LeftOut:
    """Stands where the original would have left a tensor, or a number made of one; using it raises AttributeError that says what to do."""

    def __init__(self, path: str) -> None:
        self.__dict__["_path"] = path

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AttributeError(
            f"{self.__dict__['_path']}: the original's forward leaves there what it computes, and the parallel module does not. Return the "
            f"tensor from forward, or compile with outputs='all', which leaves tensors there, and numbers that are an element of one "
            f"(x.item(), float(x); none that is computed of these)"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(x for x in args if isinstance(x, cls))._refuse()

    __getitem__ = __iter__ = __len__ = __float__ = __int__ = __bool__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = __format__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __contains__ = __call__ = __index__ = _refuse
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<{self.__dict__['_path']}: not left by the parallel module>"
