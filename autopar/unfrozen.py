"""What it takes to train parameters that were frozen when the plan was made, in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autopar.ir import Layout
from autopar.planner.plan import Plan
from autopar.report.units import bytes_text
from autopar.run.dtypes import dtype_named
from autopar.run.manifest import ParamSpec
from cost_models.memory import OPTIMIZERS

__all__ = ["unplanned_bytes", "unplanned_text"]


def unplanned_bytes(specs: Sequence[ParamSpec], plan: Plan) -> list[int]:
    """Of each pipeline stage of the plan, the bytes on one rank of gradients and optimizer states of these parameters, as they rest."""
    found = Counter[int]()
    for spec in specs:
        cut = math.prod(plan.mesh.get(axis, 1) for axis, layout in spec.layouts.items() if Layout.parse(layout).is_shard)
        parts = cut * (plan.shard if spec.zero_dim is not None else 1)
        each = dtype_named(spec.dtype).itemsize * (1 + OPTIMIZERS[plan.optimizer])
        found.update(dict.fromkeys(spec.stages, math.prod(spec.shape) // parts * each))
    return [found[s] for s in range(len(plan.stages))]


def unplanned_text(model: str, specs: Sequence[ParamSpec], plan: Plan) -> str:
    """What the user is told of it. specs: one at least."""
    names = ", ".join(spec.name for spec in specs[:2]) + (f" and {len(specs) - 2} more" if specs[2:] else "")
    train, were = ("train", "were") if specs[1:] else ("trains", "was")
    added = unplanned_bytes(specs, plan)
    fullest = max(range(len(added)), key=lambda s: plan.stages[s].memory.total_bytes + added[s])
    planned = plan.stages[fullest].memory.total_bytes
    return (
        f"{names} of {model} {train}, and {were} frozen when it was compiled. Gradients and states of {plan.optimizer} take "
        f"{bytes_text(added[fullest])} more than planned for ({bytes_text(planned)} of {bytes_text(plan.memory_limit_bytes)}), beside what "
        f"backward keeps. Compile the model before it is frozen, and the plan has room for all"
    )
