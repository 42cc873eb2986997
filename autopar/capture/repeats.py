"""Which calls of submodules do the same: the layers of a deep model. One of them is traced, and the others are made from its operators.

Nothing is concluded from classes or attributes. The model runs once on the meta device, and every operator that it calls is noted. Two
calls are the same if their arguments and states correspond in types and in what is shared, and their operators follow one another with
corresponding operands, equal constants and equal modes. A call that reads any tensor but its arguments, its own parameters and buffers
and what it made itself, that writes to its arguments, or that returns more than one new tensor is the same as no other.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.around import as_called
from autopar.capture.export import FAILURES, as_exported, objective_of, own_gradients
from autopar.capture.given import Inputs, copied
from autopar.capture.state import Change, State
from autopar.run.autocast import ambient
from autopar.run.hooks import of_calls
from autopar.run.outside_draws import from_seed

__all__ = ["Repeated", "forwards_replaced", "repeated", "type_of"]

_GRAD = torch.is_grad_enabled  # of torch itself: while a model is called it is told what its call wants (see `around`)
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
    """One operator as it was called: its tensors, of the arguments and of the results, in order; whether it may write to some of them; and
    the rest of its results with the modes in which it was called."""

    func: Any
    args: Any
    kwargs: Any
    given: list[Tensor]
    made: list[Tensor]
    writes: bool
    rest: tuple[object, ...]


class _Record(TorchDispatchMode):
    """Notes what runs. An operator that makes new tensors runs once for each kind of operands: only its results' types are asked for.
    numbers: of each operator, equal for equal operators on operands of equal kinds with equal constants."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[_Ran] = []
        self.numbers = array("q")
        self.number: dict[object, int] = {}
        self.known: dict[int, tuple[type, list[tuple[Any, ...]]]] = {}
        self.schemas: dict[int, tuple[Any, bool, bool]] = {}  # by the identity of an operator, which is kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if id(func) not in self.schemas:
            schema = func._schema
            self.schemas[id(func)] = func, any(r.alias_info is not None for r in schema.returns), schema.is_mutable
        _, shares, writes = self.schemas[id(func)]
        given: list[Tensor] = []
        key = id(func), _kinds(args, given), _kinds(kwargs, given) if kwargs else ()
        number = self.number.setdefault(key, len(self.number))
        results = func(*args, **(kwargs or {})) if shares else self._results(number, func, args, kwargs or {})
        made: list[Tensor] = []
        rest = _rest(results, made), _GRAD(), ambient()
        self.numbers.append(number)
        self.ran.append(_Ran(func, args, kwargs or {}, given, made, writes, rest))
        return results

    def _results(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        if number not in self.known:
            results = func(*args, **kwargs)
            tensors = results if isinstance(results, (list, tuple)) else [results]
            if all(isinstance(x, Tensor) and x.is_meta and not x.storage_offset() for x in tensors):
                self.known[number] = type(results), [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]
            return results
        kind, types = self.known[number]
        made = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in types]
        return kind(made) if kind in (list, tuple) else made[0]

    def of(self, call: _Call) -> bytes:
        """Equal for calls whose operators are equal but for which tensors they are given."""
        return self.numbers[call.start : call.stop].tobytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """same: path of a submodule -> the path of the one that is called before it and does the same; of calls within one another the
    outermost. changes: what the call of the model changed."""

    same: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


_BY_THEMSELVES = frozenset({int, bool, str, type(None), torch.dtype})


def _kinds(x: Any, tensors: list[Tensor]) -> object:
    """The kinds of the tensors in some arguments, which it adds to `tensors` in order, and the constants as they are."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return tuple(x.shape), x.stride(), x.dtype, x.device
    kind = type(x)
    if kind in _BY_THEMSELVES:
        return kind, x
    if isinstance(x, (list, tuple)):
        return tuple([_kinds(y, tensors) for y in x])
    if isinstance(x, dict):
        return tuple([(k, _kinds(v, tensors)) for k, v in x.items()])
    return kind, repr(x)


def _rest(x: Any, tensors: list[Tensor]) -> object:
    """The results of an operator without the tensors in them, which it adds to `tensors` in order."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return None
    if isinstance(x, (list, tuple)):
        return tuple([_rest(y, tensors) for y in x])
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
        with from_seed(0), torch.enable_grad(), as_exported(), own_gradients() as unseen:
            with forwards_replaced({path: noted(path, m.forward, m) for path, m in model.named_modules() if path}, model), record:
                args, kwargs = copied(inputs)
                with as_called((args, kwargs)):
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
    several = Counter(record.of(call) for call in _worth(whole))
    _compare(whole, record, alone, several, {}, found)
    return Repeated(same=found, changes=changes)


