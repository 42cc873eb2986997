"""The whole compiler on one page: capture -> measure -> plan -> render -> run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.capture import Captured, capture, program_hash
from autopar.errors import PlanError
from autopar.planner import Pins, Plan, lower, make_plan
from autopar.planner.resources import choose_cluster, parse_memory
from autopar.render import load, make_manifest, positional_names, render
from autopar.run import ParallelModule
from autopar.run.deferred import DeferredModule, world_size

__all__ = ["Compiled", "build", "compile", "emit", "plan"]

Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What a model was compiled to: the captured program, its plan, the emitted source."""

    captured: Captured
    plan: Plan
    source: str


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
    pins: Pins | Mapping[str, Any] | None = None,
) -> Plan:
    """The best plan for a model on `gpus` GPUs; no process group and no GPU is needed.

    example_inputs: the global batch, a tuple of positional or a dict of keyword inputs. loss: a function of the model's
    output, where the model does not return its loss. cluster: a name of the catalogue, a TOML file, or 'auto' (this
    machine). memory: bytes of one GPU, or text like '80GiB'. precision: 'fp32', 'bf16', 'fp16' name the model's own dtype;
    nothing is cast. pins: what is decided already. Raises CaptureError, Infeasible, PlanError, ValueError.
    """
    captured = capture(model, example_inputs, loss=loss)
    return plan_of(captured, gpus, cluster=cluster, memory=memory, optimizer=optimizer, precision=precision, pins=pins)


def plan_of(
    captured: Captured,
    gpus: int,
    *,
    cluster: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    pins: Pins | Mapping[str, Any] | None = None,
) -> Plan:
    """The best plan for a captured program."""
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"gpus must be a positive number of GPUs, not {gpus!r}")
    pinned = pins if isinstance(pins, Pins) or pins is None else Pins(**dict(pins))
    described = choose_cluster(cluster, gpus)
    limit = parse_memory(memory)
    return make_plan(captured.program, gpus, described, memory_limit_bytes=limit, optimizer=optimizer, precision=precision, pins=pinned)


def emit(captured: Captured, decided: Plan, positional: tuple[str, ...] = ()) -> str:
    """The source of the emitted module. PlanError if the plan was made for another program."""
    if decided.program_hash != program_hash(captured.program):
        raise PlanError(f"the plan was made for another model or batch ({decided.model}); plan {captured.program.name} again")
    lowered = lower(captured.program, decided)
    return render(lowered, make_manifest(captured.program, lowered, decided, positional))


def build(model: nn.Module, example_inputs: Inputs, gpus: int, *, loss: Callable[[Any], Tensor] | None, plan: Plan | None, **wishes: Any) -> Compiled:
    """Everything up to the source: no process group is needed."""
    captured = capture(model, example_inputs, loss=loss)
    decided = plan if plan is not None else plan_of(captured, gpus, **wishes)
    if decided.gpus != gpus:
        raise PlanError(f"the plan is for {decided.gpus} GPUs, not for {gpus}")
    return Compiled(captured=captured, plan=decided, source=emit(captured, decided, positional_names(model)))


def tensors_of(captured: Captured) -> dict[str, Tensor]:
    """The captured tensors under the names that the manifest gives them."""
    program = captured.program
    names = {p.value: p.fqn for p in program.params} | {b.value: b.fqn or b.value for b in program.buffers}
    return {names[value]: tensor for value, tensor in captured.tensors.items()}


def compile(  # noqa: A001  (the field's word)
    model: nn.Module,
    gpus: int | None = None,
    *,
    example_inputs: Inputs | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    cluster: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    pins: Pins | Mapping[str, Any] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    verify: bool = False,
) -> ParallelModule | DeferredModule:
    """A module that trains `model` on `gpus` processes with the training loop unchanged.

    gpus: by default the size of the process group. Without example_inputs the plan is made on the first call, from its
    batch. plan: a Plan or a plan file instead of a search. verify: compare the first step's loss with the original model's.
    Other arguments as in `autopar.plan`. Outside of a process group of this size the result holds the plan and the source,
    and says on the first call which command launches it. Raises as `autopar.plan`, and LaunchError.
    """
    count = world_size() if gpus is None else gpus
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"gpus must be a positive number of GPUs, not {gpus!r}")
    decided = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    wishes = {"cluster": cluster, "memory": memory, "optimizer": optimizer, "precision": precision, "pins": pins}

    def finish(inputs: Inputs) -> Compiled:
        return build(model, inputs, count, loss=loss, plan=decided, **wishes)

    def start(compiled: Compiled) -> ParallelModule:
        module = ParallelModule(load(compiled.source), tensors_of(compiled.captured))
        module.train(model.training)
        return module

    if example_inputs is not None and (world_size() == count or count == 1):
        compiled = finish(example_inputs)
        module = start(compiled)
        module.plan, module.source = compiled.plan, compiled.source
        return module
    return DeferredModule(model, count, finish, start, finish(example_inputs) if example_inputs is not None else None)
