"""A plan as text and as JSON: `autopar explain`. One function for each section of the text."""

from __future__ import annotations

from typing import Any

import msgspec

from autopar.plan import Plan
from autopar.report.units import bytes_text, seconds_text, table

__all__ = ["plan_json", "plan_text"]

GIB = 2**30


def plan_text(plan: Plan) -> str:
    """What was chosen, what it costs, what limits it, and what is out of the ordinary; sections without content are left out."""
    sections = (_heading, _choice, _cost, _stages, _memory, _strategies, _limits, _notes)
    return "\n\n".join(text for text in (section(plan) for section in sections) if text)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, with the derived figures that scripts ask for under the names of the Plan's properties."""
    fields: dict[str, Any] = msgspec.to_builtins(plan)
    return fields | {
        "step_time_s": plan.step_time_s,
        "memory_bytes": list(plan.memory_bytes),
        "tokens_or_samples_per_s": plan.tokens_or_samples_per_s,
        "gap": plan.gap,
    }


def _heading(plan: Plan) -> str:
    return f"{plan.model} on {plan.gpus} {'GPU' if plan.gpus == 1 else 'GPUs'} (program {plan.program_hash[:12]})"


def _choice(plan: Plan) -> str:
    used = {"pp": "pipeline stages", "dp": "data parallel", "tp": "tensor parallel"}
    axes = [f"{axis}={plan.mesh[axis]} ({words})" for axis, words in used.items() if plan.mesh.get(axis, 1) > 1]
    lines = [f"  mesh           {', '.join(axes) or 'one rank'}"]
    if plan.micro_batches > 1 or plan.mesh.get("pp", 1) > 1:
        lines.append(f"  micro-batches  {plan.micro_batches}, schedule {plan.schedule}")
    zero = {0: "replicated over dp", 1: "ZeRO-1: optimizer states sharded over dp", 3: "ZeRO-3: sharded over dp, gathered at use"}
    lines.append(f"  parameters     {zero[plan.zero]}")
    segments = [segment for stage in plan.stages for segment in stage.segments]
    recomputed = sum(segment.recompute for segment in segments)
    lines.append(f"  recompute      {f'{recomputed} of {len(segments)} segments' if recomputed else 'none'}")
    return "chosen\n" + "\n".join(lines)


def _cost(plan: Plan) -> str:
    fullest = max(plan.memory_bytes)
    lines = [
        f"  step time      {seconds_text(plan.step_time_s)} predicted ({plan.provenance})",
        f"  throughput     {plan.tokens_or_samples_per_s:,.4g} a second",
        f"  memory         {bytes_text(fullest)} on the fullest GPU (stage {plan.memory_bytes.index(fullest)})",
        f"  optimality     objective {seconds_text(plan.objective)}, bound {seconds_text(plan.bound)}, gap {plan.gap:.2%}",
    ]
    return "costs\n" + "\n".join(lines)


def _stages(plan: Plan) -> str:
    rows = [
        (i, f"{stage.start}..{stage.stop - 1}", len(stage.segments), seconds_text(stage.forward_s), seconds_text(stage.backward_s))
        for i, stage in enumerate(plan.stages)
    ]
    return "stages (times of one micro-batch)\n" + table(("stage", "operators", "segments", "forward", "backward"), rows)


def _memory(plan: Plan) -> str:
    terms = list(dict.fromkeys(term for stage in plan.stages for term in stage.memory))
    rows = [
        (i, *(f"{stage.memory.get(term, 0) / GIB:.3f}" for term in terms), f"{plan.memory_bytes[i] / GIB:.3f}")
        for i, stage in enumerate(plan.stages)
    ]
    return "memory of a GPU, GiB\n" + table(("stage", *terms, "all"), rows)


def _strategies(plan: Plan) -> str:
    axes = [axis for axis, size in plan.mesh.items() if size > 1 and axis != "pp"]
    parts = []
    for block, operators in plan.strategies.items():
        rows = [(name, *(by_axis.get(axis, "") for axis in axes)) for name, by_axis in operators.items()]
        if rows and axes:
            parts.append(f"strategies in {block} (S split, R replicated for different work, I for the same, P partial sums)\n")
            parts[-1] += table(("operator", *axes), rows)
    return "\n\n".join(parts)


def _limits(plan: Plan) -> str:
    return _list("what limits it", plan.limits)


def _notes(plan: Plan) -> str:
    return _list("notes", plan.notes)


def _list(heading: str, lines: tuple[str, ...] | list[str]) -> str:
    return heading + "\n" + "\n".join(f"  - {line}" for line in lines) if lines else ""
