"""What a hook on saved tensors keeps. A hook that returns a tensor as it is, of what an operator keeps of its own results, has the operator
keep the tensor and the tensor the operator, until a backward pass has run; where none ever does, nobody collects them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

__all__ = ["Kept", "itself", "keeps_graphs", "without_hooks", "with_graphs"]

_GRAPHS: ContextVar[bool] = ContextVar("what is saved is differentiated again", default=False)


def itself(tensor: Tensor) -> Tensor:
    """A tensor to be kept and given back, for first gradients."""
    return tensor if _GRAPHS.get() else tensor.detach()


def without_hooks(of: str = "") -> contextlib.AbstractContextManager[object]:
    """Inside, hooks on saved tensors that are in force (torch.utils.checkpoint's, save_on_cpu's) are given none. of: the module that
    defines them; any if that is empty. (Only private ways lead to those in force.)"""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if top is None or of not in ("", top[0].__module__):
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(itself, lambda kept: kept)


def keeps_graphs() -> bool:
    """Whether gradients of what is computed here may be differentiated again."""
    return _GRAPHS.get()


@contextlib.contextmanager
def with_graphs() -> Iterator[None]:
    """Inside, gradients may be differentiated again, as by code of the user's in its forward: tensors are kept with their graph."""
    token = _GRAPHS.set(True)
    try:
        yield
    finally:
        _GRAPHS.reset(token)


class Kept:
    """Tensors that autograd keeps for as long as a pass lasts that is run to be looked at. Use as a context, with `pack` and
    `unpack` as the hooks."""

    def __init__(self) -> None:
        self._holders: list[list[Tensor]] = []

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: Any) -> None:
        for holder in self._holders:
            holder.clear()

    def pack(self, tensor: Tensor) -> list[Tensor]:
        """What is kept."""
        self._holders.append([tensor])
        return self._holders[-1]

    @staticmethod
    def unpack(holder: list[Tensor]) -> Tensor:
        """RuntimeError after the pass."""
        if not holder:
            raise RuntimeError("backward() through a pass that was run to be looked at, and is over")
        return holder[0]
