"""The bytes of tensors that are alive, allocation by allocation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["MemoryTracker"]


class MemoryTracker(TorchDispatchMode):
    """Bytes of the storages that are alive, from the operators that run in this context and from what `hold` is given.

    live_bytes: now. peak_bytes: the most so far. at_peak: what was alive then, 'operator' -> bytes, if `explain`.
    Views share a storage and count once; a storage counts until nothing refers to it.
    """

    def __init__(self, *, explain: bool = False) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.at_peak: Mapping[str, int] = {}
        self.phase = ""
        self._explain = explain
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}

    def hold(self, tensors: Iterable[Tensor], name: str) -> None:
        """Count these tensors, which were made before, from now on."""
        for tensor in tensors:
            self._count(tensor, name)

    def reset_peak(self) -> None:
        self.peak_bytes, self.at_peak = self.live_bytes, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, f"{self.phase}{func}")
        return result

    def _count(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        nbytes = storage.nbytes()

        def freed(_: object) -> None:
            if self._live.pop(key, None) is not None:
                self.live_bytes -= nbytes

        self._live[key] = (weakref.ref(storage, freed), name, nbytes)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            if self._explain:
                sums: Counter[str] = Counter()
                for _, made_by, size in self._live.values():
                    sums[made_by] += size
                self.at_peak = {"now": nbytes, f"last: {name}": 0, **dict(sums.most_common())}
