"""Gradients that are differentiated again outside of the model: penalties on them, residuals of differential equations, products with a
Hessian."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks._traps_kit import (
    BATCH,
    CLASSES,
    HIDDEN,
    WIDTH,
    Compile,
    Logits,
    Net,
    Results,
    batch,
    batches,
    gradients,
    program,
    samples,
    seeded,
    sgd,
    state,
    stepped,
)
from benchmarks.trap_programs.local import mean_of_ranks, part_of

KIND = "penalties"
MORE = ("hybrid3", "dp2tp2")
IN_PARTS = ("dp2mb2", "dp2tp2")  # of a model with a loss of its own


class Critic(nn.Module):
    """Samples [batch, 8] to a number each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN)
        self.second, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))


class Convolving(nn.Module):
    """Images [batch, 2, 2, 2], batch norm with statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, HIDDEN, 2, padding=1), nn.BatchNorm2d(HIDDEN)
        self.second, self.last = nn.Conv2d(HIDDEN, HIDDEN, 2), nn.Linear(4 * HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.softplus(self.norm(self.first(x.view(-1, 2, 2, 2))))
        return self.last(torch.tanh(self.second(h)).flatten(1))


def slope(of: Tensor, by: Tensor) -> Tensor:
    """The gradient of the sum, to be differentiated again."""
    (found,) = torch.autograd.grad(of.sum(), by, create_graph=True)
    return found


@program(KIND, plans=MORE)
def gradient_penalty_of_a_critic(compile: Compile) -> Results:
    """WGAN-GP: slopes of norm 1 between what is real and what a generator makes; three calls of the critic in a step, and one for the
    generator, which is another compiled module."""
    critic = compile(seeded(Critic), example_inputs=(samples(),))
    generator = compile(seeded(nn.Linear, WIDTH, WIDTH), example_inputs=(samples(),))
    of_critic, of_generator = torch.optim.Adam(critic.parameters(), lr=1e-2), torch.optim.Adam(generator.parameters(), lr=1e-2)
    losses = []
    for k in range(3):
        real = samples(2 * k)
        with torch.no_grad():
            fake = generator(samples(2 * k + 1))
        share = torch.linspace(0, 1, BATCH).unsqueeze(1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        penalty = (slope(critic(between), between).norm(2, dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        made = -critic(generator(samples(2 * k + 1))).mean()
        made.backward()
        of_generator.step()
        losses += [loss.item(), penalty.item(), made.item()]
    return {"losses": losses, "critic": state(critic), "generator": state(generator)}


@program(KIND, plans=MORE)
def zero_centred_penalty(compile: Compile) -> Results:
    """R1, as of StyleGAN: of the call whose results are trained too; a convolution and batch norm, whose statistics move once."""
    critic = compile(seeded(Convolving), example_inputs=(samples(),))
    optimizer, losses = torch.optim.SGD(critic.parameters(), lr=0.05), []
    for k in range(3):
        real = samples(k).requires_grad_()
        score = critic(real)
        penalty = slope(score, real).square().sum(1).mean()
        loss = F.softplus(-score).mean() + 5 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), penalty.item()]
    return {"losses": losses, "state": state(critic)}


@program(KIND)
def penalty_of_a_spectrally_normed_critic(compile: Compile) -> Results:
    """Each call moves the vectors of the power iteration, and the second run is that of the first."""

    def build() -> nn.Module:
        critic = Critic()
        spectral_norm(critic.first), spectral_norm(critic.second)
        return critic

    def penalty(real: Tensor, _: Tensor) -> Tensor:
        real.requires_grad_()
        return slope(critic(real), real).square().sum(1).mean()

    critic = compile(seeded(build), example_inputs=(samples(),))
    return {"losses": stepped(critic, penalty, sgd(critic, 0.05)), "state": state(critic)}


@program(KIND, plans=MORE)
def residual_of_a_differential_equation(compile: Compile) -> Results:
    """A network that is to solve u'' + u u' = f: gradients of gradients of its input, of which the loss is made."""
    network = compile(seeded(Critic), example_inputs=(samples(),))

    def residual(x: Tensor, _: Tensor) -> Tensor:
        u = network(x.requires_grad_())
        first = slope(u, x)
        second = slope(first[:, 0], x)
        return (second[:, 0] + u[:, 0] * first[:, 1] - x.detach().sin().sum(1)).square().mean() + u[:4].square().mean()

    return {"losses": stepped(network, residual, torch.optim.Adam(network.parameters(), lr=1e-2)), "state": state(network)}


