"""Grouped matrix products of a mixture of experts: by output column or by contraction of every expert's weight.

Rows are sorted by expert and `offs` says where each expert's rows end, so that neither rows nor experts can be cut
without moving rows between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.dims import Dims
from autopar.catalog.rule import OpView, register
from autopar.ir import Strategy

__all__: list[str] = []

ROW_BYTES = 16  # torch's kernel wants the rows of its operands to start at multiples of this

_BY_ROWS = Dims("s! i, e! i o, e! -> s! o", linear=(0, 1))
_BATCHED = Dims("e i k, e k o -> e i o", linear=(0, 1))


def grouped_mm(view: OpView) -> Iterable[Strategy]:
    """Ragged rows times a stack of matrices, or a stack times a stack; without a bias. Local sizes keep torch's alignment."""
    args, tensors = view.args(), view.tensors()
    ranks = [len(t.shape) for t in view.ins[:2]]
    if args["bias"] is not None or (ranks == [2, 3]) != (tensors["offs"] is not None):
        return
    rule = _BY_ROWS if ranks == [2, 3] else _BATCHED if ranks == [3, 3] else None
    for s in rule(view) if rule is not None else ():
        pairs = [*zip(s.inputs[:2], view.ins[:2], strict=True), *zip(s.outputs, view.outs, strict=True)]
        if all(not layout.is_shard or t.shape[layout.dim] // view.n * t.dtype.itemsize % ROW_BYTES == 0 for layout, t in pairs):
            yield s


register("aten._grouped_mm", grouped_mm)
register("transformers.grouped_mm_fallback", _BY_ROWS)
