"""A plan as text and as JSON: `autopar explain`. One function for each section of the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgspec

from autopar.axes import AXES, BATCH, LAYERS, axes_over
from autopar.planner.plan import AxisPlan, Plan
from autopar.report.strategies import leaves_of, splits_of
from autopar.report.units import bytes_text, count_text, seconds_text, table
from cost_models.rests import rest_of

__all__ = ["plan_json", "plan_text"]

MEMORY_TERMS = {  # field of MemoryPlan without its unit -> heading of its column
    "parameters": "parameters", "gradients": "gradients", "optimizer_states": "optimizer", "saved_activations": "activations",
    "largest_temporary": "temporary", "communication_buffers": "buffers", "framework_context": "context", "allocator_slack": "slack",
}  # fmt: skip


def plan_text(plan: Plan) -> str:
    """What was chosen, what it costs, what limits it, and what is out of the ordinary; sections without content are left out."""
    sections = (_heading, _choice, _cost, _stages, _memory, _strategies, _limits, _notes, _alternatives)
    return "\n\n".join(text for text in (section(plan) for section in sections) if text)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, with the derived figures that scripts ask for under the names of the Plan's properties."""
    fields: dict[str, Any] = msgspec.to_builtins(plan)
    strategies = [asdict(split) for axis, made in plan.axes.items() if made.n > 1 for split in splits_of(axis, made)]
    derived = {"memory_bytes": plan.memory_bytes, "tokens_or_samples_per_s": plan.tokens_or_samples_per_s, "strategies": strategies}
    return fields | derived


def _heading(plan: Plan) -> str:
    return (
        f"{plan.model} on {_count(plan.gpus, 'GPU')} of {plan.cluster}: global batch {plan.global_batch}, {plan.precision}, "
        f"{plan.optimizer} (program {plan.program_hash[:12]})"
    )


def _recomputed(plan: Plan, blocks: str) -> list[tuple[str, str]]:
    whole = [path for stage in plan.stages for path in stage.recomputed]
    part = [path for stage in plan.stages for path in stage.selective]
    lines = [("recompute", f"{len(whole)} of {blocks}: {_ranges(whole)}")] if whole else []
    if part:
        lines.append(("recompute in part", f"{len(part)} of {blocks}: {_ranges(part)}"))
        lines += [("", f"of each: {', '.join(mode.operators)}") for mode in plan.modes if mode.operators]
    return lines or [("recompute", "none")]


def _choice(plan: Plan) -> str:
    axes = [f"{row.name}={plan.mesh[row.name]} ({row.title})" for row in AXES.values() if plan.mesh[row.name] > 1]
    blocks = [path for stage in plan.stages for path in stage.blocks]
    lines = [
        ("mesh", ", ".join(axes) or "one rank, nothing is split"),
        ("micro-batches", f"{plan.micro_batches}" + (f", schedule {_scheduled(plan)}" if plan.mesh[LAYERS] > 1 else "")),
        ("parameters", _resting(plan)),
        *_recomputed(plan, _count(len(blocks), "block")),
    ]
    for row in [row for row in axes_over("operators") if plan.mesh[row.name] > 1][-1:]:
        lines.append((f"split by {row.name}", f"{plan.tensor_split_share:.1%} of the FLOPs"))
    if plan.pins:
        lines.append(("pinned", ", ".join(f"{name}={value}" for name, value in plan.pins.items())))
    return "chosen\n" + _pairs(lines)


def _scheduled(plan: Plan) -> str:
    if plan.virtual_stages == 1:
        return plan.schedule
    held = [" and ".join(str(s) for s, r in enumerate(plan.rank_of) if r == rank) for rank in range(plan.mesh[LAYERS])]
    shown = "; ".join(f"rank {r}: stages {text}" for r, text in enumerate(held[:4])) + ("; ..." if len(held) > 4 else "")
    return f"{plan.schedule}, {plan.virtual_stages} stages on each of {plan.mesh[LAYERS]} ranks ({shown})"


def _resting(plan: Plan) -> str:
    ranks = plan.mesh[BATCH]
    if ranks == 1:
        return f"whole on every rank of a stage, but for what {' and '.join(row.name for row in axes_over('operators'))} splits"
    groups = f", groups of {plan.shard} of {ranks} ranks" if 1 < plan.shard < ranks else ""
    return rest_of(plan.rest).title + groups


def _cost(plan: Plan) -> str:
    fullest = max(plan.memory_bytes)
    place = plan.memory_bytes.index(fullest)
    of_what = f"of pipeline rank {plan.rank_of[place]}" if plan.virtual_stages > 1 else f"of the fullest stage ({place})"
    parts = {"compute": plan.compute_s, "bubble": plan.bubble_s, "gradient sync": plan.gradient_sync_s, "optimizer": plan.optimizer_s}
    shown = " + ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds)
    of_limit = f" of {bytes_text(plan.memory_limit_bytes)}" if plan.memory_limit_bytes else ""
    low, high = plan.stages[place].memory.interval_bytes
    lines = [
        ("step time", f"{seconds_text(plan.step_time_s)} = {shown}"),
        *_interval(plan),
        ("throughput", f"{plan.tokens_or_samples_per_s:,.4g} {plan.samples_unit} a second"),
        ("memory", f"{bytes_text(fullest)}{of_limit} on a rank {of_what}; 80%: {bytes_text(int(low))} to {bytes_text(int(high))}"),
        ("optimality", f"objective {seconds_text(plan.objective_s)}, proven bound {seconds_text(plan.bound_s)}, gap {plan.gap:.2%}"),
        *([("tie", plan.tie)] if plan.tie else []),
        ("figures are", plan.provenance),
    ]
    if plan.planning_s:
        lines.append(("planning took", ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in plan.planning_s.items())))
    return "predicted\n" + _pairs(lines)


