"""What the search says at its end: the plan with its notes, limits and alternatives, or why there is none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import msgspec

from autopar.axes import AXES, LAYERS
from autopar.capture import program_hash
from autopar.errors import Infeasible
from autopar.ir import Program, Span, TensorType, refs
from autopar.measure import count as count_op
from autopar.planner.account import account_of
from autopar.planner.candidate import GIB, Candidate, Draft
from autopar.planner.interval import seconds_by_kind, spread_of
from autopar.planner.lower import axis_plan, on_inner_axes, spans_of
from autopar.planner.names import placed
from autopar.planner.plan import AxisPlan, BlockMode, Pins, Plan
from autopar.planner.question import Question, Searched
from autopar.planner.shard import Assignment
from autopar.planner.shortfall import (
    clusters_that_do,
    elsewhere_too,
    gpus_that_do,
    pins_that_do,
    shortfall_text,
    sizes_that_do,
    tried,
    values_that_do,
)
from autopar.planner.space import Form
from autopar.planner.stages import cut_stages
from autopar.planner.ties import ORDER, Tie
from autopar.planner.words import choice_words
from autopar.report.units import bytes_text, seconds_text
from autopar.report.words import counted
from cost_models.recipe import AUTOPAR
from cost_models.uncertainty import CENTRAL, OTHER_SOFTWARE

__all__ = ["BY_USER", "LISTED", "ended_by_user", "of_all", "plan_of", "refusal"]

BY_USER, _STOPPED = "an interrupt from the keyboard", "the search was stopped after "

LISTED, FIRST = 12, 3  # choices that are told of, where none fits; and before what would do


def plan_of(question: Question, c: Candidate, tie: Tie | None = None) -> Plan:
    """The plan of a candidate. tie: where it was chosen for its simplicity, beside the fastest, whose are objective, bound and gap."""
    fastest_s = c.step_time_s if tie is None else tie.fastest.step_time_s
    program, rank = question.program, c.rank
    positions = [c.segments[k].span.start for k in c.part.cuts]
    recompute, modes = _modes(c)
    cut_stages(rank.moments, rank.program, tuple(positions), {(b, k): spans_of(modes[m]) for b, k, m in recompute}, rank.cuts)
    bodies = list(zip(on_inner_axes(rank.moments.body, rank.inner[:-1]), rank.inner, strict=False))
    axes: dict[str, AxisPlan] = {} if rank.data is None else {rank.data.axis: axis_plan(program, rank.data)}
    axes |= {x.axis: _asked(axis_plan(body, x), (c.form or Form()).on(x.axis)) for body, x in bodies}
    bound_s = min(question.said.bound_s, fastest_s) if question.said.bound_s < math.inf else 0.0
    tokens, kinds = _tokens(program), seconds_by_kind(c)
    made = Plan(
        model=program.name,
        program_hash=program_hash(program),
        gpus=question.gpus,
        cluster=question.cluster.name,
        memory_limit_bytes=question.memory_limit_bytes,
        optimizer=question.optimizer,
        precision=question.precision,
        reduce_dtype=question.reduce_dtype,
        global_batch=program.batch_size or 0,
        samples_unit="tokens" if tokens else "samples",
        mesh=c.mesh.sizes(),
        micro_batches=rank.micro_batches,
        schedule=c.flow.schedule,
        virtual_stages=c.flow.chunks,
        rest=c.rest.name,
        shard=c.shard,
        cuts=positions,
        recompute=recompute,
        modes=modes,
        stages=list(c.stages),
        axes=axes,
        zero_dims=dict(c.zero_dims),
        step_time_s=c.step_time_s,
        compute_s=c.compute_s,
        bubble_s=c.bubble_s,
        gradient_sync_s=c.gradient_sync_s,
        optimizer_s=c.optimizer_s,
        objective_s=fastest_s,
        bound_s=bound_s,
        gap=(fastest_s - bound_s) / fastest_s if fastest_s else 0.0,
        tie="" if tie is None else _tied(tie),
        work_per_step=float(tokens or program.batch_size or 0),
        tensor_split_share=_split_share(*bodies[-1]) if bodies else 0.0,
        provenance=rank.ledger.provenance,
        notes=[
            *([] if tie is None else [_tied(tie)]), *_more_than_there_is(question), *program.notes,
            *question.known.unsplit(c.mesh.over("batch")), *question.known.notes, *_stopped(question.said),
            *(line for body, x in bodies for line in _replicated(body, x, rank.program.types)),
            *(question.known.split_notes if question.space.pinned_to_split else ()),
        ],
        limits=_limits(question, c),
        alternatives=_alternatives(question.said, c),
        seconds_by_kind=kinds,
        step_spread=_spread(kinds, question),
        pins={k: v for k, v in _asdict(question.pins).items() if v is not None},
        bound=[name for name in question.pins.__struct_fields__ if getattr(question.pins, name) != getattr(question.asked, name)],
        searched=question.said.counts(),
        account=account_of(program, c, axes),
    )
    return placed(program, made)


def _asked(made: AxisPlan, form: Form) -> AxisPlan:
    """With what was asked of it."""
    return msgspec.structs.replace(made, sequence_parallel=form.sequence, all_work=form.split, kept_s_per_byte=form.byte_s)


def _spread(kinds: Mapping[str, float], question: Question) -> float:
    """Of the step. The constants of a catalogued GPU are fitted to runs of other softwares than autopar's own."""
    own = dataclasses.replace(question.recipe, reduced_itemsize=AUTOPAR.reduced_itemsize) == AUTOPAR  # that is the user's wish
    other = own and not question.cluster.gpu.host
    return math.hypot(spread_of(kinds, question.cluster), OTHER_SOFTWARE if other else 0.0)


