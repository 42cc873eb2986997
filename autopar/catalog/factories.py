"""Operators that make tensors from nothing, or from the shape of one: every rank makes the whole."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.rule import OpView, register
from autopar.ir import I, R, S, Strategy

__all__: list[str] = []


def new_like(view: OpView) -> Iterable[Strategy]:
    """new_zeros and such read only the type of their operand, so that it may lie in any way."""
    for d, size in enumerate(view.ins[0].shape):
        for g in view.splits(size):
            yield view.strategy([S(d, g), *[R] * (len(view.ins) - 1)], [R])
            yield view.strategy([S(d, g), *[I] * (len(view.ins) - 1)], [I])


register("aten.new_zeros aten.new_ones aten.new_full aten.new_empty", new_like)
