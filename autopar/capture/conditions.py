"""Conditions on values that can only raise, as `if labels.max() >= size: raise ValueError(...)` or `assert mask.any()`: a program goes on
as if they did not, and asks in every step. Where each element must be so, it counts those that are not, which ranks and micro-batches do by
their parts."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn.modules import transformer

__all__ = ["Truths", "chooses_a_kernel", "is_at", "must_be", "parsed"]

_IS_CAUSAL = getattr(getattr(transformer, "_detect_is_causal_mask", None), "__code__", None)  # of torch.nn.Transformer; private

_SAYS: Mapping[str, bool] = {"all": True, "_is_all_true": True, "any": False, "_is_any_true": False}  # whether of all elements
_EXTREMES: Mapping[str, bool] = {"max": True, "amax": True, "min": False, "amin": False}  # whether the largest
_COMPARES: Mapping[str, bool] = {
    "__lt__": True, "lt": True, "__le__": True, "le": True, "__gt__": False, "gt": False, "__ge__": False, "ge": False
}  # fmt: skip  (whether less)


@dataclass(frozen=True, slots=True)
class _Truth:
    """What a tensor says of all elements of another one, or of some. value: that tensor. asked: makes of the elements what each is."""

    value: object
    elements: Tensor
    of_all: bool
    asked: Callable[[Tensor], Tensor] = Tensor.bool


class Truths:
    """What any and all say of elements, and comparisons of their maximum or minimum with a number."""

    def __init__(self) -> None:
        self._known: dict[int, _Truth] = {}  # by the id of what says it, which is kept
        self._extremes: dict[int, tuple[object, Tensor, bool]] = {}  # what max and min give: that, of what, whether the largest

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], result: object) -> None:
        """A torch function has been called with these arguments alone."""
        name = getattr(func, "__name__", "")
        if name in _SAYS and len(args) == 1:
            self._known[id(result)] = _Truth(result, args[0], _SAYS[name])
        elif name in _EXTREMES and len(args) == 1:
            self._extremes[id(result)] = result, args[0], _EXTREMES[name]
        elif name in _COMPARES and id(args[0]) in self._extremes and isinstance(args[1], int | float):
            _, elements, largest = self._extremes[id(args[0])]
            self._known[id(result)] = _Truth(result, elements, largest is _COMPARES[name], functools.partial(_compared, func, args[1]))

    def elements(self, value: Tensor, expected: bool) -> Tensor | None:
        """bool[*]: the elements of which each must be as a value is expected, None if there are no such: of any() that is False, all() that
        is True, a maximum that is not more than a number."""
        truth = self._known.get(id(value))
        return truth.asked(truth.elements) if truth is not None and truth.of_all is expected else None


def _compared(func: Callable[..., Tensor], number: float, elements: Tensor) -> Tensor:
    return func(elements, number)


def chooses_a_kernel(frame: FrameType) -> bool:
    """Whether a frame asks for values only to take a faster kernel, and False is right for all of them: whether a mask is the causal one,
    which is used where it is not known to be."""
    return frame.f_code is _IS_CAUSAL


def must_be(frame: FrameType, *, by_item: bool = False) -> bool | None:
    """What a tensor must be, whose truth the line that runs in a frame asks for, for the code to go on without raising; None if the line
    does something else with it. by_item: it asks by .item(), which stands for the truth where it is a term of the condition."""
    tree = parsed(frame.f_code.co_filename)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.If | ast.Assert) and is_at(n.test, frame.f_lineno)] if tree else []
    if not found:
        return None
    innermost = max(found, key=lambda n: n.lineno)
    truth = _truth(innermost.test)
    if by_item and not _items_are_terms(innermost.test):
        return None
    if truth is None or isinstance(innermost, ast.Assert):
        return truth
    raises, otherwise = _only_raises(innermost.body), _only_raises(innermost.orelse)
    return None if raises == otherwise else truth != raises


@functools.lru_cache
def parsed(path: str) -> ast.Module | None:
    """The code of a file; None if there is none, or it is none of Python's."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return None


def is_at(node: ast.expr, line: int) -> bool:
    """Whether an expression stands in a line, counted from 1."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _truth(test: ast.expr) -> bool | None:
    """What each tensor in a test must be for the test to be true; None if that is not to be told from its form."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inside = _truth(test.operand)
        return None if inside is None else not inside
    terms = test.values if isinstance(test, ast.BoolOp) else [test]
    plain = all(isinstance(x, ast.Compare | ast.Name | ast.Attribute | ast.BinOp | ast.Call) for x in terms)
    builtin = any(isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id in ("all", "any", "bool") for x in terms)
    return True if plain and not builtin else None


def _items_are_terms(test: ast.expr) -> bool:
    """Whether there are .item() in a test, and each is one of its terms, not an operand of something else."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    terms = test.values if isinstance(test, ast.BoolOp) else [test]
    calls = [n for n in ast.walk(test) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "item"]
    return bool(calls) and {id(n) for n in calls} <= {id(x) for x in terms}


def _only_raises(body: list[ast.stmt]) -> bool:
    *before, last = body or [ast.Pass()]
    return isinstance(last, ast.Raise) and all(isinstance(x, ast.Expr | ast.Assign | ast.AnnAssign) for x in before)
