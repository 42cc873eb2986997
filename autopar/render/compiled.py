"""torch.compile of what an emitted module computes between its collectives.

    h = F.layer_norm(h, (32,), w["ln.weight"], w["ln.bias"])        a, h = block_0_part_0(h, w["ln.weight"], w["ln.bias"])
    a = h.reshape(192, 32)                                     ->    del h
    del h                                                            b = C.all_gather(a, mesh.tp, dim=0)
    b = C.all_gather(a, mesh.tp, dim=0)

The functions of an emitted module are lists of statements without branches. Each run of statements that only compute becomes a function of
tensors, and torch.compile is given these. What communicates, reads weights, writes in place, calls a block or is autopar's own stays as it
is written, in its place: order of collectives, recompute, gathering and release of parameters are those of the module as emitted. A block
that stands for several layers is one function, and is compiled once.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["PART", "check_backend", "in_parts", "made_fast"]

PART = "_part_"  # in the names of the functions that are compiled
LEAST = 2  # statements of a part: one alone has nothing to be joined with
_OUTSIDE = frozenset({"C", "L", "recompute", "self"})  # what communicates, autopar's own, and what calls it


def check_backend(wanted: bool | str) -> str | None:
    """The backend of torch.compile: of True 'inductor'. ValueError, TypeError for what is none."""
    if not isinstance(wanted, bool | str):
        raise TypeError(f"compile_stages must be True, False or the name of a backend; got {type(wanted).__name__}")
    if not wanted:
        return None
    name = "inductor" if wanted is True else wanted
    known = [*torch.compiler.list_backends(()), "inductor"]
    if name not in known:
        raise ValueError(f"compile_stages={name!r}: torch.compile has no such backend; it has {', '.join(sorted(set(known)))}")
    return name


def in_parts(tree: ast.Module) -> ast.Module:
    """The module with its runs of computing statements in functions of their own."""
    tree = copy.deepcopy(tree)
    blocks = frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    found: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name != "prologue":
            parts, node.body = _divided(node, node.name, blocks)
            found += parts
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    parts, method.body = _divided(method, node.name, blocks)
                    found += parts
        found.append(node)
    tree.body = found
    return ast.fix_missing_locations(tree)


def made_fast(names: dict[str, Any], backend: str) -> None:
    """The parts among the names of a loaded module, compiled when they are first called. Random numbers are those of torch itself."""
    options: dict[str, str | int | bool | Callable[..., Any]] | None = {"fallback_random": True} if backend == "inductor" else None
    for name, value in list(names.items()):
        if PART in name and callable(value):
            names[name] = torch.compile(value, backend=backend, options=options, dynamic=False)


# ------------------------------------------------------------------------------------------------------------------ private
def _divided(function: ast.FunctionDef, name: str, blocks: frozenset[str]) -> tuple[list[ast.FunctionDef], list[ast.stmt]]:
    """The parts of a function, and its body that calls them."""
    runs: list[tuple[bool, list[ast.stmt]]] = []
    for statement in function.body:
        pure = _computes(statement, blocks)
        if runs and runs[-1][0] and pure:
            runs[-1][1].append(statement)
        else:
            runs.append((pure, [statement]))
    parts: list[ast.FunctionDef] = []
    body: list[ast.stmt] = []
    for index, (pure, statements) in enumerate(runs):
        rest = [s for _, later in runs[index + 1 :] for s in later]
        if not pure or sum(isinstance(s, ast.Assign) for s in statements) < LEAST:
            body += statements
            continue
        part, calls = _part(f"{name}{PART}{len(parts)}", statements, rest)
        parts.append(part)
        body += calls
    return parts, _forgetting_once(function.args, body)


def _computes(statement: ast.stmt, blocks: frozenset[str]) -> bool:
    """Whether it only computes new tensors, or forgets some."""
    if isinstance(statement, ast.Delete):
        return all(isinstance(target, ast.Name) for target in statement.targets)
    if not isinstance(statement, ast.Assign) or not all(isinstance(n, ast.Name) for target in statement.targets for n in _targets(target)):
        return False
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Name) and (node.id in _OUTSIDE or node.id in blocks):
            return False
        if isinstance(node, ast.Name) and node.id == "w" and not _is_weight(statement.value, node):
            return False
        if isinstance(node, ast.Name) and node.id == "mesh" and not _is_device(statement.value, node):
            return False
        if isinstance(node, ast.Attribute) and _in_place(node.attr):
            return False
        if isinstance(node, ast.Call) and _is_read(node.func):  # a submodule that runs as it is written
            return False
        if isinstance(node, ast.keyword) and node.arg == "out":
            return False
    return isinstance(statement.value, ast.Call | ast.BinOp | ast.UnaryOp | ast.Compare | ast.Subscript) and not _is_read(statement.value)


def _targets(target: ast.expr) -> Iterable[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple | ast.List) else (target,)


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _is_read(value: ast.expr) -> bool:
    """w["name"] alone."""
    return isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id == "w"


def _is_weight(value: ast.expr, name: ast.Name) -> bool:
    return any(_is_read(node) and node.value is name for node in ast.walk(value) if isinstance(node, ast.Subscript))


def _is_device(value: ast.expr, name: ast.Name) -> bool:
    return any(isinstance(node, ast.Attribute) and node.value is name and node.attr == "device" for node in ast.walk(value))


class _Outside(ast.NodeTransformer):
    """What a part is given: weights and the device become arguments, by the text of the expression."""

    def __init__(self, taken: set[str]) -> None:
        self.given: dict[str, tuple[str, ast.expr]] = {}
        self._taken = taken

    def _argument(self, node: ast.expr) -> ast.Name:
        text = ast.unparse(node)
        if text not in self.given:
            free = (f"given_{i}" for i in itertools.count())
            name = next(n for n in free if n not in self._taken)
            self._taken.add(name)
            self.given[text] = (name, node)
        return ast.Name(id=self.given[text][0], ctx=ast.Load())

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return self._argument(node) if _is_read(node) else self.generic_visit(node)  # type: ignore[return-value]

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id == "mesh":
            return self._argument(node)
        return self.generic_visit(node)  # type: ignore[return-value]


def _part(name: str, statements: Sequence[ast.stmt], rest: Sequence[ast.stmt]) -> tuple[ast.FunctionDef, list[ast.stmt]]:
    outside = _Outside(_names(statements))
    own: list[ast.stmt] = [outside.visit(copy.deepcopy(s)) for s in statements]
    made: set[str] = set()
    takes: dict[str, None] = {}
    gone: dict[str, None] = {}  # names of the caller's that the part forgets, or gives another value
    body: list[ast.stmt] = []
    given = dict(outside.given.values())
    for statement in own:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                assert isinstance(target, ast.Name)
                gone |= {target.id: None} if target.id in takes else {}
                made.discard(target.id)
            continue  # what is not returned is free when the part returns, and in what is compiled as soon as it is not needed
        for node in ast.walk(statement.value):  # type: ignore[attr-defined]
            if isinstance(node, ast.Name) and node.id not in made and node.id not in given and node.id not in _MODULES:
                takes[node.id] = None
        new = {n.id for target in statement.targets for n in _targets(target) if isinstance(n, ast.Name)}  # type: ignore[attr-defined]
        made |= new
        gone |= dict.fromkeys(n for n in new if n in takes)
        body.append(statement)
    wanted = _read_first(rest)
    gives = sorted(made & wanted)
    result = ast.Tuple(elts=[ast.Name(id=n, ctx=ast.Load()) for n in gives], ctx=ast.Load())
    arguments = [*takes, *given]
    part = ast.parse(f"def {name}({', '.join(arguments)}): pass").body[0]
    assert isinstance(part, ast.FunctionDef)
    part.body = [*body, ast.Return(value=result)]
    values: list[ast.expr] = [ast.Name(id=n, ctx=ast.Load()) for n in takes]
    values += given.values()
    call = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=values, keywords=[])
    target = ast.Tuple(elts=[ast.Name(id=n, ctx=ast.Store()) for n in gives], ctx=ast.Store())
    calls: list[ast.stmt] = [ast.Assign(targets=[target], value=call)] if gives else []
    forgotten = [n for n in gone if n not in gives and n not in wanted]
    if forgotten:
        calls.append(ast.Delete(targets=[ast.Name(id=n, ctx=ast.Del()) for n in forgotten]))
    return part, calls


def _read_first(statements: Iterable[ast.stmt]) -> set[str]:
    """The names that are read before they are given another value."""
    found: set[str] = set()
    changed: set[str] = set()
    for statement in statements:
        nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        found |= {node.id for node in nodes if isinstance(node.ctx, ast.Load)} - changed
        changed |= {node.id for node in nodes if not isinstance(node.ctx, ast.Load)}
    return found


def _forgetting_once(arguments: ast.arguments, body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements, of which those that forget names do so only with names that there are."""
    there = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Delete):
            targets = [t for t in statement.targets if isinstance(t, ast.Name) and t.id in there]
            there -= {t.id for t in targets}
            found += [ast.copy_location(ast.Delete(targets=list(targets)), statement)] if targets else []
            continue
        there |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        found.append(statement)
    return found


def _names(statements: Iterable[ast.stmt]) -> set[str]:
    return {node.id for s in statements for node in ast.walk(s) if isinstance(node, ast.Name)}


_MODULES = frozenset({"torch", "F", "float", "complex"})
