"""Why no plan fits into memory: the leanest choice, its fullest stage and what fills it, and what would help, each tried first.

The need of a choice is that of its leanest cuts with all recomputed that may be, by the account that plans are checked with (liveness); it
does not depend on how much memory there is, so what is short shrinks byte for byte as memory grows. A change is said only if a plan that
fits was found under it: of the pins, one at a time, then together; of the GPUs, the fewest of those tried; of the memory of a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from autopar.axes import AXES
from autopar.errors import Infeasible
from autopar.planner.candidate import GIB, Candidate, candidate_of, gib
from autopar.planner.estimate import Estimator
from autopar.planner.fold import NotAlike
from autopar.planner.plan import MemoryPlan, Pins
from autopar.planner.question import Question
from autopar.planner.solver import OutOfBudget
from autopar.planner.space import Choice, Form
from cost_models.rests import RESTS

__all__ = ["Short", "changes_that_do", "leanest", "memory_text", "shortfall_text"]

MESHES = 12  # that are looked at for one change, those that split the most first
DOUBLINGS = 5  # of the GPUs
BETWEEN = 4  # numbers of GPUs tried between the last doubling that did not do and the first that did
MIB = 2.0**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Short:
    """The leanest choice: what its fullest stage needs, and of what."""

    choice: Choice
    stage: int
    stages: int
    memory: MemoryPlan
    needs_bytes: float


def shortfall_text(question: Question) -> str:
    """Empty where no choice was refused for its memory, or none can be priced."""
    found = leanest(question)
    if found is None:
        return ""
    limit = question.memory_limit_bytes
    form = {None: "", True: " sequence_parallel=true", False: " sequence_parallel=false"}[found.choice.form.sequence]
    counts = f"micro-batches={found.choice.micro_batches} {found.choice.resting}{form}"
    text = (
        f"The binding constraint is memory: the leanest candidate is {gib(max(1.0, found.needs_bytes - limit))} short of {gib(limit)} a "
        f"GPU. It is {found.choice.mesh} {counts}; its stage {found.stage} of {found.stages} needs "
        f"{gib(found.needs_bytes)} at the upper end of its interval, {gib(found.memory.total_bytes)} by the account: "
        f"{memory_text(found.memory)}."
    )
    changes = changes_that_do(question, found)
    if changes:
        return f"{text}\nTried, and each would do: {'; '.join(changes)}."
    return f"{text}\nNo change that was tried would do (pins, up to {question.gpus * 2**DOUBLINGS} GPUs, more memory)."


def memory_text(memory: MemoryPlan) -> str:
    """The terms, the largest first."""
    terms = {name.removesuffix("_bytes").replace("_", " "): getattr(memory, name) for name in memory.__struct_fields__}
    return ", ".join(f"{gib(size)} of {name}" for name, size in sorted(terms.items(), key=lambda x: -x[1]) if size)


def leanest(question: Question) -> Short | None:
    """Of the choices that split the most, the one whose fullest stage needs least; None where none can be priced."""
    best: tuple[float, Choice] | None = None
    for choice, estimator in _lean_choices(question):
        needs = _by_pieces(question, estimator)
        if best is None or needs < best[0]:
            best = needs, choice
    if best is None:
        return None
    needs, choice = best
    found = _leanest_candidate(question, choice)
    if found is None:
        return None
    totals = [s.memory.upper_bytes for s in found.stages]
    stage = max(range(len(totals)), key=totals.__getitem__)
    return Short(choice=choice, stage=stage, stages=len(totals), memory=found.stages[stage].memory, needs_bytes=max(totals[stage], needs))


def _lean_choices(question: Question) -> Iterator[tuple[Choice, Estimator]]:
    """Of each mesh the smallest micro-batches and the most that rests in parts, in every form of the tensor axis."""
    meshes = sorted(question.space.meshes(), key=lambda m: (-m.over("operators") * m.over("layers"), -m.over("operators")))
    for mesh in meshes[:MESHES]:
        counts = question.space.micro_batch_counts(mesh)
        if not counts:
            continue
        first = question.space.form if mesh.inner else Form()
        forms = (first, Form(sequence=True), Form(sequence=False)) if mesh.has_forms and first.sequence is None else (first,)
        for (rest, shard), form in itertools.product(question.space.rests(mesh), forms):
            for schedule, chunks in question.space.schedules(mesh, max(counts)):
                choice = Choice(
                    mesh=mesh, micro_batches=max(counts), schedule=schedule, rest=rest, shard=shard, form=form, chunks=chunks
                )  # fmt: skip
                rank = question.known.rank(mesh, choice.micro_batches, question.batch_size, question.recipe, form)
                estimator = question.estimator(rank, choice)
                if not isinstance(estimator, str):
                    yield choice, estimator


def _by_pieces(question: Question, estimator: Estimator) -> float:
    """The memory whose room (Estimator.room_bytes) is what the pieces of the fullest stage need at least."""
    return estimator.upper_bytes(estimator.least_bytes)


def _leanest_candidate(question: Question, choice: Choice) -> Candidate | None:
    """The choice with its leanest cuts, as it would run."""
    rank = question.known.whole(choice.mesh, choice.micro_batches, question.batch_size, question.recipe, choice.form)
    estimator = question.estimator(rank, choice)
    if isinstance(estimator, str):
        return None
    least = estimator.least_bytes
    cuts = question.pinned_cuts(estimator)
    try:
        part = estimator.partition(
            limit_bytes=least * (1 + 1e-9) + 1.0 if cuts is None else float("inf"), cuts=cuts if not isinstance(cuts, str) else None
        )
    except (Infeasible, OutOfBudget):
        return None
    return candidate_of(estimator, part) if part is not None else None


# ------------------------------------------------------------------------------------------------------------- changes
def changes_that_do(question: Question, short: Short) -> list[str]:
    """What would make it fit, as the user would write it: pins alone, then together; GPUs; memory."""
    pins = dict(_pins_changed(question.pins))
    found = [text for text, changed in pins.items() if _fits(question, pins=changed)]
    if not found and len(pins) > 1:
        together = question.pins
        for changed in pins.values():
            differs = {k: getattr(changed, k) for k in changed.__struct_fields__ if getattr(changed, k) != getattr(question.pins, k)}
            together = msgspec.structs.replace(together, **differs)
        found = [" with ".join(pins)] if _fits(question, pins=together) else []
    gpus = _fewest_gpus(question)
    memory = _least_memory(question, short)
    return [*found, *([f"{gpus} GPUs"] if gpus else []), *([f"{memory} a GPU"] if memory else [])]


def _pins_changed(pins: Pins) -> Iterator[tuple[str, Pins]]:
    """A leaner value of each pin that has one, or the pin left out."""
    most = max(row.zero for row in RESTS.values())
    if pins.zero not in (None, most):
        yield f"zero={most}", msgspec.structs.replace(pins, zero=most)
    if pins.recompute == "none":
        yield "recompute=full", msgspec.structs.replace(pins, recompute="full")
    if pins.micro_batch not in (None, 1) or pins.micro_batches is not None:
        yield "micro_batch=1", msgspec.structs.replace(pins, micro_batch=1, micro_batches=None)
    if pins.sequence_parallel is False:
        yield "sequence_parallel=true", msgspec.structs.replace(pins, sequence_parallel=True)
    for axis in AXES:
        if pins.of_axis(axis) is not None and pins.blocks is None:
            yield f"{axis} not pinned", pins.without_axis(axis)


def _fits(question: Question, *, pins: Pins | None = None, gpus: int | None = None, limit_bytes: int | None = None) -> bool:
    """Whether a plan was found; the leanest choices alone are tried."""
    other = question.other(
        gpus=gpus or question.gpus, pins=pins or question.pins, batch_size=question.batch_size, recipe=question.recipe,
        memory_limit_bytes=limit_bytes or question.memory_limit_bytes,
    )  # fmt: skip
    try:
        for choice, estimator in _lean_choices(other):
            if _by_pieces(other, estimator) <= other.memory_limit_bytes and other.exact(choice) is not None:
                return True
    except NotAlike:
        pass
    return False


def _fewest_gpus(question: Question) -> int | None:
    most = question.cluster.nodes * question.cluster.gpus_per_node if question.cluster.nodes is not None else None
    last = question.gpus
    for k in range(1, DOUBLINGS + 1):
        gpus = question.gpus * 2**k
        if most is not None and gpus > most:
            return None
        if _fits(question, gpus=gpus):
            step = max(1, (gpus - last) // (BETWEEN + 1))
            between = range(last + step, gpus, step)
            return next((n for n in between if _fits(question, gpus=n)), gpus)
        last = gpus
    return None


def _least_memory(question: Question, short: Short) -> str:
    """The need, rounded up to what a person would write, and a little more where that is not enough."""
    unit = GIB if short.needs_bytes >= 4 * GIB else MIB
    for spare in (1.0, 1.02, 1.1):
        rounded = -(-int(short.needs_bytes * spare) // int(unit))
        if _fits(question, limit_bytes=int(rounded * unit)):
            return f"{rounded} {'GiB' if unit == GIB else 'MiB'}"
    return ""
