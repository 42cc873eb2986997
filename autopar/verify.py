"""Does the parallel module compute what the original computes? Real processes, float64, loss, gradients and trained parameters.

The single-process side is the original module, not our capture of it. Casts to float32 that a model makes on purpose are
lifted to float64 on both sides; dropout is off on both sides, since two ways to draw random numbers cannot be compared. Other
random numbers are drawn by the original and given to both.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import Captured, capture, lift_to_float64, to_float64
from autopar.capture.export import loss_of
from autopar.compiler import emit, plan_of, tensors_of
from autopar.draws import Recorder, drawn_names, draws_given
from autopar.planner import Pins, Plan
from autopar.planner.wishes import check_inputs
from autopar.render import load, positional_names
from autopar.run import ParallelModule, WorkerPool

__all__ = ["Reference", "Report", "TOLERANCE", "reference", "verify", "verify_plan"]

TOLERANCE = 1e-9
LEARNING_RATE = 1e-4  # small steps: batch norm of few samples (ResNet-50) multiplies rounding by a thousand in two steps of 1e-3
ADAM_EPS = 1e-4  # a gradient that is zero but for rounding (an attention key's bias) must not be blown up to a whole step


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The original model's own training, in float64. losses: of each step. gradients: of the first. parameters: the
    state_dict (buffers too) after the last. captured: the program of the same model, for the plans to be verified; made in
    capture_s seconds. draws: the random numbers of each step, which the program takes as further inputs."""

    name: str
    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    captured: Captured
    inputs: Any
    positional: tuple[str, ...]
    draws: tuple[Mapping[str, Tensor], ...] = ()
    notes: tuple[str, ...] = ()
    capture_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Worst relative error of each kind, and where: of a tensor, relative to its largest magnitude, but not to less than a
    thousandth of the largest gradient of the model, or one step of the optimizer. copies_equal: all copies of a replicated
    or tied part are bit-equal on all ranks after the last step."""

    plan: Plan
    source: str
    loss: float
    gradient: float
    gradient_at: str
    parameter: float
    parameter_at: str
    copies_equal: bool
    unequal: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return max(self.loss, self.gradient, self.parameter) < TOLERANCE and self.copies_equal


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout does nothing inside, in attention too."""
    attention = F.scaled_dot_product_attention

    def plain(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *more: Any, **rest: Any
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *more, **rest)

    def same(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(F, name, same))
            stack.enter_context(mock.patch.object(torch.nn.functional, name, same))
        stack.enter_context(mock.patch.object(torch, "dropout", same))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", plain))
        yield


def reference(
    model: nn.Module, example_inputs: Any, *, steps: int = 3, loss: Callable[[Any], Tensor] | None = None, seed: int = 0
) -> Reference:
    """Train a float64 copy of the model for `steps` AdamW steps on one process, and capture it. Raises CaptureError, WishError."""
    check_inputs(model, example_inputs)
    model = to_float64(copy.deepcopy(model))
    inputs = _as_float64(example_inputs)
    with lift_to_float64(), without_dropout():
        start = time.perf_counter()
        captured = capture(copy.deepcopy(model), inputs, loss=loss)  # its tensors are not trained below
        capture_s = time.perf_counter() - start
        drawn = drawn_names(captured)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, eps=ADAM_EPS)
        losses, gradients, outcomes = [], {}, []
        for step in range(steps):
            torch.manual_seed(seed + step)
            optimizer.zero_grad(set_to_none=True)
            with Recorder() if drawn else contextlib.nullcontext() as recorder:
                value = loss_of(model(**inputs) if isinstance(inputs, dict) else model(*inputs), loss)
            outcomes.append(recorder.outcomes if recorder is not None else [])
            value.backward()
            losses.append(value.item())
            if step == 0:
                trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
                gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained}
            optimizer.step()
    parameters = {n: t.detach().clone() for n, t in model.state_dict().items()}
    captured, given = draws_given(captured, outcomes) if drawn else (captured, ({},) * steps)
    return Reference(
        name=captured.program.name, losses=tuple(losses), gradients=gradients, parameters=parameters, captured=captured, inputs=inputs,
        positional=positional_names(model), draws=given, capture_s=capture_s,
    )  # fmt: skip


