"""A plan in a notebook: the verdict, and the rest behind a click. No script and no style sheet, so that it looks as the notebook does."""

from __future__ import annotations

import html

from autopar.planner.plan import Plan
from autopar.report.explanation import explanation_of
from autopar.report.text import explanation_text

__all__ = ["plan_html"]

PRE = "line-height: 1.25; overflow-x: auto"


def plan_html(plan: Plan) -> str:
    found = explanation_of(plan)
    _, _, rest = explanation_text(found).partition("\n\n")
    return (
        f"<div><p>{html.escape(found.verdict)}</p><details><summary>mesh, blocks, memory, time, limits</summary>"
        f'<pre style="{PRE}">{html.escape(rest)}</pre></details></div>'
    )
