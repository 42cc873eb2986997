"""Operators that copy, repeat or rearrange elements in a fixed pattern, beyond the views: diagonals, repetitions, grids."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.dims import split_names
from autopar.catalog.rule import OpView, localizes, register, set_args
from autopar.catalog.views import mapped, reshaped
from autopar.ir import Op, P, R, S, Strategy

__all__: list[str] = []


def diagonal(view: OpView) -> Iterable[Strategy]:
    """The two dims of the diagonal become the last one; the others pass."""
    args, ndim = view.args(), len(view.ins[0].shape)
    pair = {d % ndim for d in (args["dim1"], args["dim2"])}  # type: ignore[operator]
    yield from mapped(view, dict(enumerate(k for k in range(ndim) if k not in pair)))
    yield view.strategy([P], [P])


def diag_embed(view: OpView) -> Iterable[Strategy]:
    """The last dim becomes two; the others pass."""
    args, ndim = view.args(), len(view.outs[0].shape)
    pair = {d % ndim for d in (args["dim1"], args["dim2"])}  # type: ignore[operator]
    yield from mapped(view, {d: k for k, d in enumerate(d for d in range(ndim) if d not in pair)})
    yield view.strategy([P], [P])


def trace(view: OpView) -> Iterable[Strategy]:
    yield view.strategy([P], [P])


def repeat_interleave(view: OpView) -> Iterable[Strategy]:
    """Each element along `dim` r times in place keeps any cut of it; without a dim the operand is flattened first."""
    before, dim = view.ins[0].shape, view.args()["dim"]
    if view.op.target.endswith(".self_Tensor"):  # its own count for each element
        if isinstance(dim, int) and before:
            yield from mapped(view, {d: d for d in range(len(before)) if d != dim % len(before)})
        yield view.strategy([P, R], [P])
        return
    flat = (view.ins[0].numel,)
    for d, size in enumerate(before):
        for g in view.splits(size):
            for out in [S(d, g)] if dim is not None else reshaped(S(d, g), before, flat, view.n):
                yield view.strategy([S(d, g)], [out])
    if isinstance(dim, int) and before and before[dim] == 1:  # as it expands
        after = view.outs[0].shape[dim]
        yield from (view.strategy([R], [S(dim % len(before), g)]) for g in (view.splits(after) if after > 1 else ()))
    yield view.strategy([P], [P])


@localizes("aten.repeat_interleave.self_int")
def _output_size(op: Op, view: OpView, strategy: Strategy) -> Op:
    args, cut = view.args(), strategy.inputs[0]
    size, dim = args["output_size"], args["dim"]
    if strategy.outputs[0].is_shard and not cut.is_shard:
        after = view.outs[0].shape[strategy.outputs[0].dim] // view.n
        return set_args(op, repeats=after, **({} if size is None else {"output_size": after}))
    if isinstance(size, int) and cut.is_shard and (dim is None or dim % len(view.ins[0].shape) == cut.dim):  # type: ignore[operator]
        return set_args(op, output_size=size // view.n)
    return op


def meshgrid(view: OpView) -> Iterable[Strategy]:
    """Vector i lies along dim i of every result (the first two swapped for 'xy')."""
    along = list(range(len(view.ins)))
    if view.args().get("indexing") == "xy" and len(along) > 1:
        along[:2] = [1, 0]
    for i, t in enumerate(view.ins):
        for g in view.splits(t.shape[0]) if t.shape else ():
            yield view.strategy([S(0, g) if k == i else R for k in range(len(along))], [S(along[i], g)] * len(view.outs))
    yield view.strategy([P] * len(along), [P] * len(along))


def cross(view: OpView) -> Iterable[Strategy]:
    """Vectors of three along `dim`; other dims broadcast."""
    dim = view.args()["dim"]
    if not isinstance(dim, int):
        return  # found by its size
    ndim = len(view.outs[0].shape)
    names = [f"d{k}" for k in range(ndim)]
    operands = [tuple(names[ndim - len(t.shape) :]) for t in view.ins]
    yield from split_names(view, operands, [tuple(names)], [False, False], lambda name: name == names[dim % ndim])


register("aten.diagonal", diagonal)
register("aten.diag_embed", diag_embed)
register("aten.trace aten.diag", trace)
register("aten.repeat_interleave.self_int aten.repeat_interleave.self_Tensor", repeat_interleave)
register("aten.meshgrid", meshgrid)
register("aten.linalg_cross aten.cross", cross)
