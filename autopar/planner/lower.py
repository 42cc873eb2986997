"""Program x decisions -> Lowered: the data axis, the moments, the tensor axis, the cuts, in this order.

The same functions serve the search (which prices what they return) and a plan read from a file (whose every strategy is
checked against the rules before it is used).
"""

from __future__ import annotations

import dataclasses

from autopar.catalog import strategies_of
from autopar.errors import PlanError
from autopar.ir import I, Layout, Lowered, Op, Program, Strategy, refs
from autopar.planner.choices import members_of
from autopar.planner.moments import Moments, NotSplittable, split_into_moments
from autopar.planner.plan import AxisPlan, Plan, parse_strategy
from autopar.planner.shard import Assignment, shard, view_of
from autopar.planner.stages import cut_stages

__all__ = ["axis_plan", "lower", "on_tensor_axis"]


def on_tensor_axis(moments: Moments, assignment: Assignment | None) -> Program:
    """The body over the tensor axis (None: an axis of one rank)."""
    return moments.body if assignment is None else shard(moments.body, assignment)


def lower(program: Program, plan: Plan) -> Lowered:
    """The lowered program of a plan. PlanError if the plan does not fit the program or states something unsound."""
    data = _assignment(program, plan, "dp")
    local = program if data is None else shard(program, data)
    local = local.replace(batch_size=(program.batch_size or 0) // plan.mesh["dp"] or None) if data is not None else local
    try:
        moments = split_into_moments(local, plan.micro_batches)
    except NotSplittable as e:
        raise PlanError(f"the plan splits the step into {plan.micro_batches} micro-batches, but {e}") from e
    rank = on_tensor_axis(moments, _assignment(moments.body, plan, "tp"))
    return cut_stages(moments, rank, tuple(plan.cuts), frozenset(plan.recompute))


def axis_plan(program: Program, assignment: Assignment) -> AxisPlan:
    """An assignment as the plan states it: a block's operators once."""
    representative = members_of(program)
    return AxisPlan(
        n=assignment.n,
        ops={name: str(s) for name, s in assignment.ops.items() if representative[name] == name},
        leaves={name: str(x) for name, x in assignment.leaves.items()},
    )


def _assignment(program: Program, plan: Plan, axis: str) -> Assignment | None:
    stated = plan.axes.get(axis)
    if plan.mesh[axis] == 1:
        return None
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
    for x in (*program.inputs, *program.params, *program.buffers):
        leaves[x.value] = Layout.parse(stated.leaves[x.value]) if x.value in stated.leaves else I
        if not leaves[x.value].divides(program.types[x.value].shape, stated.n):
            raise PlanError(f"{x.value} of {program.types[x.value]} cannot lie as {leaves[x.value]} over {stated.n} ranks of {axis}")
    return Assignment(axis=axis, n=stated.n, ops=ops, leaves=leaves)


def _checked(program: Program, op: Op, stated: Strategy, axis: str, n: int) -> Strategy:
    """The rule's own strategy that the plan names. Only what a rule states is ever run."""
    groups = frozenset({1, *(x.groups for x in (*stated.inputs, *stated.outputs) if x.is_shard)})
    for s in strategies_of(view_of(program, op, n, groups)):
        if dataclasses.replace(s, collective=False) == stated:
            return s
    operands = ", ".join(str(program.types[r]) for r in refs(op))
    raise PlanError(f"{op.target} ({op.name}) has no strategy '{stated}' on {axis} of {n} ranks with operands {operands}")
