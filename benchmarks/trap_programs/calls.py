"""Programs that differ in how the model is called: closures as losses, Python arguments, inputs with gradients, inputs that change."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import WIDTH, Compile, Logits, Net, Results, batch, batches, program, seeded, sgd, state, train, trained

CLOSURES, ARGUMENTS, INPUTS = "closures", "arguments", "inputs"


# ------------------------------------------------------------------------------------------------------ loss=
@program(CLOSURES, plans=("dp2mb2",))
def loss_without_a_closure(compile: Compile) -> Results:
    """A function of the output alone."""
    model = compile(seeded(Logits), example_inputs=(batch()[0],), loss=lambda logits: logits.logsumexp(1).square().mean())
    return trained(model, inputs=[(x,) for x, _ in batches()])


@program(CLOSURES, plans=("dp2mb2",))
def loss_closes_over_the_targets(compile: Compile) -> Results:
    """Targets of the batch at hand, from a variable outside."""
    now: dict[str, Tensor] = {"y": batch()[1]}
    model = compile(seeded(Logits), example_inputs=(batch()[0],), loss=lambda logits: F.cross_entropy(logits, now["y"]))
    optimizer, losses = sgd(model), []
    for x, y in batches():
        now["y"] = y
        losses += train(model, optimizer, inputs=[(x,)])
    return {"losses": losses, "state": state(model)}


@program(CLOSURES, remedy_of="loss_closes_over_the_targets", plans=("dp2mb2",))
def targets_as_an_input(compile: Compile) -> Results:
    """The targets go through the model."""

    class Passing(Net):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.logits(x), y

    model = compile(seeded(Passing), example_inputs=batch(), loss=lambda output: F.cross_entropy(output[0], output[1]))
    return trained(model)


@program(CLOSURES, plans=("dp2mb2",))
def loss_closes_over_fixed_targets(compile: Compile) -> Results:
    """One target tensor of the batch's size that never changes."""
    x, y = batch()
    model = compile(seeded(Logits), example_inputs=(x,), loss=lambda logits: F.cross_entropy(logits, y))
    return trained(model, inputs=[(x,)] * 3)


@program(CLOSURES, plans=("dp2mb2",))
def loss_closes_over_parameters(compile: Compile) -> Results:
    """A penalty on the model's own parameters inside of loss=."""
    original = seeded(Logits)

    def loss(logits: Tensor) -> Tensor:
        return logits.square().mean() + 1e-2 * sum(p.square().sum() for p in original.parameters())

    model = compile(original, example_inputs=(batch()[0],), loss=loss)
    return trained(model, inputs=[(x,) for x, _ in batches()])


@program(CLOSURES)
def loss_closes_over_a_number(compile: Compile) -> Results:
    """A weight of the loss that the user changes between steps."""
    weight = {"now": 1.0}
    model = compile(seeded(Logits), example_inputs=(batch()[0],), loss=lambda logits: weight["now"] * logits.square().mean())
    optimizer, losses = sgd(model), []
    for step, (x, _) in enumerate(batches()):
        weight["now"] = 1.0 + step
        losses += train(model, optimizer, inputs=[(x,)])
    return {"losses": losses, "state": state(model)}


@program(CLOSURES)
def loss_closes_over_another_module(compile: Compile) -> Results:
    """A frozen network as a perceptual loss."""
    torch.manual_seed(4)
    judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)
    model = compile(seeded(Logits), example_inputs=(batch()[0],), loss=lambda logits: judge(logits).square().mean())
    return trained(model, inputs=[(x,) for x, _ in batches()])


