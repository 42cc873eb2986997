"""Optimizers that update each element by itself step on this rank's parts as on plain parameters.

Every other optimizer (norms or matrices of whole parameters: Adafactor, Muon, LAMB, LBFGS and people's own) sees `Part`s, on which
torch functions are exact and slower. While an elementwise one of torch.optim steps, its parameters and their gradients are plain
tensors: the hooks that torch calls before and after each step change their class, not the objects. A closure is called with parts, and
so are hooks of the user's own: an optimizer that has some steps on parts. What state_dict() gives are parts too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.run import record
from autopar.run.parts import Part, PartTensor, cut_as, is_part, lies_of, part_like

__all__ = ["close_steps", "hook_optimizers"]

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
_open: dict[int, list[Any]] = {}  # by optimizer: the parameters that are plain for the time of its step
_plain_state: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()  # the state that was made plain
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
    record.phase(record.OPTIMIZER)
    params: list[Any] = [p for group in optimizer.param_groups for p in group["params"] if type(p) is Part]
    if not params:
        return None
    if not _is_elementwise(type(optimizer)) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        if _plain_state.pop(optimizer, None) is optimizer.state:
            _state_to_parts(optimizer, params)
        return None
    if _plain_state.get(optimizer) is not optimizer.state:  # new, loaded, or of a step on parts
        if optimizer not in _plain_state:
            optimizer.register_state_dict_post_hook(_state_dict_of_parts)
        _state_to_plain(optimizer, params)
        _plain_state[optimizer] = optimizer.state

    def open_() -> None:
        _open[id(optimizer)] = params
        for param in params:
            param.__class__ = nn.Parameter
            grad: Any = param.grad
            if type(grad) is PartTensor:
                grad.__class__ = Tensor  # type: ignore[assignment]

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
    record.phase(record.OUTSIDE)


def _close(optimizer: int) -> None:
    for param in _open.pop(optimizer, ()):
        param.__class__ = Part


def _is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether the class is one of these, or has the step of one."""
    for base in kind.__mro__:
        if base in _ELEMENTWISE:
            return True
        if "step" in vars(base):
            return False
    return False


def _state_to_plain(optimizer: Optimizer, params: list[Any]) -> None:
    """State as plain tensors of this rank's parts. What is whole (an optimizer older than the parts, a loaded one) is cut."""
    for param in params:
        lies = lies_of(param)
        state = optimizer.state.get(param, {})
        for name, value in list(state.items()):
            if isinstance(value, Tensor) and (is_part(value) or value.shape == lies.shape and value.dim() > 0):
                state[name] = cut_as(value, lies)


def _state_to_parts(optimizer: Optimizer, params: list[Any]) -> None:
    for param in params:
        lies = lies_of(param)
        here = lies.cut(torch.empty(lies.shape, device="meta")).shape
        state = optimizer.state.get(param, {})
        for name, value in list(state.items()):
            if isinstance(value, Tensor) and not is_part(value) and value.shape == here and value.dim() > 0:
                state[name] = part_like(value, lies)


def _state_dict_of_parts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """What state_dict() gives: parts, which refuse to be saved as if they were the whole."""
    if _plain_state.get(optimizer) is not optimizer.state:
        return state_dict
    found = dict(state_dict["state"])
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, index in zip(group["params"], packed["params"], strict=True):
            if type(param) is Part and index in found:
                lies = lies_of(param)
                here = lies.cut(torch.empty(lies.shape, device="meta")).shape
                found[index] = {
                    name: part_like(value, lies) if isinstance(value, Tensor) and value.dim() > 0 and value.shape == here else value
                    for name, value in found[index].items()
                }
    return {**state_dict, "state": found}
