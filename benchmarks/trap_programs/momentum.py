"""Momentum encoders: frozen parameters that the forward itself moves."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks._traps_kit import CLASSES, HIDDEN, WIDTH, Compile, Net, Results, batch, program, samples, seeded, sgd, state, train, trained

KIND = "momentum"


def encoder() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(2 * HIDDEN, WIDTH))


class Contrast(nn.Module):
    """MoCo: keys are made by an encoder that follows the other one, and wait in a queue as negatives."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.query, self.key = encoder(), encoder()
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 24), dim=0))

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data * self.momentum + q.data * (1.0 - self.momentum)

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            if self.training:
                self.follow()
            key = F.normalize(self.key(0.9 * x + 0.1), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], dim=1) / 0.2
        if self.training:
            self.queue = torch.cat([self.queue[:, x.shape[0] :], key.T], dim=1)
        return F.cross_entropy(logits, torch.zeros(x.shape[0], dtype=torch.long))


def views(count: int = 4) -> list[tuple[Tensor]]:
    return [(samples(k),) for k in range(count)]


@program(KIND, plans=("dp2tp2", "zero2"))
def momentum_contrast(compile: Compile) -> Results:
    """The optimizer is given all parameters; afterwards it is evaluated, when nothing moves, and trained on."""
    model = compile(seeded(Contrast), example_inputs=views()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = train(model, optimizer, inputs=views())
    model.eval()
    with torch.no_grad():
        losses += [model(samples(7)).item(), model(samples(8)).item()]
    model.train()
    return {"losses": losses + train(model, optimizer, inputs=views(2)), "state": state(model)}


@program(KIND)
def momentum_planned_in_evaluation(compile: Compile) -> Results:
    """The first call is an evaluation, in which nothing moves: the plan does not know that the keys will."""
    model = compile(seeded(Contrast).eval(), example_inputs=views()[0])
    with torch.no_grad():
        first = model(samples(7)).item()
    model.train()
    return {"first": first, "losses": train(model, inputs=views()), "state": state(model)}


@program(KIND)
def momentum_annealed(compile: Compile) -> Results:
    """The momentum is a number that a schedule sets between the steps, and the norm of the frozen parameters is logged."""
    model = compile(seeded(Contrast), example_inputs=views()[0])
    optimizer, losses, norms = sgd(model, 0.3), [], []
    for k, given in enumerate(views()):
        model.momentum = 0.5 + 0.1 * k
        losses += train(model, optimizer, inputs=[given])
        norms.append(torch.stack([p.detach().norm() for p in model.parameters() if not p.requires_grad]).norm().item())
    return {"losses": losses, "norms": norms, "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def momentum_saved_and_resumed(compile: Compile) -> Results:
    """A checkpoint of the model and the optimizer, loaded into a fresh model that goes on; the keys go on from where they were."""
    model = compile(seeded(Contrast), example_inputs=views()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = train(model, optimizer, inputs=views(2))
    names = [name for name, _ in model.named_parameters()]
    again = compile(Contrast(), example_inputs=views()[0])
    other = torch.optim.AdamW(again.parameters(), lr=0.05)
    if hasattr(model, "full_state_dict"):
        folder = model.mesh.agree(tempfile.mkdtemp())
        autopar.save(f"{folder}/last", model, optimizer)
        autopar.load(f"{folder}/last", again, other)
    else:
        again.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
    losses += train(again, other, inputs=views(4)[2:])
    return {"names": names, "losses": losses, "state": state(again), "of the first": state(model)}


@program(KIND)
def momentum_reset_by_the_user(compile: Compile) -> Results:
    """Between the steps the keys are written to by the loop: copied anew from the queries, halved, and loaded from a state_dict."""
    model = compile(seeded(Contrast), example_inputs=views()[0])
    optimizer, first = sgd(model, 0.3), {name: value.clone() for name, value in model.state_dict().items()}
    losses = train(model, optimizer, inputs=views(2))
    with torch.no_grad():
        for q, k in zip(model.query.parameters(), model.key.parameters(), strict=True):
            k.copy_(q)
    losses += train(model, optimizer, inputs=views(2))
    with torch.no_grad():
        model.key[0].weight.mul_(0.5)
    losses += train(model, optimizer, inputs=views(2))
    model.load_state_dict(first)
    return {"losses": losses + train(model, optimizer, inputs=views(2)), "state": state(model)}


@program(KIND)
def momentum_unfrozen_by_the_user(compile: Compile) -> Results:
    """requires_grad_(True) of everything, the keys too, after compile."""
    model = compile(seeded(Contrast), example_inputs=views()[0])
    model.requires_grad_(True)
    return {"losses": train(model, inputs=views()), "state": state(model)}


@program(KIND)
def momentum_copied(compile: Compile) -> Results:
    """copy.deepcopy of what compile returned: the copy's keys move by themselves."""
    model = compile(seeded(Contrast), example_inputs=views()[0])
    losses = train(model, sgd(model, 0.3), inputs=views(2))
    other = copy.deepcopy(model)
    losses += train(other, sgd(other, 0.3), inputs=views(2))
    return {"losses": losses, "state": state(model), "of the copy": state(other)}


class Latent(nn.Module):
    """BYOL: the target has one weight of two names, moves by lerp_ after it is asked, and starts as the online network in the first call
    if told so."""

    def __init__(self, starts: bool = False) -> None:
        super().__init__()
        self.starts = starts
        self.online = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias=False), nn.Tanh())
        self.online.append(nn.Linear(WIDTH, HIDDEN, bias=False))
        self.target = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias=False), nn.Tanh())
        self.target.append(nn.Linear(WIDTH, HIDDEN, bias=False))
        self.predictor = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.target[4].weight = self.target[0].weight = nn.Parameter(torch.randn(HIDDEN, WIDTH))
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.starts:
            self.target.load_state_dict(self.online.state_dict())
            self.starts = False
        with torch.no_grad():
            aim = F.normalize(self.target(0.5 * x - 0.1), dim=-1)
        predicted = F.normalize(self.predictor(self.online(x)), dim=-1)
        with torch.no_grad():
            for mine, theirs in zip(self.target.parameters(), (self.online[0].weight, self.online[0].bias, self.online[2].weight)):
                mine.lerp_(theirs, 0.1)
        return {"loss": 2 - 2 * (predicted * aim).sum(dim=-1).mean(), "aim": aim}


