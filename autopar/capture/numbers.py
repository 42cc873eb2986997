"""Numbers that a forward makes of tensors (`x.item()`) and gives to its caller, and sums, differences, products and quotients of them: each
is followed by the tensors of one element that it is made of, which a graph can hold. Arrays of numpy that are made of tensors and kept are
followed by these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor

from autopar.run.outputs import MadeOf, Returned
from autopar.run.varying import as_tensor

__all__ = ["NUMBERS", "Numbers", "Standing", "TracedArray", "may_stand", "numbers_like"]

NUMBERS = (torch.SymInt, torch.SymFloat)  # of a trace
_Of = Callable[[Sequence[Any]], Any]  # computes a number of others
_STEPS: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Mul": operator.mul, "FloatTrueDiv": operator.truediv, "IntTrueDiv": operator.truediv
}  # fmt: skip  (as sympy and torch call them)


class Standing(RuntimeError):
    """What stands for a number that is made of a tensor is computed with."""


class TracedArray:
    """Stands for an array of numpy that a trace makes of a tensor. It can be kept; what else is asked of it raises RuntimeError."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return numpy.ndarray

    def __getattr__(self, name: str) -> NoReturn:
        if not hasattr(numpy.ndarray, name):
            raise AttributeError(f"'numpy.ndarray' object has no attribute '{name}'")
        raise RuntimeError(f"an array that .numpy() has made of a tensor is used ({name}), which no graph holds")

    __hash__ = object.__hash__


def _used(name: str) -> Callable[..., NoReturn]:
    return lambda self, *_: self.__getattr__(name)


for _name in vars(numpy.ndarray):
    if _name.startswith("__") and _name not in vars(object):
        setattr(TracedArray, _name, _used(_name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__str__", "__format__", "__reduce_ex__"):
    setattr(TracedArray, _name, _used(_name))


_UNUSUAL = 2**62  # from here on, whole numbers are found in no model


def may_stand(value: object) -> bool:
    """Whether a number may be one that a trace has put in the place of another."""
    return (type(value) is float and value != value) or (type(value) is int and abs(value) >= _UNUSUAL // 2)


class Numbers:
    """Those of one trace."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[object, Tensor]] = {}  # by the number's id
        self._by_symbol: dict[object, Tensor] = {}
        self.stand = False  # numbers for others: nan, or one that is found in no model

    def note(self, number: Any, of: Tensor, dtype: torch.dtype) -> Any:
        """The number, made of a tensor of one element as that is now. (Without `torch.no_grad()`, which what is detached does not need:
        torch.export would move what is inside to a graph of its own, and lose who uses the numbers of this one.)"""
        self._made[id(number)] = number, (tensor := of.detach().reshape(()).to(dtype, copy=True))
        if isinstance(number, NUMBERS):
            self._by_symbol[number.node.expr] = tensor
        return number

    def hold(self, number: object, tensor: Tensor) -> None:
        """What stands for a number that the graph computes as this tensor of one element."""
        self._made[id(number)] = number, tensor

    def standing(self, number: object) -> int | float:
        """A number to leave in the place of what stands for one."""
        tensor = self._made[id(number)][1]
        return self._stands(float if tensor.dtype.is_floating_point else int, tensor)

    def stands_for(self, kind: type[int] | type[float], of: Tensor) -> int | float:
        """A number in the place of one that is made of a tensor of one element as that is now, and only kept."""
        return self._stands(kind, of.detach().reshape(()).to(torch.float64 if kind is float else torch.int64, copy=True))

    def _stands(self, kind: type[int] | type[float], tensor: Tensor) -> int | float:
        self.stand = True
        left: int | float = float("nan") if kind is float else _UNUSUAL + len(self._made)
        self.hold(left, tensor)
        return left

    def is_standing(self, value: object) -> bool:
        """Whether it may be such a number, or one that is computed of some."""
        return self.stand and may_stand(value)

    def array(self, of: Tensor) -> TracedArray:
        """Stands for the array that is made of a tensor, and has its memory."""
        array = TracedArray()
        self.hold(array, of.detach())
        return array

    def made_of(self, number: object) -> MadeOf | None:
        """The tensors that a number is made of, and what computes it of their elements; None for another number."""
        if id(number) in self._made:
            return (self._made[id(number)][1],), operator.itemgetter(0)
        if not isinstance(number, NUMBERS):
            return None
        expression = number.node.expr
        symbols = [x for x in self._by_symbol if x in expression.free_symbols]
        computed = _computed(expression, {symbol: place for place, symbol in enumerate(symbols)})
        return (tuple(self._by_symbol[x] for x in symbols), computed) if symbols and computed is not None else None

    def follows(self, number: object) -> bool:
        """Whether it is one of these, or computed of them."""
        return self.made_of(number) is not None

    def tensor_of(self, number: object) -> Tensor | None:
        """A number as a tensor of one element, computed by the graph; None for another number."""
        made_of = self.made_of(number)
        if made_of is None:
            return None
        tensors, computed = made_of
        if id(number) in self._made:
            return tensors[0]
        found: Tensor = computed([x.to(torch.float64) for x in tensors])
        return found.to(torch.int64 if isinstance(number, torch.SymInt) else torch.float64)


def _computed(expression: Any, places: Mapping[object, int]) -> _Of | None:
    """What computes an expression of sympy of its symbols; None if there is anything else in it than these, constants, sums, products and
    quotients."""
    if expression in places:
        return operator.itemgetter(places[expression])
    if expression.is_Integer or expression.is_Float or expression.is_Rational:
        constant = int(expression) if expression.is_Integer else float(expression)
        return lambda _: constant
    operands = [x for x in (_computed(x, places) for x in expression.args) if x is not None]
    if not operands or len(operands) < len(expression.args):
        return None
    kind = type(expression).__name__
    first, *others = operands
    if kind == "ToFloat":
        return lambda values: first(values) * 1.0
    if kind not in _STEPS:
        return None
    step = _STEPS[kind]

    def of(values: Sequence[Any]) -> Any:
        found = first(values)
        for other in others:
            found = step(found, other(values))
        return found

    return of


def numbers_like(returned: Returned | None) -> Callable[[object], MadeOf | None]:
    """Tells of a call's numbers which a trace has followed in what it returned; to be asked of each, in order. These stand as tensors."""
    followed = iter(returned.numbers if returned is not None else ())

    def made_of(number: Any) -> MadeOf | None:
        return ((as_tensor(number),), operator.itemgetter(0)) if next(followed, False) else None

    return made_of
