"""The parts of a tensor as boxes: rectangles of the whole that one rank holds, or one place of a checkpoint.

A part that is cut in groups (a fused query, key and value) is several boxes: torch.distributed.checkpoint knows rectangles only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.run.slices import Span

__all__ = ["Box", "boxes_of", "not_a_tiling", "whole_box"]

Ints = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """offsets, sizes: of the rectangle in the whole, by dim. here: its offsets in the tensor that this rank holds."""

    offsets: Ints
    sizes: Ints
    here: Ints

    def of(self, local: Tensor) -> Tensor:
        """The rectangle: a view of the tensor that this rank holds."""
        for dim, (start, size) in enumerate(zip(self.here, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def whole_box(shape: Sequence[int]) -> tuple[Box, ...]:
    """A tensor that is held whole."""
    return (Box(offsets=(0,) * len(shape), sizes=tuple(shape), here=(0,) * len(shape)),)


def boxes_of(spans: Sequence[Sequence[Span]] | None) -> tuple[Box, ...]:
    """The boxes of a part: for each dim, the ranges of the whole that it is made of, in its order. None: it is empty."""
    if spans is None:
        return ()
    places: list[list[tuple[int, int, int]]] = []
    for of_dim in spans:
        starts = itertools.accumulate((end - start for start, end in of_dim), initial=0)
        places.append([(start, end - start, here) for (start, end), here in zip(of_dim, starts, strict=False)])
    return tuple(
        Box(offsets=tuple(p[0] for p in at), sizes=tuple(p[1] for p in at), here=tuple(p[2] for p in at))
        for at in itertools.product(*places)
    )


def not_a_tiling(shape: Sequence[int], rectangles: Iterable[tuple[Ints, Ints]]) -> str | None:
    """What is wrong with rectangles (offsets, sizes) that should be a grid over a tensor of this shape: each element in exactly one of
    them. None if nothing is. In time linear in their number."""
    found = [(offsets, sizes) for offsets, sizes in rectangles if math.prod(sizes) > 0]
    if math.prod(shape) == 0:
        return None if not found else "parts of a tensor without elements"
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in found):
        return f"parts of another number of dims than {len(shape)}"
    count = 1
    for dim, size in enumerate(shape):
        ranges = sorted({(offsets[dim], sizes[dim]) for offsets, sizes in found})
        at = 0
        for start, length in ranges:
            if start != at:
                return f"its parts leave out or repeat what is at {min(start, at)} of dim {dim}"
            at += length
        if at != size:
            return f"its parts are {at} long in dim {dim}, of {size}"
        count *= len(ranges)
    if len(found) != count or len(set(found)) != count:
        return f"it has {len(found)} parts, and should have {count}"
    return None
