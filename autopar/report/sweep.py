"""What a sweep has found, as data and as text: a table of every question, a picture of it, the cheapest, and where scaling stops paying."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from autopar.report.columns import WIDTH, last_wrapped, wrapped
from autopar.report.units import bytes_text, count_text, seconds_text, table
from autopar.report.words import counted, share_text

__all__ = ["Point", "Series", "Sweep", "by_series", "ended_before", "sweep_text", "sweep_verdict", "where_it_stops"]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One question. step_time_s None: no plan, and why. gpu_seconds: of a step; per_sample: of a sample; efficiency: of a GPU, against the
    fewest GPUs of the series; cut_short: what is not known of a plan whose search was ended before its end."""

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
    cut_short: str = ""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The same over numbers of GPUs. stops_at: the last number that pays; why: what the further ones are spent on ('' where all pay)."""

    name: str
    gpus: list[int]
    stops_at: int | None
    why: str


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """cheapest, fastest: indices of points, None where nothing fits; remedy: what would do then, tried for the most GPUs and memory."""

    model: str
    schema: int
    unit: str
    points: list[Point]
    cheapest: int | None
    fastest: int | None
    series: list[Series]
    remedy: str = ""


def sweep_verdict(found: Sweep) -> str:
    if found.cheapest is None or found.fastest is None:
        return f"{found.model}: nothing fits"
    cheap, fast = found.points[found.cheapest], found.points[found.fastest]
    said = f"{found.model}: the cheapest that fits is {_point(cheap)}, {cheap.gpu_seconds:,.4g} GPU-seconds a step"
    return said + (f"; the fastest is {_point(fast)}" if found.fastest != found.cheapest else ", and it is the fastest")


def _point(p: Point) -> str:
    return f"{_where(p)}: {seconds_text(p.step_time_s or 0.0)} a step"


def _where(p: Point) -> str:
    batch = f", batch {p.batch}" if p.batch is not None else ""
    return f"{counted(p.gpus, 'GPU')} of {p.cluster} with {bytes_text(p.memory_limit_bytes)}{batch}"


def where_it_stops(found: Sweep) -> list[str]:
    """Of each series of several numbers of GPUs, in a sentence."""
    said = []
    for series in found.series:
        if series.stops_at is not None and len(series.gpus) > 1:
            name = f"{series.name}: " if series.name else ""
            most = "the most that was asked for" if series.stops_at == series.gpus[-1] else "the most of these that there is a plan for"
            why = f"; {series.why}" if series.why else f", {most}"
            said.append(f"{name}scaling pays up to {counted(series.stops_at, 'GPU')}{why}")
    return said


def ended_before(found: Sweep) -> list[str]:
    """Of each search that was ended before its end, in a sentence."""
    return [f"{_where(p)}: {p.cut_short}" for p in found.points if p.cut_short]


# ----------------------------------------------------------------------------------------------------------------- text
def sweep_text(found: Sweep) -> str:
    tables = [f"{series.name}\n" * bool(series.name) + _table(found, points) for series, points in by_series(found)]
    remedy = "\n".join(map(wrapped, found.remedy.splitlines()))
    parts = [wrapped(sweep_verdict(found)), remedy, *tables, _picture(found), *map(wrapped, [*where_it_stops(found), *ended_before(found)])]
    return "\n\n".join(part for part in parts if part)


def by_series(found: Sweep) -> Iterator[tuple[Series, list[Point]]]:
    points = iter(found.points)
    for series in found.series:
        yield series, list(itertools.islice(points, len(series.gpus)))


def _table(found: Sweep, points: Sequence[Point]) -> str:
    rows: list[tuple[str, ...]] = []
    for p in points:
        gpus = f"{p.gpus}*" if found.cheapest is not None and p is found.points[found.cheapest] else f"{p.gpus}"
        if p.step_time_s is None:
            rows.append((gpus, *["-"] * 5, p.why))
            continue
        rows.append((
            gpus, seconds_text(p.step_time_s), f"{p.gpu_seconds:,.4g}", count_text(p.work_per_s or 0.0), bytes_text(p.memory_bytes or 0),
            share_text(p.mfu) if p.mfu else "-", p.plan,
        ))  # fmt: skip
    return last_wrapped(("GPUs", "step", "GPU-s", f"{found.unit}/s", "memory", "MFU", "plan"), rows)


def _picture(found: Sweep) -> str:
    """Step time, cost, memory and MFU as bars, and how much of its work each GPU does, against the fewest GPUs."""
    fits = [p for p in found.points if p.step_time_s is not None]
    if len(found.points) < 2 or not fits:
        return ""
    slowest, dearest, best = (max(amounts) for amounts in zip(*((p.step_time_s or 0.0, p.gpu_seconds or 0.0, p.mfu or 0.0) for p in fits)))
    named = any(series.name for series in found.series)
    headings = (*(("",) if named else ()), "GPUs", "step", "GPU-s", "memory", "MFU", "each does")
    left = WIDTH - 2 - len("each does") - max(len(series.name) + 2 for series in found.series) - max(len(f"{p.gpus}") + 4 for p in fits)
    width = max(6, min(16, left // 4 - 2))
    rows: list[tuple[object, ...]] = []
    for series, points in by_series(found):
        for p in points:
            own = ((series.name,) if named else ()) + (p.gpus,)
            if p.step_time_s is None:
                rows.append((*own, "no" if "fit" in p.why else "none", "", "", "", ""))
                continue
            shares = (
                p.step_time_s / slowest, (p.gpu_seconds or 0.0) / dearest, (p.memory_bytes or 0) / p.memory_limit_bytes,
                (p.mfu or 0.0) / best if best else 0.0,
            )  # fmt: skip
            efficiency = f"{p.efficiency:.0%}" if p.efficiency is not None else ""
            rows.append((*own, *("#" * max(1, round(min(1.0, x) * width)) if x else "" for x in shares), efficiency))
    heading = "as bars (step, cost and MFU against the largest; memory against what a GPU may use; no: it does not fit), and how much of a "
    return wrapped(heading + "GPU's work on the fewest GPUs each does") + "\n" + table(headings, rows)
