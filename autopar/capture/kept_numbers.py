"""Numbers that code only keeps, or returns, and computes nothing else of: `self.accuracy = float(hits.mean())`, `self.hits +=
int(hits.sum())`, `return loss, {"norm": float(x.norm())}`."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
from types import FrameType, SimpleNamespace

from torch import nn

from autopar.capture.conditions import is_at, parsed

__all__ = ["is_only_kept"]

_SUMS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_FILLS = ("append", "update")  # methods of lists and dicts that take what they are given as it is, and return nothing
_MADE = "<string>"  # the file of what dataclasses write themselves
_BETWEEN = ("torch.nn.modules.module", "torch.fx.")
_CALLER = "autopar.capture.export"  # which calls the model to trace it
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_only_kept(frame: FrameType, kind: type[int] | type[float]) -> bool:
    """Whether the line that runs in a frame, which makes a number of a tensor by float() or int(), does nothing with it but return it from
    the model, by itself or in a tuple, list, dict or record, or keep it, or a sum or product with it, under an attribute, in a container
    under one, or at the end of a list: at once, or by way of local variables of which the function does nothing else."""
    tree, line = parsed(frame.f_code.co_filename), frame.f_lineno
    made = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_made_by(kind, n) and is_at(n, line)] if tree else []
    return bool(made) and tree is not None and all(_Ways(tree, frame).are_kept(n) for n in made)


class _Ways:
    """Of values in the code of one file."""

    def __init__(self, tree: ast.Module, frame: FrameType) -> None:
        self._parents, self._frame, self._ends = _parents(tree), frame, _is_whole_forward(frame)

    def are_kept(self, value: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        """Whether the value of an expression is only kept. seen: local variables that it went through."""
        parent = self._parents[value]
        if isinstance(parent, ast.Tuple | ast.List | ast.Dict | ast.Starred | ast.keyword):
            return self.are_kept(parent, seen)
        if isinstance(parent, ast.Return):
            return self._ends
        if isinstance(parent, ast.Assign):
            return all(self._takes(target, seen) for target in parent.targets)
        if isinstance(parent, ast.AnnAssign):
            return self._takes(parent.target, seen)
        if isinstance(parent, ast.BinOp | ast.AugAssign) and isinstance(parent.op, _SUMS):
            if isinstance(parent, ast.BinOp):
                other = parent.left if value is parent.right else parent.right
                with_another = any(isinstance(n, ast.Attribute | ast.Subscript) for n in ast.walk(other))  # as a running number is
                return with_another and self._is_put_somewhere(parent)
            return not isinstance(parent.target, ast.Name) and self._takes(parent.target, seen)
        if isinstance(parent, ast.Call) and value is not parent.func:
            if isinstance(parent.func, ast.Attribute) and parent.func.attr in _FILLS:
                return self._takes(parent.func.value, seen)
            return self._is_record(parent.func) and self.are_kept(parent, seen)
        return False

    def _is_put_somewhere(self, value: ast.expr) -> bool:
        """Whether the value of an expression goes to an attribute, or into what is under one, and nowhere else: what is computed of it in
        one call is of another number."""
        parent = self._parents[value]
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, _SUMS):
            return self._is_put_somewhere(parent)
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target] if isinstance(parent, ast.AugAssign) else []
        return bool(targets) and all(not isinstance(x, ast.Name) and self._takes(x, frozenset()) for x in targets)

    def _takes(self, target: ast.expr, seen: frozenset[str]) -> bool:
        """Whether what is put there, or into what is there, is only kept."""
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            return self._is_watched(target)
        if not isinstance(target, ast.Name):
            return False
        if target.id in seen:
            return True
        inside = list(ast.walk(self._function(target)))
        elsewhere = [name for n in inside if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names]
        if target.id in elsewhere or any(isinstance(n, ast.arg) and n.arg == target.id for n in inside):
            return False
        uses = [n for n in inside if isinstance(n, ast.Name) and n.id == target.id and n is not target]
        return all(self._does_nothing(use, seen | {target.id}) for use in uses)

    def _is_watched(self, target: ast.expr) -> bool:
        """Whether an attribute is of the model, or of what else lives longer than the call: of a local object nobody sees who reads it."""
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        code = self._frame.f_code
        if not isinstance(target, ast.Name):
            return False
        is_local = target.id in (*code.co_varnames, *code.co_cellvars)
        return not is_local or isinstance(self._frame.f_locals.get(target.id), nn.Module)

    def _does_nothing(self, use: ast.Name, seen: frozenset[str]) -> bool:
        """Whether one use of a local variable is only to set, fill or keep it."""
        parent = self._parents[use]
        if isinstance(use.ctx, ast.Store):
            return not isinstance(parent, ast.AugAssign)
        if isinstance(parent, ast.Subscript) and parent.value is use:
            return isinstance(parent.ctx, ast.Store) and not isinstance(self._parents[parent], ast.AugAssign)
        if isinstance(parent, ast.Attribute):
            return parent.attr in _FILLS
        return self.are_kept(use, seen)

    def _function(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, (*_FUNCTIONS, ast.Module)):
            node = self._parents[node]
        return node

    def _is_record(self, function: ast.expr) -> bool:
        """Whether a function makes a container that has what it is given as it is."""
        if not isinstance(function, ast.Name):
            return False
        name = function.id
        if name in self._frame.f_code.co_varnames:
            return False
        kind = self._frame.f_globals.get(name, getattr(builtins, name, None))
        if not isinstance(kind, type):
            return False
        if dataclasses.is_dataclass(kind):
            code = getattr(kind.__init__, "__code__", None)
            return not hasattr(kind, "__post_init__") and code is not None and code.co_filename == _MADE
        return kind in (dict, SimpleNamespace) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _is_whole_forward(frame: FrameType) -> bool:
    """Whether what a frame returns is what the model returns: no other code of the user's takes it, as a hook or a loss=fn."""
    back = frame.f_back
    while back is not None and str(back.f_globals.get("__name__", "")).startswith(_BETWEEN):
        back = back.f_back
    own = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    if back is None or back.f_globals.get("__name__") != _CALLER or getattr(own, "_forward_hooks", None):
        return False
    loss = back.f_locals.get("loss")
    return loss is None or getattr(loss, "__module__", "") == _CALLER


@functools.lru_cache
def _parents(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    return {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}


def _is_made_by(kind: type, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == kind.__name__
