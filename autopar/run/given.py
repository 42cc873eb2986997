"""Tensors that were given to a parameter as its data or its gradient. Of a whole one each rank keeps its part of a copy, so that what is
written to it afterwards, as to a flat buffer of which every parameter is a view, would be lost: it is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from autopar.run.plain import plainly

__all__ = ["DATA", "GRAD", "Memory", "check_given", "note"]

DATA, GRAD = "_data_given", "_grad_given"  # attributes of a parameter


@dataclass(slots=True, eq=False)
class Memory:
    """That of a parameter and of its other names (p.data, p.detach()). owner: the parameter. left: its count of writes when it was given
    another memory, so that what becomes of that says nothing of this; None: it has this one."""

    owner: weakref.ref[Any]
    left: int | None = None


class _Given(NamedTuple):
    """tensor: of which what was given is a view, or itself. version: its count of writes then. address: of what was given."""

    tensor: weakref.ref[Tensor]
    version: int
    address: int


def note(x: Any, attribute: str, value: Tensor) -> None:
    """x, a parameter or gradient, was given a whole value. (Of a value that is another part its Memory is noted in the same place.)"""
    with plainly():
        base = value._base if value._is_view() else value
        if base is not None and not base.is_inference():
            vars(x)[attribute] = _Given(weakref.ref(base), base._version, value.data_ptr())


def check_given(named: Iterable[tuple[str, Any]]) -> None:
    """ValueError if what one of the parameters was given has been written to since, or is the memory of another one too."""
    tensors: dict[int, str] = {}
    for name, param in named:
        for attribute, what in ((DATA, "data"), (GRAD, "grad")):
            given = vars(param).get(attribute)
            if given is None or (attribute == GRAD and param.grad is None):
                continue
            if isinstance(given, Memory):
                owner = given.owner()
                if owner is not None and owner is not param and given.left is None:
                    _refuse_one_memory(name, what)
                continue
            tensor = given.tensor()
            if tensor is None:
                continue
            with plainly():
                written = tensor._version != given.version
            if written:
                raise ValueError(
                    f"{name}.{what} was given a tensor that has been written to since. Each rank keeps its part of a copy, which that does "
                    f"not reach: write to {name}.{what} itself, or give it the tensor after the last write (tensor.clone(), where the two "
                    f"shall go apart)"
                )
            if given.address in tensors:
                _refuse_one_memory(name, what)
            tensors[given.address] = name


def _refuse_one_memory(name: str, what: str) -> None:
    raise ValueError(
        f"{name}.{what} was given the memory of another parameter too, so that a write to one would be one to both: each rank keeps parts "
        f"of its own. Give it a copy (.clone()), or make the two one parameter before the model is compiled"
    )
