"""A measured run beside its plan: what `model.profile(...).save("run.json")` writes, and where the plan was wrong, and by what."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from autopar.axes import AXES, LAYERS, levels_of
from autopar.errors import AutoparError
from autopar.files import in_line
from autopar.planner.account import BUBBLE
from autopar.planner.plan import Plan
from autopar.planner.plan_account import SentAccount
from autopar.report.columns import wrapped
from autopar.report.units import bytes_text, seconds_text, table
from autopar.report.words import counted
from cost_models.collectives import KINDS

__all__ = [
    "MOST_SPANS", "Calls", "Compared", "RankRun", "Row", "Run", "RunError", "Span", "axis_of", "compared", "compared_json",
    "compared_text",
]  # fmt: skip

FORMAT, VERSION = "autopar-run", 1
OVER = "communication over "  # how the account of a plan names it, before the axis
MOST_SPANS = 4000  # of a rank, that are kept
ALL = "all ranks"
BESIDE = "what ranks tell each other beside the plan: that they run the same, the loss"
NOT_KEPT = "the plan was made before plans kept it; plan again"
NEAR = 1.1  # a figure within a tenth of what was predicted is not said to be wrong

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class RunError(AutoparError, ValueError):
    """A file that is no measured run, or one of another plan."""


class Calls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls of one kind in a step, and their seconds together."""

    count: Count
    seconds: Seconds


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank did from start to end, in seconds of the step: a pass ('forward', 'backward'), or the wait for a collective over an
    axis, by its kind."""

    what: str
    start_s: Seconds
    end_s: Seconds
    axis: str = ""


class RankRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank. passes: 'forward', 'backward' -> of all micro-batches of a step, with what is prepared for them; collectives: kind -> on
    this rank, in a step, as torch.profiler saw them; axes: group of ranks (an axis, or a level of
    one) -> the same as the run itself noted when it waited; memory_bytes: the
    most, None where the system does not tell; spans: of the step, in order (the first MOST_SPANS)."""

    rank: Count
    step_s: Seconds
    passes: dict[str, Calls]
    collectives: dict[str, Calls]
    memory_bytes: Count | None = None
    axes: dict[str, Calls] = {}
    spans: list[Span] = []


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """steps_s: of forward and backward of each step, on the slowest rank, without the profiler; the ranks' own figures are of one step
    with it. device: what they ran on."""

    program_hash: str
    mesh: dict[str, Annotated[int, msgspec.Meta(ge=1)]]
    micro_batches: Annotated[int, msgspec.Meta(ge=1)]
    schedule: str
    device: str
    steps_s: Annotated[list[Seconds], msgspec.Meta(min_length=1)]
    ranks: Annotated[list[RankRun], msgspec.Meta(min_length=1)]
    format: str = FORMAT
    version: int = VERSION

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Run:
        """Read and validate. RunError."""
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read the run {os.fspath(path)!r}: {getattr(error, 'strerror', None) or error}") from error
        try:
            found = msgspec.json.decode(data, type=Run)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RunError(f"{os.fspath(path)} is no measured run (model.profile(...).save(path) writes one): {in_line(error)}") from error
        if found.format != FORMAT or found.version != VERSION:
            raise RunError(f"{os.fspath(path)} is a run of version {found.version!r}; this autopar reads version {VERSION}. Measure again")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure. unit: 's' or 'bytes'; predicted, measured: None where it is not known; why: there is no prediction."""

    what: str
    unit: str
    predicted: float | None
    measured: float | None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    def _text(self, amount: float | None) -> str:
        return "-" if amount is None else seconds_text(amount) if self.unit == "s" else bytes_text(amount)

    @property
    def predicted_text(self) -> str:
        return self._text(self.predicted)

    @property
    def measured_text(self) -> str:
        return self._text(self.measured)

    @property
    def ratio_text(self) -> str:
        return "-" if self.ratio is None else f"{self.ratio:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """verdict: where the plan was wrong, in a sentence; ranks: of each pipeline rank the one that took longest, for its spans."""

    verdict: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    ranks: tuple[RankRun, ...] = ()


def compared(plan: Plan, run: Run) -> Compared:
    """RunError if the run is not one of the plan."""
    if run.program_hash != plan.program_hash:
        raise RunError(f"the run is of another model or batch than the plan ({plan.model}): measure the module that was compiled with it")
    if dict(run.mesh) != plan.mesh or run.micro_batches != plan.micro_batches or run.schedule != plan.schedule:
        ran = " ".join(f"{axis}={n}" for axis, n in run.mesh.items())
        raise RunError(f"the run had {ran}, {run.micro_batches} micro-batches, {run.schedule}, and the plan has others: it is another plan")
    step = Row(
        what="step without the optimizer", unit="s", predicted=plan.step_time_s - plan.optimizer_s, measured=statistics.median(run.steps_s)
    )
    rows = (step, *_stages(plan, run), *_collectives(plan, run), *_memory(plan, run))
    notes = [f"measured on {run.device}; the plan's figures are {plan.provenance}"]
    profiled = max(rank.step_s for rank in run.ranks)
    notes.append(
        f"stages and collectives are of one step with torch.profiler, which took {seconds_text(profiled)}: over an axis what a rank "
        f"waited, beside what the plan does not hide; of a kind what the backend ran, beside what the plan's take if nothing hides them. "
        f"Both hold what a rank waited for the others. ratio: measured over predicted"
    )
    slowest = [max(_of_stage(plan, run, k), key=lambda r: r.step_s, default=None) for k in range(plan.mesh[LAYERS])]
    return Compared(verdict=_verdict(step, rows), rows=rows, notes=tuple(notes), ranks=tuple(r for r in slowest if r is not None))


def _of_stage(plan: Plan, run: Run, rank: int) -> list[RankRun]:
    each = plan.gpus // plan.mesh[LAYERS]
    return [r for r in run.ranks if r.rank // each == rank]


def _stages(plan: Plan, run: Run) -> Iterator[Row]:
    """Of each pipeline rank: the seconds of one micro-batch's passes, on the slowest of its ranks."""
    for rank in range(plan.mesh[LAYERS]):
        own = [s for s, r in zip(plan.stages, plan.rank_of, strict=True) if r == rank]
        where = f" of pipeline rank {rank}" if plan.mesh[LAYERS] > 1 else ""
        for name, predicted in (("forward", sum(s.forward_s for s in own)), ("backward", sum(s.backward_s for s in own))):
            measured = [r.passes[name].seconds / plan.micro_batches for r in _of_stage(plan, run, rank) if name in r.passes]
            yield Row(what=f"{name}{where}, one micro-batch", unit="s", predicted=predicted, measured=max(measured, default=None))


