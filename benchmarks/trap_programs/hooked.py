"""Hooks on activations, and gradients that a forward asks for, in a part of the model and in its own forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._traps_kit import Compile, Net, Results, batch, program, seeded, sgd, state, train

KIND = "hooked"


class Clamping(nn.Module):
    """Clamps the gradients that come to what it is given."""

    def forward(self, h: Tensor) -> Tensor:
        h = torch.tanh(h)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.002, 0.002))
        return h * 1.5


class WithPart(Net):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def hidden(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.part(self.blocks[0](torch.tanh(self.first(x)))))


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def clamped_in_a_part_and_a_scaled_loss(compile: Compile) -> Results:
    """The loss is divided before backward, as in an accumulation: what is clamped are the gradients of that."""
    model = compile(seeded(WithPart, Clamping()), example_inputs=batch())
    optimizer, losses = sgd(model, 0.5), []
    for k in range(3):
        optimizer.zero_grad()
        for half in (2 * k, 2 * k + 1):
            loss = model(*batch(half)) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return {"losses": losses, "state": state(model)}


class Logging(nn.Module):
    """Keeps the norms of the gradients that come to what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def seen(self, grad: Tensor) -> None:
        self.norms.append(grad.norm().item())

    def forward(self, h: Tensor) -> Tensor:
        h = torch.tanh(h)
        if h.requires_grad:
            h.register_hook(self.seen)
        return h


@program(KIND, plans=("dp2mb2",))
def norms_logged_by_a_hook_in_a_part(compile: Compile) -> Results:
    part = Logging()
    model = compile(seeded(WithPart, part), example_inputs=batch())
    return {"losses": train(model), "norms": list(part.norms), "state": state(model)}


class LoggingAndGiving(Logging):
    def seen(self, grad: Tensor) -> Tensor:  # type: ignore[override]
        self.norms.append(grad.norm().item())
        return 0.5 * grad


@program(KIND, plans=("dp2mb2",))
def norms_logged_by_a_hook_that_halves(compile: Compile) -> Results:
    part = LoggingAndGiving()
    model = compile(seeded(WithPart, part), example_inputs=batch())
    return {"losses": train(model), "norms": list(part.norms), "state": state(model)}


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class Clipping(nn.Module):
    """Clips gradients by an autograd function: none of the first batch is as large."""

    def forward(self, h: Tensor) -> Tensor:
        clipped: Tensor = _Clipped.apply(torch.tanh(h))
        return clipped


class ClampingLate(nn.Module):
    """The same by a hook."""

    def forward(self, h: Tensor) -> Tensor:
        h = torch.tanh(h)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return h


def _large_later(compile: Compile, part: nn.Module) -> Results:
    model = compile(seeded(WithPart, part), example_inputs=batch())
    losses = train(model, steps=1)
    with torch.no_grad():
        model.head.weight.mul_(50.0)
    return {"losses": losses + train(model, steps=3), "state": state(model)}


@program(KIND)
def clipped_by_a_function_later(compile: Compile) -> Results:
    """Gradients are as large as the bound in the second step alone."""
    return _large_later(compile, Clipping())


@program(KIND)
def clamped_by_a_hook_later(compile: Compile) -> Results:
    return _large_later(compile, ClampingLate())


class LastSeen(nn.Module):
    """A hook leaves the gradient of an activation in an attribute, as for saliency."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def seen(self, grad: Tensor) -> None:
        self.last = grad.detach().norm()

    def forward(self, h: Tensor) -> Tensor:
        h = torch.tanh(h)
        if h.requires_grad:
            h.register_hook(self.seen)
        return h


@program(KIND)
def gradient_left_by_a_hook(compile: Compile) -> Results:
    part = LastSeen()
    model = compile(seeded(WithPart, part), example_inputs=batch())
    return {"losses": train(model), "last": part.last.item(), "state": state(model)}
