"""Reductions: dims that stay may be split; a reduced dim that is split gives a partial sum, or is not split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopar.catalog.dims import split_names
from autopar.catalog.rule import OpView, Rule, dims_of, local_code, register
from autopar.ir import Op, P, Ref, S, Strategy

__all__ = ["along", "reduced_dims"]


def reduced_dims(view: OpView) -> set[int]:
    """The dims that the operator reduces; all of them if it names none."""
    args, ndim = view.args(), len(view.ins[0].shape)
    dims = args.get("dim", args.get("dims"))
    if dims is None or dims == ():
        return set(range(ndim))
    return {d % ndim for d in dims_of(dims)} if ndim else set()


def kept(view: OpView) -> Iterable[Strategy]:
    """Split a dim that is not reduced."""
    reduced = reduced_dims(view)
    keepdim = len(view.outs[0].shape) == len(view.ins[0].shape)
    stay = [d for d in range(len(view.ins[0].shape)) if d not in reduced]
    for position, d in enumerate(stay):
        for g in view.splits(view.ins[0].shape[d]):
            yield view.strategy([S(d, g)], [S(d if keepdim else position, g)] * len(view.outs))


def sum_(view: OpView) -> Iterable[Strategy]:
    yield from kept(view)
    for d in reduced_dims(view):
        for g in view.splits(view.ins[0].shape[d]):
            yield view.strategy([S(d, g)], [P])
    if view.ins[0].dtype.is_floating_point == view.outs[0].dtype.is_floating_point and view.ins[0].dtype.itemsize >= 2:
        yield view.strategy([P], [P])


def mean(view: OpView) -> Iterable[Strategy]:
    """Equal shards: the mean is the mean of the shards' means, each divided by the number of ranks."""
    yield from kept(view)
    for d in reduced_dims(view):
        for g in view.splits(view.ins[0].shape[d]):
            yield view.strategy([S(d, g)], [P], local="mean_part")
    yield view.strategy([P], [P])


@local_code("mean_part")
def _mean_part(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    part = f"{op.name}_part"
    divide = Op(target="aten.div.Tensor", args=(Ref(part), view.n), outputs=op.outputs, module=op.module, source=op.source)
    return dataclasses.replace(op, outputs=(part,)), divide


def along(*dim_names: str) -> Rule:
    """Operators that work along one dim and keep it (softmax, cumsum, sort ...): any other dim may be split."""

    def rule(view: OpView) -> Iterable[Strategy]:
        args, shape = view.args(), view.ins[0].shape
        busy: set[int] = set()
        for name in dim_names:
            dims = args.get(name)
            if dims is None or dims == () or len(view.ins) != 1:
                return
            busy |= {d % max(len(shape), 1) for d in dims_of(dims)}
        for d, size in enumerate(shape):
            for g in view.splits(size) if d not in busy else ():
                yield view.strategy([S(d, g)], [S(d, g)] * len(view.outs))

    return rule


def diff(view: OpView) -> Iterable[Strategy]:
    """Dims other than `dim`, also of what is put before and behind."""
    dim, ndim = view.args()["dim"], len(view.outs[0].shape)
    assert isinstance(dim, int)
    if any(len(t.shape) != ndim for t in view.ins):
        return
    names = [tuple(f"along{k}" if d == dim % ndim else f"d{d}" for d in range(ndim)) for k in range(len(view.ins) + 1)]
    yield from split_names(view, names[:-1], names[-1:], [False] * len(view.ins), lambda name: name.startswith("along"))


register("aten.sum aten.nansum", sum_)
register("aten.mean", mean)
register(
    "aten.amax aten.amin aten.max.dim aten.min.dim aten.argmax aten.argmin aten.logsumexp aten.prod.dim_int aten.any.dim aten.all.dim "
    "aten.any.dims aten.all.dims aten.var aten.std aten.var_mean aten.std_mean aten.median.dim aten.mode aten.norm.ScalarOpt_dim "
    "aten.linalg_vector_norm aten.count_nonzero.dim_IntList aten.aminmax",
    kept,
)
register("aten.softmax aten.log_softmax aten._softmax aten._log_softmax", along("dim"))
register("aten.cumsum aten.cumprod aten.logcumsumexp aten.cummax aten.cummin aten.sort aten.argsort aten.topk aten.kthvalue", along("dim"))
register("aten.flip aten.roll", along("dims"))
register("aten.diff", diff)
