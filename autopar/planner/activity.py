"""What runs on a stage in a step, and what becomes of the gradients of its parameters: as they are made, sent and left."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

from autopar.ir import Span

__all__ = ["Activity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What runs on a stage. span: its operators; recomputed: the spans in it that run again in backward. in_flight, micro_batches:
    of the schedule. gradients: parameter value -> bytes of its gradient as it is made and as it rests. reduced: the parameters whose
    gradients are gathered into buckets for a reduction; scattered: those of them that are reduce-scattered at the end of the step, with a
    bucket that stays until then; late: parameters that other ranks use too, whose gradients are complete when all passes are over;
    at_once: those that are reduce-scattered in every backward pass, by unit or by bucket, of which the parts
    alone stay. bucket_bytes: 0 if gradients are reduced where they lie. accumulates: gradients are added at once into
    buffers that are not counted here. where_used: value -> bytes of the parameters that are gathered where they are used; units:
    value -> what it is gathered with (see units.gather_units). cast: the parameters that are used in a lower dtype, in which backward makes
    their gradients. sent: of the parameters whose gradients are reduced in another dtype than they rest in, bytes of a whole gradient in
    it; summed: of those that are scattered, the ones whose parts are then summed over further ranks: their bucket goes when the next one
    comes. alike: the passes of the stages of one estimator that have the same need the same; None: not known."""

    span: Span
    recomputed: tuple[Span, ...]
    sends: tuple[str, ...]
    receives: tuple[str, ...]
    in_flight: int
    micro_batches: int
    gradients: Mapping[str, tuple[int, int]]
    reduced: Collection[str]
    scattered: Collection[str]
    at_once: Collection[str]
    where_used: Mapping[str, int]
    units: Mapping[str, int]
    bucket_bytes: int
    accumulates: bool = False
    late: Collection[str] = ()
    cast: Collection[str] = ()
    sent: Mapping[str, int] = field(default_factory=dict)
    summed: Collection[str] = ()
    alike: Hashable = None

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of parameters that a backward pass leaves."""
        return 0 if self.accumulates else sum(g[r in self.at_once] for r, g in self.gradients.items())

    @property
    def left_bytes(self) -> int:
        """Of the gradients when all passes of the stage are over: of what was reduce-scattered, its part and the bucket."""
        if self.accumulates:
            return 0
        return sum(made if r in self.late and r not in self.at_once else self.staying_bytes(r) for r, (made, _) in self.gradients.items())

    def sent_bytes(self, r: str) -> int:
        """Bytes of a whole gradient as it is sent."""
        return self.sent.get(r, self.gradients[r][0])

    def part_bytes(self, r: str) -> int:
        """Of the part of it that stays on this rank, before it is brought to the dtype in which it rests."""
        made, rests = self.gradients[r]
        return rests * self.sent_bytes(r) // made if made else 0

    def staying_bytes(self, r: str) -> int:
        """Of what is left of a gradient until the end of the step, once its reduction has begun."""
        made, rests = self.gradients[r]
        if r in self.at_once:
            return rests
        if r in self.scattered:
            return self.part_bytes(r) + (0 if r in self.summed else self.sent_bytes(r))
        return self.sent_bytes(r) if r in self.reduced else made

    def parts_bytes(self, bucket: Collection[str]) -> int:
        """Of the parts that are made of a bucket, if it is reduce-scattered."""
        return sum(self.part_bytes(r) for r in bucket if r in self.scattered or r in self.at_once)

    def left_of(self, bucket: Collection[str], *, accumulated: bool) -> dict[str, int]:
        """The gradients that are left of a bucket. At once: the parts, which are added to those of earlier passes. At the end of the step:
        the parts, and the buffer in the place of the gradients. accumulated: what was there before the pass is counted already."""
        there = {r: self.gradients[r][r in self.at_once] if accumulated else 0 for r in bucket}
        return {r: self.staying_bytes(r) - there[r] for r in bucket}
