"""Runs and captures a model wholly in float64, the casts to lower precision that it makes on purpose included.

What is captured inside lift_to_float64() names the dtypes that the lifted model computes in, so that the emitted module is run as it
is, inside float64_by_default(), and nothing is lifted a second time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture.scripted import as_python

__all__ = ["LOWER_PRECISIONS", "float64_by_default", "in_float64", "lift_to_float64", "to_float64"]

_LIFTED = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}  # fmt: skip
LOWER_PRECISIONS = tuple(_LIFTED)
_CLASSES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")  # of torch, which make tensors of numbers
_LIFTED_TYPES = {f"torch.{name}": "torch.DoubleTensor" for name in _CLASSES}
_LIFTED_TYPES |= {name.replace("torch.", "torch.cuda."): "torch.cuda.DoubleTensor" for name in _LIFTED_TYPES}
_CASTS = {
    torch.Tensor.float: torch.float64, torch.Tensor.half: torch.float64, torch.Tensor.bfloat16: torch.float64,
    torch.Tensor.cfloat: torch.complex128, torch.Tensor.chalf: torch.complex128,  # type: ignore[attr-defined]
}  # fmt: skip
_MADE_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)  # in the dtype of an array
_FROM_NUMPY = torch.from_numpy
_CASTS_TO_ANOTHER = (torch.Tensor.to, torch.Tensor.type_as)  # which may take the dtype of another tensor
_WRAPPERS = ("__torch_function__", "handle_torch_function")
_GROUPED_MM = tuple(
    f for f in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None
)


class _GroupedMode(TorchFunctionMode):
    """Gives float64 what torch has not in float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _GROUPED_MM and args[0].dtype == torch.float64:
            return _grouped_mm_float64(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _LiftMode(TorchFunctionMode):
    """Replaces each floating dtype that a torch function is given by float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _called_by_torch():
            return func(*args, **kwargs)
        if func in _CASTS:
            return args[0].to(_CASTS[func])
        if func in _CASTS_TO_ANOTHER:
            args = tuple(_lift_another(a) if i else a for i, a in enumerate(args))
            kwargs = {k: _lift_another(v) for k, v in kwargs.items()}
        result = func(*(_lift(a) for a in args), **{k: _lift(v) for k, v in kwargs.items()})
        return in_float64(result) if func in _MADE_OF_DATA else result


def _called_by_torch() -> bool:
    """Whether torch, autopar or an emitted module makes the call that is being handled: to describe a tensor, to make room for a
    message, or to run a captured program, not as the model's code."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _WRAPPERS:
        wrapped = frame.f_code.co_name == "handle_torch_function"  # it is called by the function that is being handled
        frame = frame.f_back
        if wrapped and frame.f_back is not None:
            frame = frame.f_back
    module = str(frame.f_globals.get("__name__", ""))
    computes = module.startswith(("torch.nn.", "torch.distributions.", "torch.functional"))
    return module.startswith(("torch.", "autopar.", "autopar_emitted")) and not computes


def _lift(arg: Any) -> Any:
    if isinstance(arg, torch.dtype):
        return _LIFTED.get(arg, arg)
    if isinstance(arg, str):
        return _LIFTED_TYPES.get(arg, arg)
    if isinstance(arg, type) and hasattr(arg, "dtype"):  # torch.FloatTensor
        return _LIFTED_TYPES.get(f"{arg.__module__}.{arg.__name__}", arg)
    return arg


def _from_numpy(array: Any) -> torch.Tensor:
    return in_float64(_FROM_NUMPY(array))


def _lift_another(arg: Any) -> Any:
    """The tensor whose dtype another one takes."""
    return arg.to(_LIFTED[arg.dtype]) if isinstance(arg, torch.Tensor) and arg.dtype in _LIFTED else arg


def _grouped_mm_float64(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None, out_dtype: object = None
) -> torch.Tensor:
    """torch.nn.functional.grouped_mm for rows a [tokens, in] sorted by group and b [groups, in, out], which torch (2.13) has not
    in float64. Rows behind the last offset are zero, as there."""
    if a.dim() != 2 or b.dim() != 3 or offs is None:
        raise NotImplementedError("grouped_mm in float64 is known for a [tokens, in], b [groups, in, out] and offs [groups] only")
    ends = [0, *offs.tolist()]
    parts = [a[start:end] @ b[g] for g, (start, end) in enumerate(zip(ends, ends[1:]))]
    out = torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
    return out if bias is None else out + bias


@contextlib.contextmanager
def lift_to_float64() -> Iterator[None]:
    """Inside, what asks torch for float32 or lower (`.float()`, `.to(torch.float32)`, `dtype=torch.bfloat16`, `torch.FloatTensor([0.5])`,
    an array of numpy in it, the default dtype) gets float64, while a model runs and while it is captured; functions of TorchScript, which
    cannot be lifted, run as the Python that they were made from. For models made float64 with to_float64; not thread-safe, since it
    changes names of the torch module until it exits."""
    float32, float_ = torch.float32, torch.float
    with contextlib.ExitStack() as lifted:
        lifted.enter_context(_default_float64())
        lifted.enter_context(as_python())
        for name in _CLASSES:
            lifted.enter_context(mock.patch.object(torch, name, torch.DoubleTensor))
        lifted.enter_context(mock.patch.object(torch, "from_numpy", _from_numpy))
        # Code that compares with torch.float32 (`if x.dtype != torch.float32`) must take the branch that it takes unlifted.
        torch.float32 = torch.float = torch.float64
        try:
            with _GroupedMode(), _LiftMode():
                yield
        finally:
            torch.float32, torch.float = float32, float_


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    """Inside, an emitted module runs whose program was captured inside lift_to_float64()."""
    with _default_float64(), _GroupedMode():
        yield


@contextlib.contextmanager
def _default_float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def to_float64(model: nn.Module) -> nn.Module:
    """The model itself, its floating parameters, buffers, and the tensors that its modules merely hold, made float64 (complex128) in place;
    what is the memory of a parameter stays so. Run it inside lift_to_float64(), where torch cannot tell what float32 and float64 together
    give."""
    shared: _Shared = {_place(p): p for p in model.parameters()}
    for parameter in model.parameters():
        parameter.data = in_float64(parameter.data)
        if parameter.grad is not None:
            parameter.grad = in_float64(parameter.grad)
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
        vars(module).update({name: _held_in_float64(value, shared) for name, value in own.items()})
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, _held_in_float64(buffer, shared))
    return model


