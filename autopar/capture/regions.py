"""Opaque regions: the smallest submodules around what torch.export cannot capture stand in the trace as one operator each.

A submodule can be one if what it takes and returns has fixed shapes, and if it changes nothing but what it returns. It is run, as it is
written, to find that out, what it costs, and whether it works on every sample by itself (`samples`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, library, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture.around import as_called
from autopar.capture.calls import Inputs, left_as_it_was
from autopar.capture.export import objective_of
from autopar.capture.flops import CountedFlops
from autopar.capture.follow import storage_of
from autopar.capture.reach import is_foreign
from autopar.capture.repeats import forwards_replaced
from autopar.capture.samples import works_by_samples
from autopar.capture.source import first_line, module_of
from autopar.errors import CaptureError
from autopar.run.autocast import ambient
from autopar.run.condition import Condition
from autopar.run.region import Place, Region

__all__ = ["Call", "Regions", "asked", "is_static"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_AUTOPAR = os.path.dirname(os.path.dirname(__file__)) + os.sep
MOST = 64  # exports that are tried

_LIBRARY = library.Library("autopar_region", "DEF")
_LIBRARY.define("call(str key, Tensor[] tensors, int results) -> Tensor[]")
_TRACED: dict[str, Call] = {}  # while a model is exported, and until its graph has been read
_CONDITION = "condition_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a submodule. arguments: what it was given, detached. results: what it returned; structure: the leaves of which they
    are the tensors. rows: which of its tensors are cut where it works by samples. line: what made it necessary."""

    region: Region
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    structure: Any
    flops: int
    saved: int
    draws: bool
    rows: tuple[int, ...]
    line: str


def _made(key: str, tensors: list[Tensor], results: int) -> list[Tensor]:
    like = next((t for t in tensors), torch.empty(0))
    return [like.new_empty(tuple(r.shape), dtype=r.dtype) for r in _TRACED[key].results]


library.register_fake("autopar_region::call", _made, lib=_LIBRARY)
_LIBRARY.impl("call", _made, "CompositeExplicitAutograd")


def asked(value: Tensor, expected: bool, line: str) -> Tensor:
    """While a model is exported: a region that asks in every step whether a value is as expected; its result, True."""
    key = f"{_CONDITION}{sum(k.startswith(_CONDITION) for k in _TRACED)}"
    region = Region(path=key, module=Condition(expected, line), state=(), arguments=((Place(),), {}), modes=(True,))
    _TRACED[f"{key}@0"] = Call(
        region=region, arguments=(), results=(torch.empty((), dtype=torch.bool),), structure=None, flops=0, saved=0, draws=False, rows=(),
        line=line,
    )  # fmt: skip
    result: Tensor = torch.ops.autopar_region.call(f"{key}@0", [value.detach()], 1)[0]
    return result


