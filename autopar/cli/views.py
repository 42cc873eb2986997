"""Pictures of a plan (HTML, SVG, Perfetto), and a measured run beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.answers import answer
from autopar.cli.application import UsageError
from autopar.cli.explaining import explanations
from autopar.files import write_file

if TYPE_CHECKING:
    from autopar.explain.study import Study
    from autopar.planner import Plan
    from autopar.report.page.page import Emitted

__all__ = ["give", "view_of", "with_measured"]


def view_of(form: str, plan: Plan, study: Study | None, *, alternatives: bool, measured: Path | None) -> bytes:
    """The file of a form. From a TARGET a page has the emitted source and, if asked, families of plans."""
    if form == "perfetto":
        from autopar.report.perfetto import perfetto_trace

        return perfetto_trace(plan) + b"\n"
    from autopar.report.page import page_of, svg_of

    if form == "svg":
        return svg_of(plan).encode()
    from autopar.measured import Run, compared

    run = None if measured is None else compared(plan, Run.load(measured))
    *_, found = explanations(plan, study, alternatives=alternatives)
    return page_of(plan, found, emitted=None if study is None else _emitted(plan, study), measured=run).encode()


def _emitted(plan: Plan, study: Study) -> Emitted:
    from autopar.measure import Pricer
    from autopar.planner import lower
    from autopar.render import make_manifest, render_linked
    from autopar.report.page.page import Emitted

    lowered = lower(study.program, plan)
    source, lines = render_linked(lowered, make_manifest(study.program, lowered, plan))
    costs = Pricer(study.asked.cluster, plan.mesh).program(lowered.program).ops
    return Emitted(source=source, lines=lines, costs=costs, program=study.program)


def with_measured(value: dict[str, Any], plan: Plan, measured: Path) -> tuple[dict[str, Any], str]:
    """The explanation with the run in it, and the run beside the plan in words."""
    from autopar.measured import Run, compared, compared_json, compared_text

    found = compared(plan, Run.load(measured))
    return {**value, "measured": compared_json(found)}, compared_text(found)


def give(data: bytes, out: Path | None, as_json: bool) -> None:
    """To a file, or to standard output. UsageError where that is for an answer in JSON."""
    if out is None and as_json:
        raise UsageError("--json answers with where the file is: give --out FILE")
    if out is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    write_file(out, data)
    if as_json:
        answer({"written": str(out)})
    else:
        print(f"written to {out}")