def in_float64(t: torch.Tensor) -> torch.Tensor:
    """The tensor in float64 or complex128; itself if its numbers are integers."""
    return t.to(_LIFTED.get(t.dtype, t.dtype))


_REGISTERED = ("_parameters", "_buffers", "_modules")


_Shared = Mapping[object, torch.Tensor]


def _held_in_float64(value: Any, shared: _Shared) -> Any:
    """What a module holds with its tensors in float64, those in lists, tuples and dicts too; itself if there are none. Lists and dicts are
    changed: modules may share them. shared: the parameters, by where they lay."""
    if isinstance(value, torch.Tensor):
        parameter = None if value.requires_grad else shared.get(_place(value))
        return value if value.requires_grad else in_float64(value) if parameter is None else parameter.detach()
    if type(value) not in (list, tuple, dict):
        return value
    items = list(value.values()) if type(value) is dict else list(value)
    found = [_held_in_float64(item, shared) for item in items]
    if all(a is b for a, b in zip(items, found, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(found)
    if type(value) is dict:
        value.update(zip(value, found, strict=True))
    else:
        value[:] = found
    return value


def _place(t: torch.Tensor) -> object:
    """Equal for tensors that are the same memory, seen alike."""
    if t.layout != torch.strided or not t.numel():
        return id(t)
    return t.untyped_storage()._cdata, tuple(t.shape), t.stride(), t.storage_offset()
