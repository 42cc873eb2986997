"""A trace that is written anew with further casts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from autopar.capture.infer import Meta
from autopar.capture.trace import Trace, Traced
from autopar.ir import Op, Ref, map_refs

__all__ = ["CAST", "Casting"]

CAST = "aten.to.dtype"


class Casting:
    """The operators that have been written so far, and what is known of their values."""

    def __init__(self, trace: Trace, metas: Mapping[str, Meta]) -> None:
        """metas: of what the trace reads and makes."""
        self._trace, self.metas, self._storages = trace, dict(metas), dict(trace.storages)
        self._storage = min(self._storages.values(), default=0)
        self._ops: list[Traced] = []

    def add(self, traced: Traced) -> None:
        self._ops.append(traced)

    def cast(self, name: str, dtype: torch.dtype, place: Traced) -> str:
        """Adds a cast of a value, for what stands at this place; the name of its result."""
        made, by = self._trace.names.fresh(f"{name}_{str(dtype).removeprefix('torch.')}"), place.op
        self._storage -= 1
        self.metas[made], self._storages[made] = dataclasses.replace(self.metas[name], dtype=dtype), self._storage
        op = Op(target=CAST, args=(Ref(name), dtype), outputs=(made,), no_grad=by.no_grad, module=by.module, source=by.source)
        self.add(dataclasses.replace(place, op=op))
        return made

    def with_operands(self, traced: Traced, casts: Mapping[str, torch.dtype]) -> Op:
        """The operator with these operands cast, whose casts are added."""
        made = {name: self.cast(name, dtype, traced) for name, dtype in casts.items()}
        return map_refs(traced.op, lambda name: Ref(made.get(name, name)))

    def trace(self) -> Trace:
        return dataclasses.replace(self._trace, ops=tuple(self._ops), metas=self.metas, storages=self._storages)
