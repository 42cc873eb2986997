"""Which tensors the operators of a call read, and to which they write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.follow import storage_of

__all__ = ["Reads", "Writes"]


class Reads(TorchDispatchMode):
    """Notes which of some tensors the operators inside read, views of them included."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._watched = {storage_of(t) for t in tensors}
        self._read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.layout == torch.strided and storage_of(x) in self._watched:
                self._read.add(storage_of(x))
        return func(*args, **(kwargs or {}))

    def has_read(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._read


class Writes(TorchDispatchMode):
    """Notes which of some parameters the operators inside write to, through .data too, which counts no version."""

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._params, self._before = params, {name: storage_of(p) for name, p in params.items()}
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            arguments = func._schema.arguments
            given = {a.name: x for a, x in zip(arguments, args)} | dict(kwargs)
            into = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
            self._written |= {storage_of(x) for x in pytree.tree_leaves(into) if isinstance(x, torch.Tensor)}
        return func(*args, **kwargs)

    def names(self) -> frozenset[str]:
        """Those written to, and those that were given other memory."""
        now = {name: storage_of(p) for name, p in self._params.items()}
        return frozenset(name for name, was in self._before.items() if was in self._written or now[name] != was)