def _tied(tie: Tie) -> str:
    other = tie.fastest
    again = f", {len(other.part.recomputed)} blocks recomputed" if other.part.recomputed else ""
    words = choice_words(other.mesh.sizes(), other.rest, other.shard, other.rank.micro_batches, other.flow.chunks)
    return (
        f"simpler than the fastest ({words}{again}), which is {seconds_text(tie.difference_s)} faster "
        f"({tie.difference_s / other.step_time_s:.2%}), a difference that may be off by {seconds_text(CENTRAL * tie.spread_s)}; of plans "
        f"that tie so the simplest is taken: {ORDER}"
    )


def _modes(c: Candidate) -> tuple[list[tuple[int, int, int]], list[BlockMode]]:
    """(block, instance, mode) of what runs again, and the modes."""
    modes: dict[tuple[int, str, tuple[Span, ...]], BlockMode] = {}
    found = []
    for k in sorted(c.part.recomputed):
        segment, mode = c.segments[k], c.estimator.pieces[k].modes[c.part.modes[k]]
        key = segment.block, mode.name, mode.spans
        if key not in modes:
            ops = [op for s in mode.spans for op in c.rank.program.ops[segment.span.start + s.start : segment.span.start + s.stop]]
            names = [op.name for op in ops] if len(ops) < len(segment.span) else []
            spans = [(s.start, s.stop) for s in mode.spans]
            modes[key] = BlockMode(name=mode.name, block=segment.block, spans=spans, operators=names)
        found.append((segment.block, segment.instance, list(modes).index(key)))
    return sorted(found), list(modes.values())


def ended_by_user(plan: Plan) -> bool:
    """Whether its search was ended by Ctrl-C."""
    return any(note.startswith(_STOPPED + BY_USER) for note in plan.notes)


def _more_than_there_is(question: Question) -> list[str]:
    limit, has = question.memory_limit_bytes, question.cluster.gpu.memory_bytes
    if limit <= has:
        return []
    return [f"memory: a GPU of {question.cluster.name} has {bytes_text(has)}, and the plan may use {bytes_text(limit)}, as was asked for"]


def refusal(question: Question) -> Infeasible:
    """Why no candidate was found: which constraint binds, by how much, what was tried and would help; and the first reasons, of many."""
    if question.spaces is not None and isinstance(why := question.spaces(question.asked), str):
        return Infeasible(why + tried(lambda: elsewhere_too(question, values_that_do(question) or pins_that_do(question))))
    if question.space.too_many:
        return Infeasible(question.space.too_many + tried(lambda: [*gpus_that_do(question), *clusters_that_do(question)]))
    if not any(True for _ in question.space.meshes()):
        pinned = ", ".join(f"{axis}={n}" for axis in AXES if (n := question.pins.of_axis(axis)) is not None)
        product = " x ".join(AXES)
        gpus = question.gpus
        text = f"no mesh of {counted(gpus, 'GPU')} has {pinned}: pinned axes must divide and fill the GPUs ({product} = {gpus})"
        if question.space.one_stage:
            text += f", and {LAYERS} is 1: {question.space.one_stage}"
        do = tried(lambda: elsewhere_too(question, sizes_that_do(question) or pins_that_do(question) or gpus_that_do(question)))
        return Infeasible(text + do)
    # What was asked for by name first (that a step is not split matters only where it had to be), then the leanest.
    short = question.said.short
    found = sorted(question.refused, key=lambda line: (line.startswith("micro-batches:"), short.get(line, 0.0)))
    lines = [f"  - {line}" for line in found[:LISTED] or ["no candidate satisfies the pins"]]
    if short and (said := shortfall_text(question)):
        return Infeasible(f"no plan fits the constraints. {said}", more=lines)
    text = "\n".join(["no plan fits the constraints:", *lines[:FIRST]])
    changes = tried(lambda: elsewhere_too(question, pins_that_do(question) or gpus_that_do(question)))
    return Infeasible(text + changes, more=lines[FIRST:])


