"""Walks over what a model holds and over what its code reads elsewhere, and notes it for a picture of both."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)  # fmt: skip
from typing import Any

import torch
from torch import nn

from autopar.capture.attributes import Asked
from autopar.capture.by_value import Mark, by_value, changes_in_place, mark_of, objects_in
from autopar.capture.held import (
    ABSENT,
    EMPTY,
    EXACTLY,
    LEFT_OUT,
    REGISTERED,
    Held,
    Opaque,
    Shape,
    Value,
    child,
    contents,
    is_leaf,
    is_plain,
    order_of,
    shown_key,
)
from autopar.capture.numbers import TracedArray
from autopar.capture.reach import HOOKS, LruCache, Reached, Reads, is_foreign, stored_by
from autopar.run import hooks
from autopar.run.left_out import LeftOut
from autopar.run.stand_in import StandIn

__all__ = ["CODE", "DEPTH", "REGISTRIES", "TABLES", "WATCHED_HOOKS", "Walk"]

REGISTRIES = ("_parameters", "_buffers", "_modules")
_OTHER_TABLES = (
    "_backward_hooks", "_backward_pre_hooks", *hooks.OF_STATE, "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_non_persistent_buffers_set", "_is_full_backward_hook",
)  # fmt: skip
WATCHED_HOOKS = hooks.OF_CALLS
TABLES = frozenset((*REGISTRIES, *HOOKS, *_OTHER_TABLES))
_APART = TABLES | {"training"}  # attributes of a module that are no leaves
_NOT_WATCHED = tuple(table for table in _OTHER_TABLES if table not in WATCHED_HOOKS)
CODE = (
    FunctionType, BuiltinFunctionType, MethodType, MethodWrapperType, ModuleType, type, LruCache, functools.partial, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket, property, staticmethod, classmethod, functools.cached_property, weakref.ref,
)  # fmt: skip
_NAMESPACES = (
    SimpleNamespace, threading.local, UserDict, UserList, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
)  # fmt: skip
DEPTH = 8  # containers and objects within one another
_ITEMS = 2000  # of one container: longer ones are compared as a whole, if their items are plain, else by identity and length


class Walk:
    """Fills the parts of a State. reads: only what code may read is looked at, and functions are compared; None: everything is, and may be
    put back."""

    def __init__(self, model: nn.Module, buffers: frozenset[str], reads: Reads | None, attributes: tuple[Asked, ...]) -> None:
        self.buffers, self.reads, self.attributes = buffers, reads, attributes
        self.found: dict[int, object] = {}  # of what the model and the loss hold
        self.arrays: list[Any] = []
        self.leaves: dict[str, object] = {}
        self.versions: dict[str, Mark] = {}
        self.held: list[Held] = []
        self.kept: list[str] = []  # where results of functions are that an lru_cache keeps
        self.modules = list(model.named_modules())
        self.seen: set[int] = {id(m) for _, m in self.modules}
        tensors = (t for _, m in self.modules for table in (m._parameters, m._buffers) for t in table.values())
        self.registered = {id(t) for t in tensors if t is not None}
        self.opened: dict[int, object] = {}  # of those, by identity, the objects and containers whose contents were looked at
        self.classes: set[type] = set()
        self.foreign: dict[type, bool] = {}  # of the types of modules: whether that is Python's or torch's

    def copy(self) -> Walk:
        """Another one that has got as far."""
        other = copy.copy(self)
        for name in ("found", "arrays", "leaves", "versions", "held", "kept", "seen", "opened", "classes", "foreign"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def model(self) -> None:
        for name, module in self.modules:
            self._module(f"{name}." if name else "", module)
        for one in self.attributes:
            if (value := one.value) is not ABSENT:
                self.visit(one.path, value, DEPTH)

    def _of(self, cls: type, attributes: Mapping[Any, Any]) -> dict[Any, Any]:
        """Those of the attributes of an object that are looked at."""
        return dict(attributes) if self.reads is None else self.reads.of(cls, attributes)

    def _module(self, prefix: str, module: nn.Module) -> None:
        own, kind = vars(module), type(module)
        shown, new = self._of(kind, own), kind not in self.foreign
        self.held.append(Held(prefix, own, shown))
        if new:  # of what is parametrized, the class is torch's and has the user's behind it
            self.foreign[kind] = all(is_foreign(base.__module__) for base in kind.__mro__)
        foreign = self.foreign[kind]
        kept = len(dict.get(own, "_non_persistent_buffers_set", ()))
        for table in REGISTRIES:
            found = dict(own[table])
            self.held.append(Held(prefix, own[table], found, table=table))
            self.leaves[f"{prefix}{table}"] = _names(tuple([k for k, v in found.items() if v is not None]), kept)
        for name, inner in own["_modules"].items():
            self.leaves[f"{prefix}{name} (the module)"] = Opaque(inner)
        for name, buffer in own["_buffers"].items():
            if buffer is not None and f"{prefix}{name}" not in self.buffers:
                self._tensor(f"{prefix}{name}", buffer)
        for table in WATCHED_HOOKS:
            if own[table]:
                self.leaves[f"{prefix}{table}"] = Value(f"{len(own[table])} hooks", tuple(map(id, own[table].values())))
                for number, hook in enumerate(own[table].values()):
                    self.visit(f"{prefix}{table}[{number}]", hook, DEPTH)
            self.held.append(Held(prefix, own[table], contents(own[table]) if own[table] else {}, table=table))
        empty = []
        for table in _NOT_WATCHED:
            if isinstance(x := own.get(table), (dict, set)):
                if x:
                    self.held.append(Held(prefix, x, contents(x), table=table))
                else:
                    empty.append(x)
        self.held.append(Held(prefix, tuple(empty), (), table=EMPTY))
        for name, value in shown.items():
            if name in _APART or id(value) in self.opened:
                continue
            if is_leaf(value) or (foreign and is_plain(value)):
                self._plain(f"{prefix}{name}", value, DEPTH)
                continue
            if isinstance(value, CODE) and hasattr(kind, name):
                self.leaves[f"{prefix}{name}"] = Opaque(value)  # in place of the class's own
            elif foreign and name in stored_by(kind) and not (isinstance(value, torch.Tensor) or callable(value)):
                continue
            self.visit(f"{prefix}{name}", value, DEPTH)
        for cls in kind.__mro__ if new else ():
            if cls not in self.classes and not is_foreign(cls.__module__):
                self._class(cls)

    def _class(self, cls: type) -> None:
        if cls in self.classes:
            return
        self.classes.add(cls)
        found = self._of(cls, contents(cls))
        self.held.append(Held(cls.__name__, cls, found))
        for key, value in found.items():
            if isinstance(value, FunctionType):  # a method, which is followed where its name is read
                self.leaves[f"{cls.__name__}.{key}"] = Opaque(value)
            else:
                self.visit(f"{cls.__name__}.{key}", value, DEPTH)

    def code(self, code: Reached) -> None:
        for cls in code.classes:
            self._class(cls)
        for of, (beside, values) in code.values.items():
            now = {key: getattr(beside, key, ABSENT) for key in sorted(values)}
            self.held.append(Held(f"{of}.", beside, now, frozenset(now)))
            self.leaves |= {f"{of}.{key}": value for key, value in now.items()}
        for scope, module, names in code.scopes.values():
            keys = frozenset(names if self.reads else (k for k in names if not isinstance(scope.get(k), CODE)))
            self.held.append(Held(module, scope, contents(scope, keys), keys))
            for key in keys & scope.keys():
                self.visit(f"{key} of {module}", scope[key], DEPTH)
        for function in code.functions:
            name = function.__qualname__.replace(".<locals>", "")
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                found = contents(cell)
                if id(cell) in self.seen or (isinstance(found, CODE) and not self.reads) or found is ABSENT:
                    continue
                self.seen.add(id(cell))
                self.held.append(Held(f"{variable}, which {name} closes over", cell, found))
                self.visit(self.held[-1].path, found, DEPTH)
            self.held.append(Held(name, function, contents(function)))
            self.leaves[f"the code of {name}"] = Opaque(function.__code__)
            self.visit(f"the defaults of {name}", function.__defaults__ or (), DEPTH)
            if function.__kwdefaults__:
                self.visit(f"the keyword defaults of {name}", function.__kwdefaults__, DEPTH)
            own = Held(f"the attributes of {name}", vars(function), dict(vars(function)))
            self.held.append(own)
            self.leaves[own.path] = Shape("dict", len(own.items))
            for key, value in own.items.items():
                if key != "__wrapped__":
                    self.visit(child(own, key), value, DEPTH)

    def visit(self, path: str, value: object, depth: int) -> None:
        """Adds the leaves of a value."""
        if id(value) in self.opened or (isinstance(value, StandIn) and id(vars(value).get("original")) in self.seen):
            return
        if is_leaf(value) or (depth == 0 and is_plain(value)):
            self._plain(path, value, depth)
        elif isinstance(value, LeftOut):
            self.leaves[path] = LEFT_OUT
        elif id(value) in self.registered:
            self.leaves[path] = REGISTERED
        elif type(value) is TracedArray:
            self.leaves[path] = Opaque(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, CODE):
            self._callable(path, value, depth)
        elif id(value) in self.seen:
            return
        elif (known := by_value(value)) is not None:
            self.leaves[path] = known
            if changes_in_place(value):
                self.arrays.append(value)
            self._members(path, objects_in(value), depth)
        else:
            self._container(path, value, depth)

    def _plain(self, path: str, value: Any, depth: int) -> None:
        """A number, a string, a member of an Enum, with the user's own attributes."""
        self.leaves[path] = value
        if type(value) in EXACTLY or type(value) is tuple or type(value).__module__.startswith("autopar."):  # what stands for a number
            return
        if depth and _has_attributes(value) and id(value) not in self.seen:
            self.seen.add(id(value))
            for name, item in self._attributes(path, value):
                self.visit(name, item, depth - 1)

    def _attributes(self, path: str, value: Any) -> list[tuple[str, object]]:
        """Those that an object has in a dict and in slots, which are held, with their paths."""
        cls, found = type(value), list[tuple[str, object]]()
        if not is_foreign(cls.__module__):
            self.found[id(cls)] = cls
        own = vars(value) if hasattr(value, "__dict__") else None
        if isinstance(own, dict) and own is not value:
            shown = self._of(cls, own)
            found = [(f"{path}.{k}", v) for k, v in shown.items()]
            self.held.append(Held(f"{path}.", own, shown))
        if slots := _slots(cls):
            filled = self._of(cls, {s: getattr(value, s, ABSENT) for s in sorted(slots)})
            found += [(f"{path}.{s}", x) for s, x in filled.items() if x is not ABSENT]
            self.held.append(Held(f"{path}.", value, filled, frozenset(filled)))
        return found

    def _callable(self, path: str, value: Any, depth: int) -> None:
        """A function, a class or a reference, and what it is bound to."""
        if self.reads is not None:
            self.leaves[path] = Opaque(value)
        if id(value) in self.seen or depth == 0:
            return
        self.seen.add(id(value))
        if isinstance(value, functools.partial):
            self.visit(f"{path}.func", value.func, depth - 1)
            self.visit(f"{path}.args", list(value.args), depth - 1)
            self.visit(f"{path}.keywords", value.keywords, depth - 1)
        elif isinstance(value, weakref.ref):
            if (target := value()) is not None:
                self.visit(f"{path}()", target, depth - 1)
        elif isinstance(value, (MethodType, BuiltinFunctionType, MethodWrapperType)):
            if not isinstance(value.__self__, (ModuleType, type, type(None))):
                self.visit(f"{path}.__self__", value.__self__, depth - 1)
        if isinstance(value, (FunctionType, MethodType)) or (isinstance(value, type) and not is_foreign(value.__module__)):
            self.found[id(value)] = value

    def _tensor(self, path: str, value: torch.Tensor) -> None:
        self.leaves[path] = value
        if not value.is_inference():
            self.versions[path] = mark_of(value)

    def _is_open(self, value: Any) -> bool:
        """Whether the attributes of an object are looked at: those of Python's and torch's own are where code reads them."""
        cls = type(value)
        if not is_foreign(cls.__module__) or isinstance(value, _NAMESPACES) or cls.__name__ == "Namespace":
            return True
        return self.reads is not None and _root(cls) in ("torch", "collections") and hasattr(value, "__dict__")

    def _container(self, path: str, value: Any, depth: int) -> None:
        items: list[tuple[str, object]] | None = None
        found: Any = None
        if isinstance(value, dict):
            found = contents(value)
            self.held.append(Held(path, value, found))
            if (order := order_of(self.held[-1])) is not None:
                self.leaves[f"{path}.keys()"] = order
            items = [(f"{path}[{shown_key(k)}]", v) for k, v in found.items()] if len(found) <= _ITEMS else None
        elif isinstance(value, (list, tuple, deque)):
            found = contents(value)
            if not isinstance(value, tuple):
                self.held.append(Held(path, value, found))
            items = [(f"{path}[{i}]", v) for i, v in enumerate(found)] if len(found) <= _ITEMS else None
        elif isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self.held.append(Held(path, value, contents(value)))
            self.leaves[path] = Value(f"set of {len(value)}", frozenset(x if is_plain(x) else id(x) for x in value))
            self._members(path, value if len(value) <= _ITEMS else (), depth)
            self._beside(path, value, depth)
            return
        elif isinstance(value, nn.Module):
            self.seen.add(id(value))
            for key, found in (*value._parameters.items(), *value._buffers.items(), *value._modules.items()):
                self.visit(f"{path}.{key}", found, depth - 1)
            self.held.append(Held(f"{path}.", vars(value), {"training": value.training}, frozenset({"training"})))
            self.leaves[f"{path}.training"] = value.training  # not among the modes of the model
            self._module(f"{path}.", value)
            return
        elif isinstance(value, (ContextVar, CellType)):
            self.held.append(Held(path, value, contents(value)))
            if self.held[-1].items is not ABSENT:
                self.visit(f"{path}{'.get()' if isinstance(value, ContextVar) else ''}", self.held[-1].items, depth - 1)
            return
        elif isinstance(value, MappingProxyType):
            self.visit(path, gc.get_referents(value)[0], depth - 1)
            return
        elif self._is_open(value):
            items = self._attributes(path, value)
        if items is None and found is not None and all(map(is_plain, found.values() if isinstance(found, dict) else found)):
            self.leaves[path] = Value(f"{type(value).__name__} of {len(found)}", found)
            self._beside(path, value, depth)
            return
        if items is None or depth == 0:
            self.leaves[path] = Opaque(value)
            return
        if not is_plain(value):  # a tuple of numbers is what it holds
            self.seen.add(id(value))
            self.opened[id(value)] = value
        self.leaves[path] = Shape(type(value).__name__, len(found) if found is not None else -1)
        for name, item in items:
            self.visit(name, item, depth - 1)
        if isinstance(value, dict):
            self._members(f"{path}.keys()", found, depth)
        if found is not None:
            self._beside(path, value, depth)

    def _members(self, path: str, members: Iterable[Any], depth: int) -> None:
        """The user's own objects, and parameters and buffers, among what has no place: members of a set, keys of a dict, what waits in a
        queue."""
        for one in members if depth else ():
            one = one() if isinstance(one, weakref.ref) else one
            if id(one) in self.registered:  # of another class from when it is a part on
                self.leaves[f"{path}{{a tensor {id(one)}}}"] = REGISTERED
            elif not (is_foreign(type(one).__module__) or isinstance(one, CODE)):
                self.visit(f"{path}{{{type(one).__name__} {id(one)}}}", one, depth - 1)

    def _beside(self, path: str, value: Any, depth: int) -> None:
        """What a container has as attributes beside its items."""
        if depth and _has_attributes(value):
            for name, item in self._attributes(path, value):
                self.visit(name, item, depth - 1)


@functools.lru_cache(maxsize=1 << 12)
def _names(names: tuple[str, ...], kept: int) -> Value:
    """What is compared of a registry of a module: the names of what it has. kept: how many of its buffers are not persistent."""
    return Value("the names " + (", ".join(map(str, names)) or "(none)"), (names, kept))


def _has_attributes(value: object) -> bool:
    """Whether it is of the user's own kind of a number, a string or a container, of which attributes may be set."""
    return not is_foreign(type(value).__module__) and (hasattr(value, "__dict__") or bool(_slots(type(value))))


def _root(cls: type) -> str:
    return str(cls.__module__).partition(".")[0]


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _slots(cls: type) -> set[str]:
    """The names of attributes that objects of a class have in slots; not where a subclass has a property of the name instead."""
    named = {s for base in cls.__mro__ for s in _as_tuple(vars(base).get("__slots__", ()))} - {"__dict__", "__weakref__"}
    return {s for s in named if isinstance(next((vars(b)[s] for b in cls.__mro__ if s in vars(b)), None), MemberDescriptorType)}