def _collectives(plan: Plan, run: Run) -> Iterator[Row]:
    """All of a step on the rank that spends the most on them, by axis and by kind; the plan's are those that nothing hides."""
    totals = [sum(calls.seconds for calls in rank.collectives.values()) for rank in run.ranks]
    exposed = {kind.removeprefix(OVER): s for kind, s in (plan.account.seconds if plan.account else {}).items() if kind.startswith(OVER)}
    if any(totals) or exposed:
        yield Row(
            what="collectives in a step (predicted: what nothing hides)", unit="s", predicted=sum(exposed.values()), measured=max(totals)
        )
    by_rank = {rank.rank: _by_axis(rank) for rank in run.ranks}
    bubble = plan.account.seconds.get(BUBBLE) if plan.account else None
    if bubble is not None:  # which is of the rank that works longest, and waits least
        busiest = max(run.ranks, key=lambda rank: sum(calls.seconds for calls in rank.passes.values())).rank
        own = by_rank[busiest].get(LAYERS)
        yield Row(
            what=f"  over {LAYERS}, with the bubble, on the busiest rank", unit="s", predicted=bubble,
            measured=own.seconds if own else None,
        )  # fmt: skip
    for axis in dict.fromkeys([*exposed, *(axis for found in by_rank.values() for axis in found)]):
        if axis == LAYERS and bubble is not None:
            continue
        waited = [found[axis] for found in by_rank.values() if axis in found]
        most = max(waited, key=lambda calls: calls.seconds, default=None)
        count = f", {counted(most.count, 'wait')} in a step" if most else ""
        known = exposed.get(axis, 0.0 if any(x.axis == axis for x in _sent(plan)) else None)
        yield Row(
            what=f"  over {axis}{count}", unit="s", predicted=known, measured=most.seconds if most else None,
            why="" if known is not None else BESIDE if axis == ALL else f"the plan has no collective over {axis}",
        )  # fmt: skip
    yield from _by_kind(plan, run)


