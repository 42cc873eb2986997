"""Tensors that were given to a parameter as its data or its gradient. Of a whole one each rank keeps its part of a copy, so that what is
written to it afterwards, as to a flat buffer of which every parameter is a view, would be lost: it is refused. What is written to the
parameter reaches it when the parameter is given other data; given once more, it is the parameter's own memory.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.run.plain import plainly, users_level

__all__ = ["DATA", "GRAD", "Memory", "check_given", "has_now", "leave", "note"]

DATA, GRAD = "_data_given", "_grad_given"  # attributes of a parameter


@dataclass(slots=True, eq=False)
class Memory:
    """That of a parameter and of its other names (p.data, p.detach()). owner: the parameter. left: its count of writes when it was given
    another memory, so that what becomes of that says nothing of this; None: it has this one."""

    owner: weakref.ref[Any]
    left: int | None = None


class _Given(NamedTuple):
    """tensor: of which what was given is a view, or itself. version: its count of writes then. address: of what was given. view: how that
    lies in the tensor: size, strides, offset. own: the count of writes, then, to what this rank keeps. told: that the two have gone
    apart."""

    tensor: weakref.ref[Tensor]
    version: int
    address: int
    view: tuple[Any, ...]
    own: int
    told: bool = False

    @property
    def stays(self) -> bool:
        """Whether somebody holds the tensor still, and has not written to it."""
        tensor = self.tensor()
        with plainly():
            return tensor is not None and tensor._version == self.version


def note(x: Any, attribute: str, value: Tensor, own: Tensor) -> None:
    """x, a parameter, was given a whole value as its data or its gradient. own: what this rank keeps of a copy. (Of a value that is another
    part its Memory is noted in the same place.)"""
    with plainly():
        base = value._base if value._is_view() else value
        if base is not None and not base.is_inference():
            view = value.size(), value.stride(), value.storage_offset()
            vars(x)[attribute] = _Given(weakref.ref(base), base._version, value.data_ptr(), view, own._version)


def has_now(x: Any, value: Tensor) -> bool:
    """Whether that is what x, a parameter, was given as its data last: its own memory, on one process."""
    given = vars(x).get(DATA)
    if not isinstance(given, _Given) or not given.stays:
        return False
    with plainly():
        return value.data_ptr() == given.address and (value.size(), value.stride(), value.storage_offset()) == given.view


def leave(x: Any, whole: Callable[[], Tensor]) -> None:
    """Collective: x is about to get other data. The tensor that it was given has what x has come to. whole: gathers that."""
    given = vars(x).get(DATA)
    with plainly():
        if not isinstance(given, _Given) or x._version == given.own:
            return
    found = whole()
    tensor = given.tensor()
    if tensor is not None and given.stays:
        with torch.no_grad(), plainly():
            torch.as_strided(tensor, *given.view).copy_(found)


def check_given(named: Iterable[tuple[str, Any]]) -> None:
    """ValueError if what one of the parameters was given has been written to since, or is the memory of another one too. A warning, once
    for each, if somebody holds it and the parameter was written to."""
    tensors: dict[int, str] = {}
    apart: list[str] = []
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
            with plainly():
                has_moved = (param if attribute == DATA else param.grad)._version != given.own
            if has_moved and not given.told:
                vars(param)[attribute] = given._replace(told=True)
                if param._lies.mesh.rank == 0:
                    apart.append(f"{name}.{what}")
    if apart:
        others = f" (and what {len(apart) - 1} others have)" if apart[1:] else ""
        warnings.warn(
            f"{apart[0]}{others} is a tensor that the loop holds. On one process what is written to the one is written to the other; here "
            f"that tensor keeps its values: read {apart[0]} itself, or give it a copy (tensor.clone()), if that is to stay as it is",
            stacklevel=users_level(),
        )


def _refuse_one_memory(name: str, what: str) -> None:
    raise ValueError(
        f"{name}.{what} was given the memory of another parameter too, so that a write to one would be one to both: each rank keeps parts "
        f"of its own. Give it a copy (.clone()), or make the two one parameter before the model is compiled"
    )
