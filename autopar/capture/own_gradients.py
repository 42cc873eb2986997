"""Where a model's code has gradients of its own: autograd functions of its author's, hooks on activations, and gradients that it asks for
in its forward. A graph of operators does not show them: the functions run as they are written, and so do submodules with the others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.around import as_called
from autopar.capture.calls import Inputs, left_as_it_was
from autopar.capture.export import objective_of
from autopar.capture.source import module_of, running_line

__all__ = ["OwnGradients", "applied_by", "innermost", "own_gradients"]


Apply = Callable[..., Any]
Function = type[torch.autograd.Function]
Calls = Callable[[Function, Apply, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnGradients:
    """modules: the outermost submodules that have hooks on activations or ask for gradients, and a line of each that does ('file.py:12: the
    code'). functions: the autograd functions that are called outside of these. remedy: a line for the user's error, where code outside of
    any submodule does what those do; else ''."""

    modules: Mapping[str, str] = field(default_factory=dict)
    functions: frozenset[Function] = frozenset()
    remedy: str = ""


def own_gradients(model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs) -> OwnGradients:
    """Calls the model once, and leaves it as it was."""
    paths = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
    found: dict[str, str] = {}
    functions: set[tuple[str, Function]] = set()

    def note() -> None:
        if (path := innermost(paths)) is not None:
            found.setdefault(path, running_line())

    def noted(cls: Function, apply: Apply, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        functions.add((innermost(paths) or "", cls))
        return apply(*args, **kwargs)

    with left_as_it_was(model, loss), _watched(note), applied_by(noted), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        with as_called():
            objective_of(model(*inputs[0], **inputs[1]), loss, None)
    if line := found.get("", ""):
        own = f"\n  {line} has gradients of its own: call it in a submodule of {type(model).__name__}, which then runs as it is written"
        return OwnGradients(remedy=own)
    outermost = {p: line for p, line in found.items() if not any(p.startswith(f"{other}.") for other in found)}
    outside = frozenset(cls for p, cls in functions if not any(f"{p}.".startswith(f"{other}.") for other in outermost))
    return OwnGradients(modules=outermost, functions=outside)


def innermost(paths: Mapping[int, str]) -> str | None:
    """The path of the submodule whose code calls; None if none does. paths: by the identities of a model's modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(module_of(frame)) not in paths:
        frame = frame.f_back
    return None if frame is None else paths[id(module_of(frame))]


@contextlib.contextmanager
def applied_by(call: Calls) -> Iterator[None]:
    """Inside, autograd functions that are not torch's are applied by `call`: it is given the function, what applies it, and its
    arguments."""
    before = torch.autograd.Function.__dict__["apply"]

    def applied(cls: Function, *args: Any, **kwargs: Any) -> Any:
        apply = before.__get__(None, cls)
        return apply(*args, **kwargs) if cls.__module__.startswith(("torch.", "autopar.")) else call(cls, apply, args, kwargs)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _watched(note: Callable[[], None]) -> Iterator[None]:
    """Inside, `note` is called by hooks that are registered on tensors, and where gradients are asked for."""
    register, grad = Tensor.register_hook, torch.autograd.grad

    def registered(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        note()
        return register(self, hook)

    def asked(*args: Any, **kwargs: Any) -> Any:
        note()
        return grad(*args, **kwargs)

    torch.autograd.grad = asked
    Tensor.register_hook = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.grad = grad
        Tensor.register_hook = register  # type: ignore[method-assign]
