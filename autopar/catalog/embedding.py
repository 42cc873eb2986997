"""Lookups of rows in a table: by position of the indices, by column of the table, and by row (vocabulary parallel)."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.dims import Dims
from autopar.catalog.rule import OpView, local_code, register
from autopar.ir import Arg, Op, P, R, S, Strategy

__all__: list[str] = []

_LOOKUP = Dims("v! d, b* -> b* d", linear=(0,))


def embedding(view: OpView) -> Iterable[Strategy]:
    """Positions, columns; and rows, where a rank gives zeros for the rows that it does not hold. Gradients that are scaled
    by how often a row is used would need the counts of all ranks, and sparse ones cannot be cut."""
    args = view.args()
    if args["sparse"] or args["scale_grad_by_freq"]:
        return
    yield from _LOOKUP(view)
    yield view.strategy([S(0), R], [P], local="masked_embedding")


@local_code("masked_embedding")
def _masked_embedding(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    args = view.args()
    padding = args["padding_idx"]
    assert isinstance(padding, int)
    kwargs: tuple[tuple[str, Arg], ...] = (("axis", axis),)
    if padding >= 0:  # aten says -1 where no row is padding
        kwargs += (("padding_idx", padding),)
    call = Op(
        target="autopar.L.masked_embedding",
        args=(args["indices"], args["weight"]),
        kwargs=kwargs,
        outputs=op.outputs,
        no_grad=op.no_grad,
        module=op.module,
        source=op.source,
    )
    return (call,)


def masked_embedding(view: OpView) -> Iterable[Strategy]:
    """A vocabulary-parallel lookup under a further axis: its rows are cut already."""
    indices, table = view.ins
    ndim = len(indices.shape)
    for d, size in enumerate(indices.shape):
        for g in view.splits(size):
            yield view.strategy([S(d, g), R], [S(d, g)])
    for g in view.splits(table.shape[1]):
        yield view.strategy([R, S(1, g)], [S(ndim, g)])
    yield view.strategy([R, P], [P])


def embedding_bag(view: OpView) -> Iterable[Strategy]:
    """Bags have ragged bounds in `indices`, so that only the table's columns are split, where bags are sums or means.
    Of the four results the last three are about the bags alone, the same for any number of columns."""
    args = view.args()
    if args["sparse"] or args["scale_grad_by_freq"] or args["mode"] not in (0, 1) or args["per_sample_weights"] is not None:
        return
    for g in view.splits(view.ins[0].shape[1]):
        layouts = (S(1, g), R, R, R)
        yield view.strategy([S(1, g), R, R], [x for x, name in zip(layouts, view.op.outputs, strict=True) if name is not None])


register("aten.embedding", embedding)
register("autopar.L.masked_embedding", masked_embedding)
register("aten.embedding_bag", embedding_bag)
register("autopar_operators.embedding_bag", Dims("v! d, n b!, n b! -> n d"))
