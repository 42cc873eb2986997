"""The whole compiler on one page: capture -> measure and plan -> render. What comes out of it runs as `autopar.parallel` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import Captured, captured_alike, program_hash
from autopar.collector import held_back
from autopar.debug import said, timed
from autopar.errors import PlanError
from autopar.planner import Plan, lower
from autopar.planner.names import named_as
from autopar.planner.wishes import check_inputs
from autopar.planning import Inputs, wishes
from autopar.render import make_manifest, render
from autopar.run.inputs import positional_names
from autopar.run.together import decided_by_rank_0, done_by_all

__all__ = ["Compiled", "build", "emit", "plan_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What a model was compiled to: the captured program, its plan, the emitted source. apart: as in `captured_alike`."""

    captured: Captured
    plan: Plan
    source: str
    apart: bool = False


def build(
    model: nn.Module, inputs: Inputs, gpus: int, *, loss: Callable[[Any], Tensor] | None, decide: Callable[[Captured], Plan],
    outputs: bool | None = None, dtype: torch.dtype | None = None, apart: bool = False,
) -> Compiled:  # fmt: skip
    """Everything up to the source. outputs, dtype: as in `capture`; apart: as in `captured_alike`. Where there are other ranks it is
    collective: each captures, and rank 0 plans for all."""
    check_inputs(model, inputs)
    with timed("capture"):
        captured = done_by_all(
            lambda: captured_alike(model, inputs, apart=apart, loss=loss, outputs=outputs, dtype=dtype),
            same=lambda c: program_hash(c.program), what="capture",
        )  # fmt: skip
    decided = Plan.from_json(decided_by_rank_0(lambda: decide(captured).to_json()))
    if decided.gpus != gpus:
        raise PlanError(f"the plan is for {decided.gpus} GPUs, not for {gpus}")
    decided = named_as(captured.program, decided)
    return Compiled(captured=captured, plan=decided, source=emit(captured, decided, positional_names(model)), apart=apart)


def plan_of(captured: Captured, gpus: int, **wanted: Any) -> Plan:
    """The best plan for a captured program; arguments as in `plan`."""
    return wishes(gpus, **wanted)(captured)


def emit(captured: Captured, decided: Plan, positional: tuple[str, ...] = ()) -> str:
    """The source of the emitted module. PlanError if the plan was made for another program."""
    if decided.program_hash != program_hash(captured.program):
        raise PlanError(
            f"the plan was made for another model or batch, or another kind of device ({decided.model}); plan {captured.program.name} again"
        )
    with timed("rendering"), held_back():
        lowered = lower(captured.program, decided)
        source = render(lowered, make_manifest(captured.program, lowered, decided, positional, training=captured.training))
    said(4, lambda: source)
    return source