@program(CLOSURES)
def loss_is_a_module(compile: Compile) -> Results:
    """loss= is an nn.Module with class weights, over logits and targets."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0, 4.0]))

        def forward(self, output: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(output[0], output[1], weight=self.weight)

    class Passing(Net):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.logits(x), y

    return trained(compile(seeded(Passing), example_inputs=batch(), loss=Weighted()))


# --------------------------------------------------------------------------------------------------- arguments
class Options(Net):
    """Takes Python values beside tensors."""

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0, smooth: bool = False, weight: Tensor | None = None) -> Tensor:
        return scale * F.cross_entropy(self.logits(x), y, weight=weight, label_smoothing=0.2 if smooth else 0.0)


@program(ARGUMENTS)
def number_that_changes(compile: Compile) -> Results:
    model = compile(seeded(Options), example_inputs=(*batch(), 1.0))
    return trained(model, inputs=[(*given, 1.0 + i) for i, given in enumerate(batches())])


@program(ARGUMENTS)
def number_that_changes_planned_later(compile: Compile) -> Results:
    model = compile(seeded(Options))
    return trained(model, inputs=[(*given, 1.0 + i) for i, given in enumerate(batches())])


@program(ARGUMENTS)
def flag_that_changes(compile: Compile) -> Results:
    model = compile(seeded(Options), example_inputs=(*batch(), 1.0, False))
    return trained(model, inputs=[(*given, 1.0, i == 1) for i, given in enumerate(batches())])


@program(ARGUMENTS)
def argument_added_later(compile: Compile) -> Results:
    """The example has no scale; the second call has."""
    model = compile(seeded(Options), example_inputs=batch())
    return trained(model, inputs=[batch(), (*batch(1), 3.0), batch(2)])


@program(ARGUMENTS)
def argument_dropped_later(compile: Compile) -> Results:
    """The example has a scale of 2; later calls leave it out, which is a scale of 1."""
    model = compile(seeded(Options), example_inputs=(*batch(), 2.0))
    return trained(model, inputs=[(*batch(), 2.0), batch(1), batch(2)])


@program(ARGUMENTS)
def tensor_given_later(compile: Compile) -> Results:
    """An optional tensor that is None at first."""
    model = compile(seeded(Options), example_inputs=(*batch(), 1.0, False, None))
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return trained(model, inputs=[(*batch(), 1.0, False, None), (*batch(1), 1.0, False, weight)])


@program(ARGUMENTS)
def keywords_and_positions_in_turns(compile: Compile) -> Results:
    """The same inputs by position, by name, and mixed."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for call in (lambda x, y: model(x, y), lambda x, y: model(y=y, x=x), lambda x, y: model(x, y=y)):
        optimizer.zero_grad()
        loss = call(*batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class AnyNumber(Net):
    """Takes any number of tensors, and of keywords."""

    def forward(self, x: Tensor, /, *rest: Tensor, scale: float = 1.0, **more: Tensor) -> Tensor:  # type: ignore[override]
        return self.logits(x) * scale + sum(rest) + sum(more.values())


def _any_number(model: Any) -> Results:
    (x, y), e = batch(), torch.ones(12, 4).cumsum(1)
    calls = (lambda: model(x), lambda: model(x, e, 2 * e), lambda: model(x, e, scale=0.5), lambda: model(x, scale=2.0, a=e, b=e * x[:, :1]))
    optimizer, losses = sgd(model), []
    for call in (*calls[::-1], *calls):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(ARGUMENTS)
def keywords_beside_any_number_of_tensors(compile: Compile) -> Results:
    """forward(x, /, *rest, scale=1.0, **more), called in all these ways."""
    return _any_number(compile(seeded(AnyNumber), example_inputs=(batch()[0],)))


@program(ARGUMENTS)
def keywords_beside_any_number_planned_later(compile: Compile) -> Results:
    """The same, planned on the first call, which has both."""
    return _any_number(compile(seeded(AnyNumber)))


# ------------------------------------------------------------------------------------------------------ inputs
@program(INPUTS, plans=("dp2tp2", "dp2mb2"))
def gradient_of_an_input(compile: Compile) -> Results:
    """x.grad after backward, on every rank."""
    model = compile(seeded(Net), example_inputs=batch())
    x, y = batch(1)
    x.requires_grad_(True)
    loss = model(x, y)
    loss.backward()
    return {"loss": loss.item(), "gradient": None if x.grad is None else x.grad.clone()}


@program(INPUTS, plans=("dp2mb2",))
def encoder_before_the_model(compile: Compile) -> Results:
    """An ordinary module before the compiled one is trained through it."""
    torch.manual_seed(2)
    encoder = nn.Linear(WIDTH, WIDTH)
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.SGD([*encoder.parameters(), *model.parameters()], lr=0.1)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = model(encoder(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "encoder": state(encoder), "state": state(model)}


@program(INPUTS)
def encoder_planned_on_the_first_call(compile: Compile) -> Results:
    """The same, where the first batch that compile sees requires a gradient."""
    torch.manual_seed(2)
    encoder = nn.Linear(WIDTH, WIDTH)
    model = compile(seeded(Net))
    first, losses = sgd(encoder), []
    for x, y in batches():
        loss = model(torch.tanh(encoder(x)), y)
        first.zero_grad()
        loss.backward()
        first.step()
        losses.append(loss.item())
    return {"losses": losses, "encoder": state(encoder)}


@program(INPUTS)
def frozen_encoder_before_the_model(compile: Compile) -> Results:
    """The encoder runs under no_grad."""
    torch.manual_seed(2)
    encoder = nn.Linear(WIDTH, WIDTH)
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for x, y in batches():
        with torch.no_grad():
            x = encoder(x)
        losses += train(model, optimizer, inputs=[(x, y)])
    return {"losses": losses, "state": state(model)}


@program(INPUTS)
def adversarial_inputs(compile: Compile) -> Results:
    """FGSM: the sign of the input's gradient, then a step on the attacked input."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for x, y in batches():
        attacked = x.clone().requires_grad_(True)
        model(attacked, y).backward()
        attacked = (attacked + 0.1 * attacked.grad.sign()).detach()
        losses += train(model, optimizer, inputs=[(attacked, y)])
    return {"losses": losses, "state": state(model)}


@program(INPUTS)
def adversarial_inputs_by_autograd(compile: Compile) -> Results:
    """The same by torch.autograd.grad(loss, x)."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for x, y in batches():
        x.requires_grad_(True)
        (grad,) = torch.autograd.grad(model(x, y), x)
        losses += train(model, optimizer, inputs=[((x + 0.1 * grad.sign()).detach(), y)])
    return {"losses": losses, "state": state(model)}


class Critic(Net):
    def forward(self, x: Tensor, sign: Tensor) -> Tensor:
        return F.softplus(sign * self.logits(x)[:, 0]).mean()


@program(INPUTS)
def generator_and_critic(compile: Compile) -> Results:
    """A plain generator trained through a compiled critic, each with its optimizer."""
    torch.manual_seed(2)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    ones = torch.ones(12)
    critic = compile(seeded(Critic), example_inputs=(batch()[0], ones))
    of_generator, of_critic, losses = sgd(generator), sgd(critic), []
    for step, (x, _) in enumerate(batches()):
        noise = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
        of_critic.zero_grad()
        loss = critic(x, -ones) + critic(generator(noise).detach(), ones)
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        fooled = critic(generator(noise), -ones)
        fooled.backward()
        of_generator.step()
        losses += [loss.item(), fooled.item()]
    return {"losses": losses, "generator": state(generator), "critic": state(critic)}


@program(INPUTS)
def two_compiled_players(compile: Compile) -> Results:
    """Generator and critic are both compiled; the generator's output is the critic's input."""

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH))

        def forward(self, noise: Tensor) -> Tensor:
            return self.layers(noise)

    ones = torch.ones(12)
    generator, critic = compile(seeded(Generator)), compile(seeded(Critic), example_inputs=(batch()[0], ones))
    noise = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    optimizer = sgd(generator)
    fooled = critic(generator(noise), -ones)
    fooled.backward()
    optimizer.step()
    return {"loss": fooled.item(), "generator": state(generator)}


