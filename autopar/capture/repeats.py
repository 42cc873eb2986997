"""Which calls of submodules do the same: the layers of a deep model. One of them is traced, and the others are made from its operators.

Nothing is concluded from classes or attributes. The model runs once on the meta device, and every operator that it calls is noted. Two
calls are the same if their arguments and states correspond in types and in what is shared, and their operators follow one another with
corresponding operands, equal constants and equal modes. A call that reads any tensor but its arguments, its own parameters and buffers
and what it made itself, that writes to its arguments, or that returns more than one new tensor is the same as no other.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.around import as_called
from autopar.capture.calls import Inputs, copied, seeded
from autopar.capture.export import FAILURES, as_exported, objective_of, own_gradients
from autopar.capture.state import Change, State
from autopar.run.autocast import ambient

__all__ = ["Repeated", "forwards_replaced", "repeated", "type_of"]

LEAST = 8  # operators of a call that is worth it


@dataclass(slots=True)
class _Call:
    """One call of a submodule: its operators are [start, stop) of all."""

    path: str
    module: nn.Module
    given: Any
    start: int
    stop: int = 0
    returned: Any = None
    inner: list[_Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Ran:
    """One operator as it was called, and the modes in which it was."""

    func: Any
    args: Any
    kwargs: Any
    results: Any
    modes: tuple[object, ...]


class _Record(TorchDispatchMode):
    """Notes what runs. An operator that makes new tensors runs once for each kind of operands: only its results' types are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[_Ran] = []
        self.known: dict[object, tuple[type, list[tuple[Any, ...]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = self._results(func, args, kwargs or {})
        modes = (torch.is_grad_enabled(), ambient())
        self.ran.append(_Ran(func, args, kwargs or {}, results, modes))
        return results

    def _results(self, func: Any, args: Any, kwargs: Any) -> Any:
        if any(r.alias_info is not None for r in func._schema.returns):
            return func(*args, **kwargs)
        key = func, _kinds(args), _kinds(kwargs)
        if key not in self.known:
            results = func(*args, **kwargs)
            tensors = results if isinstance(results, (list, tuple)) else [results]
            if all(isinstance(x, Tensor) and x.is_meta and not x.storage_offset() for x in tensors):
                self.known[key] = type(results), [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]
            return results
        kind, types = self.known[key]
        made = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in types]
        return kind(made) if kind in (list, tuple) else made[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """same: path of a submodule -> the path of the one that is called before it and does the same; of calls within one another the
    outermost. changes: what the call of the model changed."""

    same: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


def _kinds(x: Any) -> object:
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    if isinstance(x, (list, tuple)):
        return tuple(map(_kinds, x))
    if isinstance(x, dict):
        return tuple((k, _kinds(v)) for k, v in x.items())
    return type(x), repr(x)


def repeated(
    model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs, start: State, *, outputs: bool | None = False
) -> Repeated:
    """Of models on the meta device whose submodules have one name each; of others nothing."""
    names = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    if max(names.values()) > 1:  # whose calls torch.export names otherwise
        return Repeated()
    leaves = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(inputs)]
    if not all(x.is_meta for x in leaves if isinstance(x, Tensor)):
        return Repeated()
    record, whole, count = _Record(), _Call("", model, None, 0), dict[str, int]()
    trained = [p.requires_grad for p in model.parameters()]
    active = [whole]

    def noted(path: str, forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = _Call(path, module, (args, kwargs), len(record.ran))
            count[path] = count.get(path, 0) + 1
            active[-1].inner.append(call)
            active.append(call)
            call.returned = forward(*args, **kwargs)
            active.pop()
            call.stop = len(record.ran)
            return call.returned

        return run

    try:
        with seeded(0, inputs), torch.enable_grad(), as_exported(), own_gradients() as unseen:
            with forwards_replaced({path: noted(path, m.forward, m) for path, m in model.named_modules() if path}, model), record:
                args, kwargs = copied(inputs)
                with as_called():
                    objective_of(model(*args, **kwargs), loss, outputs)
        changes = tuple(start.changes(State.take(model, loss, start)))
    except FAILURES:  # which the trace of it as it is explains
        return Repeated()
    finally:
        start.restore()
        frozen = [p.requires_grad for p in model.parameters()] != trained
        for p, trains in zip(model.parameters(), trained, strict=True):
            p.requires_grad_(trains)
    if unseen or frozen:
        return Repeated()
    alone = {path for path, n in count.items() if n == 1}
    found: dict[str, str] = {}
    _compare(whole, record.ran, alone, {}, found)
    return Repeated(same=found, changes=changes)


def _compare(call: _Call, ran: list[_Ran], alone: set[str], known: dict[object, str], found: dict[str, str]) -> None:
    """alone: submodules that are called once."""
    for inner in call.inner:
        if inner.stop - inner.start < LEAST:
            continue
        said = _signature(inner, ran) if inner.path in alone else None
        if said is not None and known.setdefault(said, inner.path) != inner.path:
            found[inner.path] = known[said]
        else:
            _compare(inner, ran, alone, known, found)


def type_of(tensor: Tensor) -> tuple[object, ...]:
    """What operators can see of a tensor beside its data."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad


class _Unlike(Exception):
    """The call does what no other does."""


def _signature(call: _Call, ran: list[_Ran]) -> object | None:
    """Equal for calls that do the same; None if there is no other."""
    labels: dict[int, str] = {}
    own: list[tuple[object, ...]] = []
    state = [*call.module.named_parameters(remove_duplicate=False), *call.module.named_buffers(remove_duplicate=False)]
    given, spec = pytree.tree_flatten(call.given)
    memory: dict[int, int] = {}
    writable: set[str] = set()
    for name, tensor in (*state, *((f"argument {k}", x) for k, x in enumerate(given) if isinstance(x, Tensor))):
        label = labels.setdefault(id(tensor), name)
        if not name.startswith("argument "):
            writable.add(label)
        shared = memory.setdefault(tensor.untyped_storage()._cdata, len(memory))
        own.append((name, label, shared, *type_of(tensor), isinstance(tensor, nn.Parameter)))

    def text(x: Any) -> object:
        if isinstance(x, Tensor):
            label = labels.get(id(x))
            if label is None:
                raise _Unlike
            return label
        if isinstance(x, (list, tuple)):
            return tuple(map(text, x))
        if isinstance(x, dict):
            return tuple((k, text(v)) for k, v in x.items())
        return type(x), repr(x)

    def make(x: Any) -> object:
        if isinstance(x, Tensor):
            return labels.setdefault(id(x), f"made {len(labels)}")
        return tuple(map(make, x)) if isinstance(x, (list, tuple)) else (type(x), repr(x))

    try:
        constants = [text(x) for x in given]
        operators = []
        for r in ran[call.start : call.stop]:
            operands = text(r.args), text(r.kwargs)
            if r.func._schema.is_mutable and not _written(r, labels) <= writable:
                raise _Unlike
            operators.append((r.func, operands, make(r.results), r.modes))
        returned, structure = pytree.tree_flatten(call.returned)
        results = [text(x) for x in returned]
    except _Unlike:
        return None
    new = {x for x in results if isinstance(x, str) and x.startswith("made ")}
    if len(new) != 1:
        return None
    kinds = tuple((path, type(m), m.training, _hooks(m)) for path, m in call.module.named_modules())
    grads = tuple(x.requires_grad for x in returned if isinstance(x, Tensor))
    return kinds, tuple(own), str(spec), tuple(constants), tuple(operators), str(structure), tuple(results), grads


def _written(ran: _Ran, labels: dict[int, str]) -> set[str]:
    """The labels of the operands that an operator writes to, of those that the call did not make."""
    named = dict(zip((a.name for a in ran.func._schema.arguments), ran.args, strict=False)) | ran.kwargs
    names = [a.name for a in ran.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found = {labels[id(x)] for n in names for x in pytree.tree_leaves(named.get(n)) if isinstance(x, Tensor)}
    return {x for x in found if not x.startswith("made ")}


def _hooks(module: nn.Module) -> tuple[int, ...]:
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return tuple(id(hook) for table in tables for hook in table.values())


@contextlib.contextmanager
def forwards_replaced(forwards: dict[str, Callable[..., Any]], model: nn.Module) -> Iterator[None]:
    """Inside, these submodules have another forward."""
    modules = [(model.get_submodule(path), forward) for path, forward in forwards.items()]
    before = [vars(m).get("forward") for m, _ in modules]
    for m, forward in modules:
        vars(m)["forward"] = forward
    try:
        yield
    finally:
        for (m, _), own in zip(modules, before, strict=True):
            if own is None:
                vars(m).pop("forward", None)
            else:
                vars(m)["forward"] = own
