"""One call of what may be a region, looked at: what it takes, returns and changes, what it costs, and how it may be split."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.capture.applied import Function, applied_by, hooks_told, only_computes
from autopar.capture.draws import OTHER_DRAWS
from autopar.capture.export import FAILURES
from autopar.capture.flops import CountedFlops
from autopar.capture.follow import storage_of
from autopar.capture.hooked import Call, Outside
from autopar.capture.repeats import forwards_replaced
from autopar.capture.samples import identical, is_linear, run_small, works_by_samples, writes_unseen
from autopar.capture.state import State
from autopar.capture.terms import as_terms
from autopar.capture.walk import TABLES
from autopar.run import outside_draws
from autopar.run.autocast import ambient
from autopar.run.closed import function_of
from autopar.run.hooks import of_all_modules, of_calls, of_gradients
from autopar.run.inputs import not_dense
from autopar.run.region import Place, Region, within
from autopar.run.region_modules import Applied, Drawn, Terms
from autopar.run.saved import Kept

__all__ = ["Pass", "ReadsValues", "observed"]

STATES = 4  # of Python's and numpy's generators in which a region is tried by samples: the lowest numbers, the highest, and two others
DEPTH = 3  # of containers in containers
KEEP_TENSORS = "keep tensors (x.detach()), which are followed, and make numbers and arrays of them where they are read"
_OF_TENSORS = (f"torch{os.sep}_tensor.py", f"torch{os.sep}overrides.py")  # where methods of tensors are that Python has
_TORCH = os.path.dirname(torch.__file__) + os.sep


class ReadsValues(TorchFunctionMode):
    """Notes whether the user's code inside takes values of tensors into Python, and which of some hooks does so."""

    def __init__(self) -> None:
        super().__init__()
        self.read = False
        self.hooks: Mapping[CodeType, str] = {}
        self.by_hook = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS_VALUES:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename.endswith(_OF_TENSORS):
                frame = frame.f_back
            if frame is not None and not frame.f_code.co_filename.startswith(_TORCH):
                self.read = True
                self.by_hook = self.by_hook or next((self.hooks[c] for c in _running(frame) if c in self.hooks), "")
        return func(*args, **(kwargs or {}))


