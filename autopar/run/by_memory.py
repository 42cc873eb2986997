"""What of torch takes the memory of tensors without asking their class: functions of TorchScript, transforms of torch.func, DLPack.

Of a part they would see this rank's alone, and would compute something else without a word. So they are told of parts, and refuse them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.utils import dlpack

__all__ = ["not_transformed", "refuse_parts", "refused"]

_TRANSFORMS = "a transform of torch.func (vmap, grad, vjp)"
_PLACES: tuple[tuple[Any, str, str], ...] = (  # where it stands, its name there, what it is to the user
    (eager_transforms, "_wrap_for_grad", _TRANSFORMS),
    (vmap, "_add_batch_dim", _TRANSFORMS),
    (torch._C.ScriptFunction, "__call__", "a function of TorchScript"),
    (dlpack, "to_dlpack", "DLPack"),
    (torch, "to_dlpack", "DLPack"),
)


def refuse_parts(name_of: Callable[[object], str | None]) -> None:
    """From now on they raise TypeError where they are given parts. name_of: of what a part is; None of anything else."""
    for owner, name, what in _PLACES:
        setattr(owner, name, _asking(getattr(owner, name), what, name_of))


def not_transformed(name: str) -> None:
    """TypeError inside of a function that torch.func transforms, which reads a part by another way than as an argument."""
    if torch._C._are_functorch_transforms_active():
        raise TypeError(refused(name, _TRANSFORMS))


def refused(name: str, what: str) -> str:
    """Why, and what to do. name: of what the part is of; what: takes it."""
    return (
        f"{name} is held in parts by several processes, and {what} takes the memory of this rank's part for the whole. Call it inside of "
        f"`with model.full_parameters():`"
    )


def _asking(func: Callable[..., Any], what: str, name_of: Callable[[object], str | None]) -> Callable[..., Any]:
    @functools.wraps(func)
    def asking(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            for one in given if isinstance(given, (list, tuple)) else (given,):
                if (name := name_of(one)) is not None:
                    raise TypeError(refused(name, what))
        return func(*args, **kwargs)

    return asking
