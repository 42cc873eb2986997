"""The page: everything that is known of a plan, rendered by jinja2 with every text escaped; data and library are in the file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from autopar.ir import Program
from autopar.measure import OpCost
from autopar.measured import Compared
from autopar.planner.plan import Plan
from autopar.report.explanation import Explanation
from autopar.report.page.charts import (
    Spec,
    families_chart,
    matrix_chart,
    measured_chart,
    memory_chart,
    parts_chart,
    pool_chart,
    sweep_chart,
    timeline_chart,
)
from autopar.report.page.graph import tree_of
from autopar.report.page.vega import library_script, vega_of
from autopar.report.timeline import MOST_DRAWN, timeline_of
from autopar.report.units import bytes_text, count_text, seconds_text

__all__ = ["Emitted", "page_of"]

MOST_LINES = 40_000  # of source; a file of a model with more is not read in a page
AXIS_COLOURS = {"tp": "#0072b2", "dp": "#009e73", "cp": "#cc79a7", "ep": "#d55e00", "none": "#8a8a8a"}


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
    plan: Plan, explanation: Explanation, *, emitted: Emitted | None = None, sweep: Sequence[Mapping[str, Any]] = (),
    measured: Compared | None = None,
) -> str:  # fmt: skip
    """The whole file. emitted: the source, where the model is at hand; sweep: points of `autopar sweep`; measured: a run beside the plan.
    Raises LibraryMissing."""
    made = timeline_of(plan)
    matrix, matrix_note = matrix_chart(plan) if plan.gpus > 1 else (None, "")
    charts: dict[str, Spec | None] = {
        "timeline": timeline_chart(made), "memory": memory_chart(made, plan), "parts": parts_chart(explanation),
        "pool": pool_chart(explanation), "families": families_chart(explanation), "matrix": matrix,
        "sweep": sweep_chart([dict(point) for point in sweep]) if sweep else None,
        "measured": measured_chart(measured) if measured is not None else None,
    }  # fmt: skip
    tree = tree_of(plan, emitted.program if emitted else None, emitted.costs if emitted else None)
    axes = [axis for axis, n in plan.mesh.items() if n > 1 and axis in plan.axes]
    return _template().render(
        plan=plan, x=explanation, timeline=made, drawn=MOST_DRAWN, tree=tree, axes=axes, colours=AXIS_COLOURS, emitted=emitted,
        lines=_lines(emitted) if emitted else [], cut=emitted is not None and emitted.source.count("\n") > MOST_LINES, sweep=sweep,
        measured=measured, matrix_note=matrix_note, charts={name: vega_of(spec) for name, spec in charts.items() if spec is not None},
        library=_script(library_script()), script=_script(_file("page.js")), style=Markup(_file("page.css")),
    )  # fmt: skip


def _lines(emitted: Emitted) -> list[_Line]:
    found = []
    known = {op.name: op for op in emitted.program.ops}
    for k, text in enumerate(emitted.source.split("\n")[:MOST_LINES], start=1):
        name = emitted.lines.get(k, "")
        title = ""
        if name:
            cost, op = emitted.costs.get(name), known.get(name)
            parts = [name, *([f"{op.target} in {op.module or 'the model'}"] if op else [])]
            if cost is not None:
                parts += [f"forward {seconds_text(cost.forward_s)}, backward {seconds_text(cost.backward_s)}"]
                parts += [f"of that communication {seconds_text(cost.communication_s)}"] if cost.communication_s else []
            title = "\n".join([*parts, *([op.source] if op and op.source else [])])
        found.append(_Line(number=k, text=text, op=name, title=title))
    return found


def _script(text: str) -> Markup:
    """Code of ours and of the library inside of a script element, which it must not end."""
    return Markup(text.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "seconds": seconds_text, "bytes": bytes_text, "count": count_text, "percent": lambda share: f"{share:.1%}",
    }  # fmt: skip
    return environment.from_string(_file("page.html"))
