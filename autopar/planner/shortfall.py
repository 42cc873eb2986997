"""Why no plan fits into memory: the leanest choice, its fullest stage and what fills it, and what would help, each tried first.

The need of a choice is that of its leanest cuts with all recomputed that may be, by the account that plans are checked with (liveness); it
does not depend on how much memory there is, so what is short shrinks byte for byte as memory grows. A change is said only if a plan that
fits was found under it: of the pins, one at a time, then together, without those that are not needed; of the GPUs, the fewest of those
tried; of the memory of a GPU.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from autopar.axes import AXES
from autopar.errors import Infeasible, PlanError
from autopar.planner.candidate import GIB, Candidate, candidate_of
from autopar.planner.estimate import FEW, Estimator
from autopar.planner.fold import NotAlike
from autopar.planner.modes import RECOMPUTES
from autopar.planner.plan import MemoryPlan, Pins
from autopar.planner.question import Question
from autopar.planner.resources import usable_bytes
from autopar.planner.solver import OutOfBudget
from autopar.planner.space import Choice, Form, Mesh
from autopar.report.units import bytes_text
from cost_models.cluster import MOST_GPUS, list_clusters, load_cluster
from cost_models.pipeline import SCHEDULES
from cost_models.rests import RESTS

__all__ = [
    "Short", "changes_that_do", "clusters_that_do", "elsewhere_too", "gpus_that_do", "leanest", "memory_text", "pins_that_do",
    "shortfall_text", "sizes_that_do", "tried", "values_that_do",
]  # fmt: skip

LEANEST = 3  # meshes of which it is worked out what their leanest choices need as they run
MESHES = 12  # that are looked at for one change, those that split the most first
VALUES: Mapping[str, tuple[Any, ...]] = {
    "zero": tuple(sorted({row.zero for row in RESTS.values()})), "recompute": (*RECOMPUTES, "auto"), "schedule": tuple(SCHEDULES),
    "sequence_parallel": (False, True),
}  # fmt: skip
OTHERS = ("schedule", "virtual_stages", "shard", "blocks", "even_stages")  # pins that may take memory beside those with a leaner value
DOUBLINGS = 5  # of the GPUs
SIZES = 4  # of a mesh axis that are tried in place of one that makes no mesh
CLUSTERS = 3  # of the catalogue that are tried in place of one with too few GPUs
NEAREST = 2  # choices that are tried with other than their leanest cuts, where none fits with these, and beside the leanest of each mesh;
NEAREST_OPS = 5000  # more of small programs: as many as have so many operators together
NEAR = 4  # numbers of GPUs below those that were asked for that are tried
BETWEEN = 31  # numbers of GPUs between the last doubling that did not do and the first that did: five of them are tried
SPARE = (1 + 1e-9, 1.02, 1.1, 1.5, math.inf)  # times the least that pieces need: what several need together may be more
MIB = 2.0**20


class _Ended(Exception):
    """The user has enough of what is tried."""


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
    form = question.space.formed(found.choice.form)
    text = (
        f"The binding constraint is memory: the leanest candidate is {bytes_text(max(1.0, found.needs_bytes - limit))} short of "
        f"{bytes_text(limit)} a GPU. It is {found.choice.words}{form}."
    )
    stage = f"stage {found.stage} of {found.stages}" if found.stages > 1 else "fullest GPU"
    needs = (
        f"Its {stage} needs {bytes_text(found.needs_bytes)} at the upper end of its interval, {bytes_text(found.memory.total_bytes)} by "
        f"the account: {memory_text(found.memory)}."
    )
    nothing = f"\nNo change that was tried would do (pins, up to {question.gpus * 2**DOUBLINGS} GPUs, more memory)."
    return f"{text}{tried(lambda: changes_that_do(question, found)) or nothing}\n{needs}"


def memory_text(memory: MemoryPlan) -> str:
    """The terms, the largest first."""
    terms = {name.replace("_", " "): size for name, size in memory.terms.items()}
    return ", ".join(f"{bytes_text(size)} of {name}" for name, size in sorted(terms.items(), key=lambda x: -x[1]) if size)


def leanest(question: Question) -> Short | None:
    """Of the choices that split the most, the one whose fullest stage needs least; None where none can be priced."""
    known = dict(_lean_choices(question))
    if not known:
        return None
    needs = {choice: _by_pieces(estimator) for choice, estimator in known.items()}
    choice = min(needs, key=needs.__getitem__)
    first = dataclasses.replace(choice, form=question.space.form)
    if first in known:
        for other in question.space.leaner(first, known[first].prices):  # those that keep less at a price
            if other not in known and (estimator := _estimator(question, other)) is not None:
                needs[other] = _by_pieces(estimator)
    of_meshes: dict[Mesh, Choice] = {}  # the leanest of each by its pieces, of which several may need more together
    for choice in sorted(needs, key=needs.__getitem__):
        of_meshes.setdefault(choice.mesh, choice)
    found = (_as_it_runs(question, choice, needs[choice]) for choice in list(of_meshes.values())[:LEANEST])
    return min((x for x in found if x is not None), key=lambda x: x.needs_bytes, default=None)


def _as_it_runs(question: Question, choice: Choice, needs: float) -> Short | None:
    """needs: of its pieces, at least."""
    found = _leanest_candidate(question, choice)
    if found is None:
        return None
    totals = [s.memory.upper_bytes for s in found.stages]
    stage = max(range(len(totals)), key=totals.__getitem__)
    return Short(
        choice=choice, stage=stage, stages=len(totals), memory=found.stages[stage].memory, needs_bytes=max(totals[stage], needs)
    )  # fmt: skip


def _lean_choices(question: Question, worth: Callable[[Choice], bool] = lambda _: True) -> Iterator[tuple[Choice, Estimator]]:
    """Of each mesh the smallest micro-batches and the most that rests in parts, in every form of the tensor axis. worth: which choices are
    priced."""
    meshes = sorted(question.space.meshes(), key=lambda m: (-m.over("operators") * m.over("layers"), -m.over("operators")))
    for mesh in meshes[:MESHES]:
        counts = question.space.micro_batch_counts(mesh)
        for count in dict.fromkeys((max(counts), min(counts))) if counts else ():  # what cannot be split into many runs whole
            found = list(_of_mesh(question, mesh, count, worth))
            yield from found
            if found:
                break


def _of_mesh(question: Question, mesh: Mesh, count: int, worth: Callable[[Choice], bool]) -> Iterator[tuple[Choice, Estimator]]:
    first = question.space.form if mesh.inner else Form()
    forms = (first, Form(sequence=True), Form(sequence=False)) if mesh.has_forms and first.sequence is None else (first,)
    for (rest, shard), form in itertools.product(question.space.rests(mesh), forms):
        for schedule, chunks in question.space.schedules(mesh, count):
            choice = Choice(
                mesh=mesh, micro_batches=count, schedule=schedule, rest=rest, shard=shard, form=form, chunks=chunks
            )  # fmt: skip
            estimator = _estimator(question, choice) if worth(choice) else None
            if estimator is not None:
                yield choice, estimator


def _estimator(question: Question, choice: Choice) -> Estimator | None:
    rank = question.known.rank(choice.mesh, choice.micro_batches, question.batch_size, question.recipe, choice.form)
    estimator = question.estimator(rank, choice)
    return None if isinstance(estimator, str) else estimator


def _by_pieces(estimator: Estimator) -> float:
    """The memory whose room (Estimator.room_bytes) is what the pieces of the fullest stage need at least."""
    return estimator.upper_bytes(estimator.least_bytes)


def _leanest_candidate(question: Question, choice: Choice, *, limit_bytes: float = math.inf) -> Candidate | None:
    """The choice with its leanest cuts, as it would run. limit_bytes: None where no cuts are found that need less."""
    rank = question.known.whole(choice.mesh, choice.micro_batches, question.batch_size, question.recipe, choice.form)
    estimator = question.estimator(rank, choice)
    if isinstance(estimator, str):
        return None
    cuts = question.pinned_cuts(estimator)
    for spare in SPARE if cuts is None else SPARE[-1:]:
        try:
            limit = estimator.least_bytes * spare + 1.0
            part = estimator.partition(limit_bytes=limit, cuts=cuts if not isinstance(cuts, str) else None, nodes=question.nodes)
        except (Infeasible, OutOfBudget):
            if estimator.upper_bytes(estimator.least_bytes * spare) >= limit_bytes:
                break
            continue
        return candidate_of(estimator, part) if part is not None else None
    return None


# ------------------------------------------------------------------------------------------------------------- changes
def changes_that_do(question: Question, short: Short) -> list[str]:
    """What would make it fit, as the user would write it: pins alone, then together; GPUs; memory."""
    found = _that_do(question, dict(_pins_changed(question)))
    gpus = _fewest_gpus(question)
    memory = _least_memory(question, short)
    return elsewhere_too(question, [*found, *([f"{gpus} GPUs"] if gpus else []), *([f"{memory} a GPU"] if memory else [])])


def tried(changes: Callable[[], Sequence[str]]) -> str:
    """As the end of a refusal; also that they were not tried, where the user has enough."""
    try:
        found = changes()
    except _Ended:
        return "\nWhat would do was not found out: ended by Ctrl-C."
    return f"\nTried, and each would do: {'; '.join(found)}." if found else ""


def elsewhere_too(question: Question, changes: Sequence[str]) -> list[str]:
    """The changes, and the softwares that can run a plan with the same pins on the same GPUs."""
    found = []
    for other in question.elsewhere:
        if _fits(dataclasses.replace(question, spaces=other.spaces, recipe=other.recipe, store=question.known, elsewhere=())):
            found.append(other.name)
    return [*changes, *([f"{', '.join(found)} in its place"] if found else [])]


def values_that_do(question: Question) -> list[str]:
    """Of each pin of the user the nearest other value, where its own is none that the software has."""
    pins, found = question.asked, []
    for name, values in VALUES.items():
        own = getattr(pins, name)
        for value in sorted(values, key=lambda v: abs(values.index(v) - values.index(own))) if own in values else ():
            with contextlib.suppress(PlanError):  # what else is pinned excludes it
                if value != own and _fits(question, pins=msgspec.structs.replace(pins, **{name: value})):
                    found.append(f"{name}={str(value).lower()}")
                    break
    return found


def pins_that_do(question: Question) -> list[str]:
    """Of what the user has pinned what would have to be left free, alone or together, where memory is not what is short."""
    pins = question.asked
    free = {f"{name} not pinned": without for name, without in _left_out(question, pins.__struct_fields__)}
    return _that_do(question, free | dict(_axes_left_out(pins)))


def gpus_that_do(question: Question) -> list[str]:
    """The most GPUs below those that were asked for on which there is a plan, of a few numbers that are tried."""
    batch = question.batch_size or 1
    most = min(question.gpus - 1, question.cluster.gpu_count or question.gpus)
    fewer = sorted({*(math.gcd(n, batch) for n in (question.gpus, most)), *range(max(1, most - NEAR + 1), most + 1)}, reverse=True)
    found = next((n for n in fewer if n <= most and _fits(question, gpus=n)), None)
    return [f"{found} GPU{'s' * (found > 1)}"] if found else []


def clusters_that_do(question: Question) -> list[str]:
    """The cluster of the catalogue with as many GPUs as are asked for on which there is a plan. Those with GPUs of the same kind, or else
    of like memory, are tried first."""
    gpu = question.cluster.gpu
    clusters = [c for name in list_clusters() if (c := load_cluster(name)).gpu_count is None or c.gpu_count >= question.gpus]
    clusters.sort(key=lambda c: (c.gpu.name != gpu.name, c.gpu.host != gpu.host, abs(c.gpu.memory_bytes - gpu.memory_bytes)))
    stated = question.memory_limit_bytes != usable_bytes(gpu)
    for cluster in clusters[:CLUSTERS]:
        limit = question.memory_limit_bytes if stated else usable_bytes(cluster.gpu)
        if _fits(dataclasses.replace(question, cluster=cluster, store=None, memory_limit_bytes=limit)):
            return [f"the cluster {cluster.name}"]
    return []


def _left_out(question: Question, names: Iterable[str]) -> Iterator[tuple[str, Pins]]:
    pins = question.asked
    follow = () if question.program.own_loss else ("schedule", "micro_batches")  # from that (wishes.for_loss_outside)
    for name in names:
        if name not in (*AXES, "axes", *follow) and getattr(pins, name) is not None:
            with contextlib.suppress(PlanError):  # what else is pinned needs it
                yield name, msgspec.structs.replace(pins, **{name: None})


def sizes_that_do(question: Question) -> list[str]:
    """Of each mesh axis that the user has pinned the nearest other sizes under which there is a plan, where its own makes no mesh."""
    found = []
    pins = question.asked
    for axis in [axis for axis in AXES if pins.of_axis(axis) is not None and pins.blocks is None]:
        pinned, free = pins.of_axis(axis) or 0, question.under(pins.with_axis(axis, None))
        sizes = {mesh.sizes()[axis] for each in free for mesh in dataclasses.replace(question.space, pins=each).meshes()}
        nearest = sorted(sizes, key=lambda n: (abs(n - pinned), n))[:SIZES]
        found += [f"{axis}={n}" for n in nearest if _fits_with(question, axis, n)][:2]
    return found


def _fits_with(question: Question, axis: str, n: int) -> bool:
    """Whether a plan was found with another size of a pinned mesh axis; False where what else is pinned excludes it."""
    try:
        pins = question.asked.with_axis(axis, n)
    except PlanError:
        return False
    return _fits(question, pins=pins)


def _axes_left_out(pins: Pins) -> Iterator[tuple[str, Pins]]:
    for axis in AXES:
        if pins.of_axis(axis) is not None and pins.blocks is None:
            yield f"{axis} not pinned", pins.with_axis(axis, None)


def _that_do(question: Question, pins: dict[str, Pins]) -> list[str]:
    """Each alone, or else together those that are needed."""
    found = [text for text, changed in pins.items() if _fits(question, pins=changed)]
    if not found and len(pins) > 1 and _fits(question, pins=_together(question.asked, pins)):
        for text in list(pins):
            fewer = {t: p for t, p in pins.items() if t != text}
            if len(fewer) > 1 and _fits(question, pins=_together(question.asked, fewer)):
                pins = fewer
        found = [" with ".join(pins)]
    return found


def _together(pins: Pins, changes: Mapping[str, Pins]) -> Pins:
    """All of these changes of the pins."""
    differs = {
        k: getattr(changed, k) for changed in changes.values() for k in changed.__struct_fields__ if getattr(changed, k) != getattr(pins, k)
    }
    return msgspec.structs.replace(pins, **differs)


def _pins_changed(question: Question) -> Iterator[tuple[str, Pins]]:
    """A leaner value of each pin that has one, or the pin left out; and smaller micro-batches than are tried where none are pinned."""
    pins = question.asked
    leaner = [msgspec.structs.replace(pins, zero=zero) for zero in sorted({row.zero for row in RESTS.values()}) if zero > (pins.zero or 0)]
    if pins.zero is not None and (most := next((p for p in reversed(leaner) if question.under(p)), None)) is not None:
        yield f"zero={most.zero}", most
    if pins.recompute not in (None, "auto", "full"):
        yield "recompute=full", msgspec.structs.replace(pins, recompute="full")
    if pins.micro_batch not in (None, 1) or pins.micro_batches is not None or _larger_alone(question):
        yield "micro_batch=1", msgspec.structs.replace(pins, micro_batch=1, micro_batches=None)
    if pins.sequence_parallel is False:
        yield "sequence_parallel=true", msgspec.structs.replace(pins, sequence_parallel=True)
    yield from ((f"{name} not pinned", without) for name, without in _left_out(question, OTHERS))
    yield from _axes_left_out(pins)


def _larger_alone(question: Question) -> bool:
    """Whether micro-batches of one sample are not tried on some mesh because there would be so many."""
    space, batch = question.space, question.batch_size
    if batch is None or question.pins.micro_batch is not None:
        return False
    counts = {mesh: space.micro_batch_counts(mesh) for mesh in space.meshes()}
    return any(found and max(found) < batch // mesh.over("batch") for mesh, found in counts.items())


def _fits(
    question: Question, *, pins: Pins | None = None, gpus: int | None = None, limit_bytes: int | None = None, first: Choice | None = None
) -> bool:
    """Whether a plan was found; the leanest choices alone are tried. pins: in place of the user's. first: a choice that is tried before
    them. Raises _Ended."""
    if question.stop():
        raise _Ended
    for under in question.under(question.asked if pins is None else pins):
        other = question.other(
            gpus=gpus or question.gpus, pins=under, batch_size=question.batch_size, recipe=question.recipe,
            memory_limit_bytes=limit_bytes or question.memory_limit_bytes,
        )  # fmt: skip
        with contextlib.suppress(NotAlike):
            if first is not None and under == question.pins and _one_fits(other, [first]):
                return True
            if _one_fits(other, _lean(other)):
                return True
    return False


def _lean(question: Question) -> list[Choice]:
    """Choices that fit by their pieces: of each mesh the leanest one, and as many others as a program of this size is tried with."""
    needs = [(_by_pieces(estimator), k, choice) for k, (choice, estimator) in enumerate(_lean_choices(question, question.could_fit))]
    firsts: dict[Mesh, Choice] = {}
    others: list[Choice] = []
    for nbytes, _, choice in sorted(needs, key=lambda need: need[:2]):
        if nbytes <= question.memory_limit_bytes and firsts.setdefault(choice.mesh, choice) is not choice:
            others.append(choice)
    return [*firsts.values(), *others[: _tries(question)]]


def _tries(question: Question) -> int:
    """So many tries that take a while a program of this size is worth."""
    return max(NEAREST, NEAREST_OPS // len(question.program.ops))


def _one_fits(question: Question, choices: Iterable[Choice]) -> bool:
    """Whether one of these choices fits: with its leanest cuts, or else, of those that lack least, as it would be planned, which takes
    longer to find out."""
    question.nodes, limit = FEW, question.memory_limit_bytes
    lacking: list[tuple[float, Choice]] = []
    for choice in choices:
        found = _leanest_candidate(question, choice, limit_bytes=limit)
        most = math.inf if found is None else max(stage.memory.upper_bytes for stage in found.stages)
        if most <= limit:
            return True
        lacking.append((most, choice))
    nearest = sorted(lacking, key=lambda pair: pair[0])[: _tries(question)]
    return any(question.exact(choice) is not None for _, choice in nearest)


def _fewest_gpus(question: Question) -> int | None:
    cluster = question.cluster
    most = MOST_GPUS if cluster.nodes is None else min(MOST_GPUS, cluster.nodes * cluster.gpus_per_node)
    last = question.gpus
    for k in range(1, DOUBLINGS + 1):
        gpus = question.gpus * 2**k
        if gpus > most:
            return None
        if _fits(question, gpus=gpus):
            between = _between(last, gpus, cluster.gpus_per_node)
            return [*between, gpus][bisect.bisect_left(between, True, key=lambda n: _fits(question, gpus=n))]
        last = gpus
    return None


def _between(few: int, many: int, node: int) -> range:
    """Numbers of GPUs above the few and below the many, evenly spaced: all of them, or of many whole nodes alone."""
    unit = 1 if many - few <= BETWEEN + 1 else node
    first = (few // unit + 1) * unit
    return range(first, many, unit * max(1, -(-((many - first) // unit) // BETWEEN)))


def _least_memory(question: Question, short: Short) -> str:
    """The need, rounded up to what a person would write, and a little more where that is not enough."""
    unit = GIB if short.needs_bytes >= 4 * GIB else MIB
    for spare in (1.0, 1.02, 1.1):
        rounded = -(-int(short.needs_bytes * spare) // int(unit))
        if _fits(question, limit_bytes=int(rounded * unit), first=short.choice):
            return f"{rounded} {'GiB' if unit == GIB else 'MiB'}"
    return ""
