"""Program x decisions -> Lowered: the data axis, the moments, the axes that divide operators, the cuts, in this order.

The same functions serve the search (which prices what they return) and a plan read from a file (whose every strategy is
checked against the rules before it is used).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.axes import BATCH, axes_over
from autopar.catalog import needs_transition, strategies_of
from autopar.errors import Infeasible, PlanError
from autopar.ir import I, L, Layout, Lowered, Op, P, Program, Span, Strategy, refs
from autopar.planner.choices import members_of
from autopar.planner.moments import Moments, NotSplittable, split_into_moments
from autopar.planner.plan import AxisPlan, BlockMode, Plan, parse_strategy
from autopar.planner.problems import given_on
from autopar.planner.shard import Assignment, shard, view_of
from autopar.planner.stages import cut_stages

__all__ = ["Inner", "OnAxes", "axis_plan", "inner_axes", "lower", "on_axes", "on_data_axis", "on_inner_axes", "spans_of", "split"]

Inner = tuple[Assignment, ...]  # of the axes that divide operators, in the order in which a program is laid over them


@dataclass(frozen=True, kw_only=True, slots=True)
class OnAxes:
    """A program over the axes of a plan, before it is cut. data: the assignment of the axis that divides the batch, None if it has one
    rank; inner: of those that divide operators. rank: the program of one rank and one micro-batch."""

    data: Assignment | None
    moments: Moments
    inner: Inner
    rank: Program


def on_data_axis(program: Program, assignment: Assignment | None) -> Program:
    """The program of one data-parallel rank."""
    if assignment is None:
        return program
    parts = assignment.n if any(assignment.leaves[x.value].is_shard for x in program.inputs) else 1  # else each rank has all samples
    return shard(program, assignment).replace(batch_size=(program.batch_size or 0) // parts or None)


def on_inner_axes(body: Program, assignments: Inner) -> tuple[Program, ...]:
    """The body, and what it is after each axis."""
    found = [body]
    for assignment in assignments:
        found.append(shard(found[-1], assignment))
    return tuple(found)


def inner_axes(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The axes of several ranks that divide operators, and their sizes, in the order in which a program is laid over them."""
    return tuple((row.name, n) for row in axes_over("operators") if (n := sizes.get(row.name, 1)) > 1)


def split(local: Program, count: int) -> Moments:
    """The micro-batches of one data-parallel rank. PlanError if they cannot be split exactly."""
    try:
        return split_into_moments(local, count)
    except NotSplittable as e:
        raise PlanError(f"the plan splits the step into {count} micro-batches, but {e}") from e


def on_axes(program: Program, plan: Plan) -> OnAxes:
    """The program over the plan's axes. PlanError if the plan does not fit the program or states something unsound."""
    data = _assignment(program, plan, BATCH) if plan.mesh[BATCH] > 1 else None
    moments = split(on_data_axis(program, data), plan.micro_batches)
    rank, inner = moments.body, list[Assignment]()
    for axis, _ in inner_axes(plan.mesh):
        inner.append(_assignment(rank, plan, axis))
        rank = shard(rank, inner[-1])
    return OnAxes(data=data, moments=moments, inner=tuple(inner), rank=rank)


def lower(program: Program, plan: Plan) -> Lowered:
    """The lowered program of a plan. PlanError if the plan does not fit the program or states something unsound."""
    over = on_axes(program, plan)
    _check_parts(over.rank, plan)
    try:
        return cut_stages(over.moments, over.rank, _cuts(over.rank, plan), _recomputed(over.rank, plan))
    except Infeasible as e:
        raise PlanError(f"the plan cuts where {e}") from e


def _check_parts(rank: Program, plan: Plan) -> None:
    """PlanError unless each parameter that rests in parts has the dim that they are cut along, and it divides."""
    shapes = {p.fqn: tuple(rank.types[p.value].shape) for p in rank.params}
    for name, dim in plan.zero_dims.items():
        if name not in shapes:
            raise PlanError(f"the plan cuts the parameter {name!r} into parts, which {rank.name} does not have")
        shape = shapes[name]
        if plan.shard < 2 or not 0 <= dim < len(shape) or shape[dim] % plan.shard or not shape[dim]:
            raise PlanError(
                f"the plan cuts the parameter {name!r} along dim {dim} into {plan.shard} parts; on a rank it is {list(shape)}: plan anew"
            )


def spans_of(mode: BlockMode) -> tuple[Span, ...]:
    return tuple(Span(first, behind) for first, behind in mode.spans)


