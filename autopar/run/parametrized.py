"""Modules with parametrizations (torch.nn.utils.parametrize; weight_norm is one) as bytes: torch gives each a class of its own, which
pickle cannot find by name. They are made again of the class that they had before, to be called: without hooks on what loads a state into
them, since torch's own for weight_norm are no bytes."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["class_of", "is_kept", "pickled"]


def pickled(value: object) -> bytes:
    """What pickle.loads reads again. Raises what pickle.dumps raises."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def is_kept() -> bool:
    """Whether torch.nn.utils.parametrize.cached() is on, which keeps what weights are computed to."""
    return bool(getattr(parametrize, "_cache_enabled", False))


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that the module's author wrote."""
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return kind


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, nn.Module) and parametrize.is_parametrized(value)):
            return NotImplemented
        lists = dict(value.parametrizations.items())  # type: ignore[operator, union-attr]
        modules = {name: m for name, m in value._modules.items() if name != "parametrizations"}
        made = {name: copy.deepcopy(parts).eval()().detach() for name, parts in lists.items()}  # a copy: it may change buffers of its own
        state = {**vars(value), "_modules": modules, "_load_state_dict_pre_hooks": OrderedDict()}
        return _again, (class_of(value), state, lists, made)


def _again(kind: type[nn.Module], state: Mapping[str, Any], lists: Mapping[str, Any], made: Mapping[str, Tensor]) -> nn.Module:
    """state: of the module without parametrizations; lists: those of each tensor; made: what they make of what they hold."""
    module = kind.__new__(kind)
    module.__setstate__(dict(state))
    for name, parts in lists.items():
        module.register_parameter(name, nn.Parameter(made[name], requires_grad=False))
        for part in parts:
            parametrize.register_parametrization(module, name, part, unsafe=True)
    module.parametrizations = nn.ModuleDict(lists)  # with the tensors that they held
    return module
