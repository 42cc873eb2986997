"""Numbers that a class gives to its modules (`step = 0` in its body) and that a call changes (`self.step += 1`): the module has its own
from then on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection

from torch import nn

from autopar.run.region import within

__all__ = ["made_own"]


def made_own(model: nn.Module, places: Collection[str]) -> Callable[[], None]:
    """Give modules of a model, at some places of its picture, the numbers that they have of their classes. Gives what takes them away."""
    found = []
    for path, module in model.named_modules():
        for name in [place.rpartition(".")[2] for place in places if place == within(path, place.rpartition(".")[2])]:
            value = inspect.getattr_static(type(module), name, None)
            if name not in vars(module) and type(value) in (int, float):
                vars(module)[name] = value
                found.append((module, name))

    def undo() -> None:
        for module, name in found:
            vars(module).pop(name, None)

    return undo
