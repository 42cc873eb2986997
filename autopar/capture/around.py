"""What is around the call that is captured, torch.autocast and whether gradients are wanted: the model runs in it, and nothing else of
capture does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.reach import is_foreign
from autopar.run.autocast import Autocast, ambient, under, without
from autopar.run.checkpointed import without_checkpointing
from autopar.run.grad_mode import GradMode
from autopar.run.grad_mode import as_called as called_in

__all__ = ["OF_GRADIENTS", "Around", "as_called", "asking", "capturing"]


@dataclass(slots=True)
class Around:
    """autocast: what is on. mode: whether gradients are wanted. asked: whether code of the model has asked for that. asks: whether it may
    ask activations."""

    autocast: tuple[Autocast, ...]
    mode: GradMode
    asked: bool = False
    asks: bool = False

    def ask_activations(self) -> None:
        """Code of the model reads whether tensors require a gradient, or what autograd records of them."""
        self.asked = self.asks = True

    def answer(self, wanted: bool, found: Callable[[], bool], asking: str) -> bool:
        """What is said to code of a module: to torch's own, what is."""
        if is_foreign(asking):
            return found()
        self.asked = True
        return wanted if found is _INFERENCE else wanted and found()


class _WithoutGradients(TorchFunctionMode):
    """Inside, code of a model is told of what operators make that it has no gradient."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _TOLD and not args[0].is_leaf and not is_foreign(sys._getframe(1).f_globals.get("__name__", "")):
            return _TOLD[func]
        return func(*args, **(kwargs or {}))


def asking(depth: int) -> FrameType:
    """The frame of code that calls a torch function, `depth` frames above the one that asks here; not that of the mode that stands
    between them."""
    frame = sys._getframe(depth + 1)
    above = frame.f_back if frame.f_code is _WithoutGradients.__torch_function__.__code__ else None
    return above or frame


_TOLD: Mapping[Any, Any] = {
    torch.Tensor.requires_grad.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: None,  # type: ignore[union-attr]
    torch.Tensor.is_leaf.__get__: True,  # type: ignore[attr-defined]
}  # what is asked of a tensor, and the answer where gradients are off
OF_GRADIENTS = ("requires_grad", "grad_fn", "is_leaf")  # the names of these

_GRAD, _INFERENCE = torch.is_grad_enabled, torch.is_inference_mode_enabled
_AROUND: ContextVar[Around | None] = ContextVar("what is around the call", default=None)


@contextlib.contextmanager
def capturing() -> Iterator[Around]:
    """Inside, autocast is off, except for what runs as_called(): that is in the state that was on here."""
    around = Around(ambient(), called_in())
    token = _AROUND.set(around)
    try:
        with without():
            yield around
    finally:
        _AROUND.reset(token)


@contextlib.contextmanager
def as_called(*, checkpointed: bool = False) -> Iterator[None]:
    """Inside, the user's model runs, in the autocast state of the call that is captured, is told whether that call wants gradients (it
    always has them), and keeps what its operators keep. checkpointed: but for what it wraps in torch.utils.checkpoint."""
    around = _AROUND.get()
    keeping = contextlib.nullcontext() if checkpointed else without_checkpointing()
    told = _WithoutGradients() if around is not None and around.asks and not around.mode.grad else contextlib.nullcontext()
    with under(around.autocast if around else ()), keeping, _told(around), told:
        yield


@contextlib.contextmanager
def _told(around: Around | None) -> Iterator[None]:
    if around is None:
        yield
        return

    def is_grad_enabled() -> bool:
        return around.answer(around.mode.grad, _GRAD, sys._getframe(1).f_globals.get("__name__", ""))

    def is_inference_mode_enabled() -> bool:
        return around.answer(around.mode.inference, _INFERENCE, sys._getframe(1).f_globals.get("__name__", ""))

    before = torch.is_grad_enabled, torch.is_inference_mode_enabled
    torch.is_grad_enabled, torch.is_inference_mode_enabled = is_grad_enabled, is_inference_mode_enabled
    try:
        yield
    finally:
        torch.is_grad_enabled, torch.is_inference_mode_enabled = before
