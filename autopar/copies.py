"""A copy of a module that shares no tensor with it."""

from __future__ import annotations

import copy
import operator
import types
from typing import Any

from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.run.part import own_attributes

__all__ = ["copied"]


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, in two points deeper than that of Python: functions that a module holds (`self.mlpf = lambda x: self.proj(x)`) see the
    copy's modules and tensors where they saw the model's, and tensors that a module computes before each call (the weight of
    torch.nn.utils.weight_norm) are copied as values. CaptureError if something in the model cannot be copied."""
    computed = [value for m in model.modules() for value in vars(m).values() if isinstance(value, Tensor) and not value.is_leaf]
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in computed}
    try:
        found = copy.deepcopy(model, memo)
        for param, own in zip(model.parameters(), found.parameters(), strict=True):  # torch copies no attributes of a parameter
            vars(own).update(copy.deepcopy(own_attributes(param), memo))
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied, and a copy is what is trained beside the plan\n  {type(error).__name__}: {error}\n"
            f"  what to do: keep what cannot be copied (locks, open files, generators, results of other calls) out of the model"
        ) from error
    for module in found.modules():
        for name, value in list(vars(module).items()):
            if name not in _OF_TORCH and (bound := _rebound(value, memo)) is not value:
                vars(module)[name] = bound
    return found


_OF_TORCH = ("_parameters", "_buffers", "_modules")


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """What a copy holds, with functions that see the copies; functions in lists and dicts, such as hooks, are exchanged in place. memo: id
    of what was copied -> its copy."""
    if isinstance(value, types.FunctionType):
        return _function(value, memo)
    if isinstance(value, tuple) and type(value) is tuple:
        items = tuple(_rebound(item, memo) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, (list, dict)):
        for key, item in enumerate(value) if isinstance(value, list) else list(value.items()):
            if (bound := _rebound(item, memo)) is not item:
                value[key] = bound
    return value


def _function(value: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    cells, defaults = value.__closure__ or (), value.__defaults__ or ()
    own = tuple(_cell(cell, memo) for cell in cells), tuple(_copy_of(x, memo) for x in defaults)
    if all(map(operator.is_, (*own[0], *own[1]), (*cells, *defaults))):
        return value
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, own[1] or None, own[0] or None)
    made.__kwdefaults__ = value.__kwdefaults__
    vars(made).update(vars(value))
    return made


def _cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # nothing is in it yet
        return cell
    found = _copy_of(held, memo)
    return cell if found is held else types.CellType(found)


def _copy_of(held: Any, memo: dict[int, Any]) -> Any:
    return _function(held, memo) if isinstance(held, types.FunctionType) else memo.get(id(held), held)