def _worth(call: _Call) -> Iterator[_Call]:
    """The calls inside of a call, and inside of those, that have enough operators."""
    for inner in call.inner:
        if inner.stop - inner.start >= LEAST:
            yield inner
            yield from _worth(inner)


def _compare(
    call: _Call, record: _Record, alone: set[str], several: Mapping[bytes, int], known: dict[object, str], found: dict[str, str]
) -> None:
    """alone: submodules that are called once. several: how many calls have the same operators, whatever these are given."""
    for inner in call.inner:
        if inner.stop - inner.start < LEAST:
            continue
        said = _signature(inner, record) if inner.path in alone and several[record.of(inner)] > 1 else None
        if said is not None and known.setdefault(said, inner.path) != inner.path:
            found[inner.path] = known[said]
        else:
            _compare(inner, record, alone, several, known, found)


def type_of(tensor: Tensor) -> tuple[object, ...]:
    """What operators can see of a tensor beside its data."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad


def _signature(call: _Call, record: _Record) -> object | None:
    """Equal for calls that do the same; None if there is no other."""
    labels: dict[int, str | int] = {}  # of tensors by identity; numbers of those that the call made
    own: list[tuple[object, ...]] = []
    state = [*call.module.named_parameters(remove_duplicate=False), *call.module.named_buffers(remove_duplicate=False)]
    given, spec = pytree.tree_flatten(call.given)
    memory: dict[int, int] = {}
    writable: set[str | int] = set()
    for name, tensor in (*state, *((f"argument {k}", x) for k, x in enumerate(given) if isinstance(x, Tensor))):
        label = labels.setdefault(id(tensor), name)
        if not name.startswith("argument "):
            writable.add(label)
        shared = memory.setdefault(tensor.untyped_storage()._cdata, len(memory))
        own.append((name, label, shared, *type_of(tensor), isinstance(tensor, nn.Parameter)))

    def text(x: Any) -> object:
        return labels[id(x)] if isinstance(x, Tensor) else (type(x), repr(x))

    try:
        constants = [text(x) for x in given]
        operators: list[object] = []
        for r in record.ran[call.start : call.stop]:
            operands = [labels[id(x)] for x in r.given]
            if r.writes and not _written(r, labels) <= writable:
                return None
            operators += (*operands, *[labels.setdefault(id(x), len(labels)) for x in r.made], r.rest)
        returned, structure = pytree.tree_flatten(call.returned)
        results = [text(x) for x in returned]
    except KeyError:  # a tensor that the call was not given
        return None
    new = {x for x in results if isinstance(x, int)}
    if len(new) != 1:
        return None
    kinds = tuple((path, type(m), m.training, tuple(map(id, of_calls(m)))) for path, m in call.module.named_modules())
    grads = tuple(x.requires_grad for x in returned if isinstance(x, Tensor))
    operators.append(record.of(call))
    return kinds, tuple(own), str(spec), tuple(constants), tuple(operators), str(structure), tuple(results), grads


def _written(ran: _Ran, labels: Mapping[int, str | int]) -> set[str | int]:
    """The labels of the operands that an operator writes to, of those that the call did not make."""
    named = dict(zip((a.name for a in ran.func._schema.arguments), ran.args, strict=False)) | ran.kwargs
    names = [a.name for a in ran.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found = {labels[id(x)] for n in names for x in pytree.tree_leaves(named.get(n)) if isinstance(x, Tensor)}
    return {x for x in found if isinstance(x, str)}


@contextlib.contextmanager
def forwards_replaced(forwards: dict[str, Callable[..., Any]], model: nn.Module) -> Iterator[None]:
    """Inside, these submodules have another forward."""
    named = dict(model.named_modules())
    modules = [(named[path] if path in named else model.get_submodule(path), forward) for path, forward in forwards.items()]
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
