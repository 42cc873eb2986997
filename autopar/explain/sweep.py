"""One capture, many questions: step time, cost, memory and MFU over numbers of GPUs, memories, clusters and batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from autopar.errors import AutoparError
from autopar.explain.families import in_words
from autopar.explain.study import Asked, Refused, Study
from autopar.planner.plan import Plan
from autopar.report.explanation import summary_of, time_of
from autopar.report.text import last_wrapped, wrapped
from autopar.report.units import bytes_text, count_text, seconds_text, table
from autopar.report.words import counted, share_text
from cost_models.cluster import Cluster

__all__ = ["Point", "Series", "Sweep", "sweep", "sweep_text"]

PAYS = 0.5  # of the work of the GPUs that are added must be had, or they do not pay
BAR = 32


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One question. step_time_s None: no plan, and why. gpu_seconds: of a step; per_sample: of a sample; efficiency: of a GPU, against the
    fewest GPUs of the series."""

    gpus: int
    cluster: str
    memory_limit_bytes: int
    batch: int | None
    step_time_s: float | None
    gpu_seconds: float | None = None
    per_sample: float | None = None
    work_per_s: float | None = None
    memory_bytes: int | None = None
    mfu: float | None = None
    efficiency: float | None = None
    plan: str = ""
    why: str = ""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The same over numbers of GPUs. stops_at: the last number that pays; why: what the further ones are spent on ('' where all pay)."""

    name: str
    gpus: list[int]
    stops_at: int | None
    why: str


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """cheapest, fastest: indices of points, None where nothing fits."""

    model: str
    schema: int
    unit: str
    points: list[Point]
    cheapest: int | None
    fastest: int | None
    series: list[Series]


def sweep(
    study: Study, gpus: Sequence[int], memories: Sequence[int | None], clusters: Sequence[Cluster], batches: Sequence[int | None]
) -> Sweep:
    """Every combination."""
    points: list[Point] = []
    series: list[Series] = []
    for cluster, memory, batch in itertools.product(clusters, memories, batches):
        asked = [
            dataclasses.replace(study.asked, gpus=n, cluster=cluster, memory_limit_bytes=memory, batch=batch or study.asked.batch)
            for n in sorted(set(gpus))
        ]  # fmt: skip
        answers = [_answered(study, x) for x in asked]
        made = list(_points(asked, answers))
        points += made
        plans = [(x.gpus, plan) for x, plan in zip(asked, answers, strict=True) if isinstance(plan, Plan)]
        stops_at, why = _stops(plans)
        several = (cluster.name if len(clusters) > 1 else "", bytes_text(memory) if len(memories) > 1 and memory else "",
                   f"batch {batch}" if len(batches) > 1 else "")  # fmt: skip
        series.append(Series(name=", ".join(x for x in several if x), gpus=[x.gpus for x in asked], stops_at=stops_at, why=why))
    units = (x.samples_unit for x in study.answers.values() if isinstance(x, Plan))
    fits = [k for k, point in enumerate(points) if point.step_time_s is not None]
    return Sweep(
        model=study.program.name, schema=1, unit=next(units, "samples"), points=points, series=series,
        cheapest=min(fits, key=lambda k: (points[k].per_sample or points[k].gpu_seconds or 0.0, points[k].gpus), default=None),
        fastest=min(fits, key=lambda k: (-(points[k].work_per_s or 0.0), points[k].gpus), default=None),
    )  # fmt: skip


def _answered(study: Study, asked: Asked) -> Plan | Refused | str:
    have = asked.cluster.gpu_count
    if have is not None and have < asked.gpus:
        return f"the cluster {asked.cluster.name} has {have} GPUs"
    try:
        return study.solve(asked)
    except AutoparError as error:
        return str(error).splitlines()[0]


def _points(asked: Sequence[Asked], answers: Sequence[Plan | Refused | str]) -> Iterator[Point]:
    first: float | None = None
    for question, found in zip(asked, answers, strict=True):
        common = {
            "gpus": question.gpus, "cluster": question.cluster.name, "memory_limit_bytes": question.limit_bytes, "batch": question.batch,
        }  # fmt: skip
        if not isinstance(found, Plan):
            yield Point(**common, step_time_s=None, why=found if isinstance(found, str) else found.why)  # type: ignore[arg-type]
            continue
        made, each = summary_of(found), found.tokens_or_samples_per_s / found.gpus
        first = first or each
        yield Point(
            **common, step_time_s=found.step_time_s, gpu_seconds=made.gpu_seconds_per_step,  # type: ignore[arg-type]
            per_sample=made.gpu_seconds_per_step / found.global_batch if found.global_batch else None, work_per_s=made.work_per_s,
            memory_bytes=made.memory_bytes, mfu=made.mfu, efficiency=each / first if first else None, plan=in_words(found),
        )  # fmt: skip


def _stops(plans: Sequence[tuple[int, Plan]]) -> tuple[int | None, str]:
    """The last number of GPUs that pays, and what those that are added to it are spent on."""
    for (n, few), (m, many) in itertools.pairwise(plans):
        gained = many.tokens_or_samples_per_s / few.tokens_or_samples_per_s - 1 if few.tokens_or_samples_per_s else 0.0
        if gained >= PAYS * (m / n - 1):
            continue
        shares = [{part.kind: part.share for part in time_of(plan)} for plan in (few, many)]
        grown = {kind: share - shares[0].get(kind, 0.0) for kind, share in shares[1].items() if kind != "compute"}
        most = max(grown, key=lambda kind: grown[kind], default="")
        said = f"{share_text(gained)} more work for {share_text(m / n - 1)} more GPUs"
        if most and grown[most] > 0.01:
            was = share_text(shares[0].get(most, 0.0))
            return n, f"{m} do {said}: {most} takes {share_text(shares[1][most])} of the step, where it was {was}"
        most = max(shares[1], key=lambda kind: shares[1][kind], default="compute")
        taken = f": {most} takes {share_text(shares[1][most])} of the step" if most != "compute" else ""
        return n, f"{m} do {said}{taken}"
    return (plans[-1][0] if plans else None), ""


# ----------------------------------------------------------------------------------------------------------------- text
def sweep_text(found: Sweep) -> str:
    several = {field: len({getattr(p, field) for p in found.points}) > 1 for field in ("cluster", "memory_limit_bytes", "batch")}
    titles = {"cluster": "cluster", "memory_limit_bytes": "of memory", "batch": "batch"}
    headings = ["GPUs", *(title for field, title in titles.items() if several[field])]
    headings += ["step", "GPU-s", f"{found.unit}/s", "memory", "MFU", "plan"]
    rows = []
    for k, p in enumerate(found.points):
        mark = "*" if k == found.cheapest else ""
        own = [f"{p.gpus}{mark}"]
        own += [p.cluster] if several["cluster"] else []
        own += [bytes_text(p.memory_limit_bytes)] if several["memory_limit_bytes"] else []
        own += [str(p.batch)] if several["batch"] else []
        if p.step_time_s is None:
            rows.append([*own, "-", "-", "-", "-", "-", p.why])
            continue
        rows.append([
            *own, seconds_text(p.step_time_s), f"{p.gpu_seconds:,.4g}", count_text(p.work_per_s or 0.0), bytes_text(p.memory_bytes or 0),
            share_text(p.mfu) if p.mfu else "-", p.plan,
        ])  # fmt: skip
    parts = [_verdict(found), last_wrapped(headings, rows)]
    parts += [_picture(found, several)]
    for series in found.series:
        name = f"{series.name}: " if series.name else ""
        if series.stops_at is not None and len(series.gpus) > 1:
            why = f"; {series.why}" if series.why else ", the most that was asked for"
            parts.append(wrapped(f"{name}scaling pays up to {counted(series.stops_at, 'GPU')}{why}"))
    return "\n\n".join(part for part in parts if part)


def _verdict(found: Sweep) -> str:
    if found.cheapest is None or found.fastest is None:
        return wrapped(f"{found.model}: nothing fits")
    cheap, fast = found.points[found.cheapest], found.points[found.fastest]
    said = f"{found.model}: the cheapest that fits is {_point(cheap)}, {cheap.gpu_seconds:,.4g} GPU-seconds a step"
    return wrapped(said + (f"; the fastest is {_point(fast)}" if found.fastest != found.cheapest else ", and it is the fastest"))


def _point(p: Point) -> str:
    batch = f", batch {p.batch}" if p.batch is not None else ""
    of = f"{counted(p.gpus, 'GPU')} of {p.cluster} with {bytes_text(p.memory_limit_bytes)}{batch}"
    return f"{of}: {seconds_text(p.step_time_s or 0.0)} a step"


def _picture(found: Sweep, several: Mapping[str, bool]) -> str:
    """Work in a second, as bars; how much of it each GPU does, against the fewest GPUs."""
    most = max((p.work_per_s or 0.0 for p in found.points), default=0.0)
    if not most or len(found.points) < 2:
        return ""
    rows = []
    for p in found.points:
        full = round(BAR * (p.work_per_s or 0.0) / most)
        efficiency = f"{p.efficiency:.0%}" if p.efficiency is not None else "does not fit" if "fit" in p.why else "no plan"
        own = [p.cluster] if several["cluster"] else []
        own += [bytes_text(p.memory_limit_bytes)] if several["memory_limit_bytes"] else []
        own += [f"batch {p.batch}"] if several["batch"] else []
        rows.append((*own, p.gpus, "#" * full, efficiency))
    blank = [""] * sum(several.values())
    return f"{found.unit} in a second; how much of a GPU's work on the fewest each does\n" + table((*blank, "GPUs", "", ""), rows)
