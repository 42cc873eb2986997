"""Where a model's code has gradients of its own: autograd functions of its author's, and hooks on activations. A graph of operators does
not show them; the submodules that call them run as they are written.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.around import as_called
from autopar.capture.calls import Inputs, left_as_it_was
from autopar.capture.export import objective_of

__all__ = ["OwnGradients", "own_gradients"]

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))


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
        frame, line = sys._getframe(2), ""
        while frame is not None:
            code = frame.f_code
            if not line and not code.co_filename.startswith((*_LIBRARIES, "<")):
                text = linecache.getline(code.co_filename, frame.f_lineno).strip()
                line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}: {text}"
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # what the author calls self
            if isinstance(owner, nn.Module) and id(owner) in paths:
                found.setdefault(paths[id(owner)], line)
                return
            frame = frame.f_back  # type: ignore[assignment]

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
    """Inside, `note` is called by autograd functions that are not torch's, and by hooks that are registered on tensors."""
    apply, register = torch.autograd.Function.__dict__["apply"], Tensor.register_hook

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            note()
        return apply.__get__(None, cls)(*args, **kwargs)

    def registered(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        note()
        return register(self, hook)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    Tensor.register_hook = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]
