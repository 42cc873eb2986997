"""Whether the user's call wants gradients: capture runs a model with gradients, and answers as they were when code of the model asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["GradMode", "as_called", "as_if_trained", "buffers_without_gradients", "with_gradients"]


@dataclass(frozen=True, slots=True)
class GradMode:
    """What torch.is_grad_enabled() and torch.is_inference_mode_enabled() say."""

    grad: bool
    inference: bool

    def __str__(self) -> str:
        return "torch.inference_mode()" if self.inference else "a call with gradients" if self.grad else "torch.no_grad()"


_CALLED: ContextVar[GradMode | None] = ContextVar("the grad mode of the call", default=None)


def as_called() -> GradMode:
    """That of the user's call, or of this line where no call has been prepared."""
    return _CALLED.get() or GradMode(torch.is_grad_enabled(), torch.is_inference_mode_enabled())


@contextlib.contextmanager
def with_gradients() -> Iterator[None]:
    """Inside, a call is prepared: inference mode is off and gradients are on, and as_called() is as it is here."""
    token = _CALLED.set(as_called())
    try:
        with torch.inference_mode(False):
            yield
    finally:
        _CALLED.reset(token)


@contextlib.contextmanager
def as_if_trained(model: nn.Module, inputs: object) -> Iterator[None]:
    """Inside, a model all of whose parameters are frozen (a teacher, an average) has them trained, as a plan is made; afterwards, its
    parameters are frozen again. inputs: of the call; where one of them requires a gradient, the model stays as it is."""
    params = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    asked = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(inputs))
    if asked or any(p.requires_grad for p in params):
        yield
        return
    for param in params:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in model.parameters():
            param.requires_grad_(False)


@contextlib.contextmanager
def buffers_without_gradients(model: nn.Module) -> Iterator[None]:
    """Buffers that require no gradient require none afterwards, and have none. (A forward may let one require it, so that what it returns
    does, whatever else is in it; nothing here gives that gradient.)"""
    before = [(buffer, buffer.grad) for buffer in model.buffers() if buffer.is_leaf and not buffer.requires_grad]
    try:
        yield
    finally:
        for buffer, grad in before:
            if buffer.requires_grad and buffer.is_leaf:
                buffer.requires_grad_(False)
                buffer.grad = grad
