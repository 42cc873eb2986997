"""The page of a plan: everything that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir import Program
from autopar.measure import OpCost
from autopar.measured import Compared
from autopar.planner.plan import Plan
from autopar.report.explanation import Explanation
from autopar.report.page.charts import (
    AXIS_COLOURS,
    Spec,
    families_chart,
    matrix_chart,
    memory_chart,
    parts_chart,
    pool_chart,
    timeline_chart,
)
from autopar.report.page.graph import tree_of
from autopar.report.page.layout import rendered
from autopar.report.page.measuring import measured_chart, measured_timeline_chart
from autopar.report.page.vega import vega_of
from autopar.report.strategies import kind_of
from autopar.report.timeline import MOST_DRAWN, timeline_of
from autopar.report.units import seconds_text

__all__ = ["Emitted", "page_of"]

MOST_LINES = 40_000  # of source; a file of a model with more is not read in a page


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """The emitted source, the operator that begins at a line, what each operator costs on one rank, and the captured program."""

    source: str
    lines: Mapping[int, str]
    costs: Mapping[str, OpCost]
    program: Program


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """A line of source. op: the operator that it is, '' for none."""

    number: int
    text: str
    op: str
    title: str


def page_of(
    plan: Plan, explanation: Explanation, *, emitted: Emitted | None = None, measured: Compared | None = None
) -> str:  # fmt: skip
    """The whole file. emitted: the source, where the model is at hand; measured: a run beside the plan. Raises LibraryMissing."""
    made = timeline_of(plan)
    matrix, matrix_note = matrix_chart(plan) if plan.gpus > 1 else (None, "")
    charts: dict[str, Spec | None] = {
        "timeline": timeline_chart(made), "memory": memory_chart(made, plan), "parts": parts_chart(explanation),
        "pool": pool_chart(explanation), "families": families_chart(explanation), "matrix": matrix,
        "measured": measured_chart(measured) if measured is not None else None,
        "ran": measured_timeline_chart(made, measured) if measured is not None else None,
    }  # fmt: skip
    tree = tree_of(plan, emitted.program if emitted else None, emitted.costs if emitted else None)
    axes = [axis for axis, n in plan.mesh.items() if n > 1 and axis in plan.axes]
    return rendered(
        "plan.html", plan=plan, x=explanation, timeline=made, drawn=MOST_DRAWN, tree=tree, axes=axes, colours=AXIS_COLOURS, emitted=emitted,
        lines=_lines(emitted) if emitted else [], cut=emitted is not None and emitted.source.count("\n") > MOST_LINES,
        measured=measured, matrix_note=matrix_note, charts={name: vega_of(spec) for name, spec in charts.items() if spec is not None},
    )  # fmt: skip


def _lines(emitted: Emitted) -> list[_Line]:
    found = []
    known = {op.name: op for op in emitted.program.ops}
    for k, text in enumerate(emitted.source.split("\n")[:MOST_LINES], start=1):
        name = emitted.lines.get(k, "")
        title = ""
        if name:
            cost, op = emitted.costs.get(name), known.get(name)
            parts = [f"{kind_of(name)} in {op.module or 'the model'}" if op else kind_of(name)]
            if cost is not None:
                parts += [f"forward {seconds_text(cost.forward_s)}, backward {seconds_text(cost.backward_s)}"]
                parts += [f"of that communication {seconds_text(cost.communication_s)}"] if cost.communication_s else []
            title = "\n".join([*parts, *([op.source] if op and op.source else [])])
        found.append(_Line(number=k, text=text, op=name, title=title))
    return found
