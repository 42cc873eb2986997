"""The original model's own training on one process, in float64, and the errors of what is compared with it.

It is the original module, not our capture of it. Casts to float32 that a model makes on purpose are lifted to float64; dropout is off,
since two ways to draw random numbers cannot be compared. Other random numbers are drawn here, and given to what is compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.capture import LOWER_PRECISIONS, Captured, capture, in_float64, lift_to_float64, to_float64
from autopar.capture.export import loss_of
from autopar.capture.made import in_the_state
from autopar.capture.source import first_line
from autopar.compare import finite, worst
from autopar.copies import copied
from autopar.draws import drawn_names, draws_given, recording, with_seeds
from autopar.dropout import without_dropout
from autopar.errors import CaptureError, VerificationError
from autopar.ir import Program
from autopar.planner.moments import batched_inputs
from autopar.planner.wishes import check_inputs
from autopar.run.inputs import not_dense, positional_names
from autopar.run.objects import leaf_path
from autopar.verify_rank import ADAM_EPS, LEARNING_RATE, Call, Draws, Found

__all__ = ["Errors", "Original", "Reference", "as_float64", "errors_of", "reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Worst relative error of each kind, and where: of a tensor, relative to its largest magnitude, but not to less than a
    thousandth of the largest gradient of the model, or one step of the optimizer. evaluation, batches: of the losses in evaluation
    mode, and of steps on batches of other sizes; None if there were none."""

    loss: float
    gradient: float
    gradient_at: str
    parameter: float
    parameter_at: str
    buffer: float
    buffer_at: str
    evaluation: float | None = None
    batches: float | None = None

    def by_kind(self) -> dict[str, float]:
        """The error of each kind that was compared."""
        found = {kind: getattr(self, kind) for kind in ("loss", "gradient", "parameter", "buffer", "evaluation", "batches")}
        return {kind: error for kind, error in found.items() if error is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The original model's own training, in float64. losses: of each step. gradients: of the first. parameters, buffers: after the
    last, by name; of buffers also those that are in no state_dict. captured: the program of the same model, for the plans to be
    verified; made in capture_s seconds. model, loss: as they were given, not trained. later: calls after the steps, (training, which of
    the batches), and what each lost; final: the state_dict after them; forms: what was captured for them; notes: why one is not there.
    draws: the random numbers of each call, in order, which the program of its kind takes as further inputs."""

    name: str
    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    captured: Captured
    model: nn.Module
    loss: Callable[[Any], Tensor] | None
    batches: tuple[Any, ...]
    positional: tuple[str, ...]
    later: tuple[Call, ...] = ()
    later_losses: tuple[float, ...] = ()
    final: Mapping[str, Tensor] = field(default_factory=dict)
    forms: Mapping[Call, Captured] = field(default_factory=dict)
    draws: Draws = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    capture_s: float = 0.0


def reference(
    model: nn.Module,
    example_inputs: Any,
    *,
    steps: int = 3,
    loss: Callable[[Any], Tensor] | None = None,
    later: bool = False,
) -> Reference:
    """Train a float64 copy of the model for `steps` AdamW steps on one process, and capture it. later: then evaluate it, and train it
    on a batch twice as large and on the first one again, and capture what that needs. Raises CaptureError, WishError."""
    check_inputs(model, example_inputs)
    given, model = model, to_float64(copied(model))
    inputs = as_float64(example_inputs)
    with lift_to_float64(), without_dropout():
        start = time.perf_counter()
        captured = with_seeds(capture(copied(model), inputs, loss=loss))  # its tensors are not trained below
        if captured.answers.writes:
            raise CaptureError(
                f"the forward of {type(model).__name__} writes to {', '.join(sorted(captured.answers.written_names))}, which a plan that "
                f"is verified by itself does not\n  what to do: change parameters after optimizer.step(), or compare your training loop"
            )
        if captured.guards is not None and (leaves := captured.guards.varied.leaves):
            raise CaptureError(
                f"each call of {type(model).__name__} changes {', '.join(leaf.name for leaf in leaves)}, and computes with that, which a "
                f"plan that is verified by itself does not\n  what to do: compare your training loop"
            )
        capture_s = time.perf_counter() - start
        batches = (inputs, _doubled(inputs, captured.program)) if later and captured.program.batch_size else (inputs,)
        wanted = ((False, 0), (True, 1), (True, 0)) if len(batches) > 1 else ((False, 0),)
        forms, notes = _captured(model, batches, loss, wanted if later else (), captured)
        notes = (*_lower_precision(captured), *notes)
        calls = tuple(call for call in wanted if later and (call in forms or (call == (True, 0) and (True, 1) in forms)))
        original = Original(model, batches, loss, captured)
        losses = []
        state = (*model.named_parameters(), *model.named_buffers())
        began = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        odd = next((name for name, t in state if t.is_floating_point() and not not_dense(t) and not t.isfinite().all()), "")
        for k in range(steps):
            if asked := captured.answers.changed_of(model):
                said = f"only the first {k} of {steps} steps are compared: after them the model is captured again, for {asked}"
                notes, calls = (*notes, said), ()
                break
            losses.append(original.step(0, k))
            if not math.isfinite(losses[-1]):
                raise VerificationError(_not_a_number(model, odd, k, losses[-1]))
        parameters = _cloned(dict(model.named_parameters(remove_duplicate=False)))
        frozen = {name: parameters[name] for name in captured.program.written_parameters}
        held = {name: b for name, b in model.named_buffers(remove_duplicate=False) if not not_dense(b)}
        caches = held.keys() - began - in_the_state(model)
        if caches:
            said = f"{', '.join(sorted(caches)[:3])}{' and others' if len(caches) > 3 else ''}"
            notes = (*notes, f"buffers that calls make, and no state_dict holds, are not compared: {said}")
        buffers = frozen | _cloned({name: b for name, b in held.items() if name not in caches})
        later_losses = []
        for call in calls:
            try:
                later_losses.append(original.later(call))
            except RuntimeError as error:  # it asks for gradients in its forward, perhaps
                if call[0]:
                    raise
                notes = (*notes, f"evaluation is not compared: without gradients the model itself fails: {first_line(error)}")
                calls = tuple(c for c in calls if c[0])
    draws: dict[Call, tuple[Mapping[str, Tensor], ...]] = {}
    captured, draws[True, 0] = _given(captured, original.drawn[True, 0])
    for key in calls:
        if key in forms:
            forms[key], draws[key] = _given(forms[key], original.drawn[key])
    return Reference(
        name=captured.program.name, losses=tuple(losses), gradients=original.gradients, parameters=parameters, buffers=buffers,
        captured=captured, model=given, loss=loss, batches=batches, positional=positional_names(model), later=calls,
        later_losses=tuple(later_losses), final=_cloned(model.state_dict()) if calls else {}, forms=forms, draws=draws, notes=notes,
        capture_s=capture_s,
    )  # fmt: skip


def _not_a_number(model: nn.Module, odd: str, step: int, loss: float) -> str:
    """Why nothing can be compared. odd: a parameter or buffer that began with values that are not finite."""
    where = f"; {odd} has values that are not finite, which may be why" if odd else ""
    return (
        f"the loss of {type(model).__name__} itself is {loss} on the example inputs (step {step + 1}, float64, one process){where}: there "
        f"is nothing to compare with. Give weights and inputs whose loss is a number"
    )


class Original:
    """A model in training as it is written, with AdamW. gradients: of its first step. drawn: the random numbers of each call, as the
    program that was captured takes them."""

    def __init__(self, model: nn.Module, batches: tuple[Any, ...], loss: Callable[[Any], Tensor] | None, captured: Captured) -> None:
        self._model, self._batches, self._loss, self._captured = model, batches, loss, captured
        self._modes = [(m, m.training) for m in model.modules()]
        self._optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, eps=ADAM_EPS)
        self.gradients: dict[str, Tensor] = {}
        self.drawn: dict[Call, list[list[Tensor]]] = {}

    def step(self, index: int, seed: int | None = None) -> float:
        """An optimizer step on one of the batches; its loss. seed: of the random numbers that it draws."""
        if seed is not None:
            generators.seed(seed)
        for module, training in self._modes:  # parts may be frozen in evaluation
            module.training = training
        self._optimizer.zero_grad(set_to_none=True)
        value = self._call((True, index))
        value.backward()
        if not self.gradients:
            trained = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
            self.gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained}
        self._optimizer.step()
        return value.item()

    def later(self, call: Call) -> float:
        """The loss of a step or of an evaluation after the steps."""
        return self.step(call[1]) if call[0] else self._evaluate(call[1])

    @torch.no_grad()
    def _evaluate(self, index: int) -> float:
        self._model.eval()
        return self._call((False, index)).item()

    def _call(self, call: Call) -> Tensor:
        given = self._batches[call[1]]
        with recording(self._model, self._captured) as outcomes:
            value = loss_of(self._model(**given) if isinstance(given, dict) else self._model(*given), self._loss)
        self.drawn.setdefault(call, []).append(outcomes)
        return value


def _given(captured: Captured, outcomes: list[list[Tensor]]) -> tuple[Captured, tuple[Mapping[str, Tensor], ...]]:
    """The program with the random numbers of each call as further inputs, where it draws any."""
    return draws_given(captured, outcomes) if drawn_names(captured) else (captured, ({},) * len(outcomes))


def _doubled(inputs: Any, program: Program) -> Any:
    """The inputs with every sample a second time, in the reverse order."""
    batched = batched_inputs(program)
    paths = {x.path for x in program.inputs if x.value in batched}
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})

    def doubled(path: Sequence[Any], leaf: Any) -> Any:
        return torch.cat([leaf, leaf.flip(0)]) if leaf_path(path) in paths else leaf

    args, kwargs = pytree.tree_map_with_path(doubled, (args, kwargs))
    return kwargs if isinstance(inputs, Mapping) else args


def _captured(
    model: nn.Module, batches: tuple[Any, ...], loss: Callable[[Any], Tensor] | None, wanted: tuple[Call, ...], step: Captured
) -> tuple[dict[Call, Captured], tuple[str, ...]]:
    """What was captured for each call that is not one of the usual steps, and why others could not be. step: what was for one of those."""
    forms, notes, drawn, written = {}, [], drawn_names(step), step.program.written_parameters
    for trains, index in wanted:
        if (trains, index) == (True, 0):
            continue
        what = "a batch twice as large" if index else "evaluation"
        other = copied(model)
        try:
            found = with_seeds(capture(other if trains else other.eval(), batches[index], loss=loss, written=written))
        except CaptureError as error:
            notes.append(f"{what} is not compared, since it cannot be captured: {str(error).splitlines()[0]}")
            continue
        if drawn_names(found) == drawn:
            forms[trains, index] = found
        else:
            notes.append(f"{what} is not compared, since it draws other random numbers than a step")
    return forms, tuple(notes)


def _lower_precision(captured: Captured) -> tuple[str, ...]:
    """A note on what the model computes in a lower precision although it is lifted (in code that torch does not see as Python)."""
    program = captured.program
    low = dict.fromkeys(op.source or op.name for op in program.ops for o in op.outputs if o and program.types[o].dtype in LOWER_PRECISIONS)
    if not low:
        return ()
    return (f"in spite of float64 a lower precision computes, whose rounding (1e-7) is no error: {', '.join(list(low)[:3])}",)


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in tensors.items()}


def as_float64(inputs: Any) -> Any:
    """The inputs with their floating tensors in float64, complex ones in complex128."""
    if isinstance(inputs, Tensor):
        return in_float64(inputs)
    if isinstance(inputs, Mapping):
        return {k: as_float64(v) for k, v in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(as_float64(v) for v in inputs)
    return inputs


def errors_of(ref: Reference, found: Found, later: Sequence[Call]) -> Errors:
    """How far from the reference it is. later: the calls that found.later has the losses of."""
    scale = max((g.abs().max().item() for g in ref.gradients.values() if g.numel()), default=0.0)
    gradient, gradient_at = worst(found.gradients, ref.gradients, floor=1e-3 * scale)
    parameter, parameter_at = worst(found.state, ref.parameters, floor=LEARNING_RATE)
    buffer, buffer_at = worst(found.buffers, ref.buffers, floor=LEARNING_RATE)
    done = dict(zip(later, found.later))
    evaluation, batches = (_later_error(ref, done, training) for training in (False, True))
    if ref.later and all(isinstance(done.get(c), float) for c in ref.later if c[0]):
        parameter, parameter_at = max((parameter, parameter_at), worst(found.final, ref.final, floor=LEARNING_RATE))
    return Errors(
        loss=_loss_error(found.losses, ref.losses), gradient=gradient, gradient_at=gradient_at, parameter=parameter,
        parameter_at=parameter_at, buffer=buffer, buffer_at=buffer_at, evaluation=evaluation, batches=batches,
    )  # fmt: skip


def _loss_error(found: tuple[float, ...], expected: tuple[float, ...]) -> float:
    return max(finite(abs(a - b) / max(abs(b), 1e-30)) for a, b in zip(found, expected, strict=True))


def _later_error(ref: Reference, done: Mapping[Call, float | str], training: bool) -> float | None:
    """The worst error of the later calls of one kind, without those that were refused."""
    expected = dict(zip(ref.later, ref.later_losses, strict=True))
    pairs = [(loss, expected[call]) for call, loss in done.items() if call[0] == training and isinstance(loss, float)]
    return _loss_error(*zip(*pairs, strict=True)) if pairs else None
