"""What plans: the best plan for a model, and the planner with all wishes but the program."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.debug import said, timed
from autopar.plan_cache import decisive, planned_once
from autopar.planner import Pins, Plan, make_plan
from autopar.planner.resources import check_measure, choose_cluster, parse_memory
from autopar.planner.store import Store
from autopar.planner.wishes import PRECISIONS, WishError, as_pins, check_gpus, check_inputs, check_name, for_loss_outside, with_notes
from autopar.report import notebook  # noqa: F401  which shows plans
from autopar.report.text import plan_text
from autopar.run.precision import compute_dtype
from autopar.stacks import stack_of
from autopar.stacks.spaces import as_planned_for, best_within, deciding
from autopar.stopping import stopped_by_user
from cost_models.memory import OPTIMIZERS

__all__ = ["Inputs", "plan", "wishes"]

Inputs = tuple[Any, ...] | dict[str, Any]


def plan(
    model: nn.Module,
    gpus: int,
    *,
    example_inputs: Inputs,
    loss: Callable[[Any], Tensor] | None = None,
    cluster: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    reduce_dtype: str | None = None,
    pins: Pins | Mapping[str, Any] | None = None,
    time_limit: float | None = None,
    stack: str | None = None,
) -> Plan:
    """The best plan for a model on `gpus` GPUs; no process group and no GPU is needed.

    example_inputs: the global batch, a tuple of positional or a dict of keyword inputs. loss: a function of the model's
    output, where the model does not return its loss. cluster: a name of the catalogue, a TOML file, or 'auto' (this
    machine). memory: bytes of one GPU, or text like '80GiB'. precision: 'bf16' or 'fp16': a model with float32 parameters computes and
    communicates in it, while parameters, sums of gradients and optimizer states stay float32; a model that was built in it stays as it
    is. 'fp32', 'fp64': nothing is cast. reduce_dtype: a name as of precision, in which gradients are brought together over ranks; by
    default that in which their parameters rest. pins: what is decided already. time_limit: seconds after which the best
    plan so far is the answer, with a note of what was left (the first one takes as long as it takes); without it nothing depends on the
    clock. stack: a training software ('megatron', 'torchtitan', ...; autopar.stacks): the best plan that it can run, priced as it runs it.
    Raises CaptureError, Infeasible, PlanError, ValueError.
    """
    described = wishes(
        gpus, cluster=cluster, memory=memory, optimizer=optimizer, precision=precision, reduce_dtype=reduce_dtype, pins=pins,
        time_limit=time_limit, stack=stack,
    )  # fmt: skip
    check_inputs(model, example_inputs)
    with timed("capture"):
        captured = capture(model, example_inputs, loss=loss, dtype=compute_dtype(model, precision))
    return described(captured)


def wishes(
    gpus: int,
    *,
    cluster: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    reduce_dtype: str | None = None,
    pins: Pins | Mapping[str, Any] | None = None,
    measure: str | None = None,
    time_limit: float | None = None,
    stack: str | None = None,
) -> Callable[..., Plan]:
    """The planner with everything but the program, checked: wrong wishes are refused before anything is captured. measure: as in
    `make_plan`; by default what AUTOPAR_MEASURE says, else 'roofline'. time_limit, stack: as in `plan`. What it returns takes a
    store of what was found out about the program, too, if that is to be shared."""
    check_gpus(gpus)
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise WishError(f"time_limit must be a positive number of seconds, not {time_limit!r}")
    described = choose_cluster(cluster)
    limit, pinned = parse_memory(memory), as_pins(pins)
    check_name("optimizer", optimizer, OPTIMIZERS)
    check_name("precision", precision, PRECISIONS)
    if reduce_dtype is not None:
        check_name("reduce_dtype", reduce_dtype, PRECISIONS)
    measured = measure or os.environ.get("AUTOPAR_MEASURE") or "roofline"
    check_measure(measured, described)
    software = None if stack is None else stack_of(stack)

    def planner(captured: Captured, store: Store | None = None) -> Plan:
        program = captured.program
        pins = for_loss_outside(program, pinned)
        as_it_runs = {} if software is None else best_within(software, program, pinned)

        def make() -> Plan:
            found = make_plan(
                program, gpus, described, memory_limit_bytes=limit, optimizer=optimizer, precision=precision,
                reduce_dtype=reduce_dtype, pins=pins, measure=measured, time_limit_s=time_limit, store=store, stop=stop,
                **as_it_runs,
            )  # fmt: skip
            return with_notes(found, program)

        def kept(plan: Plan) -> bool:
            return not ((time_limit or stop()) and plan.searched.get("unexplored"))

        with timed("planning"), stopped_by_user() as stop:
            asked = decisive(gpus, described, limit, optimizer, precision, pins, reduce_dtype) | deciding(as_it_runs, pinned)
            made = make() if measured == "live" else planned_once(program, asked, make, kept=kept)  # what is measured may differ each time
        made = made if software is None else as_planned_for(software, made)
        said(2, lambda: plan_text(made))
        return made

    return planner
