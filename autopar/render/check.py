"""The production check of emitted source, and how it is made a module."""

from __future__ import annotations

import ast
import builtins
import hashlib
import linecache
import symtable
import types

from autopar.errors import RenderError
from autopar.render.compiled import in_parts, made_fast

__all__ = ["check_source", "load"]

ALLOWED_IMPORTS = frozenset({"torch", "torch.nn.functional", "autopar.run"})
ALLOWED_BUILTINS = frozenset({"float", "complex"})


def check_source(source: str, *, stages: int | None = None) -> ast.Module:
    """Whether the source is what `render` may write; the parsed module.

    It parses; it consists of a docstring, imports of torch and autopar.run, functions, classes and assignments; it reads
    no name that it does not define, no builtin but float and complex, and no attribute with two leading underscores
    (aten's own __and__ and its like aside); it has MANIFEST, STAGES and, if given, that number of stages. Raises
    RenderError that shows the line.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise RenderError(f"the emitted source does not parse: {error}") from error
    found = _Checker(source)
    for n, node in enumerate(tree.body):
        if n == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign):
            found.report(node, f"a {type(node).__name__} at the top level")
    found.visit(tree)
    found.names()
    assigned = {t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    for name in ("MANIFEST", "STAGES"):
        if name not in assigned:
            found.problems.append(f"{name} is not defined")
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if stages is not None and len(classes) != stages:
        found.problems.append(f"{stages} stages were to be written, found {classes}")
    if found.problems:
        raise RenderError("the emitted source breaks its own rules:\n  " + "\n  ".join(found.problems[:20]))
    return tree


class _Checker(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.source, self.lines = source, source.splitlines()
        self.problems: list[str] = []

    def report(self, node: ast.AST, problem: str) -> None:
        line = getattr(node, "lineno", 0)
        self.problems.append(f"line {line}: {problem}: {self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ''}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name not in ALLOWED_IMPORTS:
                self.report(node, f"import of {alias.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module not in ALLOWED_IMPORTS:
            self.report(node, f"import from {node.module}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr.startswith("__") and not (isinstance(node.value, ast.Attribute) and ast.unparse(node.value).startswith("torch.ops.")):
            self.report(node, f"attribute {node.attr}")
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.report(node, "a lambda")

    def visit_Global(self, node: ast.Global) -> None:
        self.report(node, "a global statement")

    def names(self) -> None:
        """Names that are read but defined nowhere, in the module and in every function."""
        top = symtable.symtable(self.source, "<emitted>", "exec")
        defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
        waiting = [top]
        while waiting:
            table = waiting.pop()
            waiting += table.get_children()
            for symbol in table.get_symbols():
                name = symbol.get_name()
                if symbol.is_referenced() and symbol.is_global() and name not in defined and name not in ALLOWED_BUILTINS:
                    kind = "builtin" if hasattr(builtins, name) else "undefined name"
                    self.problems.append(f"{kind} {name!r} is read in {table.get_name()!r} (line {table.get_lineno()})")


def load(source: str, *, backend: str | None = None) -> types.ModuleType:
    """The emitted module, from its source. Tracebacks, debuggers and inspect show the source under a virtual file name. backend: of
    torch.compile, for what it computes between its collectives (`compiled`).

    Raises RenderError if the source does not pass `check_source`.
    """
    tree = check_source(source)
    name = f"autopar_emitted_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # no mtime: never stale
    module = types.ModuleType(name)
    module.__file__ = filename
    if backend is not None:
        tree = in_parts(tree)
    exec(compile(tree, filename, "exec"), module.__dict__)  # noqa: S102  (checked above: the source was written by render)
    if backend is not None:
        made_fast(module.__dict__, backend)
    return module
