"""Operators that make tensors from nothing, or from the shape of one: every rank makes the whole."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.rule import OpView, localizes, register, set_args
from autopar.ir import I, Op, R, S, Strategy

__all__: list[str] = []


def new_like(view: OpView) -> Iterable[Strategy]:
    """new_zeros and such read only the type of their operand, so that it may lie in any way."""
    for d, size in enumerate(view.ins[0].shape):
        for g in view.splits(size):
            yield view.strategy([S(d, g), *[R] * (len(view.ins) - 1)], [R])
            yield view.strategy([S(d, g), *[I] * (len(view.ins) - 1)], [I])


def uniform(view: OpView) -> Iterable[Strategy]:
    """Every element is the same, so that a rank can make its own part of any dim."""
    for d, size in enumerate(view.outs[0].shape):
        for g in view.splits(size):
            yield view.strategy([R] * len(view.ins), [S(d, g)])


@localizes("aten.zeros aten.ones aten.full aten.empty")
def _size(op: Op, view: OpView, strategy: Strategy) -> Op:
    return set_args(op, size=strategy.outputs[0].local_shape(view.outs[0].shape, view.n))


register("aten.zeros aten.ones aten.full aten.empty", uniform)
register("aten.new_zeros aten.new_ones aten.new_full aten.new_empty", new_like)
