"""What a model holds beside the tensors in its registries, and what the code of its forward and its loss reads elsewhere: attributes
of modules and of their classes, containers and objects behind them, closures, defaults and globals.

A State is a picture of all that. Two pictures say what changed between them, and the first can be put back.
"""

from __future__ import annotations

import enum
import functools
import gc
import itertools
import os
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from autopar.capture.reach import HOOKS, LruCache, Reached, Reads, is_foreign, reached
from autopar.run import hooks
from autopar.run.left_out import LeftOut

__all__ = [
    "ABSENT", "LEFT_OUT", "REGISTRIES", "TABLES", "WATCHED_HOOKS", "Change", "Held", "Opaque", "State", "child", "describe", "is_plain",
    "put_back", "same", "value_of",
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
_LARGEST = 1 << 20  # bytes of an array that is compared by its contents
_DEPTH = 8  # containers and objects within one another
_ITEMS = 2000  # of one container: longer ones are compared as a whole, if their items are plain, else by identity and length


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


class _Registered:
    def __repr__(self) -> str:
        return "a parameter or buffer of the model"


class _LeftOut:
    def __repr__(self) -> str:
        return "nothing that the parallel module leaves"


ABSENT = _Absent()
LEFT_OUT = _LeftOut()
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
    """leaves: path -> value. versions: of the plain tensors among them. held: every container, with its contents. arrays: those of numpy
    that are compared by their bytes. reached: the code that was looked at. buffers: the names of the buffers that hold a tensor; of others
    that do later, the tensors are leaves. reads: what code may read, if nothing else is in the picture; None if all is."""

    leaves: Mapping[str, object]
    versions: Mapping[str, int]
    held: tuple[Held, ...]
    arrays: tuple[Any, ...]
    reached: Reached
    buffers: frozenset[str]
    reads: Reads | None = None

    @staticmethod
    def take(model: nn.Module, loss: object = None, since: State | None = None) -> State:
        """since: an earlier State of the same model and loss, to be compared with this one."""
        if since is not None:
            return _pictured(model, loss, since.buffers, since.reached, since.reads)
        buffers = frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))
        hooks_of_all = [hook for found in hooks.of_all_modules().values() for hook in found.values()]
        others = [*(() if loss is None else (loss,)), *hooks_of_all]
        known: dict[int, object] = {}
        while True:  # objects that are found have methods, which read other objects
            code = reached(model, others, known.values())
            found: dict[int, object] = {}
            state = _pictured(model, loss, buffers, code, None, found)
            if found.keys() <= known.keys():
                return state
            known |= found

    def of_what_is_read(self, model: nn.Module, loss: object = None) -> State:
        """The same picture of what code may read, and of the functions there: to be watched."""
        reads = Reads(self.reached, {x for x in self.leaves.values() if isinstance(x, str)})
        return _pictured(model, loss, self.buffers, self.reached, reads)

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
    if held.keys is not None and isinstance(held.holder, dict):
        return f"{key} of {held.path}"
    if isinstance(held.holder, type):
        return f"{held.path}.{key}"
    return f"{held.path}{key}" if held.path.endswith(".") or not held.path else f"{held.path}[{_key(key)}]"


