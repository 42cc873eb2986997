"""Where a model's code has gradients of its own: autograd functions of its author's, hooks on activations, and gradients that it asks for
in its forward. A graph of operators does not show them; the submodules that call them run as they are written.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.around import as_called
from autopar.capture.calls import Inputs, left_as_it_was
from autopar.capture.export import objective_of
from autopar.capture.source import module_of, running_line

__all__ = ["OwnGradients", "own_gradients"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnGradients:
    """modules: the outermost submodules that call such code, and a line of it ('file.py:12: the code'). remedy: a line for the user's
    error; '' if there is no such code."""

    modules: Mapping[str, str]
    remedy: str


def own_gradients(model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs) -> OwnGradients:
    """Calls the model once, and leaves it as it was."""
    paths = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
    found: dict[str, str] = {}

    def note() -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(module_of(frame)) not in paths:
            frame = frame.f_back
        if frame is not None:
            found.setdefault(paths[id(module_of(frame))], running_line())

    with left_as_it_was(model, loss), _watched(note), torch.enable_grad(), torch.random.fork_rng(devices=[]), as_called():
        objective_of(model(*inputs[0], **inputs[1]), loss, None)
    if "" in found or not found:
        line = found.get("", "")
        own = f"\n  {line} has gradients of its own: call it in a submodule of {type(model).__name__}, which then runs as it is written"
        return OwnGradients(modules={}, remedy=own if line else "")
    outermost = {p: line for p, line in found.items() if not any(p.startswith(f"{other}.") for other in found)}
    return OwnGradients(modules=outermost, remedy="")


@contextlib.contextmanager
def _watched(note: Callable[[], None]) -> Iterator[None]:
    """Inside, `note` is called by autograd functions that are not torch's, by hooks that are registered on tensors, and where gradients are
    asked for."""
    apply, register, grad = torch.autograd.Function.__dict__["apply"], Tensor.register_hook, torch.autograd.grad

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            note()
        return apply.__get__(None, cls)(*args, **kwargs)

    def registered(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        note()
        return register(self, hook)

    def asked(*args: Any, **kwargs: Any) -> Any:
        note()
        return grad(*args, **kwargs)

    torch.autograd.grad = asked
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    Tensor.register_hook = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.grad = grad
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]