def verify_plan(ref: Reference, plan: Plan, pool: WorkerPool, *, timeout_s: float | None = 300.0) -> Report:
    """Run a plan for the reference's program on the pool's workers and compare. Raises LaunchError if a worker fails."""
    source = emit(ref.captured, plan, ref.positional)
    tensors = {k: t.detach() for k, t in tensors_of(ref.captured).items()}
    results = pool.run(_train, source, tensors, ref.inputs, ref.draws, timeout_s=timeout_s)
    losses, gradients, parameters, _ = results[0]
    loss = max(_finite(abs(a - b) / max(abs(b), 1e-30)) for a, b in zip(losses, ref.losses, strict=True))
    scale = max((g.abs().max().item() for g in ref.gradients.values() if g.numel()), default=0.0)
    gradient, gradient_at = _worst(gradients, ref.gradients, floor=1e-3 * scale)
    parameter, parameter_at = _worst(parameters, ref.parameters, floor=LEARNING_RATE)
    unequal = _unequal([r[3] for r in results])
    return Report(
        plan=plan, source=source, loss=loss, gradient=gradient, gradient_at=gradient_at, parameter=parameter, parameter_at=parameter_at,
        copies_equal=not unequal, unequal=unequal,
    )  # fmt: skip


def verify(
    model: nn.Module,
    example_inputs: Any,
    gpus: int,
    *,
    pins: Pins | Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    steps: int = 3,
    loss: Callable[[Any], Tensor] | None = None,
    cluster: str = "cpu",
    memory: int | str | None = None,
    pool: WorkerPool | None = None,
) -> Report:
    """Verify a model under the solver's own plan, a pinned one, or a given one, on `gpus` local gloo workers."""
    ref = reference(model, example_inputs, steps=steps, loss=loss)
    decided = plan if plan is not None else plan_of(ref.captured, gpus, cluster=cluster, memory=memory, pins=pins)
    if pool is not None:
        return verify_plan(ref, decided, pool)
    with WorkerPool(decided.gpus) as own:
        return verify_plan(ref, decided, own)


def _train(
    source: str, tensors: dict[str, Tensor], inputs: Any, draws: Sequence[Mapping[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """In a worker: losses, first gradients, parameters after the last step (both on rank 0), and checksums of local parts."""
    torch.set_default_dtype(torch.float32)
    with lift_to_float64():
        module = ParallelModule(load(source), tensors)
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, eps=ADAM_EPS) if trainable else None
        losses: list[float] = []
        gradients: dict[str, Tensor] = {}
        for step, drawn in enumerate(draws):
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
            loss = module(**inputs, **drawn) if isinstance(inputs, dict) else module(*inputs, **drawn)
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                gradients = module.full_gradients()
            if optimizer is not None:
                optimizer.step()
        full = module.full_state_dict()
    parts = {module.part_of(name): p.detach().cpu().contiguous() for name, p in module.named_parameters()}
    mine = {part: hashlib.sha256(p.numpy().tobytes()).hexdigest() for part, p in parts.items()}
    if torch.distributed.get_rank() != 0:
        gradients, full = {}, {}
    return losses, gradients, full, mine


def _worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, floor: float) -> tuple[float, str]:
    """The largest |found - expected| of any tensor, relative to the tensor's largest magnitude (at least `floor`)."""
    worst, at = 0.0, ""
    for name, b in expected.items():
        a = found.get(name)
        if a is None or a.shape != b.shape:
            return float("inf"), name
        if not b.numel():
            continue
        b = b.double()
        error = _finite((a.double() - b).abs().max().item() / max(b.abs().max().item(), floor, 1e-30))
        if error > worst:
            worst, at = error, name
    return worst, at


def _finite(error: float) -> float:
    """A comparison with what is not a number has failed."""
    return error if error == error else float("inf")


def _unequal(parts: list[dict[str, str]]) -> tuple[str, ...]:
    seen: dict[str, str] = {}
    bad = []
    for rank in parts:
        for part, digest in rank.items():
            if seen.setdefault(part, digest) != digest:
                bad.append(part)
    return tuple(dict.fromkeys(bad))


def _as_float64(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {k: _as_float64(v) for k, v in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(_as_float64(v) for v in inputs)
    return inputs
