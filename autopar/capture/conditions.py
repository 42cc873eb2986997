"""Conditions on values that can only raise, as `if labels.max() >= size: raise ValueError(...)` or `assert mask.any()`: a program goes on
as if they did not, and asks in every step. And numbers that are only kept, as in `self.accuracy = float(hits.mean())`."""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType

from torch.nn.modules import transformer

__all__ = ["chooses_a_kernel", "is_only_kept", "must_be"]

_IS_CAUSAL = getattr(getattr(transformer, "_detect_is_causal_mask", None), "__code__", None)  # of torch.nn.Transformer; private


def chooses_a_kernel(frame: FrameType) -> bool:
    """Whether a frame asks for values only to take a faster kernel, and False is right for all of them: whether a mask is the causal one,
    which is used where it is not known to be."""
    return frame.f_code is _IS_CAUSAL


def must_be(frame: FrameType) -> bool | None:
    """What a tensor must be, whose truth the line that runs in a frame asks for, for the code to go on without raising; None if the line
    does something else with it."""
    tree = _parsed(frame.f_code.co_filename)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.If | ast.Assert) and _holds(n.test, frame.f_lineno)] if tree else []
    if not found:
        return None
    innermost = max(found, key=lambda n: n.lineno)
    truth = _truth(innermost.test)
    if truth is None or isinstance(innermost, ast.Assert):
        return truth
    raises, otherwise = _only_raises(innermost.body), _only_raises(innermost.orelse)
    return None if raises == otherwise else truth != raises


def is_only_kept(frame: FrameType) -> bool:
    """Whether the line that runs in a frame, which makes a number of a tensor by float(), does nothing with it but keep it under an
    attribute, or in a container under one."""
    tree, line = _parsed(frame.f_code.co_filename), frame.f_lineno
    made = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _holds(n, line) and _is_float(n)] if tree else []
    kept = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _holds(n, line) and all(map(_is_place, n.targets))] if tree else []
    return bool(made) and {id(n) for n in made} <= {id(n.value) for n in kept}


def _is_float(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "float"


def _is_place(target: ast.expr) -> bool:
    while isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute)


@functools.lru_cache
def _parsed(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return None


def _holds(test: ast.expr | ast.Assign, line: int) -> bool:
    return test.lineno <= line <= (test.end_lineno or test.lineno)


def _truth(test: ast.expr) -> bool | None:
    """What each tensor in a test must be for the test to be true; None if that is not to be told from its form."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inside = _truth(test.operand)
        return None if inside is None else not inside
    terms = test.values if isinstance(test, ast.BoolOp) else [test]
    plain = all(isinstance(x, ast.Compare | ast.Name | ast.Attribute | ast.BinOp | ast.Call) for x in terms)
    builtin = any(isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id in ("all", "any", "bool") for x in terms)
    return True if plain and not builtin else None


def _only_raises(body: list[ast.stmt]) -> bool:
    *before, last = body or [ast.Pass()]
    return isinstance(last, ast.Raise) and all(isinstance(x, ast.Expr | ast.Assign | ast.AnnAssign) for x in before)
