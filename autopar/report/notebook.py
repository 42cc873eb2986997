"""What `print` and a notebook show of a plan: the verdict, and in a notebook the rest behind a click. No script and no style sheet, so that
it looks as the notebook does. `autopar.Plan` is loaded from here, so that every plan of a user's is shown so."""

from __future__ import annotations

import html

from autopar.planner.plan import SHOWN, Plan
from autopar.report.explanation import explanation_of
from autopar.report.text import explanation_text, short_text

__all__ = ["Plan", "plan_html"]

PRE = "line-height: 1.25; overflow-x: auto"


def plan_html(plan: Plan) -> str:
    found = explanation_of(plan)
    _, _, rest = explanation_text(found).partition("\n\n")
    return (
        f"<div><p>{html.escape(found.verdict)}</p><details><summary>mesh, blocks, memory, time, limits</summary>"
        f'<pre style="{PRE}">{html.escape(rest)}</pre></details></div>'
    )


SHOWN.update(text=short_text, html=plan_html)
