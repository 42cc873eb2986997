"""What the user asks for, checked before a model is captured: names with near matches, pins with their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from autopar.errors import PlanError
from autopar.ir import Program
from autopar.planner.plan import Pins, Plan
from autopar.targets import did_you_mean

__all__ = ["PRECISIONS", "WishError", "as_pins", "check_gpus", "check_name", "with_precision"]

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


class WishError(PlanError, ValueError):
    """An argument whose value makes no sense."""


def check_gpus(gpus: object) -> None:
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise WishError(f"gpus must be a positive number of GPUs, not {gpus!r}")


def check_name(what: str, name: object, known: Iterable[str]) -> None:
    """WishError with near matches unless the name is known."""
    if name not in list(known):
        raise WishError(f"there is no {what} {name!r}{did_you_mean(str(name), known)}")


def as_pins(pins: Pins | Mapping[str, Any] | None) -> Pins | None:
    """Pins, given as such or as a mapping; None if nothing is pinned. WishError for unknown names, PlanError for bad values."""
    if pins is None or isinstance(pins, Pins):
        return None if pins == Pins() else pins
    if not isinstance(pins, Mapping):
        raise WishError(f"pins must be autopar.Pins or a mapping such as {{'tp': 2}}, not {pins!r}")
    for name in pins:
        check_name("pin", name, Pins.__struct_fields__)
    return Pins(**dict(pins)) if pins else None


def with_precision(plan: Plan, program: Program) -> Plan:
    """Nothing is cast: the plan's note says so where the parameters have another dtype than was named."""
    dtypes = dict.fromkeys(str(program.types[p.value].dtype).removeprefix("torch.") for p in program.params)
    if not dtypes or set(dtypes) == {PRECISIONS[plan.precision]}:
        return plan
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    found = ", ".join(dtypes)
    note = f"the parameters are {found}, and nothing is cast: all figures are for that, not for precision={plan.precision}"
    own = names.get(next(iter(dtypes)), plan.precision) if len(dtypes) == 1 else plan.precision
    return msgspec.structs.replace(plan, precision=own, notes=[note, *plan.notes])
