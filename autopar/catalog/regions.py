"""Opaque regions: whole on every rank, or by samples where trying it at capture has shown that it works on each by itself, or that what
it makes of parts of them is to be added."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopar.catalog.rule import OpView, localizes, register
from autopar.ir import Arg, Op, P, R, S, Strategy

__all__: list[str] = []


def region(view: OpView) -> Iterable[Strategy]:
    """The operands are the handle, the tensors that it is given, its parameters and buffers."""
    rows = view.op.kwarg("rows")
    if isinstance(rows, tuple) and rows:
        made = P if view.op.kwarg("terms") else S(0)
        yield view.strategy([S(0) if k - 1 in rows else R for k in range(len(view.ins))], [made] * len(view.outs))


@localizes("autopar.L.region")
def _local(op: Op, view: OpView, strategy: Strategy) -> Op:
    if not strategy.splits_work:
        return op
    shapes = tuple(x.local_shape(t.shape, view.n) for x, t in zip(strategy.outputs, view.outs, strict=True))
    changed: dict[str, Arg] = {"shapes": shapes}
    changed |= {k: v // view.n for k, v in op.kwargs if k in ("flops", "saved") and isinstance(v, int)}
    return dataclasses.replace(op, kwargs=tuple((k, changed.get(k, v)) for k, v in op.kwargs))


register("autopar.L.region", region)
