"""The timeline and the memory of a step, or the charts of a sweep, as one SVG, for slides."""

from __future__ import annotations

from typing import Any

from autopar.planner.plan import Plan
from autopar.report.page.charts import Spec, memory_chart, timeline_chart
from autopar.report.page.sweep import sweep_charts
from autopar.report.page.vega import picture
from autopar.report.sweep import Sweep
from autopar.report.timeline import timeline_of

__all__ = ["svg_of", "svg_of_sweep"]

WIDTH = 900  # pixels of the plots


def svg_of(plan: Plan) -> str:
    """Raises LibraryMissing."""
    made = timeline_of(plan)
    charts = [chart for chart in (timeline_chart(made), memory_chart(made, plan)) if chart is not None]
    return _together(charts, "vconcat", WIDTH, f"{plan.model} on {plan.gpus} GPUs of {plan.cluster}")


def svg_of_sweep(found: Sweep) -> str:
    """Raises LibraryMissing; an empty picture with its title where nothing fits."""
    nothing: Spec = {"$schema": "", "autosize": {}, "data": {"values": [{}]}, "mark": {"type": "text", "text": "nothing fits"}}
    return _together(list(sweep_charts(found).values()) or [nothing], "concat", WIDTH // 2, found.model)


def _together(charts: list[Spec], how: str, width: int, title: str) -> str:
    for chart in charts:
        chart.pop("$schema")
        chart.pop("autosize")
        chart["width"] = width
    spec: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "background": "white", how: charts,
        "title": {"text": title, "anchor": "start"}, "resolve": {"scale": {"color": "independent"}},
    }  # fmt: skip
    return picture(spec | ({"columns": 2} if how == "concat" else {}))