def _interval(plan: Plan) -> list[tuple[str, str]]:
    """Between what a step will take in four cases of five, and what its seconds depend on, the most first."""
    if not plan.seconds_by_kind or not plan.step_time_s:
        return []
    low, high = (seconds_text(s) for s in plan.step_time_interval_s)
    most = list(plan.seconds_by_kind.items())[:5]
    kinds = ", ".join(f"{kind} {s / plan.step_time_s:.0%}" for kind, s in most if s >= 0.01 * plan.step_time_s)
    return [("80%", f"{low} to {high}"), ("depends on", kinds)]


def _stages(plan: Plan) -> str:
    rows = [
        (
            i, stage.first_op, _ranges(stage.blocks) or "-", count_text(stage.parameters), seconds_text(stage.forward_s),
            seconds_text(stage.backward_s), seconds_text(stage.communication_s), stage.micro_batches_in_flight,
        )
        for i, stage in enumerate(plan.stages)
    ]  # fmt: skip
    headings = ("stage", "from", "blocks", "parameters", "forward", "backward", "of both comm.", "in flight")
    return "stages (one rank; times of one micro-batch)\n" + table(headings, rows)


def _memory(plan: Plan) -> str:
    unit, factor = ("GiB", 2**30) if max(plan.memory_bytes) >= 2**30 else ("MiB", 2**20)
    rows = []
    several = plan.virtual_stages > 1
    for i, stage in [(rank, plan.stages[plan.rank_of.index(rank)]) for rank in range(plan.mesh[LAYERS])]:
        amounts = [getattr(stage.memory, f"{term}_bytes") for term in MEMORY_TERMS]
        rows.append((i, *(f"{amount / factor:.2f}" for amount in (*amounts, stage.memory.total_bytes))))
    return f"memory of one rank, {unit}\n" + table(("rank" if several else "stage", *MEMORY_TERMS.values(), "all"), rows)


def _strategies(plan: Plan) -> str:
    """Operators by name would be too long for a large model: they are counted by kind, a repeated block's once."""
    axes = {axis: made for axis, made in plan.axes.items() if made.n > 1}
    if not axes:
        return ""
    parts = [_axis_strategies(axis, made) for axis, made in axes.items()]
    legend = "S(d) split on dim d, R the same for different work, I the same for the same work, P terms of a sum"
    return f"strategies ({legend}; a repeated block counts once)\n" + "\n\n".join(parts)


def _axis_strategies(axis: str, made: AxisPlan) -> str:
    rows = [(s.split, s.strategy, s.count, ", ".join(_kinds(s.operators))) for s in splits_of(axis, made)]
    rows += [("at rest", text, len(names), _few(names)) for text, names in leaves_of(made).items()]
    return table((f"{axis}={made.n} splits", "layouts", "count", "operators, or parameters, buffers and inputs"), rows)


def _kinds(operators: dict[str, int], most: int = 8) -> list[str]:
    shown = [kind + (f" x{n}" if n > 1 else "") for kind, n in operators.items()]
    return shown[:most] + ([f"... (+{len(shown) - most} kinds)"] if len(shown) > most else [])


def _limits(plan: Plan) -> str:
    return _list("what limits it", plan.limits)


def _notes(plan: Plan) -> str:
    return _list("notes", plan.notes)


def _alternatives(plan: Plan) -> str:
    return _list("also considered", plan.alternatives)


# ------------------------------------------------------------------------------------------------------------- wording
def _list(heading: str, lines: list[str]) -> str:
    return heading + "\n" + "\n".join(f"  - {line}" for line in lines) if lines else ""


def _pairs(lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines)


def _count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f", ... (+{len(names) - most})" if len(names) > most else "")


def _ranges(paths: Iterable[str]) -> str:
    """['h.0', 'h.1', 'h.2', 'ln'] to 'h.0-2, ln': consecutive module paths that differ in their last figure."""
    shown: list[tuple[str, int, int] | str] = []
    for path in paths:
        prefix, _, last = path.rpartition(".")
        previous = shown[-1] if shown else None
        if not last.isdecimal():
            shown.append(path)
        elif isinstance(previous, tuple) and previous[0] == prefix and previous[2] + 1 == int(last):
            shown[-1] = (prefix, previous[1], int(last))
        else:
            shown.append((prefix, int(last), int(last)))

    def written(item: tuple[str, int, int] | str) -> str:
        if isinstance(item, str):
            return item
        prefix, first, last = item
        return (f"{prefix}." if prefix else "") + f"{first}" + (f"-{last}" if last > first else "")

    return ", ".join(map(written, shown))