@program(KIND, plans=IN_PARTS)
def adversarial_penalty_with_a_loss_inside(compile: Compile) -> Results:
    """The loss is the model's own, and what is penalised its gradient by the input; accumulated over two calls."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in (batches(2), batches(4)[2:]):
        optimizer.zero_grad()
        for x, y in given:
            x = x.clone().requires_grad_()
            loss = model(x, y)
            total = 0.5 * loss + slope(loss, x).square().sum()
            total.backward()
            losses.append(total.item())
        optimizer.step()
    return {"losses": losses, "state": state(model)}


class Words(nn.Module):
    """Tokens [batch, 5], whose words are predicted: attention, an embedding and a loss over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(32, HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = nn.Linear(HIDDEN, 32, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.words(tokens)
        q, k, v = self.mix(h).view(*tokens.shape, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        h = h + attended.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


@program(KIND, plans=IN_PARTS)
def gradient_norm_of_parameters(compile: Compile) -> Results:
    """The squared norm of the loss's gradient is trained too: gradients of parameters, of which ranks hold parts, differentiated again."""
    generator = torch.Generator().manual_seed(3)
    given = [torch.randint(32, (2, BATCH, 5), generator=generator) for _ in range(3)]
    model = compile(seeded(Words), example_inputs=tuple(given[0]))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for tokens, labels in given:
        labels[0, 2:] = -100
        loss = model(tokens, labels)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        norm = sum(g.square().sum() for g in slopes)
        optimizer.zero_grad()
        (loss + 0.1 * norm).backward()
        optimizer.step()
        losses += [loss.item(), norm.item()]
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=IN_PARTS)
def diagonal_of_a_hessian(compile: Compile) -> Results:
    """Hutchinson's estimate, as of AdaHessian and Sophia: backward(create_graph=True), then products of the Hessian with signs."""
    model = compile(seeded(Net), example_inputs=batch())
    found = []
    for k in range(2):
        loss = model(*batch(k))
        params = dict(model.named_parameters())
        slopes = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        signs = [torch.ones_like(p) for p in params.values()]
        products = torch.autograd.grad(slopes, list(params.values()), grad_outputs=signs, retain_graph=True)
        found.append(sum(float((h * s).sum()) for h, s in zip(products, signs, strict=True)))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, h in zip(params.values(), products, strict=True):
                p -= 0.1 * p.grad / (h.abs() + 1)  # type: ignore[operator]
    return {"traces": found, "state": state(model)}


@program(KIND)
def penalty_of_local_parts(compile: Compile) -> Results:
    """Each rank makes the mean of its own samples, and of the slopes there."""
    critic = compile(seeded(Critic), example_inputs=(samples(),), local_batch=True)
    optimizer, losses = sgd(critic), []
    for k in range(3):
        (real,) = part_of(critic, samples(k))
        real = real.clone().requires_grad_()
        score = critic(real)
        first = slope(score, real)
        loss = F.softplus(-score).mean() + 5 * first.square().sum(1).mean() + slope(first[:, 0], real).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_of_ranks(loss))
    return {"losses": losses, "state": state(critic)}


@program(KIND)
def penalty_of_local_parts_with_a_loss_inside(compile: Compile) -> Results:
    """The loss is of the global batch, and slopes are of the samples that a rank was given, each by its own loss."""
    model: Any = compile(seeded(Net), example_inputs=batch(), local_batch=True)
    optimizer, losses = sgd(model), []
    for given in batches(3):
        x, y = part_of(model, *given)
        x = x.clone().requires_grad_()
        loss = model(x, y)
        penalty = slope(loss * len(x), x).square().sum(1).mean()
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def products_by_torchs_own_functions(compile: Compile) -> Results:
    """torch.autograd.functional: a Jacobian, trained by, a Hessian of the input, and products with both."""
    network, functional = compile(seeded(Critic), example_inputs=(samples()[:4],)), torch.autograd.functional
    x, direction = samples()[:4].requires_grad_(), samples(1)[:4]

    def energy(x: Tensor) -> Tensor:
        return network(x).square().sum()  # type: ignore[no-any-return]

    found = {
        "hessian": functional.hessian(energy, x.detach()),
        "hvp": functional.hvp(energy, x.detach(), direction)[1],
        "vhp": functional.vhp(energy, x.detach(), direction)[1],
        "vjp": functional.vjp(network, x.detach(), torch.ones(4, 1))[1],
    }
    functional.jacobian(network, x, create_graph=True).square().sum().backward()  # type: ignore[attr-defined]
    return {**found, "x": x.grad, "gradients": gradients(network)}


@program(KIND, plans=IN_PARTS)
def backward_that_keeps_its_graph(compile: Compile) -> Results:
    """As of AdaHessian: gradients of a loss that are kept in .grad with their graph, and are differentiated there."""
    model = compile(seeded(Net), example_inputs=batch())
    params, losses = list(model.parameters()), []
    for k in range(3):
        loss = model(*batch(k))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a cycle, which ends with p.grad = None
            loss.backward(create_graph=True)
        products = torch.autograd.grad([p.grad for p in params], params, grad_outputs=[torch.ones_like(p) for p in params])
        with torch.no_grad():
            for p, h in zip(params, products, strict=True):
                p -= 0.1 * p.grad / (h.abs() + 1)
                p.grad = None
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class _Softly(torch.autograd.Function):
    """A step, whose gradient is that of a softer one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x) * torch.sigmoid(-x)


class _Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda grad: 0.5 * grad)
        return self.last(torch.tanh(self.second(_Softly.apply(h))))


@program(KIND, plans=MORE)
def penalty_past_functions_and_hooks(compile: Compile) -> Results:
    """A function with gradients of its own, which are differentiated again, and a hook on a gradient."""
    critic = compile(seeded(_Spiking), example_inputs=(samples(),))

    def penalised(real: Tensor, _: Tensor) -> Tensor:
        score = critic(real.requires_grad_())
        return F.softplus(-score).mean() + slope(score, real).square().sum(1).mean()

    return {"losses": stepped(critic, penalised, sgd(critic, 0.05)), "state": state(critic)}


@program(KIND)
def changed_before_the_slope(compile: Compile) -> Results:
    """A step of the optimizer between a call and the gradient of it."""
    model = compile(seeded(Logits), example_inputs=batch()[:1])
    optimizer = sgd(model)
    x = samples().requires_grad_()
    scores = model(x)
    scores[:, :CLASSES].sum().backward(retain_graph=True)
    optimizer.step()
    found = {}
    try:
        found["slope"] = slope(scores, x)
    except RuntimeError:
        found["slope"] = torch.zeros(())
    return found


class Given(nn.Module):
    """Computes with its own weights, or with those that a call gives."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Parameter(0.3 * torch.randn(HIDDEN, WIDTH)), nn.Parameter(0.3 * torch.randn(CLASSES, HIDDEN))

    def forward(self, x: Tensor, enter: Tensor | None = None, leave: Tensor | None = None) -> Tensor:
        if enter is None or leave is None:
            enter, leave = self.enter, self.leave
        return F.linear(torch.tanh(F.linear(x, enter)), leave)


@program(KIND)
def steps_within_a_step(compile: Compile) -> Results:
    """MAML: two steps on weights that are given to the call, through which the outer gradient goes; and a penalty on the norm of weights,
    whose gradient is differentiated again."""
    model = compile(seeded(Given), example_inputs=(batch()[0],))
    optimizer, losses = sgd(model), []
    for step in range(3):
        (x, y), (others, theirs) = batch(step), batch(10 + step)
        optimizer.zero_grad()
        weights: list[Tensor] = [model.enter, model.leave]
        for inner in range(2):
            loss = F.cross_entropy(model(x) if not inner else model(x, *weights), y)
            found = torch.autograd.grad(loss, weights, create_graph=True)
            weights = [weight - 0.5 * grad for weight, grad in zip(weights, found, strict=True)]
        (of_norm,) = torch.autograd.grad(model.enter.square().sum() ** 2, [model.enter], create_graph=True)
        loss = F.cross_entropy(model(others, *weights), theirs) + 1e-3 * of_norm.square().sum()
        loss.backward()
        losses += [loss.item(), model.enter.grad.norm().item(), model.leave.grad.norm().item()]
        optimizer.step()
    return {"losses": losses, "state": state(model)}