class Regions:
    """The regions of a model for one capture."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs) -> None:
        _TRACED.clear()
        self.model, self.loss, self.inputs = model, loss, inputs
        self.calls: dict[str, list[Call]] = {}
        self.tried = 0
        self.refused: dict[str, str] = {}  # path -> why it cannot be a region
        self._raised = ""  # what the last run of the model ended with, as a line
        held = (*model.named_parameters(), *model.named_buffers())
        self._names = {storage_of(t): name for name, t in held if t.layout == torch.strided}
        self._paths = {id(m): path for path, m in model.named_modules(remove_duplicate=False)}

    def include(self, error: CaptureError) -> bool:
        """Make a region of the smallest submodule around an error of capture; whether there is one."""
        path = error.module if error.module is not None else self._innermost(error.__cause__)
        self.tried += 1
        if self.tried > MOST or path is None or not self._has_data():
            return False
        line = error.line or _line_of(error.__cause__)
        while path:
            module = self.model.get_submodule(path)
            if path not in self.calls and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                alike = [p for m in self.model.modules() if type(m) is type(module) and (p := self._paths[id(m)])]
                found = self._run([p for p in alike if not any(p.startswith(f"{q}.") for q in alike)], line)
                if path in found:
                    self.calls = {p: c for p, c in self.calls.items() if not any(p.startswith(f"{q}.") for q in found)} | found
                    return True
            path = path.rpartition(".")[0]
        return False

    def include_all(self, paths: Mapping[str, str]) -> None:
        """Make regions of these submodules. paths: with what makes each necessary. CaptureError if one of them cannot be a region."""
        for path, line in paths.items():
            found = self._run([path], line)
            if path not in found:
                raise CaptureError(f"cannot capture {type(self.model).__name__}\n  at {line}{self.why_not() or self._raised}")
            self.calls |= found

    def include_graph(self, path: str, graph: fx.GraphModule, given: Sequence[Tensor], line: str) -> bool:
        """Make a region of operators that are no submodule; whether they can be one. given: what they are called with."""
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            call = _observed(path, graph, graph.forward, tuple(given), {}, line, {})[1]
        if isinstance(call, str):
            self.refused[path] = call
            return False
        self.calls[path] = [call]
        return True

    def _innermost(self, error: BaseException | None, *, users: bool = False) -> str | None:
        """The path of the innermost submodule whose code the error came from. users: without those of torch."""
        found, trace = None, error.__traceback__ if error is not None else None
        while trace is not None:
            module = module_of(trace.tb_frame)
            if not (users and is_foreign(type(module).__module__)):
                found = self._paths.get(id(module), found)
            trace = trace.tb_next
        return found

    def _run(self, paths: list[str], line: str) -> dict[str, list[Call]]:
        """Run the model, and keep the calls of those of these submodules that can be regions."""
        found: dict[str, list[Call]] = {}

        def watched(path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                output, call = _observed(path, module, forward, args, kwargs, line, self._names)
                if isinstance(call, str):
                    self.refused[path] = call
                else:
                    found.setdefault(path, []).append(call)
                return output

            return run

        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), self.inputs)
        with left_as_it_was(self.model, self.loss):
            try:
                forwards = {p: watched(p, m, m.forward) for p in paths if (m := self.model.get_submodule(p))}
                with forwards_replaced(forwards, self.model), torch.enable_grad(), torch.random.fork_rng(devices=[]), as_called():
                    torch.manual_seed(0)
                    objective_of(self.model(*args, **kwargs), self.loss, None)
            except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError) as error:
                self._raised = f"\n  running it as it is written raises {type(error).__name__}: {first_line(error)}"
                return {}
        return {p: calls for p, calls in found.items() if p not in self.refused}

    def why_not(self, error: CaptureError | None = None) -> str:
        """Lines to add to an error of capture."""
        lines = [f"\n  {path} cannot be run as it is written beside a graph of the rest: {why}" for path, why in self.refused.items()]
        if error is not None and not lines and self._has_data() and self._innermost(error.__cause__, users=True) == "":
            lines.append(
                "\n  or: move that line, and what it needs, into a submodule of its own that takes and returns tensors, of shapes that do "
                "not depend on values: what no graph holds runs as it is written there"
            )
        return "".join(lines)

    def _has_data(self) -> bool:
        leaves = [*self.model.parameters(), *self.model.buffers(), *pytree.tree_leaves(self.inputs)]
        return not any(isinstance(x, Tensor) and x.device.type == "meta" for x in leaves)

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, every region is one operator of the trace, and distributions do not check their arguments."""

        def replaced(path: str, calls: list[Call]) -> Callable[..., Any]:
            left = iter(range(len(calls)))

            def forward(*args: Any, **kwargs: Any) -> Any:
                index = next(left)
                call = calls[index] = _as_traced(calls[index], args, kwargs)
                tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                results = torch.ops.autopar_region.call(f"{path}@{index}", tensors, len(call.results))
                leaves, spec = pytree.tree_flatten(call.structure)
                given = iter(results)
                return pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], spec)

            forward.stands_in = True  # type: ignore[attr-defined]
            return forward

        validated = torch.distributions.Distribution._validate_args
        torch.distributions.Distribution.set_default_validate_args(False)  # it asks values whether they are valid
        _TRACED.clear()
        _TRACED.update({f"{path}@{k}": call for path, calls in self.calls.items() for k, call in enumerate(calls)})
        try:
            with forwards_replaced({path: replaced(path, calls) for path, calls in self.calls.items()}, self.model):
                yield
        finally:
            torch.distributions.Distribution.set_default_validate_args(validated)

    def call(self, key: str) -> Call:
        path, _, index = key.rpartition("@")
        return self.calls[path][int(index)] if path in self.calls else _TRACED[key]

    def notes(self) -> tuple[str, ...]:
        """What explain says of them."""
        conditions = [call.line for key, call in _TRACED.items() if key.startswith(_CONDITION)]
        made = [f"{line} is asked in every step, and raises" for line in dict.fromkeys(conditions)]
        for path, calls in self.calls.items():
            how = "split by samples where the plan splits these" if all(c.rows for c in calls) else "whole on every rank"
            module = calls[0].region.module
            if isinstance(module, fx.GraphModule):
                made.append(f"{calls[0].line} has sizes that depend on values: it runs as it is written, {how}")
            else:
                made.append(f"{path} ({type(module).__name__}) runs as it is written, {how}, for no graph holds {calls[0].line}")
        return tuple(made)


