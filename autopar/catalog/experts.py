"""Grouped matrix products of a mixture of experts: by output column, by contraction, or by rows.

Rows are sorted by expert, and `offs` says where each expert's rows end. A range of rows meets a range of the experts, so
that rows may be cut anywhere if every rank has all weights and knows which part of `offs` is its own: local code.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.dims import Dims, split_names
from autopar.catalog.rule import OpView, local_code, register
from autopar.ir import Op, P, R, S, Strategy

__all__: list[str] = []

ROW_BYTES = 16  # torch's kernel wants the rows of its operands to start at multiples of this

_SORTED_ROWS = Dims("s! i, e! i o, e! -> s! o", linear=(0, 1))
_BATCHED = Dims("e i k, e k o -> e i o", linear=(0, 1))


def grouped_mm(view: OpView) -> Iterable[Strategy]:
    """Ragged rows times a stack of matrices, or a stack times a stack; without a bias. Local sizes keep torch's alignment."""
    args, tensors = view.args(), view.tensors()
    ranks = [len(t.shape) for t in view.ins[:2]]
    if args["bias"] is not None or args["out_dtype"] is not None or (ranks == [2, 3]) != (tensors["offs"] is not None):
        return
    rule = sorted_rows if ranks == [2, 3] else _BATCHED if ranks == [3, 3] else None
    yield from _aligned(view, rule(view) if rule is not None else ())


def _aligned(view: OpView, stated: Iterable[Strategy]) -> Iterable[Strategy]:
    """Those under which rows of the operands and of the result still start where torch's kernel wants them to."""
    for s in stated:
        pairs = [*zip(s.inputs[:2], view.ins[:2], strict=True), *zip(s.outputs, view.outs, strict=True)]
        if all(layout.dim < 1 or t.shape[layout.dim] // view.n * t.dtype.itemsize % ROW_BYTES == 0 for layout, t in pairs):
            yield s


def sorted_rows(view: OpView) -> Iterable[Strategy]:
    """Columns, contraction, and ranges of rows."""
    yield from _SORTED_ROWS(view)
    yield view.strategy([S(0), R, R], [S(0)], local="grouped_rows")


@local_code("grouped_rows")
def _grouped_rows(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    args = view.args()
    names = ("self", "mat2", "offs") if op.target.startswith("aten.") else ("input", "weight", "offs")
    call = Op(
        target="autopar.L.grouped_rows",
        args=tuple(args[name] for name in names),
        kwargs=(("axis", axis), ("operator", op.target)),
        outputs=op.outputs,
        no_grad=op.no_grad,
        module=op.module,
        source=op.source,
    )
    return (call,)


def grouped_rows(view: OpView) -> Iterable[Strategy]:
    """Ranges of rows under a further axis: columns and contraction, at the alignment of torch's kernel."""
    names = [("s", "i"), ("e", "i", "o"), ("e",)]
    yield from _aligned(view, split_names(view, names, [("s", "o")], [False] * 3, lambda name: name in ("s", "e")))
    yield view.strategy([P, R, R], [P])
    yield view.strategy([R, P, R], [P])


register("aten._grouped_mm", grouped_mm)
register("transformers.grouped_mm_fallback", sorted_rows)
register("autopar.L.grouped_rows", grouped_rows)