@program(INPUTS)
def gradient_penalty(compile: Compile) -> Results:
    """A penalty on the norm of the input's gradient, differentiated a second time."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)
    x, y = batch()
    x.requires_grad_(True)
    loss = model(x, y)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + grad.square().sum()
    total.backward()
    optimizer.step()
    return {"loss": total.item(), "state": state(model)}


@program(INPUTS)
def input_changed_by_forward(compile: Compile) -> Results:
    """Forward normalises its input in place; the user reads it afterwards."""

    class Normalising(Net):
        def logits(self, x: Tensor) -> Tensor:
            x.sub_(x.mean(1, keepdim=True))
            return super().logits(x)

    model = compile(seeded(Normalising), example_inputs=batch())
    given = batches()
    return {**trained(model, inputs=given), "inputs": [x for x, _ in given]}


@program(INPUTS)
def example_left_as_it_was(compile: Compile) -> Results:
    """The example inputs are not changed by compile, though forward changes its input."""

    class Normalising(Net):
        def logits(self, x: Tensor) -> Tensor:
            x.mul_(0.5)
            return super().logits(x)

    x, y = batch()
    compile(seeded(Normalising), example_inputs=(x, y))
    return {"example": x}


@program(INPUTS)
def strided_inputs(compile: Compile) -> Results:
    """Inputs that are transposed views and slices of larger tensors."""
    model = compile(seeded(Net), example_inputs=batch())
    given = [(torch.cat([x.T, x.T]).narrow(0, 0, WIDTH).T, y.repeat_interleave(2)[::2]) for x, y in batches()]
    return trained(model, inputs=given)


@program(INPUTS)
def nested_inputs(compile: Compile) -> Results:
    """A dict with a list of tensors as one argument."""

    class Nested(Net):
        def forward(self, given: Any) -> Tensor:
            return super().forward(given["parts"][0] + given["parts"][1], given["y"])

    inputs = [({"parts": [x, 0.5 * x], "y": y},) for x, y in batches()]
    return trained(compile(seeded(Nested), example_inputs=inputs[0]), inputs=inputs)


@program(INPUTS, plans=("dp2mb2",))
def last_batch_is_short(compile: Compile) -> Results:
    """12, 12 and 8 samples."""
    return trained(compile(seeded(Net), example_inputs=batch()), inputs=[batch(), batch(1), batch(2, size=8)])


@program(INPUTS)
def last_batch_is_odd(compile: Compile) -> Results:
    """12, 12 and 7 samples."""
    return trained(compile(seeded(Net), example_inputs=batch()), inputs=[batch(), batch(1), batch(2, size=7)])
