"""One traced call for many: while a model is exported, each call that does the same as an earlier one (see `repeats`) is a single operator,
and in the trace it is replaced by the earlier one's operators on its own arguments and parameters.

The names of values are those of an export of every call: fx numbers names by the words that they begin with, so each replaced call raises
these counters by as much as the call that stands for it did. The counters are private to torch.fx, and this file alone reads them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from autopar.capture.repeats import forwards_replaced, type_of
from autopar.ir import Op, Ref, call_text, map_refs, refs

__all__ = ["Instances", "Made", "NotRepeated", "Place", "StandIns"]

_LIBRARY = library.Library("autopar_repeat", "DEF")
_LIBRARY.define("begin(str path, Tensor[] given) -> ()")
_LIBRARY.define("end(str path, Tensor[] returned) -> ()")
_LIBRARY.define("call(str path, Tensor[] given, Tensor[] state) -> Tensor")
_RESULT: dict[str, tuple[Any, ...]] = {}  # path -> shape, stride and so on of what a call returns, while a model is exported
_FIRST_STORAGE = -(10**12)  # of those that no traced tensor has


def _nothing(path: str, tensors: list[Tensor]) -> None:
    return None


def _result(path: str, given: list[Tensor], state: list[Tensor]) -> Tensor:
    shape, stride, _, dtype, _ = _RESULT[path]
    device = next((t.device for t in (*given, *state)), torch.device("meta"))
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


for _name, _made in (("begin", _nothing), ("end", _nothing), ("call", _result)):
    library.register_fake(f"autopar_repeat::{_name}", _made, lib=_LIBRARY)
    _LIBRARY.impl(_name, _made, "CompositeExplicitAutograd")
for _marker in (torch.ops.autopar_repeat.begin.default, torch.ops.autopar_repeat.end.default):
    has_side_effect(_marker)

Counts = dict[str, int]


class NotRepeated(Exception):
    """A call is not, in the export, what another one is: every call has to be traced."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of an output: the argument leaf that it is; -1 for the one new tensor."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One traced call. given: its arguments, tensors as their types. returned: leaves of its output. result: the type of the new tensor.
    before: the counters of names; raised: by how much it raised them."""

    given: tuple[object, ...]
    spec: Any
    returned: tuple[object, ...]
    structure: Any
    result: tuple[Any, ...]
    before: Counts
    raised: Counts


class StandIns:
    """same: path of a submodule -> path of the one whose call stands for its call."""

    def __init__(self, model: nn.Module, same: Mapping[str, str]) -> None:
        self.model, self.same = model, same
        self.made: dict[str, Made] = {}
        self.before: dict[str, Counts] = {}  # of those that are stood for

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, calls that are stood for are one operator each, and those that stand for them are marked."""
        forwards = {path: self._marked(path, self.model.get_submodule(path).forward) for path in set(self.same.values())}
        forwards |= {path: self._standing_in(path) for path in self.same}
        for forward in forwards.values():
            forward.stands_in = True  # type: ignore[attr-defined]
        _RESULT.clear()
        with forwards_replaced(forwards, self.model):
            yield

    def _marked(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given, spec = pytree.tree_flatten((args, kwargs))
            before = dict(_counters())
            torch.ops.autopar_repeat.begin(path, [x for x in given if isinstance(x, Tensor)])
            output = forward(*args, **kwargs)
            leaves, structure = pytree.tree_flatten(output)
            where = {id(x): k for k, x in reversed(list(enumerate(given))) if isinstance(x, Tensor)}
            new = list({id(x): x for x in leaves if isinstance(x, Tensor) and id(x) not in where}.values())
            if len(new) != 1:
                raise NotRepeated(path)
            torch.ops.autopar_repeat.end(path, new)
            _RESULT[path] = type_of(new[0])
            before = _with_new_words(before)
            raised = {word: n - before[word] for word, n in _counters().items() if n != before[word]}
            self.made[path] = Made(
                given=_types(given), spec=spec, structure=structure, result=_RESULT[path], before=before, raised=raised,
                returned=tuple(Place(where.get(id(x), -1)) if isinstance(x, Tensor) else x for x in leaves),
            )  # fmt: skip
            return output

        return run

    def _standing_in(self, path: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            made = self.made.get(self.same[path])
            given, spec = pytree.tree_flatten((args, kwargs))
            if made is None or spec != made.spec or _types(given) != made.given:
                raise NotRepeated(path)
            first = self.model.get_submodule(self.same[path])
            _RESULT[path] = made.result
            state = next(([p] for p in first.parameters() if p.requires_grad), [])  # through which it has a gradient
            with _untold():
                result = torch.ops.autopar_repeat.call(path, [x for x in given if isinstance(x, Tensor)], state)
            if _types([result]) != (made.result,):
                raise NotRepeated(path)
            counters = _counters()
            self.before[path] = dict(counters)
            for word, by in made.raised.items():
                counters[word] = counters.get(word, 0) + by
            leaves = [(result if x.index < 0 else given[x.index]) if isinstance(x, Place) else x for x in made.returned]
            return pytree.tree_unflatten(leaves, made.structure)

        return run


def _types(leaves: Sequence[Any]) -> tuple[object, ...]:
    with torch._C.DisableTorchFunction():  # looking at tensors is nothing to trace, and dear where it is
        return tuple(type_of(x) if isinstance(x, Tensor) else (type(x), repr(x)) for x in leaves)


def _namespace() -> Any:
    mode = get_proxy_mode()
    if mode is None:
        raise NotRepeated("nothing is traced")
    return mode.tracer.graph._graph_namespace


@contextlib.contextmanager
def _untold() -> Iterator[None]:
    """Inside, nothing is noted of the line that calls an operator, and no mode is told: finding the line takes longer than all else."""
    mode = get_proxy_mode()
    tracer: Any = None if mode is None else mode.tracer
    before = getattr(tracer, "record_stack_traces", None)
    try:
        if before is not None:
            tracer.record_stack_traces = False
        with torch._C.DisableTorchFunction():
            yield
    finally:
        if before is not None:
            tracer.record_stack_traces = before


def _counters() -> Counts:
    """Word -> the number of the last name that begins with it."""
    counts: Counts = _namespace()._base_count
    return counts


def _with_new_words(before: Counts) -> Counts:
    """What the counters were, with the words that are new since: the first name of most has no number, as if the last had been -1."""
    used = _namespace()._used_names
    return {word: before.get(word, -1 if word in used else 0) for word in _counters()}


_NUMBERED = re.compile(r"^([a-zA-Z_][0-9a-zA-Z_]*?)(?:_(\d+))?$")


@dataclass(slots=True)
class _Template:
    start: int
    given: list[Ref]
    stop: int = -1
    result: str = ""


class Instances:
    """Makes the operators of calls that are stood for. trace: what is being made, with `ops`, `names`, `metas`, `storages` and
    `value_of_fqn`."""

    def __init__(self, stand_ins: StandIns, trace: Any) -> None:
        self.stand_ins, self.trace = stand_ins, trace
        self.templates: dict[str, _Template] = {}
        self.states: dict[str, list[tuple[str, str]]] = {}  # of those that stand for others: value and name of parameters and buffers
        self.next_storage = itertools.count(_FIRST_STORAGE, -1)

    def begin(self, path: str, given: Sequence[object]) -> None:
        self.templates[path] = _Template(len(self.trace.ops), _as_refs(given))

    def end(self, path: str, returned: Sequence[object]) -> None:
        template, (result,) = self.templates[path], _as_refs(returned)
        template.stop, template.result = len(self.trace.ops), result.name

    def call(self, path: str, given: Sequence[object], calls: tuple[str, ...]) -> Ref:
        """Adds the operators of a call of the submodule at this path; what it returns. calls: those that it stands in, itself the last."""
        trace, like = self.trace, self.stand_ins.same[path]
        template = self.templates.get(like)
        if template is None or template.stop < 0 or not calls or calls[-1] != path:
            raise NotRepeated(path)
        rename: dict[str, str] = {}
        pairs = [*zip((r.name for r in template.given), (r.name for r in _as_refs(given)), strict=True)]
        pairs += [(value, trace.value_of_fqn[f"{path}.{name}"]) for value, name in self._state(like)]
        storages: dict[int, int] = {}
        for old, new in pairs:
            if rename.setdefault(old, new) != new:
                raise NotRepeated(path)
            if old in trace.storages and storages.setdefault(trace.storages[old], trace.storages[new]) != trace.storages[new]:
                raise NotRepeated(path)
        before = self.stand_ins.made[like].before
        now = self.stand_ins.before[path]
        by = {word: now[word] - n for word, n in before.items() if word in now}
        for traced in trace.ops[template.start : template.stop]:
            op: Op = traced.op
            if any(r not in rename for r in refs(op)):
                raise NotRepeated(f"{path}: {op.target} reads what the call was not given")
            for o in op.outputs:
                if o is not None:
                    rename[o] = trace.names.fresh(_moved(o, by))
                    trace.metas[rename[o]] = trace.metas[o]
                    if o in trace.storages:
                        storage = trace.storages[o]
                        trace.storages[rename[o]] = storages.setdefault(storage, next(self.next_storage))
            if not (op.module == like or op.module.startswith(f"{like}.")) or like not in traced.calls:
                raise NotRepeated(f"{path}: {op.target} does not stand in {like}")
            inside = traced.calls[traced.calls.index(like) + 1 :]
            call_text(op)  # which its instances have then
            made = map_refs(
                op, lambda n: Ref(rename[n]), outputs=tuple(None if o is None else rename[o] for o in op.outputs),
                module=path + op.module.removeprefix(like),
            )  # fmt: skip
            stack = (*calls, *(path + c.removeprefix(like) for c in inside))
            trace.ops.append(type(traced)(op=made, calls=stack, autocast=traced.autocast))
        return Ref(rename[template.result])

    def _state(self, path: str) -> list[tuple[str, str]]:
        """Of a submodule that stands for others: the value and the name of each parameter and buffer."""
        if path not in self.states:
            module = self.stand_ins.model.get_submodule(path)
            names = [name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))]
            self.states[path] = [(self.trace.value_of_fqn[f"{path}.{name}"], name) for name in names]
        return self.states[path]


def _as_refs(values: Sequence[object]) -> list[Ref]:
    found = [v for v in values if isinstance(v, Ref)]
    if len(found) != len(values):
        raise NotRepeated("a value that is no tensor")
    return found


def _moved(name: str, by: Counts) -> str:
    """The name at the same place of another call: its number is further by as much as the counter of its word is."""
    word, number = _parts(name)
    if word not in by:
        return name
    place = number + by[word]
    return f"{word}_{place}" if place else word


@functools.lru_cache(maxsize=1 << 14)
def _parts(name: str) -> tuple[str, int]:
    """The word that a name begins with, and its number; ("", 0) if it is no such name."""
    match = _NUMBERED.match(name)
    return (match[1], int(match[2] or 0)) if match is not None else ("", 0)