def _pictured(
    model: nn.Module, loss: object, buffers: frozenset[str], code: Reached, reads: Reads | None, found: dict[int, object] | None = None
) -> State:
    """found: takes the functions and the classes of objects that the model and the loss hold."""
    walk = _Walk(model, buffers, reads)
    walk.model(model)
    for number, part in enumerate(_bound(loss)):
        walk.visit("loss" if not number else f"loss's part {number}", part, _DEPTH)
    if found is not None:
        found |= walk.found
    for path, table in hooks.of_all_modules().items():
        path = f"the hooks of all modules ({path[1:]})"
        walk.held.append(Held(path, table, dict(table)))
        walk.leaves[path] = Value(f"{len(table)} hooks", tuple(map(id, table.values())))
    walk.code(code)
    if (code.names | code.asked) & {"environ", "getenv"}:
        walk.visit("os.environ", vars(os.environ)["_data"], _DEPTH)
    return State(walk.leaves, walk.versions, tuple(walk.held), tuple(walk.arrays), code, buffers, reads)


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
        return a.value is b.value or (isinstance(a.value, MethodType) and a.value == b.value)
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
    if keys is not None and not isinstance(holder, dict):
        return {k: getattr(holder, k, ABSENT) for k in keys}
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
        if not isinstance(holder, dict):
            for key in now.keys() - items.keys() if held.keys is None else ():
                delattr(holder, key)
            for key, value in items.items():
                if now.get(key, ABSENT) is not value and value is not ABSENT:
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
    """reads: only what code may read is looked at, and functions are compared; None: everything is, and may be put back."""

    def __init__(self, model: nn.Module, buffers: frozenset[str], reads: Reads | None) -> None:
        self.buffers, self.reads = buffers, reads
        self.found: dict[int, object] = {}  # of what the model and the loss hold
        self.arrays: list[Any] = []
        self.leaves: dict[str, object] = {}
        self.versions: dict[str, int] = {}
        self.held: list[Held] = []
        self.seen: set[int] = {id(m) for m in model.modules()}
        self.registered = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.classes: set[type] = set()

    def model(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self._module(f"{name}." if name else "", module)

    def _of(self, cls: type, attributes: Mapping[Any, Any]) -> dict[Any, Any]:
        """Those of the attributes of an object that are looked at."""
        return dict(attributes) if self.reads is None else self.reads.of(cls, attributes)

    def _module(self, prefix: str, module: nn.Module) -> None:
        own = vars(module)
        self.held.append(Held(prefix, own, self._of(type(module), own)))
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
                for number, hook in enumerate(own[table].values()):
                    self.visit(f"{prefix}{table}[{number}]", hook, _DEPTH)
        for table in (*HOOKS, *_OTHER_TABLES):
            if isinstance(x := own.get(table), (dict, set)):
                self.held.append(Held(prefix, x, contents(x), table=table))
        for name, value in self._of(type(module), own).items():
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
        found = self._of(cls, contents(cls))
        self.held.append(Held(cls.__name__, cls, found))
        for key, value in found.items():
            if isinstance(value, FunctionType):  # a method, which is followed where its name is read
                self.leaves[f"{cls.__name__}.{key}"] = Opaque(value)
            else:
                self.visit(f"{cls.__name__}.{key}", value, _DEPTH)

    def code(self, code: Reached) -> None:
        for cls in code.classes:
            self._class(cls)
        for of, (beside, values) in code.values.items():
            now = {key: getattr(beside, key, ABSENT) for key in sorted(values)}
            self.held.append(Held(f"{of}.", beside, now, frozenset(now)))
            self.leaves |= {f"{of}.{key}": value for key, value in now.items()}
        for scope, module, names in code.scopes.values():
            keys = frozenset(names if self.reads else (k for k in names if not isinstance(scope.get(k), _CODE)))
            self.held.append(Held(module, scope, contents(scope, keys), keys))
            for key in keys & scope.keys():
                self.visit(f"{key} of {module}", scope[key], _DEPTH)
        for function in code.functions:
            name = function.__qualname__.replace(".<locals>", "")
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                found = contents(cell)
                if id(cell) in self.seen or (isinstance(found, _CODE) and not self.reads) or found is ABSENT:
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
        elif isinstance(value, LeftOut):
            self.leaves[path] = LEFT_OUT
        elif id(value) in self.registered:
            self.leaves[path] = REGISTERED
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, _CODE):
            self._callable(path, value, depth)
        elif id(value) in self.seen:
            return
        elif (known := _by_value(value)) is not None:
            self.leaves[path] = known
            if type(value).__module__ == "numpy":
                self.arrays.append(value)
        else:
            self._container(path, value, depth)

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
        elif isinstance(value, (MethodType, BuiltinFunctionType)):
            if not isinstance(value.__self__, (ModuleType, type, type(None))):
                self.visit(f"{path}.__self__", value.__self__, depth - 1)
        if isinstance(value, (FunctionType, MethodType)) or (isinstance(value, type) and not is_foreign(value.__module__)):
            self.found[id(value)] = value

    def _tensor(self, path: str, value: torch.Tensor) -> None:
        self.leaves[path] = value
        if not value.is_inference():
            self.versions[path] = value._version

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
            self.held.append(Held(f"{path}.", vars(value), {"training": value.training}, frozenset({"training"})))
            self.leaves[f"{path}.training"] = value.training  # not among the modes of the model
            self._module(f"{path}.", value)
            return
        elif isinstance(value, ContextVar):
            self.held.append(Held(path, value, contents(value)))
            if self.held[-1].items is not ABSENT:
                self.visit(f"{path}.get()", self.held[-1].items, depth - 1)
            return
        elif isinstance(value, MappingProxyType):
            self.visit(path, gc.get_referents(value)[0], depth - 1)
            return
        elif self._is_open(value):
            cls = type(value)
            if not is_foreign(cls.__module__):
                self.found[id(cls)] = cls
            own = vars(value) if hasattr(value, "__dict__") else None
            items = []
            if isinstance(own, dict):
                shown = self._of(cls, own)
                items = [(f"{path}.{k}", v) for k, v in shown.items()]
                self.held.append(Held(f"{path}.", own, shown))
            slots = {s for base in cls.__mro__ for s in _as_tuple(vars(base).get("__slots__", ()))} - {"__dict__", "__weakref__"}
            if slots:
                filled = self._of(cls, {s: x for s in sorted(slots) if (x := getattr(value, s, ABSENT)) is not ABSENT})
                items += [(f"{path}.{s}", x) for s, x in filled.items()]
                self.held.append(Held(f"{path}.", value, filled, frozenset(filled)))
        if items is None and found is not None and all(map(is_plain, found.values() if isinstance(found, dict) else found)):
            self.leaves[path] = Value(f"{type(value).__name__} of {len(found)}", found)
            return
        if items is None or depth == 0:
            self.leaves[path] = Opaque(value)
            return
        self.seen.add(id(value))
        self.leaves[path] = Shape(type(value).__name__, len(found) if found is not None else -1)
        for name, item in items:
            self.visit(name, item, depth - 1)


def _root(cls: type) -> str:
    return str(cls.__module__).partition(".")[0]


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
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and getattr(value, "nbytes", _LARGEST + 1) <= _LARGEST:
        return Value(f"array of {value.nbytes} bytes", (str(value.dtype), value.shape, value.tobytes()))
    return None
