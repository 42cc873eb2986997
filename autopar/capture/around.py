"""What is around the call that is captured, torch.autocast and whether gradients are wanted: the model runs in it, and nothing else of
capture does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from autopar.capture.reach import is_foreign
from autopar.run.autocast import Autocast, ambient, under, without
from autopar.run.checkpointed import without_checkpointing
from autopar.run.grad_mode import GradMode
from autopar.run.grad_mode import as_called as called_in

__all__ = ["Around", "as_called", "capturing"]


@dataclass(slots=True)
class Around:
    """autocast: what is on. mode: whether gradients are wanted. asked: whether code of the model has asked for that."""

    autocast: tuple[Autocast, ...]
    mode: GradMode
    asked: bool = False

    def answer(self, wanted: bool, found: Callable[[], bool], asking: str) -> bool:
        """What is said to code of a module: to torch's own, what is."""
        if is_foreign(asking):
            return found()
        self.asked = True
        return wanted if found is _INFERENCE else wanted and found()


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
    with under(around.autocast if around else ()), keeping, _told(around):
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