def _by_kind(plan: Plan, run: Run) -> Iterator[Row]:
    """Of each kind that the backend ran, on the rank where it took longest, beside what the plan sends of it on that pipeline rank."""
    of_rank = [(rank.rank // (plan.gpus // plan.mesh[LAYERS]), _kinds(rank)) for rank in run.ranks]
    seen = dict.fromkeys(kind for _, kinds in of_rank for kind in kinds)
    for kind in sorted(seen):
        stage, calls = max(((r, kinds[kind]) for r, kinds in of_rank if kind in kinds), key=lambda x: x[1].seconds)
        alike = {kind} | ({"reduce_scatter"} if kind == "all_reduce" and "reduce_scatter" not in seen else set())  # gloo runs one so
        sent = [x for x in _sent(plan) if x.kind in alike and x.rank == stage]
        whole = f", of which {n} reduce_scatter" if (n := sum(x.count for x in sent if x.kind != kind)) else ""
        planned = f" (plan: {sum(x.count for x in sent)}{whole})" if sent else ""
        yield Row(
            what=f"  of kind {kind}, {calls.count} in a step{planned}", unit="s", predicted=sum(x.seconds for x in sent) if sent else None,
            measured=calls.seconds, why="" if sent else BESIDE if plan.account and plan.account.sent else NOT_KEPT,
        )  # fmt: skip


def _sent(plan: Plan) -> list[SentAccount]:
    return plan.account.sent if plan.account else []


def _kinds(rank: RankRun) -> dict[str, Calls]:
    """Collectives by kind, under the names that plans have for what backends call 'allreduce' or '_reduce_scatter_base'."""
    found: dict[str, Calls] = {}
    for name, calls in rank.collectives.items():
        bare = re.sub(r"[^a-z]", "", name.lower())
        kind = next((kind for kind in (*KINDS, "send", "recv") if kind.replace("_", "") in bare), name)
        before = found.get(kind, Calls(count=0, seconds=0.0))
        found[kind] = Calls(count=before.count + calls.count, seconds=before.seconds + calls.seconds)
    return found


def _by_axis(rank: RankRun) -> dict[str, Calls]:
    """What a rank waited for, under the names that plans have for axes."""
    found: dict[str, Calls] = {}
    for group, calls in rank.axes.items():
        before = found.get(name := axis_of(group), Calls(count=0, seconds=0.0))
        found[name] = Calls(count=before.count + calls.count, seconds=before.seconds + calls.seconds)
    return found


def axis_of(group: str) -> str:
    """The axis that a group of ranks belongs to: 'shard', over which the parts of parameters lie, to 'dp'; 'dp_tp' to 'dp and tp'."""
    axes = {level: axis for axis in AXES for level in levels_of(axis)}
    found = list(dict.fromkeys(axes.get(part, part) for part in group.split("_"))) if group else []
    return ALL if set(found) >= set(AXES) or not found else " and ".join(found)


def _memory(plan: Plan, run: Run) -> Iterator[Row]:
    for rank in range(plan.mesh[LAYERS]):
        where = f" of pipeline rank {rank}" if plan.mesh[LAYERS] > 1 else ""
        measured = [r.memory_bytes for r in _of_stage(plan, run, rank) if r.memory_bytes is not None]
        yield Row(
            what=f"memory{where}", unit="bytes", predicted=float(plan.memory_bytes[plan.rank_of.index(rank)]),
            measured=float(max(measured)) if measured else None,
        )  # fmt: skip


def _verdict(step: Row, rows: tuple[Row, ...]) -> str:
    def off(ratio: float) -> str:
        return f"{ratio:.2f} times" if ratio >= 1 else f"{1 / ratio:.2f} times less than"

    ratio = step.ratio or 1.0
    if 1 / NEAR <= ratio <= NEAR:
        said = f"the step took {seconds_text(step.measured or 0.0)}, {ratio:.2f} times what was predicted"
    else:
        predicted = seconds_text(step.predicted or 0.0)
        said = f"the step took {seconds_text(step.measured or 0.0)}, {off(ratio)} the {predicted} that were predicted"
    known = [row for row in rows[1:] if row.ratio and row.unit == "s" and row.predicted and row.measured]
    worst = max(known, key=lambda row: abs((row.measured or 0.0) - (row.predicted or 0.0)), default=None)
    if worst is not None and worst.ratio is not None and not 1 / NEAR <= worst.ratio <= NEAR:
        said += f"; furthest off is {_named(worst)}: {worst.measured_text} and not {worst.predicted_text}"
    memory = [row for row in rows if row.unit == "bytes" and row.ratio]
    fullest = max(memory, key=lambda row: row.measured or 0.0, default=None)
    if fullest is not None:
        said += f"; {fullest.what} is {fullest.measured_text}, predicted {fullest.predicted_text}"
    return said


def _named(row: Row) -> str:
    what = row.what.strip()
    return f"communication {what.partition(' (')[0]}" if what.startswith(("over ", "of kind ")) else what


def compared_text(found: Compared) -> str:
    rows = [(row.what, row.predicted_text, row.measured_text, row.ratio_text) for row in found.rows]
    parts = [wrapped(found.verdict), table(("", "predicted", "measured", "ratio"), rows)]
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        if row.why:
            reasons.setdefault(row.why, []).append(row.what.strip().partition(",")[0])
    without = [wrapped(f"without a prediction: {', '.join(names)}: {why}") for why, names in reasons.items()]
    return "\n\n".join([*parts, "\n".join([*without, *map(wrapped, found.notes)])])


def compared_json(found: Compared) -> dict[str, Any]:
    rows = [
        {"what": r.what.strip(), "unit": r.unit, "predicted": r.predicted, "measured": r.measured, "ratio": r.ratio,
         **({"why": r.why} if r.why else {})} for r in found.rows
    ]  # fmt: skip
    spans = [{"rank": r.rank, "step_s": r.step_s, "spans": msgspec.to_builtins(r.spans)} for r in found.ranks]
    return {"verdict": found.verdict, "rows": rows, "notes": list(found.notes), "timeline": spans}
