"""Hooks on activations, and gradients that a forward asks for, in a part of the model and in its own forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, WIDTH, Compile, Net, Normed, Results, batch, program, samples, seeded, sgd, state, train, trained

KIND = "hooked"


class _NormedLogits(Normed):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.logits(x)


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


class Rooted(Net):
    """Hooks in the model's own forward: one scales, one clamps what comes to a view, one reverses gradients for a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(HIDDEN, 2)
        self.strength = 0.5

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        h = self.blocks(h)
        left, right = h.chunk(2, dim=-1)
        if right.requires_grad:
            right.register_hook(lambda grad: 0.25 * grad)
        return torch.cat([right, left], dim=-1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.hidden(x)
        seen = h * 1.0
        if seen.requires_grad:
            seen.register_hook(lambda grad: -self.strength * grad)
        return F.cross_entropy(self.head(h), y) + F.cross_entropy(self.critic(seen), y % 2)


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def hooks_of_the_own_forward(compile: Compile) -> Results:
    """The strength of the reversed gradients is annealed between the steps."""
    model = compile(seeded(Rooted), example_inputs=batch())
    optimizer, losses = sgd(model, 0.5), []
    for k in range(4):
        model.strength = 0.5 + k
        losses += train(model, optimizer, inputs=[batch(k)])
    model.eval()
    with torch.no_grad():
        losses.append(model(*batch(9)).item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def hook_after_a_first_use(compile: Compile) -> Results:
    """What is hooked has been used already: its gradient comes from there too."""

    class Late(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            other = self.blocks[0](h)
            if h.requires_grad:
                h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            return other + self.blocks[1](h)

    return {"losses": train(model := compile(seeded(Late), example_inputs=batch())), "state": state(model)}


@program(KIND)
def gradient_kept_by_a_hook_of_the_own_forward(compile: Compile) -> Results:
    """Saliency: the gradient of an activation is left in an attribute of the model."""

    class Salient(Net):
        def keep(self, grad: Tensor) -> None:
            self.kept = grad.detach().clone()

        def hidden(self, x: Tensor) -> Tensor:
            h = self.blocks(torch.tanh(self.first(x)))
            if h.requires_grad:
                h.register_hook(self.keep)
            return h

    built = seeded(Salient)
    model = compile(built, example_inputs=batch())
    losses, norms = [], []
    for k in range(3):
        losses += train(model, inputs=[batch(k)])
        norms.append(built.kept.norm().item())
    return {"losses": losses, "norms": norms, "state": state(model)}


class Field(nn.Module):
    """Energies of samples, and forces: their negative gradients by the positions, which are trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.net(x).squeeze(-1)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -slope


def _energies_and_forces(found: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    energy, force = found
    return F.mse_loss(energy, x.square().sum(-1)) + F.mse_loss(force, -2 * x)


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def forces_of_the_own_forward(compile: Compile) -> Results:
    model = compile(seeded(Field), example_inputs=(samples(),))
    optimizer, losses = sgd(model, 0.05), []
    for k in range(3):
        x = samples(k)
        optimizer.zero_grad()
        loss = _energies_and_forces(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def penalty_of_the_own_forward(compile: Compile) -> Results:
    """The norm of the gradient of the loss by the inputs is added to the loss, in forward."""

    class Penalised(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            loss = F.cross_entropy(self.logits(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + 10.0 * slope.square().sum()

    return {"losses": train(model := compile(seeded(Penalised), example_inputs=batch())), "state": state(model)}


class FirstClipped(nn.Module):
    """A clipped activation that the next layer, split over its outputs, reads."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = Clipping()
        self.up, self.down = nn.Linear(WIDTH, 8 * HIDDEN), nn.Linear(8 * HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.down(torch.tanh(self.up(10.0 * self.clip(self.down(torch.tanh(self.up(x)))))))
        return 30.0 * F.cross_entropy(self.head(h), y)


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def clipped_before_a_split_layer(compile: Compile) -> Results:
    model = compile(seeded(FirstClipped), example_inputs=batch())
    return {"losses": train(model, sgd(model, 0.01)), "state": state(model)}


@program(KIND)
def norm_of_what_comes_bounded_later(compile: Compile) -> Results:
    """A hook bounds the norm of the gradient of the whole batch's activations, which is as large in later steps alone."""

    class Bounded(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            if h.requires_grad:
                h.register_hook(lambda grad: grad * (50.0 / grad.norm().clamp(min=50.0)))
            return h

    model = compile(seeded(Bounded), example_inputs=batch())
    losses = train(model, sgd(model, 1e-4), steps=1)
    with torch.no_grad():
        model.head.weight.mul_(2000.0)
    return {"losses": losses + train(model, sgd(model, 1e-4), steps=3), "state": state(model)}


@program(KIND, plans=("dp2mb2",))
def hooks_over_weights_of_the_batch(compile: Compile) -> Results:
    """Hooks that weigh gradients by numbers of the samples, by one of the whole batch, and by a weight of the model."""

    class Weighing(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h, each, mean, weight = torch.tanh(self.first(x)), x.abs().mean(1, keepdim=True), x.square().mean(), self.head.weight
            if h.requires_grad:
                h.register_hook(lambda grad: grad * each + 0.1 * grad * mean)
                h.register_hook(lambda grad, w=weight: grad * w.norm())
            return self.blocks(h)

    return trained(compile(seeded(Weighing), example_inputs=batch()))


@program(KIND)
def hook_over_an_attribute_of_the_call(compile: Compile) -> Results:
    """The hook reads what the forward leaves in an attribute in each call."""

    class Leaving(Net):
        scale = torch.ones(())

        def hidden(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            self.scale = x.square().mean()
            if h.requires_grad:
                h.register_hook(lambda grad: grad * self.scale)
            return self.blocks(h)

    return trained(compile(seeded(Leaving), example_inputs=batch()))


class Fixed(nn.Module):
    """A deep equilibrium: a fixed point of a layer, whose gradient is a fixed point too, which a hook finds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.layer(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(30):
                z = self.step(z, x)
        z = self.step(z, x)
        if not z.requires_grad:
            return z
        start = z.detach().requires_grad_()
        again = self.step(start, x)

        def adjoint(grad: Tensor) -> Tensor:
            found = grad
            for _ in range(30):
                found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + grad
            return found

        z.register_hook(adjoint)
        return z


@program(KIND, plans=("dp2mb2",))
def fixed_point_in_a_part(compile: Compile) -> Results:
    """A part with a hook that asks for gradients of what the part has computed."""
    return trained(compile(seeded(WithPart, Fixed()), example_inputs=batch()))


@program(KIND, plans=("dp2tp2",))
def hooks_on_weights_before_the_first_call(compile: Compile) -> Results:
    """Of what is planned on its first call: one halves a gradient, one reads the norm of another, and is removed later; an optimizer of one
    weight steps in backward."""
    model = compile(seeded(Net))
    norms: list[float] = []
    model.head.weight.register_hook(lambda grad: 0.5 * grad)
    read = model.first.weight.register_hook(lambda grad: norms.append(grad.norm().item()))
    alone = torch.optim.SGD([model.blocks[0].up.weight], lr=0.05)

    def step(_: Tensor) -> None:
        alone.step()
        alone.zero_grad()

    model.blocks[0].up.weight.register_post_accumulate_grad_hook(step)
    losses = train(model, steps=2)
    read.remove()
    return {"losses": losses + train(model, steps=2), "norms": norms, "state": state(model)}


class _Gated(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.line, self.gate = nn.Linear(HIDDEN, HIDDEN), gate

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * self.gate(x)


class _Forces(nn.Module):
    """An energy's slopes, by a gate that stands here and in the layer that it gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        self.gated = _Gated(self.gate)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.gated(x).square().sum(), x, create_graph=True)
        return torch.tanh(slope)


@program(KIND)
def part_that_has_a_layer_under_two_names(compile: Compile) -> Results:
    """What asks for gradients runs as it is written; the optimizer has the model's parameters from before it was compiled."""
    model = seeded(WithPart, _Forces())
    optimizer, gate = torch.optim.SGD(model.parameters(), lr=0.5), model.part.gate[0].weight
    made = compile(model, example_inputs=batch())
    return {"losses": train(made, optimizer), "state": state(made), "same": float(model.part.gate[0].weight is gate)}


class _TwoHeads(Net):
    """Two results of one tower; the loss may use one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = self.hidden(x)
        return self.head(h), self.other(h)


@program(KIND, plans=("dp2tp2",))
def steps_in_hooks_of_what_has_a_gradient(compile: Compile) -> Results:
    """Steps by the norm of each gradient when it has come, by a backward pass for some parameters and by one for all; of what has no
    gradient no hook is called."""
    model = compile(seeded(_TwoHeads), example_inputs=batch()[:1])
    calls = dict.fromkeys((name for name, _ in model.named_parameters()), 0)

    def stepping(name: str) -> Any:
        def step(p: nn.Parameter) -> None:
            calls[name] += 1
            with torch.no_grad():
                p.sub_(0.1 * p.grad / (p.grad.norm() + 1))  # type: ignore[operator,union-attr]
            p.grad = None

        return step

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(stepping(name))
    losses = []
    for k in range(4):
        x, y = batch(k)
        first, second = model(x)
        loss = F.cross_entropy(first, y) if k < 2 else second.square().mean()
        loss.backward(inputs=[model.first.weight, model.first.bias] if k % 2 else None)
        losses.append(loss.item())
    return {"losses": losses, "calls": calls, "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def gradients_looked_at_before_backward(compile: Compile) -> Results:
    """torch.autograd.grad of the model's own loss, whose graph is retained, and backward after it; a batch norm moves once."""
    model = compile(seeded(Normed), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k in range(3):
        loss = model(*batch(k))
        slopes = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        share = 1 / (1 + sum(g.norm() for g in slopes).item())  # type: ignore[union-attr]
        optimizer.zero_grad()
        (share * loss).backward()
        optimizer.step()
        losses += [loss.item(), share]
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def two_backward_passes_past_a_batch_norm(compile: Compile) -> Results:
    """Two losses of one call, one after the other."""
    model = compile(seeded(_NormedLogits), example_inputs=batch()[:1])
    optimizer, losses = sgd(model), []
    for k in range(3):
        x, y = batch(k)
        scores = model(x)
        optimizer.zero_grad()
        first, second = F.cross_entropy(scores, y), 0.1 * scores.square().mean()
        first.backward(retain_graph=True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        second.backward()
        optimizer.step()
        losses += [first.item(), second.item()]
    return {"losses": losses, "state": state(model)}
