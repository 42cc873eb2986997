"""The timeline and the memory of a step as one SVG, for slides."""

from __future__ import annotations

from typing import Any

from autopar.planner.plan import Plan
from autopar.report.page.charts import memory_chart, timeline_chart
from autopar.report.page.vega import picture
from autopar.report.timeline import timeline_of

__all__ = ["svg_of"]

WIDTH = 900  # pixels of the plots


def svg_of(plan: Plan) -> str:
    """Raises LibraryMissing."""
    made = timeline_of(plan)
    charts = [chart for chart in (timeline_chart(made), memory_chart(made, plan)) if chart is not None]
    for chart in charts:
        chart.pop("$schema")
        chart.pop("autosize")
        chart["width"] = WIDTH
    spec: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "background": "white", "vconcat": charts,
        "title": {"text": f"{plan.model} on {plan.gpus} GPUs of {plan.cluster}", "anchor": "start"},
        "resolve": {"scale": {"color": "independent"}},
    }  # fmt: skip
    return picture(spec)
