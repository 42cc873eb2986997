"""What a training software can run as what the planner searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from autopar.errors import AutoparError
from autopar.ir import Program
from autopar.planner.plan import Pins, Plan
from autopar.planner.question import Elsewhere, Spaces
from autopar.planner.wishes import for_loss_outside, itemsize_of
from autopar.stacks.stack import Stack, pins_within
from autopar.stacks.table import STACKS
from cost_models.recipe import AUTOPAR

__all__ = ["as_configured", "as_planned_for", "best_within", "deciding"]


def best_within(stack: Stack, program: Program, pins: Pins | None) -> dict[str, Any]:
    """Arguments of `make_plan` for the best plan that this software can run. pins: the user's."""
    itemsize = itemsize_of(program)
    others = [Elsewhere(name="autopar itself", spaces=_spaces(None, program), recipe=AUTOPAR)]
    others += [
        Elsewhere(name=other.title, spaces=_spaces(other, program), recipe=other.recipe(itemsize))
        for other in STACKS.values() if other is not stack
    ]  # fmt: skip
    return {"stated": pins or Pins(), "spaces": _spaces(stack, program), "elsewhere": others, "recipe": stack.recipe(itemsize)}


def as_configured(stack: Stack, program: Program, pins: Pins | None) -> dict[str, Any]:
    """Arguments of `make_plan` for what this software is told, all of which pins states: none of them is the user's to be changed alone."""
    own = for_loss_outside(program, pins) or Pins()
    return {"stated": Pins(), "spaces": lambda _: (own,), "recipe": stack.recipe(itemsize_of(program))}


def deciding(as_run: Mapping[str, Any], pins: Pins | None) -> dict[str, object]:
    """What of these arguments decides a plan, as `planned_once` takes it."""
    return {"spaces": as_run["spaces"](pins or Pins()), "recipe": as_run["recipe"]} if as_run else {}


def as_planned_for(stack: Stack, plan: Plan) -> Plan:
    """The plan, which says so."""
    return msgspec.structs.replace(plan, software=stack.name)


def _spaces(stack: Stack | None, program: Program) -> Spaces:
    """None: of autopar itself."""

    def found(asked: Pins) -> list[Pins] | str:
        try:
            each = [asked] if stack is None else list(pins_within(stack, asked))
            return [for_loss_outside(program, pins) or Pins() for pins in each]
        except AutoparError as why:
            return str(why)

    return found
