"""Optimizers that update each element by itself step on this rank's parts as on plain parameters.

Every other optimizer (norms or matrices of whole parameters: Adafactor, Muon, LAMB, LBFGS and people's own) sees `Part`s, on which
torch functions are exact and slower. While an elementwise one of torch.optim steps, its parameters, their gradients and its states are
plain tensors: the hooks that torch calls before and after each step change their class, not the objects. Between its steps states are
parts as parameters are: what people read of them and write to them is of the whole. A closure is called with parts, and so are hooks of
the user's own: an optimizer that has some steps on parts. What an optimizer has compiled (torch.compile, with fullgraph=True) takes no
parts, and runs as it is written.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar.run import record
from autopar.run.alike import note_written
from autopar.run.before_steps import computed_before
from autopar.run.clipping import norms_together
from autopar.run.full_states import whole_where_full
from autopar.run.given import check_given
from autopar.run.part import as_part, lies_of
from autopar.run.parts import Part, PartTensor
from autopar.run.plain import users_level
from autopar.run.wholes import cut_as

__all__ = ["close_steps", "hook_optimizers", "left_behind", "tell_of_steps"]

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
_NUMBERS = ("step", "mu_product", "eta", "mu")  # states of these that are one number, whatever the parameter is
# by its id: an optimizer, and its parameters and their gradients, which are plain for the time of its step
_open: dict[int, tuple[Optimizer, list[Any], list[Any]]] = {}
_IN_PARTS = "and NAME is held in parts by several processes. Use"
_BY_NORMS = f"has kernels for the norm of each parameter, {_IN_PARTS} one without such kernels, which sees whole parameters"
# modules of optimizers that take the memory of a part for the whole, and why
_OF_WHOLE_ONES = (
    ("torch.distributed.optim.zero_redundancy_optimizer", "has one rank step on each parameter, and NAME is held in parts by several. Use "
     "the optimizer that it wraps: pins={'zero': 1} has autopar keep states in parts"),
    ("torchao.optim.", f"of torchao keeps states of whole parameters in tensors that take no parts, {_IN_PARTS} an optimizer of "
     "torch.optim (pins={'zero': 1} keeps states in parts), or of bitsandbytes"),
    ("apex.optimizers.fused_lamb", _BY_NORMS), ("apex.optimizers.fused_mixed_precision_lamb", _BY_NORMS),
    ("apex.optimizers.fused_novograd", _BY_NORMS), ("deepspeed.ops.lamb.", _BY_NORMS),
)  # fmt: skip
_stances: list[Any] = []  # of torch.compile, of the steps that run
_hooked = False
# by its id: a parameter of what was compiled and not called since, and the name of its model
_not_called: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
_left_behind: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}  # by its id: what stood for a parameter for a while, and its name


def hook_optimizers() -> None:
    """Have every optimizer of this process treated so, and the clipping before its steps, once."""
    global _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        norms_together()
        _hooked = True


def tell_of_steps(param: nn.Parameter, model: str) -> Callable[[], None]:
    """Warn, once, where an optimizer steps on this parameter with a gradient, before what is returned is called: the first call of what was
    compiled, without which every process trains the whole model for itself."""
    hook_optimizers()
    key = id(param)

    def forget(_: object = None) -> None:
        _not_called.pop(key, None)

    _not_called[key] = weakref.ref(param, forget), model
    return forget


def left_behind(param: nn.Parameter, name: str) -> None:
    """Refuse optimizers that step on what has stood for a parameter of this name, and is none of the model any more."""
    hook_optimizers()
    key = id(param)
    _left_behind[key] = weakref.ref(param, lambda _: _left_behind.pop(key, None)), name


def _known(optimizer: Optimizer, table: dict[int, tuple[weakref.ref[nn.Parameter], str]]) -> Iterator[tuple[nn.Parameter, str]]:
    """Of the parameters of an optimizer those that are in a table, with the name there."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            known = table.get(id(param))
            if known is not None and (found := known[0]()) is not None and found is param:
                yield found, known[1]


def _refuse_what_was_left(optimizer: Optimizer) -> None:
    for _, name in _known(optimizer, _left_behind):
        raise ValueError(
            f"an optimizer was given {name} inside of full_parameters(), where the whole stands for it: outside it is no parameter of the "
            f"model. Make the optimizer outside"
        )


def _tell(optimizer: Optimizer) -> None:
    for param, model in _known(optimizer, _not_called):
        if param.grad is not None:
            del _not_called[id(param)]
            warnings.warn(
                f"an optimizer steps on {model}, which autopar has compiled, and which was not called since: every process trains all "
                f"of it for itself. Call what autopar.compile has returned with the batch, not the original, its forward or its "
                f"submodules; or let a method of the model that is called there call self(...)",
                stacklevel=users_level(),
            )


