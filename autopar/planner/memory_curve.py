"""The memory of a pipeline rank over a step, as a plan keeps it; made by planner.curve, read by report.timeline."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

__all__ = ["RankCurve", "StageCurve"]

Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=10)]
Points = Annotated[list[Count], msgspec.Meta(min_length=1, max_length=1000)]
Changes = Annotated[list[int], msgspec.Meta(min_length=1, max_length=1000)]


class StageCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage holds beside what rests while its passes run, from their beginning to their end (planner.curve). kept_bytes: of a
    micro-batch, between its forward and its backward pass; gradient_bytes: once a backward pass has left them; left_bytes: once
    the last one has. forward; first, later, last:
    of a backward pass that finds no gradients, that finds some, and that is the last one (its own bytes beside those gradients; below zero
    where their reduction leaves less of them than was there)."""

    kept_bytes: Count
    gradient_bytes: Count
    left_bytes: Count
    forward: Points
    first: Points
    later: Points
    last: Changes

    def __post_init__(self) -> None:
        if min(self.last) < -self.gradient_bytes:
            raise ValueError(f"a pass cannot free more than the {self.gradient_bytes} bytes of gradients that it finds")


class RankCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a pipeline rank over a step. rest_bytes, update_bytes: of what rests while passes run and while the optimizer does;
    waiting_bytes: received values before they are used; ends_bytes: of the gradients of parameters that several ranks share, when all
    passes are over; slack_share, held_bytes: of the allocator; context_bytes: of the framework."""

    rest_bytes: Count
    update_bytes: Count
    waiting_bytes: Count
    ends_bytes: Count
    context_bytes: Count
    held_bytes: Annotated[float, msgspec.Meta(ge=0)]
    slack_share: Share
    stages: list[StageCurve]

    def total_bytes(self, alive_bytes: int) -> int:
        """Of so many bytes that are allocated, as `cost_models.memory.stage_memory` counts them."""
        return alive_bytes + self.context_bytes + math.ceil(alive_bytes * self.slack_share + self.held_bytes)
