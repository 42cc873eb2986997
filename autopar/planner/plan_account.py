"""What a plan keeps of its figures, as data (planner.account makes it)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from autopar.planner.memory_curve import RankCurve

__all__ = ["Account", "BlockAccount", "Count", "IdleAccount", "Positive", "Seconds", "SentAccount", "UnruledAccount"]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class BlockAccount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pieces of the model that are alike: instances of a repeated block that run in one mode, by module path, or what lies between blocks
    (repeated False), by its modules. Seconds, kept bytes: of one of them, one rank and one micro-batch; backward_s without again_s, what
    runs again. rest_bytes: of parameters and optimizer states at rest on a rank."""

    paths: list[str]
    repeated: bool
    recompute: str
    forward_s: Seconds
    backward_s: Seconds
    again_s: Seconds
    communication_s: Seconds
    kept_bytes: Count
    rest_bytes: Count
    parameters: Count


class IdleAccount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Operators of a kind that an axis does not split though they compute. seconds: of all of them, on one rank and one micro-batch.
    undivided: the strategy that fewer ranks could have, and size: what of it does not divide among these; '' and 0 where there is none."""

    axis: str
    kind: str
    count: Count
    modules: list[str]
    seconds: Seconds
    undivided: str = ""
    size: Count = 0


class UnruledAccount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Operators of a kind that the catalogue has no rule for. probed: they are split over dim 0, as running them in parts has shown that
    they can be; else they run whole wherever an axis is split."""

    kind: str
    count: Count
    modules: list[str]
    probed: bool


class SentAccount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of a kind over an axis ('dp', 'dp and tp') in a step of a pipeline rank: how many, and their seconds together, as if
    nothing hid them."""

    rank: Count
    kind: str
    axis: str
    count: Count
    seconds: Seconds


class Account(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the figures of a plan are made of (planner.account). memory_bytes, peak_flops_per_s: of one GPU, the peak for the model's mix of
    dtypes; flops: of a step of the model, forward and backward, once; per_node: how many neighbours on each axis share a node; seconds:
    what the step is spent on, which adds up to it; unruled: of operators without a rule; transfer_s: of the slowest transfer between
    stages; before_s: of what runs once a step before the micro-batches; curves: of each pipeline rank; leaves, modules: the user's names of
    what the plan names by values; shapes: of operators that an axis splits along a dim that has no name, the shape of what is split;
    sent: of its collectives, by kind."""

    gpu: str
    gpus_per_node: Positive
    memory_bytes: Count
    peak_flops_per_s: Seconds
    flops: Seconds
    per_node: dict[str, int]
    seconds: dict[str, Seconds]
    blocks: list[BlockAccount]
    idle: list[IdleAccount]
    leaves: dict[str, str]
    modules: dict[str, str]
    transfer_s: Seconds = 0.0
    before_s: Seconds = 0.0
    curves: list[RankCurve] = []
    unruled: list[UnruledAccount] = []
    shapes: dict[str, list[Count]] = {}
    sent: list[SentAccount] = []
