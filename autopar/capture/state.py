"""What a model holds beside the tensors in its registries, and what the code of its forward and its loss reads elsewhere: attributes
of modules and of their classes, containers and objects behind them, closures, defaults and globals.

A State is a picture of all that. Two pictures say what changed between them, and the first can be put back.
"""

from __future__ import annotations

import enum
import functools
import itertools
import os
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from autopar.capture.reach import HOOKS, LruCache, Reached, is_foreign, reached
from autopar.run import hooks

__all__ = [
    "ABSENT", "REGISTRIES", "TABLES", "WATCHED_HOOKS", "Change", "Held", "Opaque", "State", "child", "describe", "is_plain", "put_back",
    "same", "value_of",
]  # fmt: skip

REGISTRIES = ("_parameters", "_buffers", "_modules")
_OTHER_TABLES = (
    "_backward_hooks", "_backward_pre_hooks", *hooks.OF_STATE, "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_non_persistent_buffers_set", "_is_full_backward_hook",
)  # fmt: skip
WATCHED_HOOKS = hooks.OF_CALLS
TABLES = frozenset((*REGISTRIES, *HOOKS, *_OTHER_TABLES))
_SIMPLE = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.Size, enum.Enum, range,
)  # fmt: skip
_CODE = (
    FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, LruCache, functools.partial, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket, property, staticmethod, classmethod, functools.cached_property, weakref.ref,
)  # fmt: skip
_NAMESPACES = (SimpleNamespace, threading.local)
_DEPTH = 8  # containers and objects within one another
_ITEMS = 2000  # of one container: longer ones are compared by identity and length


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


class _Registered:
    def __repr__(self) -> str:
        return "a parameter or buffer of the model"


ABSENT = _Absent()
REGISTERED = _Registered()


@dataclass(frozen=True, slots=True)
class Shape:
    """A container or an object, apart from what it holds."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.size}" if self.size >= 0 else self.kind


@dataclass(frozen=True, slots=True)
class Value:
    """What is compared by a copy of its value: the state of a random generator, a small array, a set."""

    kind: str
    value: object

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, slots=True)
class Opaque:
    """What cannot be compared but by identity."""

    value: object

    def __str__(self) -> str:
        return type(self.value).__name__


@dataclass(frozen=True, slots=True)
class Held:
    """One container as it was. path: ends with a dot where its items are attributes. items: its contents. keys: those that are looked
    at, of a dict; None for all. table: which of the tables of a module it is ('_buffers', '_forward_hooks'), if it is one."""

    path: str
    holder: Any
    items: Any
    keys: frozenset[str] | None = None
    table: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What stands at a path before and after; ABSENT for nothing."""

    path: str
    before: object
    after: object

    def __str__(self) -> str:
        if isinstance(self.before, torch.Tensor) and self.before is self.after:
            return f"{self.path}, written in place"
        return f"{self.path} from {describe(self.before)} to {'another ' if self._alike else ''}{describe(self.after)}"

    @property
    def _alike(self) -> bool:
        return self.before is not ABSENT and describe(self.before) == describe(self.after)


