"""Every figure of a plan as tables: `autopar explain --verbose`."""

from __future__ import annotations

from autopar.axes import BATCH, LAYERS, axes_over
from autopar.planner.plan import AxisPlan, Plan
from autopar.report.columns import cut, last_wrapped, with_beneath, wrapped
from autopar.report.explanation import HOWS, explanation_of
from autopar.report.strategies import leaves_of, operator_of, splits_of
from autopar.report.units import count_text, seconds_text, table
from autopar.report.words import MEMORY_TERMS, few, ranges, share_text

__all__ = ["tables_text"]

KINDS = 8  # of operators that are named in a row
MODULES = 40  # columns for the names of a block's modules
ALIKE = "framework_context"  # the term of memory that all ranks have alike


def tables_text(plan: Plan) -> str:
    sections = (_question, _search, _blocks, _recompute, _stages, _memory, _operators, _strategies)
    return "\n\n".join(text for text in (section(plan) for section in sections) if text)


def _question(plan: Plan) -> str:
    lines = [f"program       {plan.program_hash[:12]}, global batch {plan.global_batch}, {plan.precision}, {plan.optimizer}"]
    if plan.mesh[LAYERS] > 1:
        lines.append(f"schedule      {_scheduled(plan)}")
    for row in [row for row in axes_over("operators") if plan.mesh[row.name] > 1][-1:]:
        lines.append(f"split by {row.name:<4} {plan.tensor_split_share:.1%} of the FLOPs")
    return "question and form\n" + "\n".join(f"  {line}" for line in lines)


def _scheduled(plan: Plan) -> str:
    if plan.virtual_stages == 1:
        return plan.schedule
    held = [" and ".join(str(s) for s, r in enumerate(plan.rank_of) if r == rank) for rank in range(plan.mesh[LAYERS])]
    shown = "; ".join(f"rank {r}: stages {text}" for r, text in enumerate(held[:4])) + ("; ..." if len(held) > 4 else "")
    return f"{plan.schedule}, {plan.virtual_stages} stages on each of {plan.mesh[LAYERS]} ranks ({shown})"


