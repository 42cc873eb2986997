"""Does the parallel module compute what the original computes? Real processes, float64, loss, gradients and trained parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.compare import unequal
from autopar.compiler import emit, plan_of
from autopar.errors import PlanError
from autopar.planner import Pins, Plan, complete
from autopar.planner.names import named_as
from autopar.reference import Errors, Reference, errors_of, reference
from autopar.render import load
from autopar.rounding import is_as_far, rounding_of
from autopar.run import WorkerPool
from autopar.run.manifest import Manifest
from autopar.variants import tensors_of
from autopar.verify_rank import Call, Form, Found, Task, train_on_rank
from cost_models.cluster import Cluster, load_cluster

__all__ = ["Reference", "Report", "TOLERANCE", "reference", "verify", "verify_plan", "with_rounding"]

TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(Errors):
    """What was found. copies_equal: all copies of a replicated or tied part (parameters, their gradients, optimizer states, buffers) are
    bit-equal on all ranks after the last step. rounding: where an error is over the tolerance, how far rounding alone moves the
    original. notes: what was not compared, and why."""

    plan: Plan
    source: str
    copies_equal: bool
    unequal: tuple[str, ...] = field(default=())
    rounding: Errors | None = None
    notes: tuple[str, ...] = ()

    @property
    def beyond(self) -> tuple[str, ...]:
        """The kinds whose error is over the tolerance, or is no number."""
        return tuple(kind for kind, error in self.by_kind().items() if not error < TOLERANCE)

    @property
    def ok(self) -> bool:
        return not self.beyond and self.copies_equal

    @property
    def within_rounding(self) -> bool:
        """Rounding alone moves the original about as far, wherever an error is over the tolerance: nothing can be told from it."""
        if self.rounding is None or not self.copies_equal:
            return False
        moved, own = self.rounding.by_kind(), self.by_kind()
        return bool(self.beyond) and all(is_as_far(own[k], moved.get(k, 0.0)) for k in self.beyond)


def verify_plan(ref: Reference, plan: Plan, pool: WorkerPool, *, timeout_s: float | None = 300.0) -> Report:
    """Run a plan for the reference's program on the pool's workers and compare. Raises LaunchError if a worker fails."""
    plan = named_as(ref.captured.program, plan)
    source = emit(ref.captured, plan, ref.positional)
    tensors = {k: t.detach() for k, t in tensors_of(ref.captured).items()}
    forms, notes = _forms(ref, plan, load(source).MANIFEST, load_cluster("cpu"))
    later = tuple(c for c in ref.later if c in forms or (c == (True, 0) and (True, 1) in forms))
    task = Task(
        source=source, tensors=tensors, batches=ref.batches, steps=len(ref.losses), later=later, forms=forms, draws=ref.draws
    )
    results: list[Found] = pool.run(train_on_rank, task, timeout_s=timeout_s)
    bad = unequal(r.parts for r in results)
    return Report(
        **dataclasses.asdict(errors_of(ref, results[0], later)), plan=plan, source=source, copies_equal=not bad, unequal=bad,
        notes=(*ref.notes, *notes, *(f for f in results[0].later if isinstance(f, str))),
    )  # fmt: skip


def with_rounding(report: Report, ref: Reference) -> Report:
    """The report; where an error is over the tolerance, with how far rounding alone moves the original (three trainings of it)."""
    return dataclasses.replace(report, rounding=rounding_of(ref)) if report.beyond else report


def _forms(ref: Reference, plan: Plan, manifest: Manifest, cluster: Cluster) -> tuple[dict[Call, Form], list[str]]:
    """The plan completed for the programs of the later calls, and where it does not fit. cluster: the workers'."""
    forms, notes = {}, []
    for key, captured in ref.forms.items():
        size = captured.program.batch_size or 0
        try:
            completed = complete(plan, ref.captured.program, captured.program, manifest, cluster)
            source = emit(captured, completed, ref.positional)
        except PlanError as error:
            notes.append(f"a batch of {size} in {'training' if key[0] else 'evaluation'} mode is refused under this plan: {error}")
            continue
        constants = {b.fqn or b.value for b in captured.program.buffers if b.fqn is None or b.region}
        forms[key] = Form(source=source, tensors={k: t.detach() for k, t in tensors_of(captured).items() if k in constants})
    return forms, notes


def verify(
    model: nn.Module,
    example_inputs: Any,
    gpus: int,
    *,
    pins: Pins | Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    steps: int = 3,
    loss: Callable[[Any], Tensor] | None = None,
    cluster: str = "cpu",
    memory: int | str | None = None,
    pool: WorkerPool | None = None,
    device: str | None = None,
) -> Report:
    """Verify a model under the solver's own plan, a pinned one, or a given one, on `gpus` local workers: `steps` steps, then an
    evaluation and steps on batches of other sizes. device: of the workers, 'cuda' or 'cpu'; by default GPUs if there is one for each.
    The original runs on the CPU."""
    ref = reference(model, example_inputs, steps=steps, loss=loss, later=True)
    decided = plan if plan is not None else plan_of(ref.captured, gpus, cluster=cluster, memory=memory, pins=pins)
    if pool is not None:
        return with_rounding(verify_plan(ref, decided, pool), ref)
    with WorkerPool(decided.gpus, device=device) as own:
        report = verify_plan(ref, decided, own)
    return with_rounding(report, ref)
