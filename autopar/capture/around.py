"""What is around the call that is captured, torch.autocast and whether gradients are wanted: the model runs in it, and nothing else of
capture does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture.padded import left_out_as_evaluated
from autopar.capture.reach import is_foreign, is_installed
from autopar.capture.said import Said, heard
from autopar.capture.scripted import as_python
from autopar.capture.source import running_line
from autopar.errors import CaptureError
from autopar.ir import Program, refs
from autopar.run.alone import as_one_process
from autopar.run.asked import NAMES, said_of
from autopar.run.autocast import Autocast, ambient, under, without
from autopar.run.checkpointed import without_checkpointing
from autopar.run.grad_mode import GradMode
from autopar.run.grad_mode import as_called as called_in
from autopar.run.objects import key_name
from autopar.run.recoded import answered_by, as_it_was
from autopar.run.region import REGION

__all__ = ["Around", "as_called", "as_not_traced", "asking", "capturing", "check_told", "said_otherwise"]


@dataclass(slots=True)
class Traced:
    """asked: whether code of the user's has asked if it is traced, and was told that it is not."""

    asked: bool = False


@dataclass(slots=True)
class Around:
    """autocast: what is on. mode: whether gradients are wanted. modes: whether modes of torch functions are on (torch.set_default_device is
    one), under which torch takes no fast paths. asked: whether code of the model has asked for gradients. asks: whether it may ask
    activations. given: by their paths, the tensors of the call of which code is told what they say, where a copy says otherwise."""

    autocast: tuple[Autocast, ...]
    mode: GradMode
    modes: bool
    asked: bool = False
    asks: bool = False
    given: Mapping[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def ask_activations(self) -> None:
        """Code of the model reads whether tensors require a gradient, or what autograd records of them."""
        self.asked = self.asks = True

    def answer(self, wanted: bool, found: Callable[[], bool], asking: str) -> bool:
        """What is said to code of a module: to torch's own, what is."""
        if is_foreign(asking):
            return found()
        self.asked = True
        return wanted if found is _INFERENCE else wanted and found()


class _Told(TorchFunctionMode):
    """Inside, code of a model that asks a copy of an input is told what the input says, and, without gradients, of what operators make that
    it has none."""

    def __init__(self, inputs: Mapping[int, Tensor], *, gradients: bool) -> None:
        """inputs: by the ids of their copies."""
        super().__init__()
        self._inputs, self._gradients = inputs, gradients

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _name_of(func)
        if name in NAMES and args and not is_foreign(_asker(name).f_globals.get("__name__", "")):
            if (given := self._inputs.get(id(args[0]))) is not None:
                return _said(name, func, given, args[1:], kwargs or {})
            if not self._gradients and func in _TOLD and not args[0].is_leaf:
                return _TOLD[func]
        return func(*args, **(kwargs or {}))


def _name_of(func: Callable[..., Any]) -> str:
    """Of a method, or of an attribute that is read."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(getattr(func, "__self__", None), "__name__", "")) if name == "__get__" else name


def _asker(name: str) -> FrameType:
    """The frame of the code that asks, in __torch_function__; not that of a method of torch's that is written in Python."""
    frame: FrameType | None = sys._getframe(2)
    of_method = frame
    while of_method is not None and of_method.f_code.co_name == "handle_torch_function":
        of_method = of_method.f_back
    if of_method is not None and of_method.f_code.co_name == name and of_method.f_back is not None:
        return of_method.f_back
    assert frame is not None
    return frame


def _said(name: str, func: Callable[..., Any], given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an input says. CaptureError for another tensor, which a program would hold as it is now."""
    with torch._C.DisableTorchFunction():
        found = func(given, *args, **kwargs)
    if isinstance(found, Tensor):
        raise CaptureError(
            f"the forward asks an input for a tensor that it has beside its values (.{name}), which a graph holds as it was when it was "
            f"traced\n  at {running_line()}\n  what to do: give it to the model as an input of its own"
        )
    return found


def asking(depth: int) -> FrameType:
    """The frame of code that calls a torch function, `depth` frames above the one that asks here; not that of the mode that stands
    between them."""
    frame = sys._getframe(depth + 1)
    above = frame.f_back if frame.f_code is _Told.__torch_function__.__code__ else None
    return above or frame


_TOLD: Mapping[Any, Any] = {
    Tensor.requires_grad.__get__: False,  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__: None,  # type: ignore[union-attr]
    Tensor.is_leaf.__get__: True,  # type: ignore[attr-defined]
}  # what is asked of a tensor, and the answer where gradients are off

_GRAD, _INFERENCE = torch.is_grad_enabled, torch.is_inference_mode_enabled
_AROUND: ContextVar[Around | None] = ContextVar("what is around the call", default=None)
_TRACED: ContextVar[Traced | None] = ContextVar("who is told that nothing is traced", default=None)
_OF_COMPILERS = ("is_compiling", "is_exporting", "is_dynamo_compiling")  # of torch.compiler


@contextlib.contextmanager
def as_not_traced() -> Iterator[Traced]:
    """Inside, code of the user's that asks torch.compiler whether it is compiled or exported is told what it is told when it runs: that it
    is not. Packages that are installed, and torch, are told what is: what they do where they are traced is written to be traced."""
    token = _TRACED.set(traced := Traced())
    try:
        yield traced
    finally:
        _TRACED.reset(token)


@contextlib.contextmanager
def capturing() -> Iterator[Around]:
    """Inside, autocast is off, except for what runs as_called(): that is in the state that was on here. Tensors that are given the memory
    that they have, as torch.nn.utils.parametrize does to a parameter, are not written to."""
    modes = torch.overrides.has_torch_function((torch.empty(0, device="cpu"),))
    around = Around(ambient(), called_in(), modes)
    token = _AROUND.set(around)
    try:
        with without(), _given_its_own():
            yield around
    finally:
        _AROUND.reset(token)


@contextlib.contextmanager
def as_called(inputs: object = None, *, checkpointed: bool = False) -> Iterator[list[Said]]:
    """Inside, the user's model runs, in the autocast state of the call that is captured, is told whether that call wants gradients (it
    always has them), is one process alone, and keeps what its operators keep; functions of TorchScript run as Python. inputs: (args,
    kwargs) that it is given here, copies of those of that call. checkpointed: but for what it wraps in torch.utils.checkpoint. What it
    prints and logs is in the list that this gives."""
    around = _AROUND.get()
    keeping = contextlib.nullcontext() if checkpointed else without_checkpointing()
    told: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if around is not None and ((without := around.asks and not around.mode.grad) or around.given):
        told = _Told(_by_copy(around.given, inputs), gradients=not without)
    with (
        under(around.autocast if around else ()), _autocast_of_meta(), keeping, as_one_process(), as_python(), _told(around),
        _told_as_it_runs(_TRACED.get() if around else None), told, heard() as said,
    ):  # fmt: skip
        yield said


@contextlib.contextmanager
def _given_its_own() -> Iterator[None]:
    """Inside, x.set_(x) does nothing, where it counts as a write that no graph can hold."""
    own, before = torch.Tensor.set_, vars(torch.Tensor).get("set_")

    def given(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if len(args) == 1 and args[0] is tensor and not kwargs else own(tensor, *args, **kwargs)

    torch.Tensor.set_ = given  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if before is None:
            del torch.Tensor.set_
        else:  # a capture within another
            torch.Tensor.set_ = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _autocast_of_meta() -> Iterator[None]:
    """Inside, code that asks for the autocast of the device that its tensors are on, which torch has none of for the meta device, gets the
    CPU's there: transformers 4 turns it off so around float32."""
    begin = torch.autocast.__init__

    def begun(context: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(context, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = begun  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autocast.__init__ = begin  # type: ignore[method-assign]


def said_otherwise(given: object, asks: frozenset[str]) -> dict[tuple[Any, ...], Tensor]:
    """By path, the tensors among (args, kwargs) that say of themselves what copies do not say. asks: what the model's code may ask."""
    leaves = ((tuple(map(key_name, path[1:])), leaf) for path, leaf in pytree.tree_leaves_with_path(given)) if asks else ()
    return {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor) and said_of(leaf, asks)}


def check_told(program: Program, told: Mapping[tuple[Any, ...], Tensor]) -> None:
    """CaptureError if what runs as it is written is given an input of which code is told what a copy does not say. told: by path."""
    values = {i.value for i in program.inputs if i.path in told}
    if any(op.target == REGION and not values.isdisjoint(refs(op)) for op in program.ops):
        raise CaptureError(
            f"the forward of {program.name} asks an input how it was made or lies in memory, and a part of it runs as it is written, on a "
            f"copy\n  what to do: give the model a plain tensor (x.detach().clone()), or what it asks as an argument of its own"
        )


def _by_copy(given: Mapping[tuple[Any, ...], Tensor], inputs: object) -> dict[int, Tensor]:
    """given: by path, as of `Around`. By the ids of the tensors that are in these places here."""
    here = ((tuple(map(key_name, path[1:])), leaf) for path, leaf in pytree.tree_leaves_with_path(inputs))
    return {id(leaf): given[path] for path, leaf in here if path in given}


@contextlib.contextmanager
def _told(around: Around | None) -> Iterator[None]:
    if around is None:
        yield
        return

    def is_grad_enabled() -> bool:
        return around.answer(around.mode.grad, _GRAD, sys._getframe(1).f_globals.get("__name__", ""))

    def is_inference_mode_enabled() -> bool:
        return around.answer(around.mode.inference, _INFERENCE, sys._getframe(1).f_globals.get("__name__", ""))

    def wanted() -> bool:
        around.asked = True
        return around.mode.grad

    before = torch.is_grad_enabled, torch.is_inference_mode_enabled
    torch.is_grad_enabled, torch.is_inference_mode_enabled = is_grad_enabled, is_inference_mode_enabled
    try:
        with contextlib.nullcontext() if around.modes else left_out_as_evaluated(wanted):
            yield
    finally:
        torch.is_grad_enabled, torch.is_inference_mode_enabled = before


@contextlib.contextmanager
def _told_as_it_runs(traced: Traced | None) -> Iterator[None]:
    """Inside, what `as_not_traced` says, if that is on."""
    if traced is None:
        yield
        return

    def told(found: Callable[[], bool]) -> Callable[[], bool]:
        def is_traced() -> bool:
            frame = sys._getframe(2)  # who has called the function that asks this
            if str(frame.f_globals.get("__name__", "")).startswith("torch._dynamo") and frame.f_back is not None:
                frame = frame.f_back  # which asks for another
            name = frame.f_globals.get("__name__", "")
            if is_foreign(name) or is_installed(name):
                return found()
            traced.asked = True
            return False

        return is_traced

    with contextlib.ExitStack() as stack:
        for function in (getattr(torch.compiler, name) for name in _OF_COMPILERS if hasattr(torch.compiler, name)):
            stack.enter_context(answered_by(function, told(as_it_was(function))))
        yield
