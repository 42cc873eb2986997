"""Casts in a trace: it is written anew with further ones, or without those of parameters that nothing reads as they rest."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import torch

from autopar.capture.infer import Meta
from autopar.capture.trace import Trace, Traced
from autopar.ir import Op, Ref, refs, rename_refs

__all__ = ["CAST", "Casting", "cast_before_use"]

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
        self.metas[made], self._storages[made] = replace(self.metas[name], dtype=dtype), self._storage
        op = Op(target=CAST, args=(Ref(name), dtype), outputs=(made,), no_grad=by.no_grad, module=by.module, source=by.source)
        self.add(replace(place, op=op))
        return made

    def with_operands(self, traced: Traced, casts: Mapping[str, torch.dtype]) -> Op:
        """The operator with these operands cast, whose casts are added."""
        made = {name: self.cast(name, dtype, traced) for name, dtype in casts.items()}
        return rename_refs(traced.op, made)

    def trace(self) -> Trace:
        return replace(self._trace, ops=tuple(self._ops), metas=self.metas, storages=self._storages)


def cast_before_use(trace: Trace, kept: Set[str]) -> Trace:
    """The trace in which parameters that are read by casts to one lower dtype alone are of that dtype, and those casts are gone: it is for
    whoever runs the program to cast them, once (`Param.rests`). kept: values whose names must not change."""
    readers: dict[str, list[Op]] = {}
    for traced in trace.ops:
        for name in dict.fromkeys(refs(traced.op)):
            readers.setdefault(name, []).append(traced.op)
    lower: dict[str, torch.dtype] = {}
    for p in trace.params:
        casts, own = readers.get(p.value, []), trace.metas[p.value].dtype
        to = {_cast_to(op, p.value) for op in casts}
        now = next(iter(to)) if len(to) == 1 else None
        if now is None or not (own.is_floating_point and now.is_floating_point and now.itemsize < own.itemsize):
            continue
        stopped = p.trainable and any(op.no_grad for op in casts)  # no gradient goes through those
        if not stopped and kept.isdisjoint((p.value, *(op.name for op in casts))):
            lower[p.value] = now
    renamed = {op.name: value for value in lower for op in readers[value]}
    ops = tuple(
        traced.with_op(rename_refs(traced.op, renamed))
        for traced in trace.ops
        if traced.op.name not in renamed
    )
    params = tuple(replace(p, rests=trace.metas[p.value].dtype) if p.value in lower else p for p in trace.params)
    metas = {name: replace(meta, dtype=lower[name]) if name in lower else meta for name, meta in trace.metas.items()}
    return replace(trace, ops=ops, params=params, metas=metas)


def _cast_to(op: Op, value: str) -> torch.dtype | None:
    """The dtype to which an operator casts this value, and does nothing else; None otherwise."""
    to = op.args[1] if op.target == CAST and len(op.args) == 2 and not op.kwargs and refs(op) == (value,) else None
    return to if isinstance(to, torch.dtype) else None
