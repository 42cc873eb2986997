"""Full backward hooks of modules: torch puts an autograd function around what a module is given and around what it returns. Here these are
two regions, of which the first gives the second what leads back (`autopar.run.backward_hooks`). The adapter to torch's own of this."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.applied import backward_hooks_made_by
from autopar.capture.hooked import Call, tried
from autopar.errors import CaptureError
from autopar.run.backward_hooks import BackwardHooks, Entered, Returned
from autopar.run.closed import function_of
from autopar.run.region import Place, Region, within

__all__ = ["Around", "calls_noted", "calls_traced"]

_IN_THE_LOOP = "let it keep the gradients (detached), and compute in the loop"
_ALIKE = "\n  what to do: call it alike whether torch.compiler.is_compiling() or not, or take the hooks away"


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """The regions around one call of a module. entered: None where no argument needs a gradient. line: of the first hook."""

    hooks: BackwardHooks
    entered: Call | None
    returned: Call

    def __iter__(self) -> Iterator[Call]:
        yield from (self.returned,) if self.entered is None else (self.entered, self.returned)


Note = Callable[[BackwardHooks, Any, Any], None]  # of a call's hooks, its arguments and its results


class _Noting:
    """Stands for torch's BackwardHook of a call that is run to be looked at."""

    def __init__(self, module: nn.Module, hooks: Sequence[Any], before: Sequence[Any], note: Note) -> None:
        self._module, self._hooks, self._before, self._note = module, tuple(hooks), tuple(before), note
        self._arguments: tuple[Any, ...] = ()

    def setup_input_hook(self, args: Any) -> Any:
        self._arguments = tuple(args)
        return args

    def setup_output_hook(self, result: Any) -> Any:
        results = result if isinstance(result, tuple) else (result,)
        hooks = BackwardHooks(
            module=self._module, hooks=self._hooks, before=self._before, given=len(self._arguments), entered=_needing(self._arguments),
            made=len(results), returned=_needing(results), beside=_not_needing(self._arguments),
        )  # fmt: skip
        self._note(hooks, self._arguments, results)
        return result


def _needing(values: Sequence[Any]) -> tuple[int, ...]:
    """Which of some values are tensors that need a gradient."""
    return tuple(k for k, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad) if torch.is_grad_enabled() else ()


def _not_needing(values: Sequence[Any]) -> tuple[tuple[int, tuple[int, ...], torch.dtype], ...]:
    """Which are other tensors, and their shapes and dtypes."""
    found = ((k, x) for k, x in enumerate(values) if isinstance(x, Tensor) and not x.requires_grad)
    return tuple((k, tuple(x.shape), x.dtype) for k, x in found)


class _StandingIn:
    """Stands for torch's BackwardHook of a call that is traced."""

    def __init__(self, path: str, index: int, around: Around) -> None:
        self._path, self._index, self._around = path, index, around
        self._leads: list[Tensor] = []

    def setup_input_hook(self, args: Any) -> Any:
        hooks, entered = self._around.hooks, self._around.entered
        if (len(args), _needing(args)) != (hooks.given, hooks.entered):
            raise CaptureError(f"{self._path}, with backward hooks, is given other tensors when it is traced than when it runs{_ALIKE}")
        if entered is None:
            return args
        found = _called(entered, self._index, [args[k] for k in hooks.entered])
        self._leads = found[len(hooks.entered) :]
        return _put(args, hooks.entered, found)

    def setup_output_hook(self, result: Any) -> Any:
        hooks = self._around.hooks
        results = result if isinstance(result, tuple) else (result,)
        if (len(results), _needing(results)) != (hooks.made, hooks.returned):
            raise CaptureError(f"{self._path}, with backward hooks, returns other tensors when it is traced than when it runs{_ALIKE}")
        found = _called(self._around.returned, self._index, [*(results[k] for k in hooks.returned), *self._leads])
        made = _put(results, hooks.returned, found)
        return made if isinstance(result, tuple) else made[0]


