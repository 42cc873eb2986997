"""Masks of attention that are known when a model is captured: made of sizes alone, as transformers makes them where it is traced.

A mask that is the causal one is left to attention itself (`is_causal`), and one that masks nothing is left out: so a model that is called
as it is does too, for kernels are faster without a mask, keep less, and skip what lies above the diagonal. Masks are compared entry by
entry, whatever code has made them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from autopar.capture.interpret import resolve, run_op
from autopar.capture.normalise import may_run_earlier
from autopar.capture.trace import Trace
from autopar.ir import Op, Ref, TensorType, refs
from autopar.run.region import REGION

__all__ = ["Known", "is_causal", "with_known_masks"]

ATTENTION: Final = "aten.scaled_dot_product_attention.default"
EXPAND: Final = "aten.expand.default"
AND: Final = "aten.__and__.Tensor"
TO: Final = "aten.to.dtype"
ENTRIES: Final = frozenset({AND, "aten.__or__.Tensor", "aten.__xor__.Tensor", TO})  # which torch does not mark as pointwise
COMPARES: Final = {"aten.le.Tensor": True, "aten.ge.Tensor": False}  # whether the first is not more than the second, or the reverse
SMALL = 1 << 22  # bytes of a value that is computed at once
LARGE = 1 << 28  # and of one that cannot be computed row by row
MOST = 1 << 28  # entries of a mask that are looked at one by one
_CPU = torch.device("cpu")


def with_known_masks(trace: Trace) -> Trace:
    """The trace, in which attention under a mask of truth values that is the causal one for as many keys as queries is causal, and that
    under one that masks nothing has none."""
    masks = Known(trace)
    known: dict[tuple[str, bool], bool | None] = {}
    ops = []
    for traced in trace.ops:
        op = traced.op
        if op.target == ATTENTION and len(op.args) > 3 and isinstance(op.args[3], Ref) and not is_causal(op):
            key = op.args[3].name, _is_square(op, trace)
            if key not in known:
                known[key] = masks.is_causal(*key)
            if known[key] is not None:
                traced = traced.with_op(_without_mask(op, causal=bool(known[key])))
        ops.append(traced)
    return dataclasses.replace(trace, ops=tuple(ops)) if any(x is not None for x in known.values()) else trace


def is_causal(op: Op) -> bool:
    """Whether an attention is told to be causal."""
    return bool(op.kwarg("is_causal", op.args[5] if len(op.args) > 5 else False))


def _is_square(op: Op, trace: Trace) -> bool:
    """Whether there are as many keys as queries."""
    query, key = (trace.metas[name].type.shape for name in refs(op)[:2])
    return query[-2] == key[-2]


def _without_mask(op: Op, *, causal: bool) -> Op:
    dropout = op.args[4] if len(op.args) > 4 else op.kwarg("dropout_p", 0.0)
    others = tuple((name, value) for name, value in op.kwargs if name not in ("dropout_p", "is_causal"))
    return dataclasses.replace(op, args=(*op.args[:3], None, dropout, causal), kwargs=others)


class Known:
    """The values of a trace that follow from sizes and constants of its code alone."""

    def __init__(self, trace: Trace) -> None:
        self._types: Mapping[str, TensorType] = {name: meta.type for name, meta in trace.metas.items()}
        self._made = {o: t.op for t in trace.ops for o in t.op.outputs if o is not None}
        self._known: dict[str, Tensor] = {}
        self._each: dict[str, Tensor] = {}  # without what they have several times

    def is_causal(self, mask: str, square: bool) -> bool | None:
        """Whether a mask is the causal one; False if it masks nothing, None if it is another one, or not known."""
        t = self._types[mask]
        if t.dtype != torch.bool or len(t.shape) < 2 or not self.is_known(mask):
            return None
        rows, keys = t.shape[-2:]
        if (only := self._only(mask)) is not None:
            return False if bool(only) else None
        if rows == keys and square and (compared := self._compared(mask)) is not None:
            return True if _at_most_as_far(*(x.expand(rows) for x in compared)) else None
        if rows * keys > MOST:
            return None
        found = {True, False} if square and rows == keys else {False}  # of causal and nothing masked, what it may be
        order = torch.arange(keys, dtype=torch.int32, device=_CPU)
        low, entries = 0, t.numel // rows  # of a row
        while low < rows and found:
            high = min(rows, low + max(1, SMALL // (8 * entries)))
            here = self._rows(mask, low, high, {})
            if not bool(here.all()):
                found.discard(False)
            if True in found and not bool((here == (order[None, :] <= order[low:high, None])).all()):
                found.discard(True)
            low, entries = high, keys * math.prod(here.shape[:-2])
        return min(found, default=None)

    def is_known(self, value: str) -> bool:
        """Whether no operator that a value is made by reads what is given, draws, or is no operator of torch's own."""
        seen, pending = set[str](), [value]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            op = self._made.get(name)
            if op is None or op.target == REGION or not op.target.startswith("aten.") or not may_run_earlier(op):
                return False
            if not (_is_by_rows(op) or (self._is_at_once(name) and all(map(self._may_be_whole, refs(op))))):
                return False
            pending += refs(op)
        return True

    def _may_be_whole(self, value: str) -> bool:
        return self._types[value].nbytes <= LARGE or (value in self._made and self._made[value].target == EXPAND)

    def _is_at_once(self, value: str) -> bool:
        return self._types[value].nbytes <= (SMALL if _is_by_rows(self._made[value]) else LARGE)

    def _only(self, value: str) -> Tensor | None:
        """The one entry that a value has everywhere; None if it has several, or may have."""
        op = self._made[value]
        if self._is_at_once(value):
            found = self._once(value)
        elif op.target == EXPAND:
            return self._only(refs(op)[0])
        else:
            every = {r: self._only(r) for r in refs(op)}
            env = {r: x for r, x in every.items() if x is not None}
            if len(env) < len(every):
                return None
            found = _result(run_op(op, env, _CPU))
        return found.reshape(()) if found.numel() == 1 else None

    def _compared(self, value: str) -> tuple[Tensor, Tensor] | None:
        """What the columns and the rows of a large value have, if it is True where a column's is not more than a row's."""
        op = self._made[value]
        operands = refs(op)
        if op.target in (EXPAND, TO) and self._types[operands[0]].dtype == torch.bool:
            return self._compared(operands[0])
        if op.target == AND:
            for one, other in (operands, operands[::-1]):
                if (only := self._only(one)) is not None:
                    return self._compared(other) if bool(only) else None
        if op.target in COMPARES and all(map(self._is_at_once, operands)):
            column, row = (self._once(x) for x in (operands if COMPARES[op.target] else operands[::-1]))
            if column.numel() == column.shape[-1] and row.numel() == (row.shape[-2] if row.dim() > 1 else 1):
                return column.flatten(), row.flatten()
        return None

    def _rows(self, value: str, low: int, high: int, known: dict[str, Tensor]) -> Tensor:
        """The rows [low, high) of the last dim but one, of a value that has so many or one for all; `known` takes them."""
        if value not in known:
            op = self._made[value]
            if self._is_at_once(value):
                found = self._once(value)
                known[value] = found[..., low:high, :] if found.dim() > 1 and found.shape[-2] > 1 else found
            else:
                env = {r: self._rows(r, low, high, known) for r in refs(op)}
                known[value] = env[refs(op)[0]] if op.target == EXPAND else _result(run_op(op, env, _CPU))
        return known[value]

    def _once(self, value: str) -> Tensor:
        if value not in self._each:
            self._each[value] = _once(self.whole(value))
        return self._each[value]

    def whole(self, value: str) -> Tensor:
        """Of one that is known."""
        if value not in self._known:
            op = self._made[value]
            results = run_op(op, {r: self.whole(r) for r in refs(op)}, _CPU)
            self._known |= {o: x for o, x in zip(op.outputs, results, strict=True) if o is not None and x is not None}
        return self._known[value]


def _at_most_as_far(column: Tensor, row: Tensor) -> bool:
    """Whether column[j] <= row[i] where j <= i, and nowhere else."""
    before, behind = column.cummax(0).values, column.flip(0).cummin(0).values.flip(0)
    return bool((before <= row).all()) and bool((behind[1:] > row[:-1]).all())


def _is_by_rows(op: Op) -> bool:
    """Whether rows of its result follow from the same rows of its operands."""
    by_entries = op.target in ENTRIES or torch.Tag.pointwise in resolve(op.target).tags
    return op.target == EXPAND or (by_entries and len(op.outputs) == 1)


def _result(results: tuple[Tensor | None, ...]) -> Tensor:
    (found,) = results
    assert found is not None
    return found


def _once(x: Tensor) -> Tensor:
    """A tensor without what it has several times, along dims where all of it is equal."""
    for dim in range(x.dim()):
        first = x.narrow(dim, 0, 1)
        if x.shape[dim] > 1 and (x.stride(dim) == 0 or bool((x == first).all())):
            x = first
    return x
