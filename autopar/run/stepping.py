"""Optimizers that update each element by itself step on this rank's parts as on plain parameters.

Every other optimizer (norms or matrices of whole parameters: Adafactor, Muon, LAMB, LBFGS and people's own) sees `Part`s, on which
torch functions are exact and slower. While an elementwise one of torch.optim steps, its parameters and their gradients are plain
tensors: the hooks that torch calls before and after each step change their class, not the objects. A closure is called with parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.run.parts import Lies, Part, PartTensor, is_part

__all__ = ["close_steps", "hook_optimizers"]

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
_open: dict[int, list[tuple[nn.Parameter, Lies]]] = {}  # by optimizer: what is plain for the time of its step
_hooked = False


def hook_optimizers() -> None:
    """Have every optimizer of this process treated so, once."""
    global _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        _hooked = True


def close_steps() -> None:
    """Parameters that a step which raised has left plain are parts again."""
    for optimizer in list(_open):
        _close(optimizer)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    close_steps()
    params: list[Any] = [p for group in optimizer.param_groups for p in group["params"] if type(p) is Part]
    if not params or not _is_elementwise(type(optimizer)):
        return None
    opened = [(p, p._lies) for p in params]

    def open_() -> None:
        _open[id(optimizer)] = opened
        for param, lies in opened:
            param.__class__ = nn.Parameter
            _plain_gradient(param)
            for name, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[param][name] = _part_of_state(value, param, lies)

    open_()
    bound = dict(zip(("self", "closure"), args, strict=False)) | kwargs  # torch gives the optimizer itself first
    closure: Callable[[], Any] | None = bound.get("closure")
    if closure is None:
        return None

    def with_parts() -> Any:
        _close(id(optimizer))
        try:
            return closure()
        finally:
            open_()

    return (optimizer, with_parts), {k: v for k, v in kwargs.items() if k != "closure"}


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _close(id(optimizer))


def _close(optimizer: int) -> None:
    for param, lies in _open.pop(optimizer, ()):
        param.__class__ = Part
        param._lies = lies  # type: ignore[attr-defined]


def _is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether the class is one of these, or has the step of one."""
    for base in kind.__mro__:
        if base in _ELEMENTWISE:
            return True
        if "step" in vars(base):
            return False
    return False


def _plain_gradient(param: nn.Parameter) -> None:
    grad: Any = param.grad
    if type(grad) is PartTensor:
        grad.__class__ = Tensor  # type: ignore[assignment]


def _part_of_state(value: Tensor, param: nn.Parameter, lies: Lies) -> Tensor:
    """State of an optimizer that is older than the parts is cut as they are."""
    if is_part(value):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if value.dim() and value.shape == lies.shape and value.shape != param.shape:
        return lies.cut(value).clone(memory_format=torch.contiguous_format)
    return value