@dataclass(frozen=True, slots=True)
class State:
    """leaves: path -> value. versions: of the plain tensors among them. held: every container, with its contents. reached: the code
    that was looked at. buffers: the names of the buffers that hold a tensor; of others that do later, the tensors are leaves."""

    leaves: Mapping[str, object]
    versions: Mapping[str, int]
    held: tuple[Held, ...]
    reached: Reached
    buffers: frozenset[str]

    @staticmethod
    def take(model: nn.Module, loss: object = None, since: State | None = None) -> State:
        """since: an earlier State of the same model and loss, to be compared with this one."""
        buffers = since.buffers if since is not None else frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))
        of_all = {f"the hooks of all modules ({table[1:]})": found for table, found in hooks.of_all_modules().items()}
        others = [*(() if loss is None else (loss,)), *(hook for found in of_all.values() for hook in found.values())]
        code = since.reached if since is not None else reached(model, others)
        walk = _Walk(model, buffers)
        walk.model(model)
        for path, found in of_all.items():
            walk.held.append(Held(path, found, dict(found)))
            walk.leaves[path] = Value(f"{len(found)} hooks", tuple(map(id, found.values())))
        walk.code(code)
        if code.names & {"environ", "getenv"}:
            walk.visit("os.environ", vars(os.environ)["_data"], _DEPTH)
        for number, part in enumerate(_bound(loss)):
            walk.visit("loss" if not number else f"loss's part {number}", part, _DEPTH)
        return State(walk.leaves, walk.versions, tuple(walk.held), code, buffers)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The plain tensors, by path."""
        return {path: x for path, x in self.leaves.items() if isinstance(x, torch.Tensor)}

    def changes(self, later: State) -> list[Change]:
        """What differs in a later state: other values, other tensors, tensors written in place."""
        found = []
        for path, before in self.leaves.items():
            after = later.leaves.get(path, ABSENT)
            if not same(before, after) or self.versions.get(path) != later.versions.get(path):
                found.append(Change(path, before, after))
        found += [Change(path, ABSENT, after) for path, after in later.leaves.items() if path not in self.leaves]
        return found

    def restore(self) -> None:
        """Every container holds again what it held."""
        for held in self.held:
            put_back(held)


def child(held: Held, key: Any) -> str:
    """The path of one of the items of a container."""
    if held.keys is not None:
        return f"{key} of {held.path}"
    if isinstance(held.holder, type):
        return f"{held.path}.{key}"
    return f"{held.path}{key}" if held.path.endswith(".") or not held.path else f"{held.path}[{_key(key)}]"


def _bound(loss: Any) -> list[object]:
    """The objects that a loss function is bound to."""
    if isinstance(loss, functools.partial):
        return [*_bound(loss.func), list(loss.args), loss.keywords]
    if isinstance(loss, MethodType):
        return [loss.__self__]
    return [] if loss is None or isinstance(loss, _CODE) else [loss]


def same(a: object, b: object) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if isinstance(a, Opaque) and isinstance(b, Opaque):
        return a.value is b.value
    return bool(a == b) or (a != a and b != b)


def describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = str(value) if isinstance(value, (Shape, Value, Opaque)) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def value_of(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return ABSENT


def contents(holder: Any, keys: frozenset[str] | None = None) -> Any:
    """A shallow copy of what a container holds."""
    if isinstance(holder, ContextVar):
        return value_of(holder)
    if isinstance(holder, CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return ABSENT
    if isinstance(holder, FunctionType):
        return {"__defaults__": holder.__defaults__, "__kwdefaults__": holder.__kwdefaults__}
    if isinstance(holder, type):
        return {k: v for k, v in vars(holder).items() if not k.startswith("__")}
    if type(holder) is dict and keys is None:
        return holder.copy()
    if isinstance(holder, dict):
        if keys is not None:
            return {k: dict.get(holder, k, ABSENT) for k in keys}
        return dict(dict.items(holder)) if dict.__len__(holder) else {}  # an OrderedDict's items are slow, and most tables are empty
    return frozenset(set.__iter__(holder)) if isinstance(holder, set) else tuple(_base(holder).__iter__(holder))


def _base(holder: Any) -> Any:
    """The container of Python that an object is: its methods are called, not what a subclass makes of them (loads on access)."""
    return next(base for base in (OrderedDict, dict, list, tuple, deque, set, frozenset) if isinstance(holder, base))


def put_back(held: Held) -> None:
    """The container holds again what is written there; of a Held with keys, under these."""
    holder, items = held.holder, held.items
    now = contents(holder, held.keys)
    if isinstance(holder, (CellType, ContextVar)):
        if now is not items and items is not ABSENT:
            holder.set(items) if isinstance(holder, ContextVar) else setattr(holder, "cell_contents", items)
        return
    if isinstance(items, dict):
        if len(now) == len(items) and all(now.get(k, ABSENT) is v for k, v in items.items()):
            return
        if isinstance(holder, (type, FunctionType)):
            for key in now.keys() - items.keys() if held.keys is None else ():
                delattr(holder, key)
            for key, value in items.items():
                if now.get(key, ABSENT) is not value:
                    setattr(holder, key, value)
            return
        base = _base(holder)
        if held.keys is None:
            base.clear(holder)
        for key in [k for k in now if items.get(k, ABSENT) is ABSENT and held.keys is not None]:
            base.pop(holder, key, None)
        for key, value in items.items():
            if value is not ABSENT:
                base.__setitem__(holder, key, value)
        return
    if len(now) == len(items) and (now == items if isinstance(items, frozenset) else all(a is b for a, b in zip(now, items))):
        return
    base = _base(holder)
    base.clear(holder)
    base.update(holder, items) if isinstance(holder, set) else base.extend(holder, items)


class _Walk:
    def __init__(self, model: nn.Module, buffers: frozenset[str]) -> None:
        self.buffers = buffers
        self.leaves: dict[str, object] = {}
        self.versions: dict[str, int] = {}
        self.held: list[Held] = []
        self.seen: set[int] = {id(m) for m in model.modules()}
        self.registered = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.classes: set[type] = set()

    def model(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self._module(f"{name}." if name else "", module)

    def _module(self, prefix: str, module: nn.Module) -> None:
        own = vars(module)
        self.held.append(Held(prefix, own, dict(own)))
        foreign = is_foreign(type(module).__module__)
        for table in REGISTRIES:
            self.held.append(Held(prefix, own[table], dict(own[table]), table=table))
            kept = dict.get(own, "_non_persistent_buffers_set", ())
            names = tuple(k for k, v in own[table].items() if v is not None)
            self.leaves[f"{prefix}{table}"] = Value("the names " + (", ".join(map(str, names)) or "(none)"), (names, len(kept)))
        for name, child in own["_modules"].items():
            self.leaves[f"{prefix}{name} (the module)"] = Opaque(child)
        for name, buffer in own["_buffers"].items():
            if buffer is not None and f"{prefix}{name}" not in self.buffers:
                self._tensor(f"{prefix}{name}", buffer)
        for table in WATCHED_HOOKS:
            if own[table]:
                self.leaves[f"{prefix}{table}"] = Value(f"{len(own[table])} hooks", tuple(map(id, own[table].values())))
        for table in (*HOOKS, *_OTHER_TABLES):
            if isinstance(x := own.get(table), (dict, set)):
                self.held.append(Held(prefix, x, contents(x), table=table))
        for name, value in own.items():
            if name == "training" or name in TABLES:
                continue
            if isinstance(value, _CODE) and hasattr(type(module), name):
                self.leaves[f"{prefix}{name}"] = Opaque(value)  # in place of the class's own
            elif foreign and not is_plain(value):
                continue
            self.visit(f"{prefix}{name}", value, _DEPTH)
        for cls in type(module).__mro__:
            if not is_foreign(cls.__module__):
                self._class(cls)

    def _class(self, cls: type) -> None:
        if cls in self.classes:
            return
        self.classes.add(cls)
        found = contents(cls)
        self.held.append(Held(cls.__name__, cls, found))
        for key, value in found.items():
            if isinstance(value, FunctionType):
                self.leaves[f"{cls.__name__}.{key}"] = Opaque(value)
            self.visit(f"{cls.__name__}.{key}", value, _DEPTH)

    def code(self, code: Reached) -> None:
        for cls in code.classes:
            self._class(cls)
        for scope, module, names in code.scopes.values():
            keys = frozenset(k for k in names if not isinstance(scope.get(k), _CODE))
            self.held.append(Held(module, scope, contents(scope, keys), keys))
            for key in keys & scope.keys():
                self.visit(f"{key} of {module}", scope[key], _DEPTH)
        for function in code.functions:
            name = function.__qualname__.replace(".<locals>", "")
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                found = contents(cell)
                if id(cell) in self.seen or isinstance(found, _CODE) or found is ABSENT:
                    continue
                self.seen.add(id(cell))
                self.held.append(Held(f"{variable}, which {name} closes over", cell, found))
                self.visit(self.held[-1].path, found, _DEPTH)
            self.held.append(Held(name, function, contents(function)))
            self.visit(f"the defaults of {name}", function.__defaults__ or (), _DEPTH)
            if function.__kwdefaults__:
                self.visit(f"the keyword defaults of {name}", function.__kwdefaults__, _DEPTH)
            self.visit(f"the attributes of {name}", {k: v for k, v in vars(function).items() if k != "__wrapped__"}, _DEPTH)
            self.held.append(Held(f"the attributes of {name}", vars(function), dict(vars(function))))

    def visit(self, path: str, value: object, depth: int) -> None:
        """Adds the leaves of a value."""
        if is_plain(value):
            self.leaves[path] = value
        elif id(value) in self.registered:
            self.leaves[path] = REGISTERED
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, _CODE) or id(value) in self.seen:
            return
        elif (known := _by_value(value)) is not None:
            self.leaves[path] = known
        else:
            self._container(path, value, depth)

    def _tensor(self, path: str, value: torch.Tensor) -> None:
        self.leaves[path] = value
        if not value.is_inference():
            self.versions[path] = value._version

    def _container(self, path: str, value: Any, depth: int) -> None:
        items: list[tuple[str, object]] | None = None
        found: Any = None
        if isinstance(value, dict):
            found = contents(value)
            self.held.append(Held(path, value, found))
            items = [(f"{path}[{_key(k)}]", v) for k, v in found.items()] if len(found) <= _ITEMS else None
        elif isinstance(value, (list, tuple, deque)):
            found = contents(value)
            if not isinstance(value, tuple):
                self.held.append(Held(path, value, found))
            items = [(f"{path}[{i}]", v) for i, v in enumerate(found)] if len(found) <= _ITEMS else None
        elif isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self.held.append(Held(path, value, contents(value)))
            self.leaves[path] = Value(f"set of {len(value)}", frozenset(id(x) if not isinstance(x, _SIMPLE) else x for x in value))
            return
        elif isinstance(value, nn.Module):
            self.seen.add(id(value))
            for key, found in (*value._parameters.items(), *value._buffers.items(), *value._modules.items()):
                self.visit(f"{path}.{key}", found, depth - 1)
            self._module(f"{path}.", value)
            return
        elif isinstance(value, ContextVar):
            self.held.append(Held(path, value, contents(value)))
            if self.held[-1].items is not ABSENT:
                self.visit(f"{path}.get()", self.held[-1].items, depth - 1)
            return
        elif not is_foreign(type(value).__module__) or isinstance(value, _NAMESPACES) or type(value).__name__ == "Namespace":
            own = vars(value) if hasattr(value, "__dict__") else None
            items = [(f"{path}.{k}", v) for k, v in own.items()] if isinstance(own, dict) else []
            if isinstance(own, dict):
                self.held.append(Held(f"{path}.", own, dict(own)))
            slots = [s for cls in type(value).__mro__ for s in _as_tuple(vars(cls).get("__slots__", ()))]
            items += [(f"{path}.{s}", getattr(value, s)) for s in slots if s not in ("__dict__", "__weakref__") and hasattr(value, s)]
        if items is None or depth == 0:
            self.leaves[path] = Opaque(value)
            return
        self.seen.add(id(value))
        self.leaves[path] = Shape(type(value).__name__, len(found) if found is not None else -1)
        for name, item in items:
            self.visit(name, item, depth - 1)


def is_plain(value: object) -> bool:
    """Whether it is compared by its value: a number, a string, None, a dtype, a tuple of such."""
    return isinstance(value, _SIMPLE) or (type(value) is tuple and all(isinstance(x, _SIMPLE) for x in value))


def _key(key: object) -> str:
    return repr(key) if isinstance(key, (str, int, float, bool, tuple, type(None))) else f"a {type(key).__name__} {id(key)}"


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _by_value(value: Any) -> Value | None:
    """What is neither simple nor a container but can be told apart by a value of its own."""
    if isinstance(value, random.Random):
        return Value("random generator", value.getstate())
    if isinstance(value, torch.Generator):
        return Value("random generator", value.get_state().cpu().numpy().tobytes())
    if isinstance(value, itertools.count):
        return Value(repr(value), repr(value))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and getattr(value, "nbytes", 1 << 20) <= 1 << 16:
        return Value(f"array of {value.nbytes} bytes", (str(value.dtype), value.shape, value.tobytes()))
    return None