def _replicated(body: Program, assignment: Assignment, types: Mapping[str, TensorType]) -> list[str]:
    """Operators that an axis does not split though they compute, by kind. body: before the axis; types: on one rank."""
    idle: dict[str, int] = {}
    for op in body.ops:
        computes = any(types[r].numel > 1 for r in refs(op) if r in types)
        if computes and not assignment.ops[op.name].splits_work:
            idle[op.target] = idle.get(op.target, 0) + 1
    listed = sorted(idle.items(), key=lambda x: -x[1])[:8]
    return [f"replicated over {assignment.axis}: {', '.join(f'{t} x{n}' for t, n in listed)}"] if listed else []


def _limits(question: Question, c: Candidate) -> list[str]:
    fullest = max(range(len(c.stages)), key=lambda s: c.stages[s].memory.total_bytes)
    used, most = c.stages[fullest].memory.total_bytes, max(s.memory.upper_bytes for s in c.stages)
    share = {
        "compute and tensor communication": c.compute_s,
        "pipeline bubble": c.bubble_s,
        "gradient reduction": c.gradient_sync_s,
        "optimizer": c.optimizer_s,
    }
    top = max(share, key=share.__getitem__)
    slow = max(range(len(c.stages)), key=lambda s: c.stages[s].forward_s + c.stages[s].backward_s)
    return [
        f"time: {top} takes {100 * share[top] / c.step_time_s:.0f}% of the step; the slowest stage is {slow}",
        f"memory: stage {fullest} uses {used / GIB:.2f} of {question.memory_limit_bytes / GIB:.2f} GiB; at the upper end of its "
        f"interval, which must fit, {most / GIB:.2f} GiB",
    ]


def _split_share(body: Program, assignment: Assignment) -> float:
    """The share of the forward FLOPs that an assignment divides among its ranks."""
    whole = split = 0.0
    for op in body.ops:
        flops = count_op(op, tuple(body.types[r] for r in refs(op)), tuple(body.types[o] for o in op.outputs if o is not None)).flops
        whole += flops
        split += flops if assignment.ops[op.name].splits_work else 0.0
    return split / whole if whole else 0.0


def _alternatives(said: Searched, chosen: Candidate) -> list[str]:
    """The next best of other meshes or resting places, as they were priced by their pieces; where that was enough to know that they are no
    better, by what they cost at least."""
    lines = {(d.choice.mesh, d.choice.rest.name): (d.times.step_s, _one_line(d)) for d in reversed(said.drafts)}
    for least_s, choice in said.behind:
        lines.setdefault((choice.mesh, choice.rest.name), (least_s, f"{choice.words}: at least {seconds_text(least_s)}"))
    lines.pop((chosen.mesh, chosen.rest.name), None)
    return [line for _, line in sorted(lines.values())[:5]]


def _one_line(d: Draft) -> str:
    again = f", {len(d.part.recomputed)} blocks recomputed" if d.part.recomputed else ""
    return f"{d.choice.words}{again}: {seconds_text(d.times.step_s)}"


def _stopped(said: Searched) -> list[str]:
    return [_stopped_after(said.stopped, said.unexplored, said.choices)] if said.stopped else []


def _stopped_after(what: str, unexplored: int, choices: int) -> str:
    return f"{_STOPPED}{what}: {unexplored} of {choices} choices that could be faster are unexplored"


def of_all(best: Plan, found: Sequence[Plan], left: Sequence[float]) -> Plan:
    """The best plan that several searches found, with what is known of them together. left: of each choice of searches that the user did
    not wait for the seconds that no plan of it is faster than."""
    bound_s = min([*(plan.bound_s for plan in found), *left])
    counts = {name: sum(plan.searched.get(name, 0) for plan in found) for name in best.searched}
    notes = best.notes
    if left:
        counts |= {name: counts[name] + len(left) for name in ("choices", "unexplored")}
        notes = [note for note in notes if not note.startswith(_STOPPED)]
        notes.append(_stopped_after(BY_USER, counts["unexplored"], counts["choices"]))
    fastest_s = min(plan.objective_s for plan in found)
    gap = (fastest_s - bound_s) / fastest_s if fastest_s else 0.0
    return msgspec.structs.replace(best, objective_s=fastest_s, bound_s=bound_s, gap=gap, searched=counts, notes=notes)


def _asdict(pins: Pins) -> dict[str, object]:
    return {k: list(v) if isinstance(v := getattr(pins, k), tuple) else v for k in pins.__struct_fields__}


def _tokens(program: Program) -> int:
    """Tokens of the global batch: the elements of its integer inputs of two dims (batch, sequence), if there are any."""
    sizes = [program.types[x.value] for x in program.inputs]
    return max((t.numel for t in sizes if len(t.shape) == 2 and not t.dtype.is_floating_point and t.dtype.itemsize >= 4), default=0)