def close_steps() -> None:
    """Parameters that a step which raised has left plain are parts again, and what is compiled runs compiled."""
    for optimizer in list(_open):
        _close(optimizer)
    while _stances:
        _stances.pop().__exit__(None, None, None)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    close_steps()
    whole_where_full()
    if _not_called:
        _tell(optimizer)
    if _left_behind:
        _refuse_what_was_left(optimizer)
    if not torch.compiler.is_compiling():
        computed_before(optimizer)
    params: list[Any] = [p for group in optimizer.param_groups for p in group["params"] if type(p) is Part]
    record.phase(record.OPTIMIZER)
    if not params:
        return None
    _not_of_whole_ones(optimizer, params)
    check_given((lies_of(param).name, param) for param in params)
    note_written("step", type(optimizer).__name__, _settings(optimizer))
    if not _is_elementwise(type(optimizer)) and not torch.compiler.is_compiling():
        _stances.append(torch.compiler.set_stance("force_eager"))
        return None
    if not _is_elementwise(type(optimizer)) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    if len(_global_optimizer_pre_hooks) > 1 or len(_global_optimizer_post_hooks) > 1:  # beside ours
        return None

    def open_() -> None:
        grads: list[Any] = []
        _open[id(optimizer)] = optimizer, params, grads
        for param in params:
            param.__class__ = nn.Parameter
            grad: Any = param.grad
            if type(grad) is PartTensor:
                grad.__class__ = Tensor  # type: ignore[assignment]
                grads.append(grad)
        _state_to_plain(optimizer, params)

    open_()
    bound = dict(zip(("self", "closure"), args, strict=False)) | kwargs  # torch gives the optimizer itself first
    closure: Callable[[], Any] | None = bound.get("closure")
    if closure is None:
        return None

    def with_parts() -> Any:
        _close(id(optimizer))
        try:
            result = closure()
            computed_before(optimizer)
        finally:
            open_()
        return result

    return (optimizer, with_parts), {k: v for k, v in kwargs.items() if k != "closure"}


def _not_of_whole_ones(optimizer: Optimizer, params: Iterable[Any]) -> None:
    """TypeError for optimizers that take the memory of a part for the whole."""
    kinds = [kind.__module__ for kind in type(optimizer).__mro__]
    why = next((why for prefix, why in _OF_WHOLE_ONES if any(kind.startswith(prefix) for kind in kinds)), "")
    split = next((param for param in params if lies_of(param).split), None) if why else None
    if split is not None:
        raise TypeError(f"{type(optimizer).__name__} {why.replace('NAME', lies_of(split).name)}")


def _settings(optimizer: Optimizer) -> list[Any]:
    """The numbers by which it steps (learning rates, weight decays), of all groups together; tensors one by one."""
    totals: dict[str, float] = {}
    tensors: list[Tensor] = []
    for place, group in enumerate(optimizer.param_groups, 1):
        for name, value in group.items():
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, (int, float)):
                    totals[name] = totals.get(name, 0.0) + place * one
                elif isinstance(one, Tensor):
                    tensors.append(one)
    return [*totals.values(), *tensors]


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _close(id(optimizer))
    if _stances:
        _stances.pop().__exit__(None, None, None)
    record.phase(record.OUTSIDE)


def _close(number: int) -> None:
    if number in _open:
        optimizer, params, grads = _open.pop(number)
        _state_to_parts(optimizer, params)
        for param in params:
            param.__class__ = Part
        for grad in grads:  # which the user may have kept
            grad.__class__ = PartTensor


def _is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether the class is one of these, or has the step of one."""
    for base in kind.__mro__:
        if base in _ELEMENTWISE:
            return True
        if "step" in vars(base):
            return False
    return False


def _state_to_plain(optimizer: Optimizer, params: list[Any]) -> None:
    """State as plain tensors of this rank's parts. What is whole (of an optimizer older than the parts, or loaded) is cut."""
    for param in params:
        lies, state = lies_of(param), optimizer.state.get(param, {})
        for name, value in tuple(state.items()):
            kind = type(value)
            if kind is PartTensor and lies_of(value) is lies.of(name):
                value.__class__ = Tensor
            elif kind is PartTensor or (kind is Tensor and lies.split and value.shape == lies.shape and _of_elements(name, value)):
                state[name] = cut_as(value, lies)


def _state_to_parts(optimizer: Optimizer, params: list[Any]) -> None:
    """What has the shape of this rank's part of a parameter is the part of a state."""
    for param in params:
        lies = lies_of(param)
        if not lies.split:  # it is the whole
            continue
        here = param.shape
        for name, value in optimizer.state.get(param, {}).items():
            if type(value) is Tensor and value.shape == here and _of_elements(name, value):
                as_part(value, lies.of(name))


def _of_elements(name: str, value: Tensor) -> bool:
    """Whether a state has a number for each element of its parameter, which may be one without dims."""
    return value.dim() > 0 or name not in _NUMBERS
