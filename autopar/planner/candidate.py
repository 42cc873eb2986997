"""What the search builds on its way to a plan: a mesh, the program of one rank of it, a priced candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.ir import Program
from autopar.planner.moments import Moments
from autopar.planner.partition import Partition
from autopar.planner.plan import StagePlan
from autopar.planner.price import Ledger
from autopar.planner.shard import Assignment
from autopar.planner.solver import Outcome
from autopar.planner.stages import Cuts, Pieces
from cost_models.pipeline import Flow
from cost_models.rests import Rest

if TYPE_CHECKING:
    from autopar.planner.estimate import Estimator
    from autopar.planner.space import Choice, Form

__all__ = ["GIB", "Candidate", "Draft", "Mesh", "Rank", "Times", "gib"]

GIB = float(2**30)


def gib(nbytes: float) -> str:
    """Bytes as messages say them: '12.34 GiB', with more places where there is less, and '1,024 bytes'."""
    if nbytes < GIB / 2048:
        return f"{nbytes:,.0f} bytes"
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / GIB:.5f} GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    pp: int
    dp: int
    tp: int

    def sizes(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The program of one rank and one micro-batch for a (dp, micro-batches, tp), priced. made_for: the (dp, micro-batches) that it was
    made for. Another split into micro-batches of the same size has the same operators, so that it costs the same, but states other
    counts of ranks and moments: a plan is made from its own."""

    mesh: Mesh
    moments: Moments
    program: Program
    data: Assignment | None
    tensor: Assignment | None
    ledger: Ledger
    cuts: Cuts
    outcomes: tuple[Outcome, ...]
    micro_batches: int
    made_for: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a step: of each stage's forward and backward of one micro-batch, and of the terms that make up the step."""

    forwards_s: tuple[float, ...]
    backwards_s: tuple[float, ...]
    compute_s: float
    bubble_s: float
    sync_s: float
    optimizer_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The stages of a choice by the account of its pieces. bound_s: no other stages of it are faster."""

    choice: Choice
    part: Partition
    times: Times
    bound_s: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """estimator: what priced it. form: of the tensor axis."""

    estimator: Estimator
    rank: Rank
    mesh: Mesh
    flow: Flow
    rest: Rest
    shard: int
    zero_dims: Mapping[str, int]
    segments: Pieces
    part: Partition
    stages: tuple[StagePlan, ...]
    step_time_s: float
    compute_s: float
    bubble_s: float
    gradient_sync_s: float
    optimizer_s: float
    form: Form | None = None
