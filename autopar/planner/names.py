"""The operators that a plan names, in the names of another trace of the same model.

A trace numbers what it drops too: the same model, traced on another device, computes the same under other numbers. A plan keeps where each
operator that it names stands in its program, so that what it says is found again in any program that computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from autopar.capture import program_hash
from autopar.ir import Program
from autopar.planner.plan import Plan

__all__ = ["named_alike", "named_as", "placed"]

T = TypeVar("T")


def placed(program: Program, plan: Plan) -> Plan:
    """The plan of this program with the place in it of each operator that the plan names."""
    named = {name for axis in plan.axes.values() for name in axis.ops} | {s.first_op for s in plan.stages}
    named |= {name for mode in plan.modes for name in mode.operators}
    return msgspec.structs.replace(plan, operators={op.name: index for index, op in enumerate(program.ops) if op.name in named})


def named_as(program: Program, plan: Plan) -> Plan:
    """The plan in the names of this program, if it was made for one that computes the same; else as it is. What it then states is checked
    like that of any plan (planner.lower)."""
    own = [op.name for op in program.ops]
    if all(index < len(own) and own[index] == name for name, index in plan.operators.items()):
        return plan
    return _renamed(plan, dict(enumerate(own))) if plan.program_hash == program_hash(program) else plan


def named_alike(first: Plan, second: Plan) -> Plan:
    """The second plan in the names of the first, as far as both name the same operators of programs that compute the same."""
    if first.program_hash != second.program_hash or first.operators == second.operators:
        return second
    return _renamed(second, {index: name for name, index in first.operators.items()})


def _renamed(plan: Plan, names: Mapping[int, str]) -> Plan:
    new = {name: names.get(index, name) for name, index in plan.operators.items()}

    def keys(of: Mapping[str, T]) -> dict[str, T]:
        return {new.get(name, name): value for name, value in of.items()}

    account = plan.account and msgspec.structs.replace(plan.account, modules=keys(plan.account.modules), shapes=keys(plan.account.shapes))
    return msgspec.structs.replace(
        plan, operators=keys(plan.operators), account=account,
        axes={axis: msgspec.structs.replace(made, ops=keys(made.ops)) for axis, made in plan.axes.items()},
        stages=[msgspec.structs.replace(s, first_op=new.get(s.first_op, s.first_op)) for s in plan.stages],
        modes=[msgspec.structs.replace(m, operators=[new.get(name, name) for name in m.operators]) for m in plan.modes],
    )  # fmt: skip
