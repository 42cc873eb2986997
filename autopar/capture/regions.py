"""Opaque regions: the smallest submodules around what torch.export cannot capture, and autograd functions of the user's, stand in the
trace as one operator each.

A submodule can be one if what it takes and returns has fixed shapes, and if it changes nothing but what it returns. It is run, as it is
written, to find that out, what it costs, and whether it works on every sample by itself (`samples`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.capture.applied import Function, applied_by, hooks_told
from autopar.capture.around import as_called
from autopar.capture.as_before import left_as_it_was
from autopar.capture.drawn import Drawing, as_returned, drawing, functions_replaced
from autopar.capture.export import FAILURES, objective_of
from autopar.capture.follow import storage_of
from autopar.capture.given import Inputs, copied
from autopar.capture.hooked import IN_A_PART, Call, hooked
from autopar.capture.module_hooks import Around, calls_noted, calls_traced
from autopar.capture.own_gradients import OwnGradients, below, innermost, without_values
from autopar.capture.reach import is_foreign
from autopar.capture.region_calls import Pass, ReadsValues, observed
from autopar.capture.region_ops import CONDITION, TRACED
from autopar.capture.repeats import forwards_replaced
from autopar.capture.source import first_line, in_library, module_of, paths_of, running_line
from autopar.capture.varying import as_they_are
from autopar.errors import CaptureError, DependsOnValues
from autopar.run.closed import closed_tensors
from autopar.run.outside_draws import from_seed
from autopar.run.region import Place, within
from autopar.run.region_modules import Applied, Drawn, Terms
from autopar.run.saved import Kept

__all__ = ["Regions"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_AUTOPAR = os.path.dirname(os.path.dirname(__file__)) + os.sep
MOST = 64  # exports that are tried


class _Looked:
    """Calls of functions that are looked at in one call of the model. found: those that can be regions, by path. lines: of all of them.
    refused: why the others cannot be."""

    def __init__(self, of: Pass, around: Collection[str], refused: dict[str, str]) -> None:
        self.of, self.around, self.refused = of, around, refused
        self.found: dict[str, list[Call]] = {}
        self.lines: dict[str, str] = {}
        self._inside = False

    def passes(self, path: str) -> bool:
        """Whether a call runs unseen: inside of one that is looked at, and of other regions."""
        return self._inside or below(path, self.around)

    def at(self, path: str, module: nn.Module, args: Any, kwargs: Any, *, place: torch.device | None = None) -> Any:
        """What the module returns. place: as of a region."""
        self.lines[path], self._inside = running_line(), True
        try:
            output, call = observed(path, module, module.forward, args, kwargs, self.lines[path], self.of)
        finally:
            self._inside = False
        if isinstance(call, str):
            self.refused[path] = call
        else:
            region = dataclasses.replace(call.region, place=place)
            self.found.setdefault(path, []).append(dataclasses.replace(call, region=region))
        return output


class Regions:
    """The regions of a model for one capture."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs) -> None:
        TRACED.clear()
        self.model, self.loss, self.inputs = model, loss, inputs
        self.calls: dict[str, list[Call]] = {}
        self.functions: frozenset[Function] = frozenset()  # autograd functions whose calls are regions
        self.drawing: frozenset[FunctionType] = frozenset()  # functions that draw, whose calls are regions
        self.hooks: list[Call] = []  # on activations, of the model's own forward, in order
        self.around: dict[str, list[Around | None]] = {}  # of calls of modules with backward hooks, by path
        self.tried = 0
        self.refused: dict[str, str] = {}  # path -> why it cannot be a region
        self._trials: dict[Hashable, Any] = {}
        self._raised = ""  # what the last run of the model ended with, as a line
        held = (*model.named_parameters(), *model.named_buffers())
        self._names = {storage_of(t): name for name, t in held if t.layout == torch.strided}
        self._paths = paths_of(model)

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
                found = self._run([p for p in alike if not below(p, alike)], line)
                if path in found:
                    self.calls = {p: c for p, c in self.calls.items() if not below(p, found)} | found
                    return True
            path = path.rpartition(".")[0]
        return self.include_model(line)

    def include_model(self, line: str) -> bool:
        """Make the whole model a region, if it works on every sample by itself, so that the data can be divided, and looks at no value to
        decide what it does; whether it does."""
        if "" in self.calls:
            return False
        values = ReadsValues()
        calls = self._run([""], line, values).get("", [])
        if len(calls) != 1 or not calls[0].rows or values.read:
            self.refused.pop("", None)
            return False
        self.calls, self.functions = {"": calls}, frozenset()
        return True

    def include_all(self, own: OwnGradients) -> None:
        """Make regions of these submodules, and of the calls of these functions; of a submodule around one that cannot be. CaptureError
        if there is none that can."""
        self.functions = own.functions
        if own.hooks:
            self._keep_hooks()
        paths = dict(own.modules)
        for path, line in self._apply().items():
            around = path.rpartition(".")[0]
            if not around:
                raise CaptureError(f"cannot capture {type(self.model).__name__}\n  at {line}{self.why_not()}")
            paths[around] = line
            self.refused.pop(path)
        for path, line in paths.items():
            found = self._run([path], line)
            if path not in found:
                raise CaptureError(f"cannot capture {type(self.model).__name__}\n  at {line}{self.why_not() or self._raised}")
            self.calls = {p: calls for p, calls in self.calls.items() if not below(p, [path])} | found

    def include_drawn(self, drawn: Drawing) -> bool:
        """Make regions of these submodules, and of the calls of these functions; whether all of them can be."""
        if drawn.modules and not self._has_data():
            return False
        if line := drawn.modules.get("", ""):
            return self.include_model(line)
        self.drawing = drawn.functions
        place = next((p.device for p in self.model.parameters()), None)

        def noted(function: FunctionType) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                path = self._path_of(function)
                if looked.passes(path):
                    return function(*args, **kwargs)
                looked.at(path, module := Drawn(function), args, kwargs, place=place)
                return module.returned[0]

            return call

        try:
            with self._looked(drawn.modules) as looked:
                self._call_model(functions_replaced({function: noted(function) for function in drawn.functions}))
        except FAILURES:  # of the model
            return False
        around = {path.rpartition(".")[0]: looked.lines[path] for path in self.refused if "." in path}
        self.refused = {path: why for path, why in self.refused.items() if "." not in path}
        modules = {**around, **drawn.modules}
        self.calls |= {path: calls for path, calls in looked.found.items() if not below(path, modules)}
        for path, line in modules.items():
            self.calls = {p: calls for p, calls in self.calls.items() if not below(p, [path])} | self._run([path], line)
        return not self.refused and all(path in self.calls for path in modules)

    def include_functions_that_draw(self, error: CaptureError) -> bool:
        """Make regions of the calls of functions that draw random numbers of Python or numpy, if an error of capture came from one of them;
        whether they are."""
        came_through = _frames_of(error.__cause__)
        codes = {f.f_code for f in came_through if module_of(f) is None and not in_library(f.f_code.co_filename)}
        if not codes or self.drawing or self.calls:
            return False
        try:
            found = drawing(self.model, self.loss, self.inputs)
        except FAILURES:  # of the model
            return False
        failed = frozenset(function for function in found.functions if function.__code__ in codes)
        return bool(failed) and self.include_drawn(dataclasses.replace(found, modules={}))

    def _keep_hooks(self) -> None:
        """Keep the hooks on activations that the model's own forward registers, and the backward hooks of modules."""

        looking = False  # what registers it while it is tried

        def noted(tensor: Tensor, hook: Callable[..., Any]) -> None:
            nonlocal looking
            if not looking and innermost(self._paths) == "":
                line, looking = running_line(), True
                self.hooks.append(hooked(f"hook_{len(self.hooks)}", hook, tensor, line, self._names))
                held.append((hook, [*map(id, closed_tensors(hook))], line))
                looking = False

        held: list[tuple[Callable[..., Any], list[int], str]] = []
        with calls_noted(self._paths, self._names, self.around):
            self._call_model(hooks_told(noted), self.inputs)
        for hook, closed, line in held:
            if [*map(id, closed_tensors(hook))] != closed:
                raise CaptureError(f"a hook on an activation reads what is assigned after it is registered\n  at {line}{IN_A_PART}")

    def include_functions(self, applied: Collection[Function], error: CaptureError) -> bool:
        """Make regions of the calls of those of these autograd functions that an error of capture came from; whether there is one."""
        codes = {frame.f_code for frame in _frames_of(error.__cause__)}
        failed = {cls for cls in applied if getattr(cls.forward, "__code__", None) in codes}
        if failed <= self.functions or not self._has_data():
            return False
        before = len(self.calls)
        self.functions |= failed
        with contextlib.suppress(*FAILURES):  # of the model
            self._apply()
        return len(self.calls) > before

    def _apply(self) -> dict[str, str]:
        """Keep the calls of the functions in a call of the model, but of those in other regions; the paths of functions that cannot be
        regions, and a line of each."""
        self.calls = {path: calls for path, calls in self.calls.items() if not isinstance(calls[0].region.module, Applied)}

        def noted(cls: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if cls not in self.functions or looked.passes(path := self._path_of(cls)):
                return apply(*args, **kwargs)
            return looked.at(path, Applied(cls), args, kwargs)

        with self._looked(self.calls) as looked:
            self._call_model(applied_by(noted))
        self.calls |= {path: calls for path, calls in looked.found.items() if path not in self.refused}
        return {path: line for path, line in looked.lines.items() if path in self.refused}

    @contextlib.contextmanager
    def _looked(self, around: Iterable[str]) -> Iterator[_Looked]:
        """Inside, calls of functions are looked at, but those in these submodules."""
        with Kept() as keeps:
            yield _Looked(Pass(self._names, keeps, self._trials), tuple(around), self.refused)

    def _call_model(self, watched: contextlib.AbstractContextManager[object], inputs: Inputs | None = None) -> None:
        """Call the model once on copies of its inputs, and leave it as it was. inputs: those, if some are to be leaves that require a
        gradient."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), self.inputs) if inputs is None else copied(inputs)
        with left_as_it_was(self.model, self.loss), watched, torch.enable_grad(), from_seed(0), as_called((args, kwargs)):
            with without_values(self.model, self.inputs):
                objective_of(self.model(*args, **kwargs), self.loss, None)

    def _path_of(self, function: type | FunctionType) -> str:
        """Where a function is in the model: below the submodule whose code calls it."""
        path = within(innermost(self._paths) or "", function.__name__)
        while path in self._paths.values():
            path += "_"
        return path

    def include_graph(self, path: str, graph: fx.GraphModule, given: Sequence[Tensor], line: str, *, no_grad: bool = False) -> bool:
        """Make a region of operators that are no submodule; whether they can be one. given: what they are called with. no_grad: whether
        they run with gradients off."""
        with torch.set_grad_enabled(not no_grad), generators.kept(), Kept() as keeps:
            call = observed(path, graph, graph.forward, tuple(given), {}, line, Pass({}, keeps))[1]
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

    def _run(self, paths: list[str], line: str, mode: ReadsValues | None = None) -> dict[str, list[Call]]:
        """Run the model, and keep the calls of those of these submodules that can be regions. mode: as of `observed`."""
        found: dict[str, list[Call]] = {}
        self._raised = ""

        def watched(path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                output, call = observed(path, module, forward, args, kwargs, line, of, mode)
                if isinstance(call, str):
                    self.refused[path] = call
                else:
                    found.setdefault(path, []).append(call)
                return output

            return run

        forwards = {p: watched(p, m, m.forward) for p in paths if (m := self.model.get_submodule(p))}
        try:
            with Kept() as keeps:
                of = Pass(self._names, keeps, self._trials)
                self._call_model(forwards_replaced(forwards, self.model))
        except FAILURES as error:
            self._raised = f"\n  running it as it is written raises {type(error).__name__}: {first_line(error)}"
            return {}
        return {p: calls for p, calls in found.items() if p not in self.refused}

    def why_not(self, error: CaptureError | None = None) -> str:
        """Lines to add to an error of capture."""
        lines = [f"\n  {path} cannot be run as it is written beside a graph of the rest: {why}" for path, why in self.refused.items()]
        if error is None and lines:
            lines.append(
                "\n  what to do: let it change nothing but what it returns (what its backward needs is kept in ctx), and take and return "
                "tensors of fixed shapes"
            )
        if error is None or lines or "torch.func" in str(error):  # which no submodule may call
            return "".join(lines)
        inside = self._innermost(error.__cause__, users=True)
        part = "what computes it" if isinstance(error, DependsOnValues) else f"{inside}, or what is around it," if inside else ""
        if part and not self._has_data():
            lines.append(f"\n  or: build the model with data, not on the meta device: {part} may run as it is written then")
        elif inside == "" and self._has_data():
            lines.append(
                "\n  or: move that line, and what it needs, into a submodule of its own that takes and returns tensors, of shapes that do "
                "not depend on values: what no graph holds runs as it is written there"
            )
        return "".join(lines)

    def _has_data(self) -> bool:
        leaves = [*self.model.parameters(), *self.model.buffers(), *pytree.tree_leaves(self.inputs)]
        return not any(isinstance(x, Tensor) and x.device.type == "meta" for x in leaves)

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[Collection[Function]]:
        """Inside, every region is one operator of the trace, and distributions do not check their arguments. Takes the autograd functions
        that are applied there."""
        left = {path: iter(range(len(calls))) for path, calls in self.calls.items()}

        def traced(path: str, args: Any, kwargs: Any) -> Any:
            index, calls = next(left[path]), self.calls[path]
            args, kwargs = as_they_are((args, kwargs))
            call = calls[index] = _as_traced(calls[index], args, kwargs)
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            results = torch.ops.autopar_region.call(f"{path}@{index}", tensors, len(call.results))
            if isinstance(call.region.module, Terms) and call.region.module.weight is not None:
                results = [r / call.region.module.weight.of(tensors) for r in results]
            made = len(results) - len(call.region.writes)
            for name, new in zip(call.region.writes, results[made:], strict=True):
                at, _, leaf = within(path, name).rpartition(".")
                with torch.no_grad():
                    getattr(self.model.get_submodule(at), leaf).copy_(new)
            return as_returned(call.region.module, call.structure, results[:made])

        def replaced(path: str) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                return traced(path, args, kwargs)

            forward.stands_in = True  # type: ignore[attr-defined]
            return forward

        def applied(cls: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.add(cls)
            path = self._path_of(cls)
            if path in self.calls:
                return traced(path, args, kwargs)
            args, kwargs = as_they_are((args, kwargs))  # which its backward may ask, as no trace does
            return apply(*args, **kwargs)

        def drawn(function: FunctionType) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                path = self._path_of(function)
                return traced(path, args, kwargs) if path in self.calls else function(*args, **kwargs)

            return call

        def registered(tensor: Tensor, hook: Callable[..., Any]) -> None:
            if self.hooks and innermost(self._paths) == "":
                torch.ops.autopar_region.hook(f"hook_{next(hooks)}@0", tensor, closed_tensors(hook))

        hooks = iter(range(len(self.hooks)))
        seen: set[Function] = set()
        modules = {path: replaced(path) for path, calls in self.calls.items() if not isinstance(calls[0].region.module, Applied | Drawn)}
        functions = functions_replaced({function: drawn(function) for function in self.drawing})

        validated = torch.distributions.Distribution._validate_args
        torch.distributions.Distribution.set_default_validate_args(False)  # it asks values whether they are valid
        TRACED.clear()
        TRACED.update({f"{path}@{k}": call for path, calls in self.calls.items() for k, call in enumerate(calls)})
        TRACED.update({f"hook_{k}@0": call for k, call in enumerate(self.hooks)})
        TRACED.update({f"{c.region.path}@{k}": c for found in self.around.values() for k, calls in enumerate(found) for c in calls or ()})
        around = calls_traced(self._paths, self.around)
        try:
            with forwards_replaced(modules, self.model), applied_by(applied), functions, hooks_told(registered), around:
                yield seen
        finally:
            torch.distributions.Distribution.set_default_validate_args(validated)

    def call(self, key: str) -> Call:
        path, _, index = key.rpartition("@")
        return self.calls[path][int(index)] if path in self.calls else TRACED[key]

    def notes(self) -> tuple[str, ...]:
        """What explain says of them."""
        conditions = [call.line for key, call in TRACED.items() if key.startswith(CONDITION)]
        made = [f"{line} is asked in every step, and raises" for line in dict.fromkeys(conditions)]
        around = [calls.returned.line for found in self.around.values() for calls in found if calls is not None]
        made += [f"{line} is called in every step, with whole gradients" for line in dict.fromkeys(around)]
        for calls in (*self.calls.values(), *([call] for call in self.hooks)):
            how = "split by samples where the plan splits these" if all(c.rows for c in calls) else "whole on every rank"
            how += ", whose results are added" if any(isinstance(c.region.module, Terms) and c.rows for c in calls) else ""
            region = calls[0].region
            if isinstance(region.module, fx.GraphModule):
                made.append(f"{calls[0].line} has sizes that depend on values: it runs as it is written, {how}")
            else:
                made.append(f"{region.name} runs as it is written, {how}, for no graph holds {calls[0].line}")
        return tuple(made)


def _as_traced(call: Call, args: Any, kwargs: Any) -> Call:
    """The call with the arguments that it has while it is traced: code that asks whether it is may give others than it gave when it ran
    (a mask where there was none). The results tell, when the program is compared with the model, and it is not cut by samples then."""
    traced = pytree.tree_map_only(Tensor, lambda _: Place(), (args, kwargs))
    same = pytree.tree_structure(traced) == pytree.tree_structure(call.region.arguments)
    pairs = zip(pytree.tree_leaves(traced), pytree.tree_leaves(call.region.arguments), strict=False)
    if same and all(isinstance(a, Place) == isinstance(b, Place) for a, b in pairs):
        return call
    return dataclasses.replace(call, region=dataclasses.replace(call.region, arguments=traced), rows=())


def _frames_of(error: BaseException | None) -> list[FrameType]:
    """Through which an error came."""
    return [] if error is None else [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _line_of(error: BaseException | None) -> str:
    """'file.py:12: the code' of the innermost line of the user's code that an error came from."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [f for f in frames if not f.filename.startswith((_TORCH, _AUTOPAR, "<"))]
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}: {own[-1].line}" if own else ""
