"""One capture, many questions: step time, cost, memory and MFU over numbers of GPUs, memories, clusters and batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from autopar.errors import AutoparError
from autopar.explain.study import Asked, Refused, Study
from autopar.planner.plan import Plan
from autopar.report.explanation import cut_short, in_words, summary_of, time_of
from autopar.report.sweep import Point, Series, Sweep
from autopar.report.units import bytes_text
from autopar.report.words import share_text
from cost_models.cluster import Cluster

__all__ = ["sweep"]

PAYS = 0.5  # of the work of the GPUs that are added must be had, or they do not pay


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
        several = (cluster.name if len(clusters) > 1 else "", bytes_text(asked[0].limit_bytes) if len(memories) > 1 else "",
                   f"batch {batch}" if len(batches) > 1 else "")  # fmt: skip
        series.append(Series(name=", ".join(x for x in several if x), gpus=[x.gpus for x in asked], stops_at=stops_at, why=why))
    units = (x.samples_unit for x in study.answers.values() if isinstance(x, Plan))
    fits = [k for k, point in enumerate(points) if point.step_time_s is not None]
    refused = [(not x.search.space.too_many, a.gpus, a.limit_bytes, x) for a, x in study.answers.items() if isinstance(x, Refused)]
    remedy = str(max(refused, key=lambda x: x[:3])[3].error) if refused and not fits and not study.stop() else ""
    return Sweep(
        model=study.program.name, schema=1, unit=next(units, "samples"), points=points, series=series,
        cheapest=min(fits, key=lambda k: (points[k].per_sample or points[k].gpu_seconds or 0.0, points[k].gpus), default=None),
        fastest=min(fits, key=lambda k: (-(points[k].work_per_s or 0.0), points[k].gpus), default=None),
        remedy=remedy,
    )  # fmt: skip


def _answered(study: Study, asked: Asked) -> Plan | Refused | str:
    if study.stop():
        return "not tried: ended by Ctrl-C"
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
            cut_short=cut_short(found),
        )  # fmt: skip


def _stops(plans: Sequence[tuple[int, Plan]]) -> tuple[int | None, str]:
    """The last number of GPUs that pays, and what those that are added to it are spent on."""
    kept = 0
    for k in range(1, len(plans)):
        if _gained(plans[kept], plans[k]) >= PAYS * (plans[k][0] / plans[kept][0] - 1):
            kept = k
    if kept + 1 >= len(plans):
        return (plans[-1][0] if plans else None), ""
    (n, few), (m, many) = plans[kept : kept + 2]
    gained = _gained(plans[kept], plans[kept + 1])
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


def _gained(few: tuple[int, Plan], many: tuple[int, Plan]) -> float:
    """How much more work the second does in a second, as a share of the first's."""
    less, more = few[1].tokens_or_samples_per_s, many[1].tokens_or_samples_per_s
    return more / less - 1 if less else 0.0
