"""Scaled dot-product attention: batch, heads and the rows of queries may be split; keys are summed over by a softmax."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.dims import split_names
from autopar.catalog.rule import OpView, draws, register
from autopar.ir import Layout, R, S, Strategy

__all__: list[str] = []


def attention(view: OpView) -> Iterable[Strategy]:
    """q [*, H, L, E], k [*, K, T, E], v [*, K, T, F], mask that broadcasts to [*, H, L, T] -> [*, H, L, F].

    With enable_gqa, query head h reads key head h // (H / K): the same cut of both leaves them together. A causal
    attention numbers its queries from 0, so that their dim stays whole.
    """
    if draws(view.op):
        return
    bound, tensors = view.args(), view.tensors()
    ndim = len(view.outs[0].shape)
    batch = tuple(f"b{k}" for k in range(ndim - 2))  # the last of them is the heads
    ends = {"query": ("l", "e"), "key": ("t", "e"), "value": ("t", "f"), "attn_mask": ("l", "t")}
    operands: list[tuple[str, ...]] = [()] * len(view.ins)
    for name, (rows, cols) in ends.items():
        index = tensors[name]
        if index is not None:
            operands[index] = (*batch, rows, cols)[ndim - len(view.ins[index].shape) :]
    fixed = {"e", "t", "f"} | ({"l"} if bound["is_causal"] else set())
    if bound["enable_gqa"] and batch:
        yield from _grouped_heads(view, operands, batch[-1])
        fixed.add(batch[-1])
    yield from split_names(view, operands, [(*batch, "l", "f")], [False] * len(view.ins), lambda name: name in fixed)


def _grouped_heads(view: OpView, operands: list[tuple[str, ...]], heads: str) -> Iterable[Strategy]:
    """Split the query heads, and with them the key heads (R where there is one for all)."""
    for g in view.splits(view.outs[0].shape[-3]):
        ins: list[Layout] = []
        for names, t in zip(operands, view.ins, strict=True):
            size = t.shape[names.index(heads)] if heads in names else 1
            ins.append(S(names.index(heads), g) if size > 1 else R)
        yield view.strategy(ins, [S(len(view.outs[0].shape) - 3, g)])


register("aten.scaled_dot_product_attention", attention)
