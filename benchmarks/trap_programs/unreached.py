"""Parts of a model to which a step gives no gradient, since what runs as it is written uses nothing of them: they have None, not zeros, and
an optimizer with momentum or decay leaves them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, WIDTH, Compile, Net, Results, batch, program, seeded, state

KIND = "unreached"
MORE = ("dp2tp2",)


class _Positives(nn.Module):
    """How far the samples of class 0 are from the mean of all; a zero that depends on nothing where there are none. (It adds a number that
    no graph holds.)"""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        of = y == 0
        if not bool(of.any()):
            return torch.zeros((), dtype=z.dtype)
        return (z[of] - z.mean(0)).pow(2).mean() * (1 + int(y[0]))


class _Towered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.scale, self.mined = nn.Linear(WIDTH, HIDDEN), nn.Parameter(torch.ones(HIDDEN)), _Positives()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), y) + self.mined(torch.tanh(self.tower(x)) * self.scale, y)


def _given(k: int) -> tuple[Tensor, Tensor]:
    """Every other batch has no sample of class 0."""
    x, y = batch(k)
    return x, y if k % 2 == 0 else y.clamp(min=1)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def _run(
    compile: Compile, net: Callable[[], nn.Module], part: str, optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw, passes: int = 1
) -> Results:
    """part: a parameter, of which it is recorded whether it has a gradient."""
    model = compile(seeded(net), example_inputs=_given(0))
    stepped, losses, has = optimizer(model.parameters()), [], []
    for k in range(4):
        stepped.zero_grad()
        for one in range(passes):
            loss = model(*_given(k + one))
            loss.backward()
            losses.append(loss.item())
        has.append(dict(model.named_parameters())[part].grad is not None)
        stepped.step()
    return {"losses": losses, "has a gradient": has, "state": state(model)}


@program(KIND, plans=MORE)
def tower_without_positives(compile: Compile) -> Results:
    """A loss of the samples of one class, of which every other batch has none: the tower that it alone uses stands still."""
    return _run(compile, _Towered, "tower.weight")


@program(KIND, plans=MORE)
def tower_without_positives_and_momentum(compile: Compile) -> Results:
    """As above, with SGD."""
    return _run(compile, _Towered, "scale", lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))


@program(KIND)
def tower_reached_by_one_of_two_batches(compile: Compile) -> Results:
    """Gradients of two batches are added, of which one has no positives."""
    return _run(compile, _Towered, "tower.weight", passes=2)


class _Kept(torch.autograd.Function):
    """Gives no gradient to its second operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@program(KIND, plans=("dp2mb2",))
def function_that_gives_a_tower_nothing(compile: Compile) -> Results:
    """A function of the user's that multiplies by what a tower computes, and stops the gradient there."""

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(WIDTH, HIDDEN)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(_Kept.apply(self.hidden(x), torch.sigmoid(self.tower(x)))), y)

    return _run(compile, Gated, "tower.weight")


class _Chosen(nn.Module):
    """Passes on what it is given, with weights of its own; which layer runs is said by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.layers[int(y[0]) % 2](z)


@program(KIND, plans=MORE)
def one_part_before_another_that_uses_nothing(compile: Compile) -> Results:
    """Two submodules that no graph holds, the second of what the first gives: where it uses nothing, neither has a gradient."""

    class Chained(_Towered):
        def __init__(self) -> None:
            super().__init__()
            self.chosen = _Chosen()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = torch.tanh(self.chosen(torch.tanh(self.tower(x)), y)) * self.scale
            return F.cross_entropy(self.logits(x), y) + self.mined(z, y)

    found = dict(_run(compile, Chained, "tower.weight"))
    return found | dict(_run(compile, Chained, "chosen.layers.0.weight"))


class _EachPositive(nn.Module):
    """What it is given, and a loss of each sample: a zero that depends on nothing for those that are not of class 0."""

    def forward(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        none = torch.zeros((), dtype=z.dtype)
        return z * 1.0, torch.stack([z[k].pow(2).mean() if int(y[k]) == 0 else none for k in range(len(z))])


@program(KIND, plans=MORE)
def second_of_two_results_used(compile: Compile) -> Results:
    """Of what the submodule returns the loss uses the second alone, to which the samples of one rank give nothing."""

    class Second(_Towered):
        def __init__(self) -> None:
            super().__init__()
            self.mined = _EachPositive()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y = y.clamp(min=1) - (torch.arange(len(y)) == 1).long() * y.clamp(min=1)  # one sample is positive
            return F.cross_entropy(self.logits(x), y) + self.mined(torch.tanh(self.tower(x)) * self.scale, y)[1].mean()

    return _run(compile, Second, "tower.weight")


@program(KIND, plans=MORE)
def tower_that_the_loss_uses_too(compile: Compile) -> Results:
    """What the graph reads as well has a gradient in each step."""

    class Used(_Towered):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = torch.tanh(self.tower(x))
            return F.cross_entropy(self.head(self.hidden(x) + z), y) + self.mined(z * self.scale, y)

    found = dict(_run(compile, Used, "tower.weight"))
    return found | {"of the scale": _run(compile, Used, "scale")["has a gradient"]}


@program(KIND, plans=MORE)
def part_that_writes_to_what_it_is_given(compile: Compile) -> Results:
    """A submodule that no graph holds changes its operand in place."""

    class Halved(_Positives):
        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            z.mul_(0.5)
            return super().forward(z, y) + z.square().mean()

    class Writing(_Towered):
        def __init__(self) -> None:
            super().__init__()
            self.mined = Halved()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x), y) + self.mined(self.tower(x) * self.scale, y)

    return _run(compile, Writing, "tower.weight")
