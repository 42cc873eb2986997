"""One capture, many plans: what is asked of a model is asked again with something changed.

What was found out about the ranks of a program is shared by all that is asked for one cluster and optimizer (planner.store); what is asked
twice is answered once. Every answer is a search with the budgets of `autopar.plan`, so that it is the plan that would be made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from autopar.errors import Infeasible
from autopar.ir import Program
from autopar.plan_cache import decisive, planned_once
from autopar.planner.answer import ended_by_user, refusal
from autopar.planner.plan import Pins, Plan
from autopar.planner.resources import usable_bytes
from autopar.planner.search import Search, answered
from autopar.planner.store import Store
from autopar.planner.wishes import WishError, for_loss_outside, with_notes
from autopar.progress import working
from autopar.report.units import bytes_text
from autopar.report.words import counted
from autopar.run.dtypes import itemsize_named
from autopar.stacks import stack_of
from autopar.stacks.spaces import as_configured, as_planned_for, best_within, deciding
from cost_models.cluster import Cluster

__all__ = ["SHORT", "Asked", "Refused", "Study"]

MIB = 2.0**20
SHORT = "does not fit"  # how a reason begins that is memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a plan is made for, beside the program. memory_limit_bytes: None for what a plan may fill of the cluster's GPU; batch: samples
    of a step, None for the program's own. stack: the training software that runs it, by its name; configured: the pins are all that it is
    told, instead of what is pinned of the best plan that it can run."""

    gpus: int
    cluster: Cluster
    optimizer: str
    precision: str
    reduce_dtype: str | None = None
    memory_limit_bytes: int | None = None
    pins: Pins = Pins()
    batch: int | None = None
    stack: str | None = None
    configured: bool = False

    @property
    def limit_bytes(self) -> int:
        return self.memory_limit_bytes or usable_bytes(self.cluster.gpu)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """why: in a line."""

    why: str
    search: Search

    @functools.cached_property
    def error(self) -> Infeasible:
        """As `autopar plan` raises it, with what would help, which is tried now."""
        return refusal(self.search)


@dataclass(kw_only=True)
class Study:
    """asked: what the plan that is explained was made for; given: that plan, made when it is first needed. recapture: the program
    of another batch. stop: whether the user has enough: searches then end with their best so far, and what is tried beside is left.
    programs, stores, answers: what was found out already."""

    program: Program
    asked: Asked
    given: Plan | None = None
    recapture: Callable[[int], Program] | None = None
    stop: Callable[[], bool] = lambda: False
    time_limit_s: float | None = None
    programs: dict[int, Program] = field(default_factory=dict)
    stores: dict[tuple[Cluster, str, int | None], Store] = field(default_factory=dict)
    answers: dict[Asked, Plan | Refused] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.given is not None:
            self.answers[self.asked] = self.given

    @property
    def plan(self) -> Plan:
        """Raises Infeasible."""
        found = self.solve(self.asked)
        if isinstance(found, Refused):
            raise found.error
        return found

    def store(self, asked: Asked) -> Store:
        program = self.program_of(asked)
        key = asked.cluster, asked.optimizer, program.batch_size
        if key not in self.stores:
            self.stores[key] = Store(
                program=program, cluster=asked.cluster, optimizer=asked.optimizer, reduced_itemsize=itemsize_named(asked.reduce_dtype)
            )
        return self.stores[key]

    def program_of(self, asked: Asked) -> Program:
        """Captured for its batch. Raises WishError where no other batch can be captured."""
        if asked.batch in (None, self.program.batch_size):
            return self.program
        if self.recapture is None or self.program.batch_size is None:
            raise WishError(f"a batch of {asked.batch}: {self.program.name} is there with its own batch alone")
        if asked.batch not in self.programs:
            with working(f"capture of a batch of {asked.batch}"):
                self.programs[asked.batch] = self.recapture(asked.batch)
        return self.programs[asked.batch]

    def with_pins(self, **pins: object) -> Asked:
        """What is asked, with these pins beside its own, or in their place."""
        return dataclasses.replace(self.asked, pins=msgspec.structs.replace(self.asked.pins, **pins))

    def solve(self, asked: Asked) -> Plan | Refused:
        """The best plan for this, or why there is none. Plans are kept as those of `autopar.plan` are."""
        if asked not in self.answers:
            with working(f"planning {counted(asked.gpus, 'GPU')}"):
                self.answers[asked] = self._solved(asked)
        return self.answers[asked]

    def search(self, asked: Asked) -> Search:
        return Search(
            program=self.program_of(asked), gpus=asked.gpus, cluster=asked.cluster, memory_limit_bytes=asked.limit_bytes,
            optimizer=asked.optimizer, precision=asked.precision, reduce_dtype=asked.reduce_dtype,
            pins=for_loss_outside(self.program, asked.pins) or Pins(), store=self.store(asked), stop=self.stop,
            time_limit_s=self.time_limit_s, **self._as_run_by(asked),
        )  # fmt: skip

    def _as_run_by(self, asked: Asked) -> dict[str, Any]:
        """What the search is told of the training software."""
        if asked.stack is None:
            return {}
        return (as_configured if asked.configured else best_within)(stack_of(asked.stack), self.program, asked.pins)

    def _solved(self, asked: Asked) -> Plan | Refused:
        refused: list[Refused] = []
        program = self.program_of(asked)

        def make() -> Plan:
            plan, search = answered(self.search(asked))
            if plan is None:
                refused.append(Refused(why=_in_a_line(search), search=search))
                raise Infeasible(refused[0].why)
            return with_notes(plan, program)

        try:
            pinned = for_loss_outside(program, asked.pins if asked.pins != Pins() else None)
            wished = decisive(
                asked.gpus, asked.cluster, asked.memory_limit_bytes, asked.optimizer, asked.precision, pinned, asked.reduce_dtype
            ) | deciding(self._as_run_by(asked), asked.pins)
            made = planned_once(program, wished, make, kept=lambda plan: not (ended_by_user(plan) or self.time_limit_s))
            return made if asked.stack is None else as_planned_for(stack_of(asked.stack), made)
        except Infeasible:
            if not refused:
                raise
            return refused[0]


def _in_a_line(search: Search) -> str:
    lines = [line for line in search.refused if line not in search.said.short]
    others = frozenset(search.space.refused())  # meshes that are none: what another one lacks says more
    said = [line for line in lines if line not in others and not line.startswith("micro-batches:")] or lines
    short = min(search.said.short.values(), default=0.0)
    if short >= MIB or (short and not said):
        return f"{SHORT}: {f'at least {bytes_text(short)} a GPU short' if short >= MIB else 'no cut into stages does'}"
    first, *more = str(refusal(search)).splitlines()
    return said[0] if said else more[0].strip(" -") if first.endswith(":") and more else first
