"""Where a model's code has gradients of its own: autograd functions of its author's, hooks on activations, and gradients that it asks for
in its forward. A graph of operators does not show them: the functions run as they are written, and so do submodules with the others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.applied import Function, applied_by, hooks_told
from autopar.capture.around import as_called
from autopar.capture.calls import Inputs, left_as_it_was
from autopar.capture.export import objective_of
from autopar.capture.source import module_of, running_line

__all__ = ["OwnGradients", "below", "innermost", "own_gradients"]


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

    def noted(cls: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        functions.add((innermost(paths) or "", cls))
        return apply(*args, **kwargs)

    with left_as_it_was(model, loss), torch.enable_grad(), torch.random.fork_rng(devices=[]), as_called():
        with _asked_by(note), hooks_told(lambda _: note()), applied_by(noted):
            objective_of(model(*inputs[0], **inputs[1]), loss, None)
    if line := found.get("", ""):
        own = f"\n  {line} has gradients of its own: call it in a submodule of {type(model).__name__}, which then runs as it is written"
        return OwnGradients(remedy=own)
    outermost = {p: line for p, line in found.items() if not below(p, found)}
    outside = frozenset(cls for p, cls in functions if p not in outermost and not below(p, outermost))
    return OwnGradients(modules=outermost, functions=outside)


def innermost(paths: Mapping[int, str]) -> str | None:
    """The path of the submodule whose code calls; None if none does. paths: by the identities of a model's modules."""
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
    grad = torch.autograd.grad

    def asked(*args: Any, **kwargs: Any) -> Any:
        tell()
        return grad(*args, **kwargs)

    torch.autograd.grad = asked
    try:
        yield
    finally:
        torch.autograd.grad = grad
