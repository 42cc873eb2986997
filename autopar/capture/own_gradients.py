"""Where a model's code has gradients of its own: autograd functions of its author's, hooks on activations, and gradients that it asks for
in its forward. A graph of operators does not show them: the functions run as they are written, and so do submodules with the others.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.capture.applied import Function, Kept, applied_by, backward_hooks_told, hooks_told
from autopar.capture.around import as_called
from autopar.capture.as_before import left_as_it_was
from autopar.capture.export import FAILURES, as_exported, objective_of
from autopar.capture.given import Inputs, copied
from autopar.capture.said import heard
from autopar.capture.samples import gives_the_same, stand_ins
from autopar.capture.source import first_line, module_of, paths_of, running_line
from autopar.capture.state import State
from autopar.errors import CaptureError
from autopar.run.recoded import answered_by, as_it_was
from autopar.run.region import Place, Region
from autopar.run.region_modules import Applied, AsAutograd

__all__ = ["OwnGradients", "below", "innermost", "other_backward", "own_gradients", "runs_again", "without_values"]


MOST = 4  # calls of a function that are tried


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnGradients:
    """modules: the outermost submodules that have hooks on activations or ask for gradients, and a line of each that does ('file.py:12: the
    code'). functions: the autograd functions that are called outside of these. whole: a line outside of any submodule that asks for
    gradients; else ''. remedy: for the user's error then. hooks: such code has hooks on activations, or modules have backward hooks."""

    modules: Mapping[str, str] = field(default_factory=dict)
    functions: frozenset[Function] = frozenset()
    whole: str = ""
    remedy: str = ""
    hooks: bool = False


def own_gradients(model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs) -> OwnGradients:
    """Calls the model once, and leaves it as it was."""
    paths = paths_of(model)
    found: dict[str, str] = {}
    functions: set[tuple[str, Function]] = set()

    hooks: dict[str, str] = {}

    def note(into: dict[str, str] = found) -> None:
        if (path := innermost(paths)) is not None:
            into.setdefault(path, running_line())

    def hooked(*_: object) -> None:
        note(hooks if innermost(paths) == "" else found)

    def noted(cls: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        functions.add((innermost(paths) or "", cls))
        return apply(*args, **kwargs)

    with left_as_it_was(model, loss), torch.enable_grad(), generators.kept(), as_called(inputs):
        around = backward_hooks_told(lambda module, _: hooks.update({paths.get(id(module), ""): running_line()}))
        with without_values(model, inputs), _asked_by(note), hooks_told(hooked), around, applied_by(noted):
            objective_of(model(*inputs[0], **inputs[1]), loss, None)
    if line := found.get("", ""):
        name = type(model).__name__
        remedy = (
            f"\n  {line} has gradients of its own: call it in a submodule of {name}, which then runs as it is written; or let {name} "
            f"return what it computes of each sample, and make the loss of it outside, or in loss=fn: then {name} runs so by samples"
        )
        return OwnGradients(whole=line, remedy=remedy)
    outermost = {p: line for p, line in found.items() if not below(p, found)}
    outside = frozenset(cls for p, cls in functions if p not in outermost and not below(p, outermost))
    return OwnGradients(modules=outermost, functions=outside, hooks=bool(hooks))


def other_backward(
    model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs, known: Collection[Function] = ()
) -> str:  # fmt: skip
    """The name of an autograd function that the model applies whose gradients are not, of whatever it is given, those that autograd gives
    of its forward, or whose backward leaves or says something; '' if there is none. known: those that are not asked about. Calls the model
    once, and leaves it as it was."""
    for cls, calls in _applied(model, loss, inputs, known).items():
        with left_as_it_was(model, loss), heard() as said:
            before = State.take(model, loss)
            if not _gives_the_same(cls, AsAutograd, calls) or said or before.changes(State.take(model, loss, before)):
                return cls.__qualname__
    return ""


def runs_again(model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs) -> frozenset[Function]:
    """The autograd functions that the model applies whose backward runs again what their forward ran where gradients are off, as
    checkpointing written by hand does, or differentiates modules that they are given. Calls the model once, and leaves it as it was."""
    applied = _applied(model, loss, inputs, (), own={id(p) for p in model.parameters()})
    with left_as_it_was(model, loss), heard():
        return _run_again(applied)


def _run_again(applied: Mapping[Function, list[tuple[Any, Any]]]) -> frozenset[Function]:
    given_code = {cls for cls, calls in applied.items() if any(map(callable, pytree.tree_leaves(calls)))}
    other = {cls: calls for cls, calls in applied.items() if cls in given_code or not _gives_the_same(cls, AsAutograd, calls)}
    return frozenset(cls for cls, calls in other.items() if _gives_the_same(cls, Kept, calls))


def _applied(
    model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs, known: Collection[Function], own: Collection[int] = ()
) -> dict[Function, list[tuple[Any, Any]]]:  # fmt: skip
    """Of each autograd function that the model applies the arguments of some calls: copies, but for tensors with an id in `own`."""
    seen: dict[Function, list[tuple[Any, Any]]] = {}

    def noted(cls: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = seen.setdefault(cls, [])
        if len(calls) < MOST and cls not in known:
            given = (args, kwargs)
            calls.append(pytree.tree_map_only(Tensor, lambda x: x if id(x) in own else _copy(x), given) if own else copied(given))
        return apply(*args, **kwargs)

    with left_as_it_was(model, loss), torch.enable_grad(), generators.kept(), as_called(inputs):
        with without_values(model, inputs), applied_by(noted):
            objective_of(model(*inputs[0], **inputs[1]), loss, None)
    return seen


def _copy(x: Tensor) -> Tensor:
    (made,), _ = copied(((x,), {}))
    found: Tensor = made
    return found


def _gives_the_same(cls: Function, other: Callable[[Function], nn.Module], calls: Iterable[tuple[Any, Any]]) -> bool:
    """Whether the function as it is written and in another form give the same, of what each call was given. Parameters are what they are:
    what the function calls may use them too."""
    for args, kwargs in calls:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
        meta = any(t.is_meta for t in given)
        given = stand_ins(given) if meta else given
        arguments = pytree.tree_map_only(Tensor, lambda x: x if isinstance(x, nn.Parameter) else Place(), (args, kwargs))
        one, two = (Region(path=cls.__name__, module=kind(cls), state=(), arguments=arguments, modes=(True,)) for kind in (Applied, other))
        with warnings.catch_warnings(), torch.device("cpu") if meta else contextlib.nullcontext():
            warnings.simplefilter("ignore")  # of a forward that takes values of tensors, which now need gradients
            if not gives_the_same(one, two, given, doubled=other is not Kept):
                return False
    return True


@contextlib.contextmanager
def without_values(model: nn.Module, inputs: object) -> Iterator[None]:
    """Around a call that is not traced: where it is on the meta device, code that asks whether it is exported is told so, since it takes no
    values of tensors into Python then. CaptureError if it does all the same."""
    tensors = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(inputs))
    if not any(isinstance(x, Tensor) and x.is_meta for x in tensors):
        yield
        return
    try:
        with as_exported():
            yield
    except FAILURES as error:
        raise CaptureError(
            f"{type(model).__name__} has gradients of its own, and cannot be called on the meta device to look at these: "
            f"{first_line(error)}\n  what to do: build the model with data, not on the meta device"
        ) from error


def innermost(paths: Mapping[int, str]) -> str | None:
    """The path of the submodule whose code calls; None if none does. paths: as of `paths_of`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(module_of(frame)) not in paths:
        frame = frame.f_back
    return None if frame is None else paths[id(module_of(frame))]


def below(path: str, others: Iterable[str]) -> bool:
    """Whether a submodule is inside of one of others, and none of them."""
    return any(path.startswith(f"{other}.") for other in others)


@contextlib.contextmanager
def _asked_by(tell: Callable[[], None]) -> Iterator[None]:
    """Inside, `tell` is called where gradients are asked for."""
    own: Any = torch.autograd.grad
    grad = as_it_was(own)

    def asked(*args: Any, **kwargs: Any) -> Any:
        tell()
        return grad(*args, **kwargs)

    with answered_by(own, asked):
        yield