@program(KIND, plans=("dp2tp2",))
def bootstrapped_latents(compile: Compile) -> Results:
    """The norm of the gradients is clipped over all parameters, the target's too."""
    model = compile(seeded(Latent), example_inputs=views()[0])
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 0.5)
    return {"losses": losses_of(model, clip), "state": state(model)}


@program(KIND)
def latents_that_start_in_the_first_call(compile: Compile) -> Results:
    """A flag says that the target is to be copied from the online network once."""
    model = compile(seeded(Latent, starts=True), example_inputs=views()[0])
    return {"losses": losses_of(model), "state": state(model)}


def losses_of(model: Any, before_step: Callable[[], Any] | None = None) -> list[float]:
    optimizer, losses = sgd(model, 0.3), []
    for given in views():
        optimizer.zero_grad()
        loss = model(*given)["loss"]
        loss.backward()
        if before_step is not None:
            before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Taught(nn.Module):
    """A teacher of repeated blocks that follows its student after each call, and logits for a loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (self.tower() for _ in range(2))
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    @staticmethod
    def tower() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(3)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            asked = self.teacher(x)
        seen = self.student(x)
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.data.mul_(0.8).add_(new.data, alpha=0.2)
        return self.head(seen), seen, asked


@program(KIND, plans=("dp2tp2",))
def teacher_that_follows_and_a_loss_outside(compile: Compile) -> Results:
    model = compile(seeded(Taught), example_inputs=views()[0])
    optimizer, losses = sgd(model, 0.2), []
    for k in range(4):
        x, y = batch(k)
        optimizer.zero_grad()
        logits, seen, asked = model(x)
        loss = F.cross_entropy(logits, y) + F.mse_loss(seen, asked)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model), "frozen": [n for n, p in model.named_parameters() if not p.requires_grad]}


class Slow(Net):
    """A frozen copy of its first layer follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)
        self.moving = True

    def move(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(list(self.slow.parameters()), list(self.first.parameters()), 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.moving:
            self.move()
        return super().forward(x, y) + F.mse_loss(self.first(x), self.slow(x))


@program(KIND)
def momentum_by_operators_on_lists(compile: Compile) -> Results:
    """It moves in every second step alone, as the loop says."""
    model = compile(seeded(Slow), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k in range(5):
        model.moving = k % 2 == 0
        losses += train(model, optimizer, inputs=[batch(k)])
    return {"losses": losses, "state": state(model)}


class SlowByState(Slow):
    def move(self) -> None:
        with torch.no_grad():
            now = self.slow.state_dict()
            self.slow.load_state_dict({k: 0.9 * now[k] + 0.1 * v for k, v in self.first.state_dict().items()})


@program(KIND)
def momentum_by_the_state_dict(compile: Compile) -> Results:
    return trained(compile(seeded(SlowByState), example_inputs=batch()))


class SlowByData(Slow):
    def move(self) -> None:
        for old, new in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data


@program(KIND)
def momentum_with_gradients_left_on(compile: Compile) -> Results:
    return trained(compile(seeded(SlowByData), example_inputs=batch()))


class Codes(Net):
    """Frozen codes are moved towards the activations that are nearest to them, and normalised, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, HIDDEN), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.hidden(x)
        with torch.no_grad():
            nearest = torch.cdist(h, self.codes).argmin(0)
            self.codes.mul_(0.8).add_(h[nearest], alpha=0.2)
            self.codes.div_(self.codes.norm(dim=1, keepdim=True))
        return F.cross_entropy(self.head(h), y) + 0.1 * (F.normalize(h, dim=1) @ self.codes.T).square().mean()


@program(KIND, plans=("dp2tp2",))
def frozen_codes_moved_by_the_batch(compile: Compile) -> Results:
    return trained(compile(seeded(Codes), example_inputs=batch()))


class Scaled(nn.Module):
    """Statistics of batch norm in frozen parameters of the model's own, beside its scale and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.scale, self.shift = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))
        self.mean = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)
        self.var = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.batch_norm(self.first(x), self.mean, self.var, self.scale, self.shift, training=self.training)
        return F.cross_entropy(self.last(torch.relu(h)), y)


@program(KIND, plans=("dp2tp2", "zero2"))
def statistics_in_frozen_parameters(compile: Compile) -> Results:
    model = compile(seeded(Scaled), example_inputs=batch())
    losses = train(model)
    model.eval()
    with torch.no_grad():
        evaluated = model(*batch(9)).item()
    return {"losses": losses, "evaluated": evaluated, "state": state(model)}


class Distilled(nn.Module):
    """The forward itself puts its teacher in evaluation mode, which the loop's model.train() undoes."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = encoder(), nn.Sequential(encoder(), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.eval()
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.mse_loss(self.student(x), wanted)


@program(KIND, plans=("dp2tp2", "zero2"))
def teacher_put_in_evaluation_mode_by_the_forward(compile: Compile) -> Results:
    model = compile(seeded(Distilled), example_inputs=(samples(),))
    optimizer, losses, modes = sgd(model), [], []
    for k in range(4):
        if k != 2:
            model.train()
        losses += train(model, optimizer, inputs=[(samples(k),)])
        modes.append([m.training for m in (model.teacher, model.teacher[1], model.student)])
    model.eval()
    with torch.no_grad():
        losses.append(model(samples(5)).item())
    return {"losses": losses, "modes": modes, "state": state(model)}