def _called(call: Call, index: int, tensors: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = torch.ops.autopar_region.call(f"{call.region.path}@{index}", tensors, len(call.results))
    return found


def _put(values: tuple[Any, ...], places: Sequence[int], found: Sequence[Tensor]) -> tuple[Any, ...]:
    """The values with others at some places: of the same class, as of torch."""
    made = list(values)
    for k, x in zip(places, found, strict=False):
        made[k] = x
    return tuple(made) if type(values) is tuple else type(values)(*made)


def calls_noted(
    paths: Mapping[int, str], names: Mapping[int, str], into: dict[str, list[Around | None]]
) -> contextlib.AbstractContextManager[None]:  # fmt: skip
    """Inside, in a call that runs, what is around each call of a module with backward hooks is added to `into`, by the module's path: None
    where no result needs a gradient. paths: as of `paths_of`. names: of the model's tensors, by storage. CaptureError if a hook needs more
    than gradients: it is tried."""

    def make(module: nn.Module, hooks: Sequence[Any], before: Sequence[Any], _: Any) -> Any:
        path = paths.get(id(module))
        if path is None or not torch.is_grad_enabled():
            return None
        calls, line = into.setdefault(path, []), _line_of(path, (*before, *hooks))

        def note(of: BackwardHooks, arguments: Any, results: Any) -> None:
            calls.append(_around(path, of, arguments, results, line, names) if of.returned else None)

        return _Noting(module, hooks, before, note)

    return backward_hooks_made_by(make)


def calls_traced(paths: Mapping[int, str], noted: Mapping[str, Sequence[Around | None]]) -> contextlib.AbstractContextManager[None]:
    """Inside, in a call that is traced, the regions of each call of a module with backward hooks are called around it, as was noted."""
    counts: Counter[str] = Counter()

    def make(module: nn.Module, hooks: Sequence[Any], before: Sequence[Any], _: Any) -> Any:
        path = paths.get(id(module), "")
        if path not in noted or not torch.is_grad_enabled():
            return None
        index = counts[path]
        counts[path] += 1
        if index >= len(noted[path]):
            raise CaptureError(f"{path}, with backward hooks, is called more often when it is traced than when it runs{_ALIKE}")
        around = noted[path][index]
        return None if around is None else _StandingIn(path, index, around)

    return backward_hooks_made_by(make)


def _around(path: str, hooks: BackwardHooks, arguments: Any, results: Any, line: str, names: Mapping[int, str]) -> Around:
    given = tuple(arguments[k].detach().clone() for k in hooks.entered)
    made = tuple(results[k].detach().clone() for k in hooks.returned)
    hooks = replace(hooks, observes=_try(hooks, given, made, line, names))
    leads = made if given else ()
    returned = _call(within(path, "returned"), Returned(hooks), (*made, *leads), made, line)
    return Around(
        hooks=hooks, returned=returned,
        entered=_call(within(path, "entered"), Entered(hooks, made), given, (*given, *leads), line) if given else None,
    )  # fmt: skip


def _call(path: str, module: nn.Module, given: tuple[Tensor, ...], made: tuple[Tensor, ...], line: str) -> Call:
    region = Region(path=path, module=module, state=(), arguments=((Place(),) * len(given), {}), modes=(True,), linear=False)
    return Call(
        region=region, arguments=given, results=tuple(t.clone().requires_grad_() for t in made), structure=None, flops=0, saved=0,
        draws=False, rows=(), line=line,
    )  # fmt: skip


def _try(hooks: BackwardHooks, given: tuple[Tensor, ...], made: tuple[Tensor, ...], line: str, names: Mapping[int, str]) -> bool:
    """Call the hooks as backward will, on gradients of zeros; whether they give none, and do not write to these."""

    def observe() -> bool:
        to_results, to_arguments = (tuple(map(torch.zeros_like, tensors)) for tensors in (made, given))
        of_results = hooks.of_results(to_results)
        of_arguments = hooks.of_arguments(to_arguments, of_results) if given else ()
        pairs = zip((*of_results, *of_arguments), (*to_results, *to_arguments), strict=True)
        return all(a is b and b._version == 0 for a, b in pairs)

    return tried(
        observe, line, names, hook="a backward hook of a module", needs="the gradients that it is given",
        remedy=f"\n  what to do: {_IN_THE_LOOP}", reading=_IN_THE_LOOP,
    )  # fmt: skip


def _line_of(path: str, hooks: Sequence[Any]) -> str:
    """'file.py:12: the backward hook NAME on PATH', of the first that has code."""
    for hook in hooks:
        if (function := function_of(hook)) is not None:
            code, name = function.__code__, function.__qualname__.replace(".<locals>", "")
            return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}: the backward hook {name} on {path or 'the model'}"
    return f"the backward hook on {path or 'the model'}"
