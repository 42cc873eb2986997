"""Labels of a CTC loss that a mask selects: `ctc_loss(log_probs, y.masked_select(mask), frames, mask.sum(-1))`, in an exported graph.

How many are selected depends on values. Where each sample's length is how many its row of the mask has, the labels are those of the rows,
each row's selected ones put first: of a fixed size, and of each sample on its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor, fx

from autopar.run import ctc  # noqa: F401  (registers the operator)

__all__ = ["labels_in_rows"]

_ATEN = torch.ops.aten


def labels_in_rows(module: fx.GraphModule) -> None:
    """Rewrite such labels of a graph, and of those that it holds."""
    for part in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for n in list(part.graph.nodes):
            if n.target is torch.ops.autopar_operators.ctc_loss.default and (found := _selected(n)) is not None:
                with part.graph.inserting_before(n):
                    n.update_arg(1, _rows(part.graph, n, *found))
                part.recompile()


def _selected(loss: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What is selected, and by which mask, if the labels of a loss are those [count] of rows of its lengths. Where something is written
    in between it may be to either of them."""
    labels, lengths = loss.args[1], loss.args[3]
    if not isinstance(labels, fx.Node) or labels.target is not _ATEN.index.Tensor or not isinstance(lengths, fx.Node):
        return None
    of, indexes = labels.args
    mask = indexes[0] if isinstance(indexes, list | tuple) and len(indexes) == 1 else None
    if not isinstance(of, fx.Node) or not isinstance(mask, fx.Node):
        return None
    x, chosen = of.meta.get("val"), mask.meta.get("val")
    if not isinstance(x, Tensor) or not isinstance(chosen, Tensor) or chosen.dtype != torch.bool:
        return None
    rows = x.dim() == 2 and x.shape == chosen.shape
    counted = lengths.target is _ATEN.sum.dim_IntList and lengths.args in ((mask, [-1]), (mask, [1])) and not lengths.kwargs
    return (of, mask) if rows and counted and not _is_written(loss, {labels, lengths}) else None


def _is_written(loss: fx.Node, since: Set[fx.Node]) -> bool:
    """Whether an operator writes to anything between the first of these and a loss."""
    left, n = set(since), loss
    while left and n.op != "root":
        n = n.prev
        left.discard(n)
        if isinstance(n.target, torch._ops.HigherOrderOperator):  # a graph of its own, into which this does not look
            return True
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            return True
    return bool(left)


def _rows(graph: fx.Graph, loss: fx.Node, of: fx.Node, mask: fx.Node) -> fx.Node:
    """Labels [N, S], of which each row begins with the selected ones in their order; 0 behind them."""
    x: Tensor = of.meta["val"]

    def made(target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> fx.Node:
        n = graph.call_function(target, args, kwargs)
        n.meta = {key: loss.meta[key] for key in ("nn_module_stack", "stack_trace", "torch_fn") if key in loss.meta}
        n.meta["val"] = torch.empty(tuple(x.shape), dtype=dtype, device="meta")
        return n

    last = made(_ATEN.logical_not.default, mask, dtype=torch.bool)
    numbers = made(_ATEN.to.dtype, last, torch.uint8, dtype=torch.uint8)
    both = graph.call_function(_ATEN.sort.stable, (numbers,), {"stable": True, "dim": 1})
    both.meta = {**last.meta, "val": tuple(_results(x))}
    left = made(operator.getitem, both, 0, dtype=torch.uint8)
    places = made(operator.getitem, both, 1, dtype=torch.int64)
    rows = made(_ATEN.gather.default, of, 1, places, dtype=x.dtype)
    behind = made(_ATEN.to.dtype, left, torch.bool, dtype=torch.bool)
    return made(_ATEN.masked_fill.Scalar, rows, behind, 0, dtype=x.dtype)


def _results(x: Tensor) -> Iterator[Tensor]:
    for dtype in (torch.uint8, torch.int64):
        yield torch.empty(tuple(x.shape), dtype=dtype, device="meta")
