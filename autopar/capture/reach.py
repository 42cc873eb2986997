"""The Python code that a model's forward and its loss can run, the names that this code reads, and the classes whose attributes it may."""

from __future__ import annotations

import dis
import enum
import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

__all__ = ["HOOKS", "LruCache", "Reached", "is_foreign", "reached"]

LruCache = functools._lru_cache_wrapper
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "builtins"}
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_WRAPPERS = (staticmethod, classmethod)


class Reached:
    """functions: those that may run, each once. names: what they read as global, attribute or string. caches: functions with an
    lru_cache beside them. scopes: for the globals of each file (and for modules used as `settings.x`), the dict, its name, and the
    names that are read there. classes: the user's, of objects and used by name, apart from those of modules."""

    def __init__(self) -> None:
        self.functions: list[FunctionType] = []
        self.names: set[str] = set()
        self.caches: list[Any] = []
        self.scopes: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
        self.classes: dict[type, None] = {}  # in order


def is_foreign(module_name: object) -> bool:
    """Whether code of this module is that of Python, torch or numpy: it keeps no state of the user's."""
    return str(module_name).partition(".")[0] in _FOREIGN


def reached(model: nn.Module, others: Iterable[object]) -> Reached:
    """What the forward of the model and the given functions may run: methods are followed by their names, functions by what the
    globals and closures hold. Code of Python and torch is not followed."""
    return _Search(model).run(others)


class _Search:
    def __init__(self, model: nn.Module) -> None:
        self.found = Reached()
        self.pending: list[FunctionType] = []
        self.seen: set[int] = set()
        self.methods: dict[str, list[object]] = {}
        self.classes: set[type] = set()
        for module in model.modules():
            for cls in type(module).__mro__:
                self._class(cls)
            for value in (*_values(vars(module)), *(h for table in HOOKS for h in vars(module)[table].values())):
                self._add(value)
        for function in self.methods.get("forward", ()):
            self._add(function)

    def run(self, others: Iterable[object]) -> Reached:
        for other in others:
            self._add(other)
            if not isinstance(other, FunctionType) and not is_foreign(type(other).__module__):
                for cls in type(other).__mro__:
                    self._class(cls)
                self._names({"__call__", "forward"})
        while self.pending:
            self._visit(self.pending.pop())
        return self.found

    def _class(self, cls: type) -> None:
        if cls in self.classes or is_foreign(cls.__module__):
            return
        self.classes.add(cls)
        for name, value in vars(cls).items():
            if name in self.found.names:
                self._add(value)
            self.methods.setdefault(name, []).append(value)
            if isinstance(value, LruCache):
                self.found.caches.append(value)

    def _object(self, cls: type) -> None:
        """A class that is used by name, or that of an object: its attributes are read, and its methods run, where the names are."""
        for base in cls.__mro__:
            if base not in self.classes and not is_foreign(base.__module__) and not issubclass(base, (nn.Module, enum.Enum)):
                self.found.classes[base] = None
                self._class(base)

    def _add(self, value: object) -> None:
        kind = value if isinstance(value, type) else type(value)
        if not is_foreign(kind.__module__):
            self._object(kind)
        for function in _functions(value, 3):
            if id(function) not in self.seen and not is_foreign(function.__module__):
                self.seen.add(id(function))
                self.pending.append(function)
                self.found.functions.append(function)

    def _visit(self, function: FunctionType) -> None:
        names = set(_names(function.__code__))
        self._names(names)
        self._scope(function.__globals__, str(function.__module__), names, set(_stored(function.__code__)))
        for cell in function.__closure__ or ():
            try:
                found = cell.cell_contents
            except ValueError:  # it is empty
                continue
            for value in (found, *_inside(found)):
                self._add(value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(value)

    def _names(self, names: set[str]) -> None:
        new = names - self.found.names
        self.found.names |= new
        for name in new & self.methods.keys():
            for method in self.methods[name]:
                self._add(method)

    def _scope(self, scope: dict[str, Any], name: str, names: set[str], stored: set[str]) -> None:
        if id(scope) not in self.found.scopes:
            self.found.scopes[id(scope)] = (scope, name, set())
            self.found.caches += [value for value in scope.values() if isinstance(value, LruCache)]
        read = self.found.scopes[id(scope)][2]
        for key in (names & scope.keys()) - read:
            read.add(key)
            value = scope[key]
            if isinstance(value, ModuleType):
                if not is_foreign(value.__name__):
                    self._scope(vars(value), value.__name__, names, set())
            else:
                for one in (value, *_inside(value)):
                    self._add(one)
        read |= stored


def _functions(value: object, depth: int) -> Iterator[FunctionType]:
    """The functions of Python that a callable is made of."""
    if depth == 0 or value is None:
        return
    if isinstance(value, FunctionType):
        yield value
        yield from _functions(vars(value).get("__wrapped__"), depth - 1)
    elif isinstance(value, (MethodType, *_WRAPPERS)):
        yield from _functions(value.__func__, depth)
    elif isinstance(value, property):
        yield from _functions(value.fget, depth)
    elif isinstance(value, functools.cached_property):
        yield from _functions(value.func, depth)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _functions(part, depth - 1)
    elif isinstance(value, LruCache):
        yield from _functions(value.__wrapped__, depth - 1)


def _values(attributes: dict[str, Any]) -> Iterator[object]:
    """The attributes of a module, and what is in containers there."""
    for value in attributes.values():
        yield value
        yield from _inside(value)


def _inside(value: object) -> Iterable[object]:
    if type(value) is dict:
        return list(value.values())
    return value if isinstance(value, (list, tuple)) and type(value) in (list, tuple) else ()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _stored(code: CodeType) -> Iterator[str]:
    """The globals that the code assigns: the first call may make them."""
    if _STORE_GLOBAL in code.co_code[::2]:
        yield from (str(i.argval) for i in dis.get_instructions(code) if i.opcode == _STORE_GLOBAL)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored(constant)