def _recomputed(rank: Program, plan: Plan) -> dict[tuple[int, int], tuple[Span, ...]]:
    """(block, instance) -> what of it runs again. PlanError if the program has no such blocks."""
    lengths = {(b, k): len(span) for b, block in enumerate(rank.blocks) for k, span in enumerate(block.spans)}
    found, missing = {}, []
    for b, k, mode in plan.recompute:
        spans = spans_of(plan.modes[mode])
        if (b, k) in lengths and spans[-1].stop <= lengths[b, k]:
            found[b, k] = spans
        else:
            missing.append((b, k))
    if missing:
        raise PlanError(f"the plan recomputes blocks that this program does not have: {sorted(missing)}")
    return found


def _cuts(rank: Program, plan: Plan) -> tuple[int, ...]:
    """Where the stages begin. PlanError if the operators there are not those that the plan names."""
    position = {op.name: index for index, op in enumerate(rank.ops)}
    named = tuple(position.get(stage.first_op, -1) for stage in plan.stages[1:])
    if named != tuple(plan.cuts):
        begin = ", ".join(s.first_op for s in plan.stages[1:])
        raise PlanError(f"the plan's stages begin at {begin}, which is not where it cuts this program")
    return named


def axis_plan(program: Program, assignment: Assignment) -> AxisPlan:
    """An assignment as the plan states it: a block's operators once."""
    representative = members_of(program)
    return AxisPlan(
        n=assignment.n,
        ops={name: str(s) for name, s in assignment.ops.items() if representative[name] == name},
        leaves={name: str(x) for name, x in assignment.leaves.items()},
    )


def _assignment(program: Program, plan: Plan, axis: str) -> Assignment:
    stated = plan.axes.get(axis)
    if stated is None or stated.n != plan.mesh[axis]:
        raise PlanError(f"the plan has a mesh axis {axis} of {plan.mesh[axis]} ranks but no strategies for it")
    representative = members_of(program)
    ops: dict[str, Strategy] = {}
    for op in program.ops:
        text = stated.ops.get(representative[op.name])
        if text is None:
            raise PlanError(f"the plan has no strategy on {axis} for operator {op.name}; it was made for another program")
        ops[op.name] = _checked(program, op, parse_strategy(text), axis, stated.n)
    leaves: dict[str, Layout] = {}
    for x in program.leaves:
        leaves[x.value] = Layout.parse(stated.leaves[x.value]) if x.value in stated.leaves else I
        if not leaves[x.value].divides(program.types[x.value].shape, stated.n):
            raise PlanError(f"{x.value} of {program.types[x.value]} cannot lie as {leaves[x.value]} over {stated.n} ranks of {axis}")
    _check_leaves(program, axis, stated.n, ops, leaves)
    return Assignment(axis=axis, n=stated.n, ops=ops, leaves=leaves)


def _check_leaves(program: Program, axis: str, n: int, ops: dict[str, Strategy], leaves: dict[str, Layout]) -> None:
    """Leaves lie as they can be given to a rank: inputs as the axis gives them, none as a term of a sum, and buffers that
    the forward changes as their readers take them, so that no copy is changed in their place."""
    for value, given in given_on(program, axis, n).items():
        if leaves[value] != given:
            raise PlanError(f"the input {value} lies as {given} on {axis}, not as {leaves[value]}")
    for value, layout in leaves.items():
        if layout in (P, L):
            terms = "terms of a sum (P)" if layout == P else "rows that the rank has sorted (L)"
            raise PlanError(f"{value} is there before the program runs on {axis}: it cannot lie as {terms}")
    changed = {b.value for b in program.buffers if b.mutated}
    for op in program.ops if changed else ():
        for r, want in zip(refs(op), ops[op.name].inputs, strict=True):
            if r in changed and needs_transition(leaves[r], want, program.types[r]):
                lies = f"which lies as {leaves[r]} on {axis}, but takes it as {want}"
                raise PlanError(f"{op.target} ({op.name}) changes the buffer {r}, {lies}")


def _checked(program: Program, op: Op, stated: Strategy, axis: str, n: int) -> Strategy:
    """The rule's own strategy that the plan names. Only what a rule states is ever run."""
    groups = frozenset({1, *(x.groups for x in (*stated.inputs, *stated.outputs) if x.is_shard)})
    known = strategies_of(view_of(program, op, n, groups))
    for s in known:
        if dataclasses.replace(s, collective=False) == stated:
            return s
    operands = ", ".join(str(program.types[r]) for r in refs(op))
    raise PlanError(f"{op.target} ({op.name}) has no strategy '{stated}' on {axis} of {n} ranks with operands {operands}")
