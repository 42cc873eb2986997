"""Operators that make tensors from nothing, or from the shape of one: every rank makes the whole."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.pointwise import pointwise
from autopar.catalog.rule import OpView, localizes, register, set_args
from autopar.ir import I, L, Op, P, R, S, Strategy

__all__: list[str] = []


def new_like(view: OpView) -> Iterable[Strategy]:
    """new_zeros and such read only the type of their operand, so that it may lie in any way; their result may too."""
    rest = len(view.ins) - 1
    given = [P, R, *(S(d, g) for d, size in enumerate(view.ins[0].shape) for g in view.splits(size))]
    for layout in given:
        if layout != R:
            yield view.strategy([layout, *[R] * rest], [R])
            yield view.strategy([layout, *[I] * rest], [I])
        for d, size in enumerate(view.outs[0].shape):
            for g in view.splits(size):
                yield view.strategy([layout, *[R] * rest], [S(d, g)])


def like(view: OpView) -> Iterable[Strategy]:
    """zeros_like and such read only the shape and type of their operand: of terms of a sum it is that of the sum."""
    yield from pointwise(view)
    rest = len(view.ins) - 1
    yield view.strategy([P, *[R] * rest], [R])
    yield view.strategy([P, *[I] * rest], [I])


def uniform(view: OpView) -> Iterable[Strategy]:
    """Every element is the same, so that a rank can make its own part of any dim."""
    for d, size in enumerate(view.outs[0].shape):
        for g in view.splits(size):
            yield view.strategy([R] * len(view.ins), [S(d, g)])


@localizes("aten.zeros aten.ones aten.full aten.empty aten.new_zeros aten.new_ones aten.new_full aten.new_empty")
def _size(op: Op, view: OpView, strategy: Strategy) -> Op:
    return set_args(op, size=strategy.outputs[0].local_shape(view.outs[0].shape, view.n))


@localizes("aten.arange")
def _positions(op: Op, view: OpView, strategy: Strategy) -> Op:
    """As positions of rows that a rank has sorted it counts the rank's own."""
    return set_args(op, end=view.outs[0].shape[0] // view.n) if strategy.outputs[0] == L else op


register("aten.zeros aten.ones aten.full aten.empty", uniform)
register("aten.zeros_like aten.ones_like aten.full_like aten.empty_like", like)
register("aten.new_zeros aten.new_ones aten.new_full aten.new_empty", new_like)
