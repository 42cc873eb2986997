"""Does the captured program compute what the model computes? Both run on the example inputs; loss and gradients are compared."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping

import torch

from autopar.capture.export import Step
from autopar.capture.interpret import run_program
from autopar.errors import CaptureError
from autopar.ir import Program

__all__ = ["check_program"]

# The largest difference allowed, relative to the largest gradient: many roundings of the precision, far below any real difference.
_TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.complex128: 1e-9, torch.complex64: 1e-4,
}  # fmt: skip


def check_program(
    program: Program, step: Step, tensors: Mapping[str, torch.Tensor], args: tuple[object, ...], kwargs: Mapping[str, object],
    inputs: Mapping[str, torch.Tensor],
) -> None:  # fmt: skip
    """Compares loss and every gradient of the program with those of the model. CaptureError names the parameters that differ.

    inputs: the leaves of args and kwargs by value name. The model's buffers, its gradients and all random states are as before
    afterwards.
    """
    trainable = {p.value: tensors[p.value] for p in program.params if p.trainable}
    fqn = {p.value: p.fqn for p in program.params}
    if not trainable:
        raise CaptureError("no parameter of the model requires a gradient, so there is nothing to train")
    with _unchanged(step), torch.enable_grad():
        with _same_randomness(tensors):
            expected = step(*args, **kwargs)
        expected_grads = torch.autograd.grad(expected, list(trainable.values()), allow_unused=True)
    values = dict(tensors) | dict(inputs)
    values |= {b.value: tensors[b.value].clone() for b in program.buffers}
    with torch.enable_grad(), _same_randomness(tensors):
        found = run_program(program, values)
        found_grads = torch.autograd.grad(found, list(trainable.values()), allow_unused=True)
    tolerance = max(_TOLERANCE.get(t.dtype, 0.0) for t in [*trainable.values(), expected])
    if not _close(expected, found, tolerance * max(1.0, abs(expected.item()))):
        raise CaptureError(
            f"the captured program's loss is {found.item()!r}, the model's is {expected.item()!r}\n  what to do: if the forward draws "
            f"random numbers from Python or numpy, or changes from call to call, make it draw from torch; else this is a defect of autopar"
        )
    scale = max((float(g.abs().max()) for g in expected_grads if g is not None and g.numel()), default=0.0)
    wrong = []
    for value, expected_grad, found_grad in zip(trainable, expected_grads, found_grads, strict=True):
        zero = torch.zeros_like(trainable[value])
        if not _close(zero if expected_grad is None else expected_grad, zero if found_grad is None else found_grad, tolerance * scale):
            wrong.append(fqn[value])
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CaptureError(
            f"the captured program's gradients of {', '.join(wrong[:5])}{more} differ from the model's by more than {tolerance:g} of the "
            f"largest\n  what to do: look for torch.no_grad, .detach(), .data or custom autograd functions on the way to these parameters"
        )


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool(((a - b).abs() <= tolerance).logical_or(a == b).logical_or(a.isnan() & b.isnan()).all())


@contextlib.contextmanager
def _unchanged(step: Step) -> Iterator[None]:
    """Buffers hold after it what they held before it."""
    before = [(b, b.detach().clone()) for b in step.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextlib.contextmanager
def _same_randomness(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Every run inside draws the same random numbers; the random states are restored after it."""
    devices = sorted({t.device.index for t in tensors.values() if t.device.type == "cuda"})
    python = random.getstate()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
