"""The Python code that a model's forward and its loss can run, the names that this code reads, and the classes whose attributes it may."""

from __future__ import annotations

import dis
import enum
import functools
import os
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = [
    "HOOKS", "LruCache", "Reached", "Reads", "Search", "codes_of", "compares_objects", "is_foreign", "is_installed", "loaded_in",
    "stored_by",
]  # fmt: skip

LruCache = functools._lru_cache_wrapper
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "builtins"}
_INSTALLED = {os.path.realpath(path) for path in site.getsitepackages()} | set(site.getsitepackages())
# Whose code runs between the lines of the user's: asserts that pytest rewrites call it, and what a model holds in parts is of its classes.
_APART = ("autopar", "cost_models", "pytest", "_pytest")
_FEW = 200
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_LOADS = frozenset(dis.opmap[n] for n in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_SUPER_ATTR") if n in dis.opmap)
_WRAPPERS = (staticmethod, classmethod)
_NO_CODE = (bool, int, float, str, type(None))
# Methods that run without being named.
_IMPLICIT = frozenset(
    f"__{name}__"
    for name in (
        "call", "getattr", "getattribute", "getitem", "setitem", "delitem", "missing", "get", "len", "iter", "next", "contains", "bool",
        "float", "int", "index", "enter", "exit", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv",
        "rtruediv", "floordiv", "mod", "pow", "neg", "abs", "matmul", "rmatmul", "torch_function",
    )
)  # fmt: skip
_MAKING = frozenset({"__new__", "__init__", "__post_init__"})  # methods that run where an object of a class is made
_OF_FUNCTIONS = frozenset({"forward", "setup_context", "backward"})
_BY_NAME = frozenset({"import_module", "__import__", "modules"})  # give a module for its name
_ALL_AT_ONCE = frozenset({"vars", "__dict__", "asdict", "astuple", "attrgetter", "eval", "exec", "getmembers"})  # attributes by no name
_MADE = frozenset({"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "BUILD_STRING", "BINARY_OP"})  # of a name


class Reached:
    """functions: those that may run, each once. names: what they read as global, attribute or string. asked: what they read as an attribute
    of a module of Python or torch alone. values: of these modules, those attributes that are values. caches: functions with an lru_cache
    beside them. scopes: for the globals of each file (and for modules used as `settings.x`), the dict, its name, and the names that are
    read there. classes: the user's, of objects and used by name, apart from those of modules. wide: classes of whose objects any attribute
    may be read, by a name that code makes or by none; everywhere: of all. by_data: names may stand in the user's data."""

    def __init__(self) -> None:
        self.functions: list[FunctionType] = []
        self.names: set[str] = set()
        self.asked: set[str] = set()
        self.values: dict[str, tuple[ModuleType, set[str]]] = {}
        self.caches: list[Any] = []
        self.scopes: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
        self.classes: dict[type, None] = {}  # in order
        self.wide: set[type] = set()
        self.everywhere = self.by_data = False


class Reads:
    """Which attributes of an object may be read. data: strings that the user's objects hold."""

    def __init__(self, code: Reached, data: Iterable[str]) -> None:
        self._code, self._names = code, code.names | (set(data) if code.by_data else set()) | {"forward"}
        self._of_classes: dict[type, frozenset[str] | None] = {}

    def of(self, cls: type, attributes: Mapping[Any, Any]) -> dict[Any, Any]:
        """Those that may be read of the attributes of an object of a class."""
        if cls not in self._of_classes:
            self._of_classes[cls] = self._beside(cls)
        more = self._of_classes[cls]
        if more is None:
            return dict(attributes)
        return {k: v for k, v in attributes.items() if k in self._names or k in more or not isinstance(k, str)}

    def _beside(self, cls: type) -> frozenset[str] | None:
        """What methods of Python and torch read, which are not followed; None for anything."""
        if self._code.everywhere or not self._code.wide.isdisjoint(cls.__mro__):
            return None
        if not issubclass(cls, nn.Module) and any(is_installed(base.__module__) for base in cls.__mro__ if not is_foreign(base.__module__)):
            return None  # whose methods are not followed
        foreign = [base for base in cls.__mro__ if is_foreign(base.__module__) and base not in (object, nn.Module)]
        methods = {name: value for base in reversed(foreign) for name, value in vars(base).items()}
        pending, found = [name for name in methods if name in self._names or name in _IMPLICIT], set[str]()
        while pending:
            for function in _functions(methods[pending.pop()], 3):
                if isinstance(function, LruCache):
                    continue
                new = set(_names(function.__code__)) - found
                found |= new
                pending += new & methods.keys()
        return frozenset(found)


def is_foreign(module_name: object) -> bool:
    """Whether code of this module is that of Python, torch or numpy: it keeps no state of the user's."""
    return str(module_name).partition(".")[0] in _FOREIGN


def stored_by(cls: type) -> frozenset[str]:
    """The attributes that methods of a class of torch's, and of its bases, give to an object. Others are the user's."""
    if cls not in _OF_CLASSES:
        methods = [x for base in cls.__mro__ for x in vars(base).values() if isinstance(x, FunctionType)]
        _OF_CLASSES[cls] = frozenset(i.argval for function in methods for i in dis.get_instructions(function) if i.opname == "STORE_ATTR")
    return _OF_CLASSES[cls]


_OF_CLASSES: dict[type, frozenset[str]] = {}


def _is_followed(module_name: object) -> bool:
    """Whether code of this module is looked at: it is the user's, or that of packages that are installed."""
    name = str(module_name)
    return not is_foreign(name) and not any(name == apart or name.startswith(f"{apart}.") for apart in _APART)


@functools.cache
def is_installed(module_name: str) -> bool:
    """Whether code of this module lies among the installed packages: what keeps settings in its classes is the user's code."""
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return bool(file) and any(file.startswith(f"{folder}{os.sep}") for folder in _INSTALLED)


class Search:
    """For what the forward of the model and the given functions may run (`found`): methods are followed by their names, functions by what
    the globals and closures hold. Code of Python and torch is not followed."""

    def __init__(self, model: nn.Module, others: Iterable[object]) -> None:
        self.found = Reached()
        self.pending: list[FunctionType] = []
        self.seen: set[int] = set()
        self.methods: dict[str, list[tuple[type, object]]] = {}
        self.owners: dict[int, type] = {}  # of a function
        self.classes: set[type] = set()
        self.making: set[type] = set()  # classes of which it is known what runs where an object is made
        for module in model.modules():
            for cls in type(module).__mro__:
                self._class(cls)
            own = vars(module)
            for value in (*own.values(), *(h for table in HOOKS for h in own[table].values())):
                if type(value) in _NO_CODE:
                    continue
                self._add(value)
                for item in _inside(value):
                    self._add(item)
        for cls, function in self.methods.get("forward", ()):
            self._add(function, cls)
        for other in others:
            self._add(other)
            if not isinstance(other, FunctionType) and not is_foreign(type(other).__module__):
                for cls in type(other).__mro__:
                    self._class(cls)
                self._names({"__call__", "forward"})

    def follow(self, objects: Iterable[object]) -> None:
        """From all that is known, and from functions and classes that are found to be there."""
        for value in objects:
            self._add(value)
        while self.pending:
            self._visit(self.pending.pop())

    def _class(self, cls: type) -> None:
        if cls in self.classes or not _is_followed(cls.__module__):
            return
        self.classes.add(cls)
        for name, value in vars(cls).items():
            if name in self.found.names or name in _IMPLICIT:
                self._add(value, cls)
            self.methods.setdefault(name, []).append((cls, value))
            if isinstance(value, LruCache):
                self.found.caches.append(value)

    def _object(self, cls: type) -> None:
        """A class that is used by name, or that of an object: its attributes are read, and its methods run, where the names are."""
        for base in cls.__mro__:
            if base in self.classes or not _is_followed(base.__module__) or issubclass(base, enum.Enum) or is_installed(base.__module__):
                continue
            self._class(base)
            if issubclass(base, nn.Module):
                self._names({"forward"})
            else:
                self.found.classes[base] = None
            if issubclass(base, torch.autograd.Function):  # of which autograd calls the rest
                for name in _OF_FUNCTIONS & vars(base).keys():
                    self._add(vars(base)[name], base)

    def _made(self, cls: type) -> None:
        """A class that is used by name: where its objects are made, it may give one that it made before."""
        if cls in self.making or issubclass(cls, (nn.Module, enum.Enum)):
            return
        self.making.add(cls)
        for base in cls.__mro__:
            if _is_followed(base.__module__) and not is_installed(base.__module__):
                for name in _MAKING & vars(base).keys():
                    self._add(vars(base)[name], base)

    def _add(self, value: object, owner: type | None = None) -> None:
        kind = value if isinstance(value, type) else type(value)
        if not is_foreign(kind.__module__):
            self._object(kind)
            if kind is value:
                self._made(kind)
        if not is_foreign(type(kind).__module__):
            self._object(type(kind))
        of = value.__self__ if isinstance(value, MethodType) else None
        if isinstance(of, type) and issubclass(of, torch.autograd.Function):  # its `apply`
            self._object(of)
        for function in _functions(value, 3):
            if isinstance(function, LruCache):
                self.found.caches.append(function)
                continue
            if owner is not None:
                self.owners[id(function)] = owner
            written_in = function.__globals__.get("__name__", "")  # functools.wraps says another module
            if id(function) not in self.seen and (_is_followed(function.__module__) or (written_in and _is_followed(written_in))):
                self.seen.add(id(function))
                self.pending.append(function)
                self.found.functions.append(function)

    def _visit(self, function: FunctionType) -> None:
        names, asked, values = _read(function)
        if function.__name__ in _MAKING:  # which sets attributes, and reads few
            names = (names & loaded_in(function.__code__)) - _MAKING
        self.found.asked |= asked
        for module, name in values:
            self.found.values.setdefault(module.__name__, (module, set()))[1].add(name)
        self._names(names)
        self._unnamed(function, names)
        by_name = _named(function) if not _BY_NAME.isdisjoint(names | asked) else ()
        for module in (*_imported(function), *by_name):
            self._module(module, names)
        self._scope(function.__globals__, str(function.__module__), names, set(_stored(function.__code__)))
        for cell in function.__closure__ or ():
            try:
                found = cell.cell_contents
            except ValueError:  # it is empty
                continue
            if isinstance(found, ModuleType):
                self._module(found, names)
            for value in (found, *_inside(found)):
                self._add(value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(value)

    def _names(self, names: set[str]) -> None:
        new = names - self.found.names
        self.found.names |= new
        for name in new & self.methods.keys():
            for cls, method in self.methods[name]:
                self._add(method, cls)

    def _unnamed(self, function: FunctionType, names: set[str]) -> None:
        """Notes whether the function reads attributes by other than their names."""
        made, from_data = _getattr(function.__code__) if names & {"getattr", "hasattr"} else (False, False)
        self.found.by_data |= from_data
        if made or names & _ALL_AT_ONCE:
            owner = self.owners.get(id(function))
            if owner is not None:
                self.found.wide.add(owner)
            elif not is_installed(function.__module__):
                self.found.everywhere = True

    def _module(self, module: ModuleType, names: set[str]) -> None:
        """A module of the user's that is used by name."""
        if _is_followed(module.__name__):
            self._scope(vars(module), module.__name__, names, set())

    def _scope(self, scope: dict[str, Any], name: str, names: set[str], stored: set[str]) -> None:
        if id(scope) not in self.found.scopes:
            self.found.scopes[id(scope)] = (scope, name, set())
            self.found.caches += [value for value in scope.values() if isinstance(value, LruCache)]
        read = self.found.scopes[id(scope)][2]
        for key in (names & scope.keys()) - read:
            read.add(key)
            value = scope[key]
            if isinstance(value, ModuleType):
                self._module(value, names)
            else:
                for one in (value, *_inside(value)):
                    self._add(one)
        read |= stored


def _functions(value: object, depth: int) -> Iterator[Any]:
    """The functions of Python that a callable is made of, and their caches."""
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
        yield value
        yield from _functions(value.__wrapped__, depth - 1)


def _inside(value: object, depth: int = 3) -> Iterator[object]:
    """What containers hold, of which there are not many."""
    if type(value) not in (dict, list, tuple) or depth == 0 or len(value) > _FEW:  # type: ignore[arg-type]
        return
    for item in list(value.values()) if isinstance(value, dict) else value:  # type: ignore[attr-defined]
        yield item
        yield from _inside(item, depth - 1)


def _names(code: CodeType) -> Iterator[str]:
    """All names and strings in code."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        else:
            yield from (x for x in (constant if isinstance(constant, (tuple, frozenset)) else (constant,)) if _is_name(x))


def _is_name(constant: object) -> bool:
    return isinstance(constant, str) and constant.isidentifier()


def _read(function: FunctionType) -> tuple[set[str], set[str], list[tuple[ModuleType, str]]]:
    """The names in a function, apart from those that are only attributes of modules of Python and torch (`torch.log`), and these; and which
    of those are values (`torch.backends.cudnn.benchmark`), with their modules."""
    elsewhere, of_modules, values = set[str](), set[str](), list[tuple[ModuleType, str]]()
    base: ModuleType | None = None
    for kind, name in _loads(function.__code__):
        if kind == "global":
            elsewhere.add(name)
            base = _foreign_module(function.__globals__.get(name))
        elif kind == "attribute" and base is not None:
            of_modules.add(name)
            value = getattr(base, name, None) if name in vars(base) or type(base) is not ModuleType else None
            if isinstance(value, (bool, int, float, str)):
                values.append((base, name))
            base = _foreign_module(value)
        else:
            elsewhere.add(name)
            base = None
    asked = of_modules - elsewhere
    return {name for name in _names(function.__code__) if name not in asked}, asked, values


def _imported(function: FunctionType) -> Iterator[ModuleType]:
    """The modules that a function imports where it runs, of those that are there."""
    package = function.__globals__.get("__package__") or ""
    for kind, name in _loads(function.__code__):
        if kind == "import":
            found = sys.modules.get(name) or sys.modules.get(f"{package}.{name}".rstrip("."))
            if isinstance(found, ModuleType):
                yield found


def _named(function: FunctionType) -> Iterator[ModuleType]:
    """The modules of which the names are strings in a function."""
    for one in codes_of(function.__code__):
        for text in one.co_consts:
            if isinstance(text, str) and isinstance(found := sys.modules.get(text), ModuleType):
                yield found


@functools.lru_cache(maxsize=1 << 14)
def _loads(code: CodeType) -> tuple[tuple[str, str], ...]:
    """In order, the names that code and what is defined in it load: a global, an attribute of what was loaded before, or another."""
    found = []
    chained = False
    for one in codes_of(code):
        for i in dis.get_instructions(one):
            if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.append(("global", i.argval))
                chained = True
            elif i.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found.append(("attribute" if chained else "other", i.argval))
            elif i.opcode in dis.hasname:
                found.append(("import" if i.opname == "IMPORT_NAME" else "other", i.argval))
                chained = False
            else:
                chained &= i.opname in ("PUSH_NULL", "CACHE", "PRECALL", "EXTENDED_ARG")
    return tuple(found)


def _foreign_module(value: object) -> ModuleType | None:
    return value if isinstance(value, ModuleType) and is_foreign(value.__name__) else None


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of what is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


@functools.lru_cache(maxsize=1 << 14)
def _getattr(code: CodeType) -> tuple[bool, bool]:
    """Of the calls of getattr and hasattr in code: whether one is given a name that is made there, and one that is held elsewhere."""
    made = from_data = False
    for one in codes_of(code):
        depth, calls = 0, list[tuple[int, bool]]()  # of the stack below each open call; whether a string has been loaded for it
        for i in dis.get_instructions(one):
            if i.opname == "LOAD_GLOBAL" and i.argval in ("getattr", "hasattr"):
                calls.append((depth, False))
            elif calls and i.opname == "LOAD_CONST" and isinstance(i.argval, str):
                calls[-1] = calls[-1][0], True
            elif calls and i.opname in _MADE:
                made = True
            depth += dis.stack_effect(i.opcode, i.arg, jump=False)
            if calls and i.opname.startswith("CALL") and depth <= calls[-1][0] + 1:
                from_data |= not calls.pop()[1]
    return made, from_data


@functools.lru_cache(maxsize=1 << 14)
def loaded_in(code: CodeType) -> frozenset[str]:
    """The names that code loads, and the strings in it, which may be names or keys; not what it only assigns."""
    names = {str(i.argval) for one in codes_of(code) for i in dis.get_instructions(one) if i.opcode in _LOADS}
    return frozenset(names | {constant for one in codes_of(code) for constant in one.co_consts if _is_name(constant)})


def _stored(code: CodeType) -> Iterator[str]:
    """The globals that the code assigns: the first call may make them."""
    for one in codes_of(code):
        if _STORE_GLOBAL in one.co_code[::2]:
            yield from (str(i.argval) for i in dis.get_instructions(one) if i.opcode == _STORE_GLOBAL)


@functools.lru_cache(maxsize=1 << 14)
def compares_objects(code: CodeType) -> bool:
    """Whether code asks if two things are one (`a is b`), of which neither is a constant or a name of a class or a function's."""
    for one in codes_of(code):
        before = ""
        for i in dis.get_instructions(one):
            if i.opname == "IS_OP" and before not in ("LOAD_CONST", "LOAD_GLOBAL"):
                return True
            before = i.opname
    return False
