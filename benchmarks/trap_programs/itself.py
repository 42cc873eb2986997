"""Models whose own methods call them: steps, fits, losses of several calls, as the classes of many libraries have them."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    HIDDEN,
    WIDTH,
    Compile,
    InDict,
    Logits,
    Net,
    Normed,
    Results,
    batch,
    batches,
    program,
    samples,
    seeded,
    sgd,
    state,
    train,
)

KIND = "methods"


def steps_of(model: Any, step: Callable[..., Tensor], count: int = 3, first: int = 0) -> list[float]:
    """The usual loop, in which a method of the model makes the loss."""
    return train(step, sgd(model), inputs=[(batch(index), index) for index in range(first, first + count)])


class _Stepping(Net):
    """Keeps what it sees on itself, of which its forward reads some."""

    def __init__(self) -> None:
        super().__init__()
        self.global_step, self.logged = 0, dict[str, list[float]]()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        smoothing = 0.1 if self.global_step > 1 else 0.0
        return F.cross_entropy(self.logits(x), y, label_smoothing=smoothing)

    def log(self, name: str, value: Tensor) -> None:
        self.logged.setdefault(name, []).append(float(value))

    def training_step(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.train()
        loss = self(*given)
        self.log("loss", loss.detach())
        self.global_step += 1
        return loss

    def validation_step(self, given: tuple[Tensor, Tensor], index: int) -> float:
        self.eval()
        with torch.no_grad():
            return float(self(*given))


@program(KIND)
def step_of_the_model(compile: Compile) -> Results:
    """`training_step` and `validation_step`, with a count on the model that its forward reads."""
    model = compile(seeded(_Stepping))
    losses = steps_of(model, model.training_step)
    seen = [model.validation_step(batch(7), 0)]
    losses += steps_of(model, model.training_step, 2, 3)
    return {"losses": losses, "seen": seen, "logged": model.logged["loss"], "step": model.global_step, "state": state(model)}


class _Several(Logits):
    def contrastive(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = given
        first, second = self(x), self(x + 0.1)
        distance = (first - second).square().mean()
        with torch.no_grad():
            wanted = self(x.flip(0)).softmax(-1)
        return F.cross_entropy(first, y) + 0.1 * distance + F.kl_div(second.log_softmax(-1), wanted, reduction="batchmean")


@program(KIND)
def loss_of_several_calls_in_a_method(compile: Compile) -> Results:
    """Two calls with gradients and one without, in a method of the model."""
    model = compile(seeded(_Several))
    return {"losses": steps_of(model, model.contrastive), "state": state(model)}


class _InParts(Logits):
    def by_forward(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.forward(given[0]), given[1])

    def by_submodules(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        hidden = self.blocks(torch.tanh(self.first(given[0])))
        return F.cross_entropy(self.head(hidden), given[1]) + 0.01 * hidden.square().mean()


@program(KIND)
def forward_and_submodules_in_a_method(compile: Compile) -> Results:
    """Methods that call `self.forward` and submodules by themselves, between usual calls."""
    model = compile(seeded(_InParts))
    losses = steps_of(model, model.by_forward, 2)
    losses += steps_of(model, lambda given, _: F.cross_entropy(model(given[0]), given[1]), 2)
    losses += steps_of(model, model.by_submodules, 2, 2)
    return {"losses": losses, "state": state(model)}


class _Teaching(Logits):
    """Has a slow copy of itself, which a method makes and another one moves."""

    def teach(self) -> None:
        target = copy.deepcopy(self).requires_grad_(False)
        object.__setattr__(self, "target", target)

    def step(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        wanted: Tensor = self.target(given[0])  # type: ignore[operator]
        return F.cross_entropy(self(given[0]), given[1]) + (self(given[0]) - wanted).square().mean()

    @torch.no_grad()
    def follow(self) -> None:
        target: Any = self.target
        for slow, fast in zip(target.parameters(), self.parameters(), strict=True):
            slow.lerp_(fast, 0.5)


@program(KIND)
def copy_of_itself_in_a_method(compile: Compile) -> Results:
    """A slow copy that the model makes of itself by copy.deepcopy(self), moves by its own parameters, and compares itself with."""
    model, losses = compile(seeded(_Teaching)), []
    model.teach()
    for index in range(3):
        losses += steps_of(model, model.step, 1, index)
        model.follow()
    return {"losses": losses, "state": state(model)}


class _Answering(InDict):
    def loss_of(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        found = self(*given)
        return found["loss"] + 0.01 * found["logits"].square().mean()


@program(KIND)
def more_than_the_loss_in_a_method(compile: Compile) -> Results:
    """A method that uses the logits beside the loss, with gradients through both."""
    model = compile(seeded(_Answering))
    return {"losses": steps_of(model, model.loss_of), "state": state(model)}


class _Listening(Normed):
    def step(self, given: tuple[Tensor, Tensor], index: int, *, factor: float = 1.0) -> Tensor:
        with torch.enable_grad():
            return factor * self(x=given[0], y=given[1])


@program(KIND)
def hooks_and_a_decorator_around_a_method(compile: Compile) -> Results:
    """Hooks of the model see each call once; the method is wrapped by the loop, takes keywords, and batch norm counts its batches."""
    model, seen = compile(seeded(_Listening)), list[tuple[str, float]]()
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(("before", float(len(kwargs)))), with_kwargs=True)
    model.register_forward_hook(lambda module, args, found: seen.append(("after", float(found.detach()))))
    step = functools.partial(model.step, factor=2.0)
    losses = steps_of(model, step)
    return {"losses": losses, "seen": [value for _, value in seen], "names": len({name for name, _ in seen}), "state": state(model)}


@program(KIND)
def method_that_is_put_on_the_model(compile: Compile) -> Results:
    """A function is made a method of this one model, before and after it is compiled."""

    def step(self: Any, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self(given[0]), given[1], reduction="sum") / 12

    plain = seeded(Logits)
    plain.step = types.MethodType(step, plain)
    model = compile(plain)
    losses = steps_of(model, model.step, 2)
    model.other = types.MethodType(step, model)
    losses += steps_of(model, model.other, 2, 2)
    return {"losses": losses, "state": state(model)}


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 4)

    def loss(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self(given[0]), given[1])

    def decay(self) -> Tensor:
        return sum((p.square().sum() for p in self.parameters()), torch.zeros(()))


class _Derived(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))

    def loss(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        return super().loss(given, index) + 0.01 * self.decay()

    def epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches(2)

    def fit(self, optimizer: torch.optim.Optimizer, epochs: int) -> list[float]:
        losses = []
        for index in range(epochs):
            for given in self.epoch():

                def closure(given: tuple[Tensor, Tensor] = given, index: int = index) -> Tensor:
                    optimizer.zero_grad()
                    loss = self.loss(given, index)
                    loss.backward()
                    return loss

                losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
        return losses


@program(KIND)
def fit_by_closures_with_a_term_of_weights(compile: Compile) -> Results:
    """A fit of a base class with closures, in which a derived class adds a term of its weights to the loss."""
    model = compile(seeded(_Derived))
    return {"losses": model.fit(sgd(model), 2), "state": state(model)}


class _Critic(Logits):
    def penalty(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def loss_of(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self(given[0]), given[1]) + 0.1 * self.penalty(given[0])


@program(KIND)
def penalty_of_gradients_in_a_method(compile: Compile) -> Results:
    """A term of the norm of the gradient by the input, which is differentiated again, in a method that another method calls."""
    model = compile(seeded(_Critic))
    return {"losses": steps_of(model, model.loss_of), "state": state(model)}


@program(KIND)
def gradients_of_several_calls_without_sync(compile: Compile) -> Results:
    """As loops for DistributedDataParallel add up gradients: `no_sync`, where the model has it."""
    model, losses = compile(seeded(Net)), []
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            loss = model(*batch(2 * step + part)) / 2
            if part == 0 and hasattr(model, "no_sync"):
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return {"losses": losses, "seen": [float(model.logits(samples(9)).sum())], "state": state(model)}