class _Outside(TorchFunctionMode):
    """Notes what the code inside reads of the tensors of a model. names: by storage; read: one that was read."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names, self.read = names, ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._names and not self.read:
            tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.layout == torch.strided)
            self.read = next((self._names[s] for x in tensors if (s := storage_of(x)) in self._names), "")
        return func(*args, **(kwargs or {}))


def _observed(
    path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, line: str, names: Mapping[int, str]
) -> tuple[Any, Call | str]:
    """What a submodule returns, and the call, or why it cannot be a region. names: of the model's tensors, by storage."""
    given = tuple(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    copies = tuple(t.detach().clone() for t in given)
    versions = [t._version for t in (*given, *own.values())]
    attributes = _attributes(module)
    state = torch.get_rng_state()
    held = {storage_of(t) for t in own.values()}
    known = held | {storage_of(t) for t in given}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if storage_of(t) not in known:
            saved[storage_of(t)] = t.untyped_storage().nbytes()
        return t

    outside = _Outside({storage: name for storage, name in names.items() if storage not in known})
    with outside, CountedFlops() as counted, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = forward(*args, **kwargs)
    results = tuple(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
    if versions != [t._version for t in (*given, *own.values())] or attributes != _attributes(module):
        return output, "it changes what it is given, a buffer or an attribute"
    if outside.read:
        return output, f"it reads {outside.read}, which is not its own: let the model give it in the call"
    if not results or any(t.layout != torch.strided for t in (*given, *results)):
        return output, "it does not return dense tensors"
    if any(storage_of(t) in held for t in results):
        return output, "what it returns shares memory with its parameters or buffers"
    draws = not torch.equal(state, torch.get_rng_state())
    region = Region(
        path=path, module=module, state=tuple(own), arguments=pytree.tree_map_only(Tensor, lambda _: Place(), (args, kwargs)),
        modes=tuple(m.training for m in module.modules()), autocast=ambient(),
    )  # fmt: skip
    structure = pytree.tree_map_only(Tensor, lambda t: torch.empty(0), output)
    call = Call(
        region=region, arguments=copies, results=tuple(r.detach() if not r.requires_grad else r.detach().requires_grad_() for r in results),
        structure=structure, flops=counted.flops, saved=sum(saved.values()), draws=draws, rows=(), line=line,
    )  # fmt: skip
    with forwards_replaced({"": forward}, module):
        steady, rows = works_by_samples(call.region, copies, tuple(own.values()), call.results, draws=draws)
    return output, dataclasses.replace(call, rows=rows) if steady else "the shapes of what it returns depend on values"


def _as_traced(call: Call, args: Any, kwargs: Any) -> Call:
    """The call with the arguments that it has while it is traced: code that asks whether it is may give others than it gave when it ran
    (a mask where there was none). The results tell, when the program is compared with the model, and it is not cut by samples then."""
    traced = pytree.tree_map_only(Tensor, lambda _: Place(), (args, kwargs))
    same = pytree.tree_structure(traced) == pytree.tree_structure(call.region.arguments)
    pairs = zip(pytree.tree_leaves(traced), pytree.tree_leaves(call.region.arguments), strict=False)
    if same and all(isinstance(a, Place) == isinstance(b, Place) for a, b in pairs):
        return call
    return dataclasses.replace(call, region=dataclasses.replace(call.region, arguments=traced), rows=())


def _line_of(error: BaseException | None) -> str:
    """'file.py:12: the code' of the innermost line of the user's code that an error came from."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [f for f in frames if not f.filename.startswith((_TORCH, _AUTOPAR, "<"))]
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}: {own[-1].line}" if own else ""


def _attributes(module: nn.Module) -> list[dict[str, int]]:
    """Which tensors and numbers its modules hold."""
    held = [{**vars(m), **m._buffers} for m in module.modules()]
    return [{name: id(x) for name, x in of.items() if isinstance(x, Tensor | int | float)} for of in held]


def is_static(tensor: Tensor) -> bool:
    """Whether the sizes of a traced tensor are numbers."""
    return all(isinstance(s, int) for s in (*tensor.shape, *tensor.stride()))
