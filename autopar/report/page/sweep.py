"""A sweep as a page: step time, cost, memory and MFU over numbers of GPUs as charts, every question in a table that can be sorted."""

from __future__ import annotations

from typing import Any

from autopar.report.page.charts import PALETTE, Spec, spec_of, tooltip_of
from autopar.report.page.layout import rendered
from autopar.report.page.vega import vega_of
from autopar.report.sweep import Point, Sweep, by_series, ended_before, sweep_verdict, where_it_stops
from autopar.report.units import bytes_text, seconds_text
from autopar.report.words import share_text

__all__ = ["sweep_charts", "sweep_page"]

GIB = 2.0**30
# name of a chart -> the field of its values, the title of its axis, whether equal distances are equal ratios
CHARTS = {
    "step": ("seconds", "seconds of a step", True), "cost": ("gpu_seconds", "GPU-seconds of a step", True),
    "memory": ("gib", "GiB of the fullest GPU", False), "mfu": ("mfu", "MFU", False),
}  # fmt: skip


def sweep_page(found: Sweep) -> str:
    """The whole file. Raises LibraryMissing."""
    charts = {name: vega_of(spec) for name, spec in sweep_charts(found).items()}
    stops = [*where_it_stops(found), *ended_before(found)]
    return rendered("sweep.html", x=found, verdict=sweep_verdict(found), stops=stops, charts=charts)


def sweep_charts(found: Sweep) -> dict[str, Spec]:
    """Nothing of what does not fit; a chart without values is left out."""
    names = [series.name or found.points[0].cluster for series in found.series]
    values = [
        _value(name, p) for name, (_, points) in zip(names, by_series(found), strict=True) for p in points if p.step_time_s is not None
    ]
    return {
        name: _chart([v for v in values if v[field] is not None], names, field, title, logarithmic)
        for name, (field, title, logarithmic) in CHARTS.items()
        if any(v[field] is not None for v in values)
    }


def _value(series: str, p: Point) -> dict[str, Any]:
    return {
        "series": series, "gpus": p.gpus, "seconds": p.step_time_s, "gpu_seconds": p.gpu_seconds,
        "gib": p.memory_bytes / GIB if p.memory_bytes else None, "mfu": p.mfu, "plan": p.plan, "takes": seconds_text(p.step_time_s or 0.0),
        "costs": f"{p.gpu_seconds or 0.0:,.4g} GPU-seconds a step",
        "holds": f"{bytes_text(p.memory_bytes or 0)} of {bytes_text(p.memory_limit_bytes)}",
        "of_peak": share_text(p.mfu) if p.mfu else "-",
    }  # fmt: skip


def _chart(values: list[dict[str, Any]], names: list[str], field: str, title: str, logarithmic: bool) -> Spec:
    scale = {"type": "log", "nice": False, "padding": 12} if logarithmic else {"zero": True}
    share = {"axis": {"format": ".0%"}} if field == "mfu" else {}
    colours = [PALETTE[k % len(PALETTE)] for k in range(len(names))]
    return spec_of(
        values, height=220, mark={"type": "line", "point": {"size": 60}},
        encoding={
            "x": {
                "field": "gpus", "type": "quantitative", "title": "GPUs", "scale": {"type": "log", "base": 2, "nice": False, "padding": 12},
                "axis": {"values": sorted({v["gpus"] for v in values}), "format": "d"},
            },
            "y": {"field": field, "type": "quantitative", "title": title, "scale": scale} | share,
            "color": {
                "field": "series", "type": "nominal", "title": None, "legend": {"orient": "top"} if len(names) > 1 else None,
                "scale": {"domain": names, "range": colours},
            },
            "tooltip": [
                tooltip_of("series", "of"), tooltip_of("gpus", "GPUs"), tooltip_of("takes", "a step takes"), tooltip_of("costs", "costs"),
                tooltip_of("holds", "holds"), tooltip_of("of_peak", "MFU"), tooltip_of("plan", "plan"),
            ],
        },
    )  # fmt: skip
