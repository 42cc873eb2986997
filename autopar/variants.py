"""The same plan for other inputs: a batch of another size, or the model's other mode (training, evaluation).

What the plan froze at capture (sizes of views, masks, counts) is not patched: the model is captured again for the new
inputs, the decisions of the plan are applied to that program, and every one of them is checked against the operator rules
as for a plan that was read from a file. The parameters stay where they rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch import Tensor, nn

from autopar.capture import Captured, capture, program_hash
from autopar.errors import AutoparError, PlanError
from autopar.planner import Plan
from autopar.render import load, positional_names
from autopar.run import ParallelModule
from autopar.run.module import Emitted
from autopar.run.together import done_by_all

__all__ = ["Variants", "tensors_of"]


def tensors_of(captured: Captured) -> dict[str, Tensor]:
    """The captured tensors under the names that the manifest gives them."""
    program = captured.program
    names = {p.value: p.fqn for p in program.params} | {b.value: b.fqn or b.value for b in program.buffers}
    return {names[value]: tensor for value, tensor in captured.tensors.items()}


class Variants:
    """Emits the module of a plan for other inputs or the other mode. Keeps the model's structure and buffers, and none of its
    parameters' memory: for a capture they are assembled from the parts on the ranks."""

    def __init__(
        self, model: nn.Module, plan: Plan, loss: Callable[[Any], Tensor] | None, emit: Callable[..., str]
    ) -> None:
        self._plan, self._loss, self._emit = plan, loss, emit
        self._devices = {name: p.device for name, p in model.named_parameters(remove_duplicate=False)}
        empty = {id(p): nn.Parameter(p.detach().new_empty(0), p.requires_grad) for p in model.parameters()}
        self._model, self._why_not = None, ""
        try:
            self._model = copy.deepcopy(model, dict(empty))
        except (TypeError, RuntimeError) as e:  # what the model holds besides tensors may be anything
            self._why_not = str(e)

    def __call__(self, module: ParallelModule, training: bool, inputs: Any) -> tuple[Emitted, Mapping[str, Tensor]]:
        """Collective. Raises ValueError if the plan's decisions do not fit the new inputs, CaptureError."""
        if self._model is None:
            what = "a batch of another size, or another mode, needs a copy of the model, which it does not allow"
            raise ValueError(f"{what}: {self._why_not}")
        model, plan = self._model, self._plan
        self._fill(module.full_state_dict())
        model.train(training)
        try:
            captured = done_by_all(
                lambda: capture(model, inputs, loss=self._loss), same=lambda c: program_hash(c.program), what="capture for other inputs"
            )
        finally:
            for p in model.parameters():
                p.data = p.data.new_empty(0)
        fitted = msgspec.structs.replace(plan, program_hash=program_hash(captured.program), global_batch=captured.program.batch_size or 0)
        try:
            emitted = load(self._emit(captured, fitted, positional_names(model), adapted=True))
            self._check(module, emitted)
        except PlanError as e:
            size = f"a batch of {fitted.global_batch} in {'training' if training else 'evaluation'} mode"
            planned = f"batch {plan.global_batch}, dp={plan.mesh['dp']}, {plan.micro_batches} micro-batches"
            raise ValueError(
                f"{size} cannot run as it was planned ({planned}): "
                f"{e}. Give batches that divide alike (drop the last short one), or compile the model for this size and mode"
            ) from e
        constants = {b.fqn or b.value for b in captured.program.buffers if b.fqn is None or b.region}
        return emitted, {name: tensor for name, tensor in tensors_of(captured).items() if name in constants}

    def _fill(self, state: Mapping[str, Tensor]) -> None:
        assert self._model is not None
        for name, p in self._model.named_parameters(remove_duplicate=False):
            if name not in state:
                why = "is not part of the plan, and its values are not kept"
                raise AutoparError(f"the parameter {name} {why}: compile again for these inputs")
            p.data = state[name].to(self._devices[name])

    @staticmethod
    def _check(module: ParallelModule, emitted: Emitted) -> None:
        """Parameters and buffers must be used as they rest."""
        params = {spec.name: spec for spec in module.manifest.params}
        for param in emitted.MANIFEST.params:
            if params.get(param.name) != param:
                raise PlanError(f"{param.name} would have to lie otherwise than it does")
        buffers = {spec.name: spec for spec in module.manifest.buffers}
        for buffer in emitted.MANIFEST.buffers:
            known = buffers.get(buffer.name)
            if not buffer.constant and (known is None or known.layouts != buffer.layouts or not set(buffer.stages) <= set(known.stages)):
                raise PlanError(f"{buffer.name} would have to lie otherwise than it does")