def _search(plan: Plan) -> str:
    lines = [f"objective {seconds_text(plan.objective_s)}, proven bound {seconds_text(plan.bound_s)}, gap {plan.gap:.2%}"]
    if plan.searched:
        lines.append(", ".join(f"{name} {n:,}" for name, n in plan.searched.items()))
    if plan.planning_s:
        lines.append(", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in plan.planning_s.items()))
    return "search (choices; explored: priced; cut: into stages; left: could not be better)\n" + "\n".join(f"  {line}" for line in lines)


def _blocks(plan: Plan) -> str:
    """Each with all that is split of it; the screen has those that take longest."""
    rows = [
        (
            cut(block.name, MODULES),
            count_text(block.parameters),
            f"{axis} {plan.mesh[axis]}" if axis else "-",
            ", ".join(words) or "not split",
        )
        for block in explanation_of(plan).blocks
        for axis, words in (block.splits or {"": []}).items()
    ]
    return "blocks\n" + last_wrapped(("modules", "parameters", "over", "split"), rows) if rows else ""


def _operators(plan: Plan) -> str:
    """One line for each kind that an axis leaves whole, cannot split, or that has no rule."""
    found = explanation_of(plan).operators
    rows = [
        (
            operator_of(x.kind), x.count, HOWS[x.how], x.axis if x.axis in plan.mesh else "-", share_text(x.share) if x.share else "-",
        )
        for x in found
    ]  # fmt: skip
    said = ["; ".join(filter(None, (few([m or "the model's own" for m in x.modules]), x.why))) for x in found]
    headings = ("operator", "count", "is", "over", "of the step")
    heading = "operators to know about (none is padded; beneath: in which modules, and why)\n"
    return heading + with_beneath(headings, rows, said) if rows else ""


def _recompute(plan: Plan) -> str:
    whole = [path for stage in plan.stages for path in stage.recomputed]
    part = [path for stage in plan.stages for path in stage.selective]
    lines = [f"whole: {ranges(whole)}"] if whole else []
    lines += [f"in part: {ranges(part)}"] if part else []
    lines += [f"of each: {', '.join(mode.operators)}" for mode in plan.modes if mode.operators]
    return "recomputed blocks\n" + "\n".join(wrapped(line, "    ", "  ") for line in lines) if lines else ""


def _stages(plan: Plan) -> str:
    names = plan.account.modules if plan.account else {}
    rows = [
        (
            i, count_text(stage.parameters), seconds_text(stage.forward_s), seconds_text(stage.backward_s),
            seconds_text(stage.communication_s), stage.micro_batches_in_flight,
        )
        for i, stage in enumerate(plan.stages)
    ]  # fmt: skip
    said = [
        (ranges(stage.blocks) or "no blocks") + (f"; begins with {names[stage.first_op]}" if names.get(stage.first_op) else "")
        for stage in plan.stages
    ]
    headings = ("stage", "parameters", "forward", "backward", "comm.", "in flight")
    return "stages (one rank; times of one micro-batch; beneath: repeated blocks)\n" + with_beneath(headings, rows, said)


def _memory(plan: Plan) -> str:
    unit, factor = ("GiB", 2**30) if max(plan.memory_bytes) >= 2**30 else ("MiB", 2**20)
    terms = {term: title for term, title in MEMORY_TERMS.items() if term != ALIKE}
    rows = []
    for i, stage in [(rank, plan.stages[plan.rank_of.index(rank)]) for rank in range(plan.mesh[LAYERS])]:
        amounts = [getattr(stage.memory, f"{term}_bytes") for term in terms]
        rows.append((i, *(f"{amount / factor:.2f}" for amount in (*amounts, stage.memory.total_bytes))))
    alike = f", all with {plan.stages[0].memory.framework_context_bytes / factor:.2f} of {MEMORY_TERMS[ALIKE]}"
    headings = ("rank" if plan.virtual_stages > 1 else "stage", *terms.values(), "all")
    return f"memory of one rank, {unit}{alike}\n" + table(headings, rows)


def _strategies(plan: Plan) -> str:
    """Operators by name would be too long for a large model: they are counted by kind, a repeated block's once."""
    axes = {axis: made for axis, made in plan.axes.items() if made.n > 1}
    if not axes:
        return ""
    parts = [_axis_strategies(plan, axis, made) for axis, made in axes.items()]
    legend = "S(d) split on dim d, R the same for different work, I the same for the same work, P terms of a sum"
    heading = f"strategies ({legend}; a repeated block counts once; beneath: operators, or parameters, buffers and inputs)"
    return "\n".join([wrapped(heading), "\n\n".join(parts)])


def _axis_strategies(plan: Plan, axis: str, made: AxisPlan) -> str:
    shapes = plan.account.shapes if plan.account else {}
    rows = [(s.split, s.strategy, s.count, ", ".join(_kinds(s.operators))) for s in splits_of(axis, made, shapes)]
    names = plan.account.leaves if plan.account else {}
    groups: dict[tuple[str, str], list[str]] = {}
    for layout, values in leaves_of(made).items():
        for name in (names.get(value, value) for value in values):
            dim = plan.zero_dims.get(name) if axis == BATCH else None
            kept = ("used as", layout) if dim is None else (f"at rest in {plan.shard} parts", f"along dim {dim}")
            groups.setdefault(kept, []).append(name)
    rows += [(*kept, len(found), few(found)) for kept, found in groups.items()]
    headings = (f"{axis}={made.n} splits", "layouts", "count")
    return with_beneath(headings, [row[:-1] for row in rows], [row[-1] for row in rows])


def _kinds(operators: dict[str, int], most: int = KINDS) -> list[str]:
    shown = [kind + (f" x{n}" if n > 1 else "") for kind, n in operators.items()]
    return shown[:most] + ([f"... (+{len(shown) - most} kinds)"] if len(shown) > most else [])
