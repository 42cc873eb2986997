"""Scaled dot-product attention: batch, heads and the rows of queries may be split; keys are summed over by a softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopar.catalog.dims import split_names
from autopar.catalog.rule import OpView, draws, local_code, over_axes, register
from autopar.ir import Layout, Op, R, S, Strategy

__all__: list[str] = []


def attention(view: OpView) -> Iterable[Strategy]:
    """q [*, H, L, E], k [*, K, T, E], v [*, K, T, F], mask that broadcasts to [*, H, L, T] -> [*, H, L, F].

    With enable_gqa, query head h reads key head h // (H / K): the same cut of both leaves them together. A causal
    attention numbers its queries from 0, so that their dim stays whole.
    """
    bound, tensors = view.args(), view.tensors()
    if view.op.target == "autopar.L.attention":
        tensors = {"query": 0, "key": 1, "value": 2, "attn_mask": 3 if len(view.ins) > 3 else None}
    ndim = len(view.outs[0].shape)
    batch = tuple(f"b{k}" for k in range(ndim - 2))  # the last of them is the heads
    ends = {"query": ("l", "e"), "key": ("t", "e"), "value": ("t", "f"), "attn_mask": ("l", "t")}
    operands: list[tuple[str, ...]] = [()] * len(view.ins)
    for name, (rows, cols) in ends.items():
        index = tensors[name]
        if index is not None:
            operands[index] = (*batch, rows, cols)[ndim - len(view.ins[index].shape) :]
    fixed = {"e", "t", "f"} | ({"l"} if bound["is_causal"] else set())
    found: list[Strategy] = []
    if bound["enable_gqa"] and batch:
        found += _grouped_heads(view, operands, batch[-1])
        fixed.add(batch[-1])
    found += split_names(view, operands, [(*batch, "l", "f")], [False] * len(view.ins), lambda name: name in fixed)
    for s in found:
        yield dataclasses.replace(s, local="attention") if draws(view.op) else s


@local_code("attention")
def _attention(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    """Attention with dropout draws from a stream of the shard's own."""
    bound = view.args()
    operands = op.args[:4] if op.target == "autopar.L.attention" else tuple(bound[n] for n in ("query", "key", "value", "attn_mask"))
    rest = tuple((name, bound[name]) for name in ("dropout_p", "is_causal", "scale", "enable_gqa"))
    return (dataclasses.replace(op, target="autopar.L.attention", args=operands, kwargs=(("axis", over_axes(op, axis)), *rest)),)


def _grouped_heads(view: OpView, operands: list[tuple[str, ...]], heads: str) -> Iterable[Strategy]:
    """Split the query heads, and with them the key heads (R where there is one for all)."""
    for g in view.splits(view.outs[0].shape[-3]):
        ins: list[Layout] = []
        for names, t in zip(operands, view.ins, strict=True):
            size = t.shape[names.index(heads)] if heads in names else 1
            ins.append(S(names.index(heads), g) if size > 1 else R)
        yield view.strategy(ins, [S(len(view.outs[0].shape) - 3, g)])


register("aten.scaled_dot_product_attention autopar.L.attention", attention)
