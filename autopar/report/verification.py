"""The outcome of `autopar verify` as text and as JSON."""

from __future__ import annotations

from typing import Any

from autopar.axes import AXES
from autopar.planner import Plan
from autopar.report.units import table
from autopar.verify import TOLERANCE, Report
from autopar.verify_loop import LoopReport

__all__ = ["loop_json", "loop_text", "verification_json", "verification_text"]


_KINDS = {
    "loss": "loss", "gradients": "gradient", "parameters": "parameter", "buffers": "buffer", "loss in evaluation": "evaluation",
    "loss of other batch sizes": "batches",
}  # fmt: skip


def verification_text(report: Report) -> str:
    """The worst relative error of each kind, where it is, and the verdict."""
    plan = report.plan
    moved = report.rounding
    rows = []
    for name, kind in _KINDS.items():
        error, rounding = getattr(report, kind), getattr(moved, kind, None)
        row = (name, "not compared" if error is None else f"{error:.1e}", getattr(report, f"{kind}_at", ""))
        rows.append(row if moved is None else (*row, "" if rounding is None else f"{rounding:.1e}"))
    header = ("", "worst relative error", "in") if moved is None else ("", "worst relative error", "in", "rounding alone")
    if report.copies_equal:
        copies = "all copies of parameters, gradients, optimizer states and buffers are bit-equal on all ranks"
    else:
        copies = f"COPIES DIFFER between ranks: {', '.join(report.unequal)}"
    moved_how = "the original itself, its weights and inputs moved by their last bit"
    what_to_do = "compare fewer steps (--steps 1), or other weights, inputs, or a larger batch"
    verdict = "verified" if report.ok else f"NOT VERIFIED: every error must be under {TOLERANCE:.0e}, and copies equal"
    verdict += _rounding(report, moved_how, what_to_do)
    notes = "".join(f"  {note}\n" for note in report.notes)
    return (
        f"{_plan_text(plan)}\n{table(header, rows)}\n  {copies}\n{notes}{verdict}"
    )


def _rounding(report: Report | LoopReport, how: str, what_to_do: str) -> str:
    """What the errors are beside those of rounding alone."""
    if report.rounding is None:
        return ""
    own = f"\nrounding alone: {how} (the most of three trainings)"
    if not report.within_rounding:
        return f"{own}; the plan moves it further"
    return (
        f"{own}. It moves about as far as under this plan: it is badly conditioned there, and what is over the tolerance says nothing of "
        f"the plan\nwhat to do: {what_to_do}"
    )


def verification_json(report: Report) -> dict[str, Any]:
    """The same figures under their names."""
    plan = report.plan
    return {
        "ok": report.ok, "tolerance": TOLERANCE, "model": plan.model, "gpus": plan.gpus, "mesh": plan.mesh,
        "micro_batches": plan.micro_batches, "schedule": plan.schedule, "virtual_stages": plan.virtual_stages,
        "zero": plan.zero, "shard": plan.shard, "loss": report.loss, "gradient": report.gradient, "gradient_at": report.gradient_at,
        "parameter": report.parameter, "parameter_at": report.parameter_at,
        "buffer": report.buffer, "buffer_at": report.buffer_at, "evaluation": report.evaluation, "batches": report.batches,
        "rounding": None if report.rounding is None else report.rounding.by_kind(), "within_rounding": report.within_rounding,
        "notes": list(report.notes), "copies_equal": report.copies_equal, "unequal": list(report.unequal),
    }  # fmt: skip


def loop_text(report: LoopReport, loop: str) -> str:
    """The worst relative error of what the user's loop returned, where it is, and the verdict."""
    where = f", of {report.at}" if report.at else ""
    verdict = "verified" if report.ok else f"NOT VERIFIED: it must be under {TOLERANCE:.0e}"
    if report.rounding is not None:
        where += f"; of rounding alone {report.rounding:.1e}"
    verdict += _rounding(report, "the original itself, its weights moved by their last bit", "compare fewer steps, or a larger batch")
    return f"{_plan_text(report.plan)}\n  {loop}: {report.numbers} numbers, worst relative error {report.error:.1e}{where}\n{verdict}"


def loop_json(report: LoopReport) -> dict[str, Any]:
    """The same figures under their names."""
    plan = report.plan
    error = report.error if report.error < float("inf") else None
    return {
        "ok": report.ok, "tolerance": TOLERANCE, "model": plan.model, "gpus": plan.gpus, "mesh": plan.mesh, "error": error,
        "at": report.at, "numbers": report.numbers, "rounding": report.rounding, "within_rounding": report.within_rounding,
    }  # fmt: skip


def _plan_text(plan: Plan) -> str:
    mesh = ", ".join(f"{axis}={plan.mesh[axis]}" for axis in AXES)
    return (
        f"{plan.model} on {plan.gpus} workers in float64: {mesh}, micro-batches {plan.micro_batches}, schedule {plan.schedule}, "
        f"zero {plan.zero}{f' shard {plan.shard}' if 1 < plan.shard < plan.mesh['dp'] else ''}"
    )
