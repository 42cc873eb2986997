"""What stands where each forward of the original leaves a tensor that no forward reads: attention weights to look at, an auxiliary loss.
What is old there must not be taken for new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["LeftOut"]


class LeftOut:
    """Stands where the original would have left a tensor, or a number made of one. read: computes the tensor, of which is asked what is
    asked of this; None: using it raises AttributeError that says what to do (why: in these words)."""

    def __init__(self, path: str, read: Callable[[], Tensor] | None = None, why: str = "") -> None:
        self.__dict__["_path"], self.__dict__["_read"], self.__dict__["_why"] = path, read, why

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return LeftOut if self.__dict__["_read"] is None else Tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tensor(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tensor(), name, value)

    def _tensor(self) -> Tensor:
        read: Callable[[], Tensor] | None = self.__dict__["_read"]
        return read() if read is not None else self._refuse()

    def _refuse(self) -> NoReturn:
        said = self.__dict__["_why"] or (
            f"{self.__dict__['_path']}: the original's forward leaves there what it computes, and the parallel module does not. Return the "
            f"tensor from forward, or compile with outputs='all', which leaves tensors there, and numbers that are made of them "
            f"by x.item(), float(x) and + - * / of these"
        )
        raise AttributeError(said)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, cls._tensor, (args, kwargs or {}))
        return func(*args, **kwargs)

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: Any) -> LeftOut:
        return LeftOut(self.__dict__["_path"], why=self.__dict__["_why"])

    def __reduce__(self) -> Any:
        return LeftOut, (self.__dict__["_path"], None, self.__dict__["_why"])

    def __repr__(self) -> str:
        path, read = self.__dict__["_path"], self.__dict__["_read"]
        return f"<{path}: {'not left by the parallel module' if read is None else 'computed when it is read'}>"

    def __str__(self) -> str:
        return repr(self) if self.__dict__["_read"] is None else str(self._tensor())


def _asked(name: str) -> Callable[..., Any]:
    def method(self: LeftOut, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._tensor(), name)(*args, **kwargs)

    return method


for _name in (
    "getitem", "setitem", "iter", "len", "float", "int", "bool", "index", "contains", "format", "array", "call",
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "floordiv", "rfloordiv", "mod",
    "rmod", "matmul", "rmatmul", "pow", "rpow", "neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "and", "rand", "or",
    "ror", "xor", "rxor", "complex",
):  # fmt: skip
    setattr(LeftOut, f"__{_name}__", _asked(f"__{_name}__"))
