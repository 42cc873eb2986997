"""The same plan for other inputs, another mode, or a model that has changed: a batch of another size, evaluation, a number that the
user anneals, parameters that are not frozen any more.

What the plan froze at capture (sizes of views, masks, counts) is not patched: the model is captured again as it is now, the plan is
completed for that program (`planner.complete`), and every strategy is checked against the operator rules as for a plan that was read from
a file. The parameters stay where they rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from autopar.axes import BATCH
from autopar.capture import Captured, captured_alike, program_hash
from autopar.capture.around import as_called
from autopar.capture.as_before import left_as_it_was
from autopar.capture.assembled import differentiable_throughout
from autopar.capture.caches import Caches
from autopar.capture.export import each_output
from autopar.capture.given import copied
from autopar.capture.guards import Guards
from autopar.capture.said import heard
from autopar.capture.standing import Elsewhere
from autopar.capture.state import State
from autopar.errors import AutoparError, CaptureError, PlanError
from autopar.ir import Buffer, Param, Program, refs
from autopar.planner import Plan, complete
from autopar.planner.wishes import FOR_LOSS_OUTSIDE
from autopar.render import load
from autopar.run import ParallelModule
from autopar.run.form import Anew, Emitted
from autopar.run.grad_mode import with_gradients
from autopar.run.hooks import of_calls
from autopar.run.inputs import arguments_of, positional_names
from autopar.run.manifest import ParamSpec
from autopar.run.outside_draws import from_seed
from autopar.run.part import is_part
from autopar.run.together import decided_by_rank_0, done_by_all
from autopar.run.varying import Varying
from autopar.unfrozen import unplanned_text
from cost_models.cluster import Cluster

__all__ = ["Variants", "names_read", "tensors_of"]

_A_TOOL = (
    "\n  or: if the hooks on its layers are those of a tool that looks into models (a summary, attributions), give it the original with "
    "whole parameters: with model.full_parameters(): tool(model.original, ...)"
)


_PARTS = (
    "\n  or: {} is made of parts of parameters, of which no rank has the whole: make what the forward reads inside of `with "
    "model.full_parameters(write=False):`, of whole parameters"
)


def tensors_of(captured: Captured) -> dict[str, Tensor]:
    """The captured tensors under the names that the manifest gives them."""
    program = captured.program
    names = {p.value: p.fqn for p in program.params} | {b.value: b.fqn or b.value for b in program.buffers}
    return {names[value]: tensor for value, tensor in captured.tensors.items()}


def names_read(program: Program) -> frozenset[str]:
    """The names of the parameters and buffers that some operator reads."""
    read = {r for op in program.ops for r in refs(op)}
    leaves: tuple[Param | Buffer, ...] = (*program.params, *program.buffers)
    return frozenset(x.fqn for x in leaves if x.fqn is not None and x.value in read)


class Variants:
    """Emits the module of a plan for the model as it is at a call. For the capture its parameters are whole for a moment. program: that
    of the plan. cluster: prices what is decided anew. apart: as in `captured_alike`. first: the inputs for which that was captured, and
    its guards."""

    def __init__(
        self, model: nn.Module, plan: Plan, program: Program, loss: Callable[[Any], Tensor] | None, emit: Callable[..., str],
        cluster: Cluster, *, outputs: bool | None = None, dtype: torch.dtype | None = None, backend: str | None = None,
        apart: bool = False, first: tuple[Any, Guards | None] = ((), None),
    ) -> None:  # fmt: skip
        self._model, self._plan, self._program, self._loss, self._emit, self._cluster = model, plan, program, loss, emit, cluster
        self._outputs, self._dtype, self._backend, self._apart = outputs, dtype, backend, apart
        self._caches = Caches(model, loss)
        self.elsewhere = Elsewhere(model, loss)
        self._note_caches(*first)
        self._planned = frozenset(p.fqn for p in program.params if p.trainable)
        self._told: set[str] = set()  # parameters that train and were not planned to
        self._told_of_odd_batches = False

    def __call__(self, module: ParallelModule, inputs: Any, why: str, asked: str, varying: Varying) -> Anew:
        """Collective. why: what has changed of the model, in words. asked: 'all': all that it returns is computed, whatever was asked for
        when it was compiled; 'trained': and no loss is made of it. varying: numbers that it takes as inputs, where it can. Raises
        ValueError if the plan's decisions do not fit, CaptureError."""
        how: dict[str, Any] = {"outputs": True if asked else self._outputs, "loss": each_output if asked == "trained" else self._loss}
        how["varying"] = varying
        plan, captured = self._plan, self._captured_by_all(module, inputs, why, **how)
        program = captured.program
        try:
            captured, emitted, forward_only = self._fitting(module, captured, inputs, why, asked, **how)
            program = captured.program
        except PlanError as e:
            count = program.batch_size or 0
            size = f"a batch of {count} in {'training' if captured.training else 'evaluation'} mode"
            planned = f"batch {plan.global_batch}, {BATCH}={plan.mesh[BATCH]}, {plan.micro_batches} micro-batches"
            remedy = "Give batches of the size that was planned, or compile the model for this size and mode"
            if count == plan.global_batch:
                remedy = f"What it computes now is not what it computed when it was compiled{why and f' ({why})'}: compile it again"
            raise ValueError(f"{size} cannot run as it was planned ({planned}): {e}. {remedy}") from e
        unplanned = [spec for spec in emitted.MANIFEST.params if spec.trainable and spec.name not in self._planned]
        if fresh := {spec.name for spec in unplanned} - self._told:
            self._told |= fresh
            if module.mesh.rank == 0:
                warnings.warn(unplanned_text(module.manifest.model, unplanned, plan), stacklevel=2)
        samples, ranks = program.batch_size or 0, plan.mesh[BATCH]
        if samples % ranks and not self._told_of_odd_batches:
            self._told_of_odd_batches = True
            if module.mesh.rank == 0:
                warnings.warn(
                    f"a batch of {samples} does not divide among {ranks} data-parallel ranks: each of them computes all of it, which takes "
                    f"as long as on one. Leave it out (drop_last=True), or fill it (autopar.Padding), if that is too long",
                    stacklevel=2,
                )
        constants = {b.fqn or b.value for b in program.buffers if b.fqn is None or b.region}
        tensors = {name: tensor for name, tensor in tensors_of(captured).items() if name in constants}
        return Anew(
            emitted=emitted, tensors=tensors, guards=captured.guards, returned=captured.returned, around_loss=captured.around_loss,
            forward_only=forward_only,
        )

    def _fitting(
        self, module: ParallelModule, captured: Captured, inputs: Any, why: str, asked: str, **how: Any
    ) -> tuple[Captured, Emitted, bool]:
        """What was captured, emitted, and whether it can only run forward. Where the plan's decisions do not fit what trains now, and the
        model computes the same in any case: the model as it was planned to train; it has gradients of what is frozen, which nobody takes.
        In a call without gradients: cut where no gradients would come back. PlanError if nothing fits."""
        try:
            return captured, self._emitted(module, captured, asked), False
        except PlanError:
            if not torch.is_grad_enabled():
                forward = dataclasses.replace(captured, program=differentiable_throughout(captured.program))
                with contextlib.suppress(PlanError):
                    return captured, self._emitted(module, forward, asked), True
            with module.trained_as_planned() as otherwise:
                as_planned = self._captured_by_all(module, inputs, why, **how) if otherwise else None
            if as_planned is None or not _compute_the_same(captured.program, as_planned.program):
                raise
            return as_planned, self._emitted(module, as_planned, asked), False

    def _captured_by_all(self, module: ParallelModule, inputs: Any, why: str, **how: Any) -> Captured:
        written, trains = module.written_parameters, torch.is_grad_enabled()
        known = frozenset(spec.name for spec in module.manifest.buffers)
        with with_gradients(), module.captured_at_home():
            captured = done_by_all(
                lambda: _without_more_buffers(self._captured(inputs, why, written=written, trains=trains, **how), known),
                same=lambda c: program_hash(c.program), what="capture for other inputs",
            )  # fmt: skip
        if captured.guards is not None:
            captured.guards.stand_again(self.elsewhere.paths)
        return captured

    def _emitted(self, module: ParallelModule, captured: Captured, asked: str) -> Emitted:
        """PlanError if the plan's decisions do not fit what was captured."""
        program, plan = captured.program, self._plan
        if asked == "trained" and plan.virtual_stages == 1:
            plan = msgspec.structs.replace(plan, schedule=FOR_LOSS_OUTSIDE)
        completed = decided_by_rank_0(lambda: complete(plan, self._program, program, module.manifest, self._cluster).to_json())
        emitted = load(self._emit(captured, Plan.from_json(completed), positional_names(self._model)), backend=self._backend)
        self.check(module, emitted)
        return emitted

    def _captured(self, inputs: Any, why: str, **how: Any) -> Captured:
        found = self._captured_again(inputs, why, **how)
        self._note_caches(inputs, found.guards)
        return found

    def _note_caches(self, inputs: Any, guards: Guards | None) -> None:
        if guards is not None:
            self._caches.note(inputs, guards.made)

    def _captured_again(self, inputs: Any, why: str, *, varying: Varying, **how: Any) -> Captured:
        again = functools.partial(captured_alike, self._model, inputs, apart=self._apart, dtype=self._dtype, again=True, **how)
        if varying:
            with contextlib.suppress(CaptureError):
                return again(varying=varying)
        if why:  # what has changed may change again: sizes that it decides are those of a call, where they can be
            with contextlib.suppress(CaptureError):
                return again(sizes=False)
        try:
            return again()
        except CaptureError as error:
            self._call_the_original(inputs)
            if found := next((path for path, t in State.take(self._model, self._loss).tensors.items() if is_part(t)), ""):
                raise CaptureError(f"{error}{_PARTS.format(found)}") from error
            if type(error) is not CaptureError or not any(map(of_calls, self._model.modules())):
                raise
            raise CaptureError(f"{error}{_A_TOOL}") from error

    def _call_the_original(self, inputs: Any) -> None:
        """Raises what the model's own forward does for these inputs, for the loop to catch as it would on one process."""
        args, kwargs = copied(arguments_of(inputs))
        with left_as_it_was(self._model, self._loss), heard(), from_seed(0), as_called((args, kwargs)), contextlib.suppress(AutoparError):
            self._model(*args, **kwargs)

    @staticmethod
    def check(module: ParallelModule, emitted: Emitted) -> None:
        """Parameters and buffers must be used as they rest (on which stages, `complete` has seen). Raises PlanError."""
        params = {spec.name: spec for spec in module.manifest.params}
        for param in emitted.MANIFEST.params:
            known = params.get(param.name)
            if known is None or _lies(param) != _lies(known):
                raise PlanError(f"{param.name} would have to lie otherwise than it does")
        buffers = {spec.name: spec for spec in module.manifest.buffers}
        for buffer in emitted.MANIFEST.buffers:
            here = buffers.get(buffer.name)
            if not buffer.constant and (here is None or here.layouts != buffer.layouts):
                raise PlanError(f"{buffer.name} would have to lie otherwise than it does")
            if not buffer.constant and here is not None and here.shape != buffer.shape:
                raise PlanError(f"{buffer.name} has the shape {list(here.shape)}, and would have {list(buffer.shape)}")


def _without_more_buffers(captured: Captured, known: frozenset[str]) -> Captured:
    """Buffers that the model has been given since it was planned and that its forward does not use are the loop's own."""
    program = captured.program
    read = names_read(program)
    more = {b.value for b in program.buffers if b.fqn is not None and b.fqn not in known | read and not (b.region or b.mutated)}
    if not more:
        return captured
    program = program.replace(
        buffers=tuple(b for b in program.buffers if b.value not in more),
        types={value: type_ for value, type_ in program.types.items() if value not in more},
    )
    tensors = {value: tensor for value, tensor in captured.tensors.items() if value not in more}
    return dataclasses.replace(captured, program=program, tensors=tensors)


def _compute_the_same(one: Program, other: Program) -> bool:
    """Whether two programs of a model, of which other parameters train, call the same operators on the same values."""
    calls, others = ([(op.target, op.args, op.kwargs, op.outputs, op.no_grad) for op in program.ops] for program in (one, other))
    return calls == others and (one.loss, one.outputs) == (other.loss, other.outputs)


def _lies(spec: ParamSpec) -> tuple[object, ...]:
    return spec.shape, spec.dtype, spec.aliases, spec.layouts, spec.zero_dim, spec.rest
