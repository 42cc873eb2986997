"""The program of one rank of a mesh and one micro-batch, with what its operators cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from autopar.ir import Program
from autopar.measure import Pricer
from autopar.planner.lower import Inner
from autopar.planner.moments import Moments
from autopar.planner.price import Ledger
from autopar.planner.shard import Assignment
from autopar.planner.solver import Outcome
from autopar.planner.space import Mesh
from autopar.planner.stages import Cuts

__all__ = ["Rank"]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The program of one rank and one micro-batch, priced. data: the assignment on the axis that divides the batch; inner: on those that
    divide operators. made_for: the (data-parallel ranks, micro-batches) that it was made for. Another split into micro-batches of the same
    size has the same operators, so that it costs the same, but states other counts of ranks and moments: a plan is made from its own.
    folded: of the program as it is, the same of the folded one, made for the same split and with the same assignments.
    in_prologue: by a pricer, as long as that is used, and the micro-batches: what a prologue takes, once it is known (prologue.py)."""

    mesh: Mesh
    moments: Moments
    program: Program
    data: Assignment | None
    inner: Inner
    ledger: Ledger
    cuts: Cuts
    outcomes: tuple[Outcome, ...]
    micro_batches: int
    made_for: tuple[int, int]
    folded: Rank | None = field(default=None, compare=False, repr=False)
    in_prologue: WeakKeyDictionary[Pricer, dict[int, tuple[float, float]]] = field(
        default_factory=WeakKeyDictionary, compare=False, repr=False
    )  # fmt: skip