def _running(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _hooks_that_may_leave(module: nn.Module) -> dict[CodeType, str]:
    """The hooks around calls of the modules inside that may leave something where others find it: their code, and what they are."""
    named = [(path, hook) for path, m in module.named_modules() if path for hook in of_calls(m)]
    named += [("any module", hook) for table in of_all_modules().values() for hook in table.values()]
    found: dict[CodeType, str] = {}
    for path, hook in named:
        if (function := function_of(hook)) is not None and not only_computes(hook):
            found[function.__code__] = f"the hook {function.__qualname__.replace('.<locals>', '')} on {path}"
    return found


_READS_VALUES = frozenset((
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal", "is_nonzero", "item",
    "numpy", "tolist",
))  # fmt: skip


_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def _beside_tensors(output: Any, read: bool) -> str:
    """What there is in an output beside tensors that another call may return otherwise; '' for nothing. read: the code has taken values of
    tensors."""
    for x in pytree.tree_leaves(output):
        if not isinstance(x, (Tensor, *_PLAIN)):
            return f"an object ({type(x).__name__})"
        if read and isinstance(x, int | float | complex | str):
            return f"{type(x).__name__} {x!r}, and takes values of tensors into Python"
    return ""


@dataclass(frozen=True, slots=True)
class _Trial:
    """What trials of a call have shown. steady: the shapes of its results do not depend on values. rows: as of Call; linear, private,
    private_gradients, module: as of Region."""

    steady: bool
    rows: tuple[int, ...]
    linear: bool
    private: bool
    private_gradients: bool
    module: nn.Module


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of a model that is looked at. names: of the model's tensors, by storage. keeps: what autograd keeps of it. trials: of calls of
    autograd functions that were tried, by what such a call may depend on beside numbers."""

    names: Mapping[int, str]
    keeps: Kept
    trials: dict[Hashable, _Trial] = field(default_factory=dict)


def observed(
    path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, line: str, of: Pass, mode: ReadsValues | None = None
) -> tuple[Any, Call | str]:
    """What a submodule returns, and the call, or why it cannot be a region. mode: notes whether its code takes values of tensors."""
    given = tuple(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    copies = tuple(t.detach().clone() for t in given)
    held_before, contained_before = _held(module, given, own), _contained(module)
    before = {name: t.detach().clone() for name, t in module.named_buffers() if not t.is_meta}
    random, random_outside = generators.states(), outside_draws.states()
    held = {storage_of(t) for t in own.values()}
    known = held | {storage_of(t) for t in given}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> list[Tensor]:
        if storage_of(t) not in known:
            saved[storage_of(t)] = t.untyped_storage().nbytes()
        return of.keeps.pack(t)

    outside = Outside({storage: name for storage, name in of.names.items() if storage not in known})
    kept = torch.autograd.graph.saved_tensors_hooks(pack, of.keeps.unpack)
    own_backward: list[object] = [module] if isinstance(module, Applied) else []
    hooks: list[Callable[..., Any]] = [hook for path, m in module.named_modules() if path for hook in of_gradients(m)]

    handed = list(_weights_held_by((args, kwargs))) if isinstance(module, Applied | Drawn) else []

    def applied(cls: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own_backward.append(cls)
        handed.extend(_weights_held_by((args, kwargs)))
        return apply(*args, **kwargs)

    watched = hooks_told(lambda _, hook: hooks.append(hook))
    values = mode if isinstance(mode, ReadsValues) else ReadsValues()  # the innermost, which the code itself calls
    values.hooks = _hooks_that_may_leave(module)
    with outside, CountedFlops() as counted, kept, watched, applied_by(applied), values:
        output = forward(*args, **kwargs)
    drawn_outside = outside_draws.states() != random_outside
    if beside := _beside_tensors(output, values.read or drawn_outside):
        return output, f"it returns {beside}, which a graph would hold as it was in one call: let it return tensors"
    results = tuple(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
    held_after = _held(module, given, own)
    changed = [name for name in {**held_before, **held_after} if held_before.get(name) != held_after.get(name)]
    writes = _written_buffers(module, changed, before)
    if values.by_hook:
        return output, f"{values.by_hook} takes values of tensors into Python, where it may leave them: {KEEP_TENSORS}"
    if values.read and (other := _other_in(contained_before, _contained(module))):
        return output, f"it takes values of tensors into Python, and leaves something in the attribute {other}: {KEEP_TENSORS}"
    if other := next((name for name in changed if name not in writes), ""):
        return output, f"it changes {other}"
    if handed and isinstance(module, Drawn):
        return output, f"it draws random numbers, and is given {handed[0]}"
    if handed:
        what = f"an autograd function is given {handed[0]}"
        return output, f"{what}, whose weights its backward may read, where they may be in parts: let it be given tensors alone"
    if outside.read:
        return output, f"it reads {outside.read}, which is not its own: let the model give it in the call"
    if not results or any(not_dense(t) for t in (*given, *results)):
        return output, "it does not take and return dense tensors"
    if any(storage_of(t) in held for t in results):
        return output, "what it returns shares memory with its parameters or buffers"
    results = (*results, *(own[name].detach().clone() for name in writes.values()))
    by_chance = not generators.same(random)  # of torch, which draws others of fewer samples
    draws = drawn_outside or by_chance
    region = Region(
        path=path, module=module, state=tuple(own), arguments=pytree.tree_map_only(Tensor, lambda _: Place(), (args, kwargs)),
        modes=tuple(m.training for m in module.modules()), autocast=ambient(), outside=drawn_outside,
        writes=tuple(writes.values()),
    )  # fmt: skip
    structure = pytree.tree_map_only(Tensor, lambda t: torch.empty(0, device="cpu"), output)
    call = Call(
        region=region, arguments=copies, results=tuple(r.detach() if not r.requires_grad else r.detach().requires_grad_() for r in results),
        structure=structure, flops=counted.flops, saved=sum(saved.values()), draws=draws, rows=(), line=line,
    )  # fmt: skip
    tried, made = list(copies), list(call.results)
    meta = any(t.is_meta for t in (*given, *own.values()))
    with forwards_replaced({"": forward}, module), torch.device("cpu") if meta else contextlib.nullcontext():
        if meta:
            small = None if own else run_small(region, given, results)
            if small is None:
                return output, "it lies on the meta device, and cannot be tried on small tensors of numbers: build the model with data"
            tried, made, draws = small
            by_chance = draws
        alike = _alike(region, given, results) if isinstance(module, Applied) and not hooks else None
        trial = of.trials.get(alike) if alike is not None else None
        if trial is None:
            trial = _tried(region, tried, tuple(own.values()), made, by_chance, own_backward, hooks)
        if alike is not None:
            of.trials[alike] = trial
    if not trial.steady:
        return output, "the shapes of what it returns depend on values"
    region = dataclasses.replace(
        region, module=trial.module if isinstance(trial.module, Terms) else module, linear=trial.linear, private=trial.private,
        private_gradients=trial.private_gradients,
    )  # fmt: skip
    return output, dataclasses.replace(call, region=region, rows=trial.rows, draws=draws)


def _tried(
    region: Region, given: Sequence[Tensor], state: tuple[Tensor, ...], results: Sequence[Tensor], draws: bool,
    own_backward: Sequence[object], hooks: Sequence[Callable[..., Any]],
) -> _Trial:  # fmt: skip
    """draws: it draws from torch. What it draws from Python and numpy it may draw alike for all samples: it is tried in several states."""
    if region.outside and region.seed is None:
        states = [dataclasses.replace(region, seed=words) for words in OTHER_DRAWS[:STATES]]
        trials = [_tried(each, given, state, results, draws, own_backward, hooks) for each in states]
        steady = all(t.steady for t in trials) and _steady_in_other_draws(region, given, state, results)
        rows = trials[0].rows if all(t.rows == trials[0].rows for t in trials) else ()
        return _Trial(
            steady=steady, rows=rows, linear=all(t.linear for t in trials), private=any(t.private for t in trials),
            private_gradients=any(t.private_gradients for t in trials), module=trials[0].module,
        )  # fmt: skip
    own = bool(own_backward or hooks)
    functions = [x if isinstance(x, Applied) else Applied(x) for x in own_backward if isinstance(x, type | Applied)]
    start = [State.take(function) for function in functions]
    private, private_gradients = writes_unseen(region, given, state, draws=draws, own_backward=own)
    region = dataclasses.replace(region, private=private, private_gradients=private_gradients)
    steady, rows = works_by_samples(region, given, state, results, draws=draws, own_backward=own)
    leaves = not all(map(only_computes, hooks))  # what is of all the gradient there is
    leaves = leaves or any(was.changes(State.take(function, None, was)) for function, was in zip(functions, start, strict=True))
    linear = not leaves and (not own or is_linear(region, given, state, draws=draws))
    if steady and not rows and not hooks and isinstance(region.module, Applied):
        region, rows = as_terms(region, given, results, draws=draws)
    return _Trial(steady, () if leaves else rows, linear, private, private_gradients, region.module)


def _written_buffers(module: nn.Module, changed: Sequence[str], before: Mapping[str, Tensor]) -> dict[str, str]:
    """The buffers of its own, and of no second name, that a module changes: as `_held` names them, their names. before: their values;
    running statistics change without a further version."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    count = Counter(storage_of(t) for t in (*buffers.values(), *module.parameters()))
    alone = {name: t for name, t in buffers.items() if count[storage_of(t)] == 1}
    now = [name for name, t in alone.items() if f"its tensor {name}" in changed or (name in before and not identical(t, before[name]))]
    return {f"its tensor {name}": name for name in now}


def _steady_in_other_draws(region: Region, given: Sequence[Tensor], state: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Whether a region gives tensors of these shapes and dtypes, and no others beside them, whatever Python and numpy draw."""
    expected = [(r.shape, r.dtype) for r in results]
    for words in OTHER_DRAWS:
        with torch.no_grad():
            try:
                found = dataclasses.replace(region, seed=words)(given, state)
            except FAILURES:
                return False
        if [(r.shape, r.dtype) for r in found] != expected:
            return False
    return True


def _alike(region: Region, given: Sequence[Tensor], results: Sequence[Tensor]) -> Hashable | None:
    """Equal for calls of one function that differ in nothing but the numbers in their tensors; None if this cannot be told."""
    leaves, spec = pytree.tree_flatten(region.arguments)
    if not all(isinstance(x, (Place, *_PLAIN)) for x in leaves):
        return None
    of = [(tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in (*given, *results)]
    function = region.module.function if isinstance(region.module, Applied) else None
    return function, str(spec), tuple(None if isinstance(x, Place) else (type(x), x) for x in leaves), tuple(of), region.autocast


def _weights_held_by(value: Any, depth: int = 3) -> Iterator[str]:
    """What there is in arguments that has parameters or buffers, in words: modules, also where functions hold them."""
    for x in pytree.tree_leaves(value) if depth else ():
        of = getattr(x, "__self__", None) if isinstance(x, MethodType) else x
        if isinstance(of, nn.Module):
            yield from (f"a module ({type(of).__name__})",) if next(chain(of.parameters(), of.buffers()), None) is not None else ()
        elif isinstance(of, functools.partial):
            yield from _weights_held_by((of.func, of.args, of.keywords), depth - 1)
        elif isinstance(of, FunctionType) and of.__closure__:
            yield from _weights_held_by([cell.cell_contents for cell in of.__closure__ if cell != CellType()], depth - 1)


def _contained(module: nn.Module) -> dict[str, Any]:
    """What the user's modules in it hold beside tensors and numbers, by name; of containers what is in them."""
    users = [(path, m) for path, m in module.named_modules() if not type(m).__module__.startswith("autopar.")]
    attributes = ((within(path, name), x) for path, m in users for name, x in vars(m).items() if name not in TABLES)
    return {name: _copied(x, DEPTH) for name, x in attributes if not isinstance(x, (Tensor, *_PLAIN))}


def _copied(value: Any, depth: int) -> Any:
    if isinstance(value, dict) and depth:
        return {key: _copied(x, depth - 1) for key, x in value.items()}
    return [_copied(x, depth - 1) for x in value] if isinstance(value, list | tuple | deque) and depth else value


def _other_in(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The name of the first that is not the same; "" if all are."""
    return next((name for name in {**before, **now} if not _same(before.get(name), now.get(name))), "")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(x, b[key]) for key, x in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and a == b)


def _held(module: nn.Module, given: Sequence[Tensor], own: Mapping[str, Tensor]) -> dict[str, int]:
    """How often what it is given and its own tensors have been written to, and which tensors and numbers its modules hold; by names."""
    found = {f"tensor {k} of those that it is given": t._version for k, t in enumerate(given)}
    found |= {f"its tensor {name}": t._version for name, t in own.items()}
    for path, m in module.named_modules():
        for name, x in {**vars(m), **m._buffers}.items():
            if isinstance(x, Tensor | int | float):
                found[f"the attribute {within(path, name)}"] = id(x)
    return found
