"""Scaled dot-product attention: batch, heads and the rows of queries may be split; keys are summed over by a softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopar.catalog.dims import split_names
from autopar.catalog.rule import OpView, draws, local_code, over_axes, register
from autopar.ir import Layout, Op, R, S, Strategy

__all__ = ["BY_ROWS", "CAUSAL_ROWS", "LOCAL_ATTENTION", "of_last_rows"]

LOCAL_ATTENTION, CAUSAL_ROWS = "autopar.L.attention", "autopar.L.causal_rows"
BY_ROWS = "causal_rows"  # the code of some of the queries of a causal attention


def of_last_rows(n: float) -> float:
    """What the rank with the last queries of causal attention computes, over the mean of n ranks: they read most keys."""
    return 2 - 1 / n


def attention(view: OpView) -> Iterable[Strategy]:
    """q [*, H, L, E], k [*, K, T, E], v [*, K, T, F], mask that broadcasts to [*, H, L, T] -> [*, H, L, F].

    With enable_gqa, query head h reads key head h // (H / K): the same cut of both leaves them together. A causal
    attention numbers its queries from 0: where these are split, code of its own knows from where on.
    """
    bound, tensors = view.args(), view.tensors()
    if view.op.target in (LOCAL_ATTENTION, CAUSAL_ROWS):
        tensors = {"query": 0, "key": 1, "value": 2, "attn_mask": 3 if len(view.ins) > 3 else None}
    ndim = len(view.outs[0].shape)
    batch = tuple(f"b{k}" for k in range(ndim - 2))  # the last of them is the heads
    ends = {"query": ("l", "e"), "key": ("t", "e"), "value": ("t", "f"), "attn_mask": ("l", "t")}
    operands: list[tuple[str, ...]] = [()] * len(view.ins)
    for name, (rows, cols) in ends.items():
        index = tensors[name]
        if index is not None:
            operands[index] = (*batch, rows, cols)[ndim - len(view.ins[index].shape) :]
    causal = view.op.target == CAUSAL_ROWS or bool(bound["is_causal"])
    fixed = {"e", "t", "f"} | ({"l"} if causal else set())
    found: list[Strategy] = []
    if bound["enable_gqa"] and batch:
        found += _grouped_heads(view, operands, batch[-1])
        fixed.add(batch[-1])
    found += split_names(view, operands, [(*batch, "l", "f")], [False] * len(view.ins), lambda name: name in fixed)
    for s in found:
        yield dataclasses.replace(s, local="attention") if draws(view.op) else s
    if causal and not draws(view.op) and (view.op.target == CAUSAL_ROWS or _is_square(view)):
        queries = S(ndim - 2)
        yield view.strategy([queries, R, R], [queries], local=BY_ROWS)


@local_code("attention")
def _attention(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    """Attention with dropout draws from a stream of the shard's own."""
    operands, options = ("query", "key", "value", "attn_mask"), ("dropout_p", "is_causal", "scale", "enable_gqa")
    return _over(op, view, axis, LOCAL_ATTENTION, operands, options)


@local_code(BY_ROWS)
def _causal_rows(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    """Some of the queries, which read the keys up to their own places."""
    return _over(op, view, axis, CAUSAL_ROWS, ("query", "key", "value"), ("scale", "enable_gqa"))


def _over(op: Op, view: OpView, axis: str, target: str, operands: tuple[str, ...], options: tuple[str, ...]) -> tuple[Op, ...]:
    """Local code over an axis, or over one more; its operands stand in this order, and its options have these names."""
    bound = view.args()
    args = op.args[: len(operands)] if op.target == target else tuple(bound[name] for name in operands)
    kwargs = (("axis", over_axes(op, axis)), *((name, bound[name]) for name in options))
    return (dataclasses.replace(op, target=target, args=args, kwargs=kwargs),)


def _is_square(view: OpView) -> bool:
    """Whether a causal attention has as many keys as queries, and no mask besides."""
    return len(view.ins) == 3 and view.ins[0].shape[-2] == view.ins[1].shape[-2]


def _grouped_heads(view: OpView, operands: list[tuple[str, ...]], heads: str) -> Iterable[Strategy]:
    """Split the query heads, and with them the key heads (R where there is one for all)."""
    for g in view.splits(view.outs[0].shape[-3]):
        ins: list[Layout] = []
        for names, t in zip(operands, view.ins, strict=True):
            size = t.shape[names.index(heads)] if heads in names else 1
            ins.append(S(names.index(heads), g) if size > 1 else R)
        yield view.strategy(ins, [S(len(view.outs[0].shape) - 3, g)])


register(f"aten.scaled_dot_product_attention {LOCAL_ATTENTION} {CAUSAL_ROWS}", attention)
