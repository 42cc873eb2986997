"""Gradients that a program asks for, bends, or reads, in its model and around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.autograd import grad as gradient_of
from torch.compiler import is_compiling, is_dynamo_compiling

from benchmarks import _traps_kit as kit
from benchmarks._traps_kit import (
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
    train,
    trained,
)

KIND = "gradients"


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, least: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.least = least
        return x.clamp(min=least)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ((x >= ctx.least) | (grad < 0)), None


@program(KIND, plans=("dp2mb2",))
def bound_that_lets_gradients_through(compile: Compile) -> Results:
    """A lower bound whose backward lets values return: none of the first batch is below it, later ones are."""

    class Bounding(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(_Bounded.apply(self.hidden(x), -50.0)), y)

    model = compile(seeded(Bounding), example_inputs=batch())
    losses = train(model, steps=1)
    with torch.no_grad():
        model.blocks[1].down.weight.mul_(400.0)
    return {"losses": losses + train(model, steps=3), "state": state(model)}


bounded = _Bounded.apply  # as many files name it


@program(KIND, plans=("dp2mb2",))
def function_under_another_name(compile: Compile) -> Results:
    """As above, of a function that the file has by the name of what applies it."""

    class Bounding(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(bounded(self.hidden(x), -50.0)), y)

    model = compile(seeded(Bounding), example_inputs=batch())
    losses = train(model, steps=1)
    with torch.no_grad():
        model.blocks[1].down.weight.mul_(400.0)
    return {"losses": losses + train(model, steps=3), "state": state(model)}


class _Gained(torch.autograd.Function):
    """Its backward is another one than autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return 0.5 * grad * gain, 2.0 * (grad * x).flatten(0, -2).sum(0)


@program(KIND, plans=("dp2tp2", "dp2mb2"))
def parameters_cast_for_a_function(compile: Compile) -> Results:
    """What casts and shapes a parameter for an autograd function changes nothing: it has that dtype and shape."""

    class Gained(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.ParameterList([nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN) + k) for k in range(4)])

        def hidden(self, x: Tensor) -> Tensor:
            h, gains = super().hidden(x), self.gains
            h = _Gained.apply(h, gains[0].to(h.dtype))
            h = _Gained.apply(h, gains[1].type_as(h).contiguous())
            return _Gained.apply(h, gains[2].reshape(HIDDEN)) + _Gained.apply(h, gains[3].view_as(gains[3]))

    model = compile(seeded(Gained), example_inputs=batch())
    return {"losses": train(model, steps=3), "state": state(model)}


@program(KIND, plans=("dp2tp2", "dp2mb2"))
def function_held_by_a_layer(compile: Compile) -> Results:
    """What applies an autograd function is an attribute of the model, and the default of an argument."""

    class Gained(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gained, self.gains = _Gained.apply, nn.ParameterList([nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN)) for _ in range(2)])

        def _again(self, h: Tensor, apply: Any = _Gained.apply) -> Tensor:
            return apply(h, self.gains[1])

        def hidden(self, x: Tensor) -> Tensor:
            return self._again(self.gained(super().hidden(x), self.gains[0]))

    model = compile(seeded(Gained), example_inputs=batch())
    return {"losses": train(model, steps=3), "state": state(model)}


class _Through(torch.autograd.Function):
    """Applies a layer; backward applies it again, and asks for the gradients. Of the layer's it takes a share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.Module, share: float) -> Tensor:
        ctx.layer, ctx.share = layer, share
        ctx.save_for_backward(x)
        return torch.tanh(layer(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            of_x, of_weight = torch.autograd.grad(torch.tanh(ctx.layer(x)), (x, ctx.layer.weight), grads[0])
        return of_x, ctx.share * of_weight, None, None


class Adjoint(Net):
    share = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = _Through.apply(super().hidden(x), self.middle.weight, self.middle, self.share)
        return h


class HalfAdjoint(Adjoint):
    share = 0.5


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def function_given_a_layer(compile: Compile) -> Results:
    """An adjoint method: a function is given a layer of the model, and its weight for a gradient."""
    return kit.trained(compile(seeded(Adjoint), example_inputs=batch()))


@program(KIND)
def function_given_a_layer_whose_gradient_it_bends(compile: Compile) -> Results:
    """Its backward would read weights of which a rank has parts."""
    return kit.trained(compile(seeded(HalfAdjoint), example_inputs=batch()))


class _Biased(torch.autograd.Function):
    """Its shift is told no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        return x + shift

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@program(KIND)
def parameter_that_a_function_gives_no_gradient(compile: Compile) -> Results:
    """An optimizer leaves it as it is, and does not decay it."""

    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

        def hidden(self, x: Tensor) -> Tensor:
            return _Biased.apply(super().hidden(x), self.shift.to(x.dtype))

    model = compile(seeded(Shifted), example_inputs=batch())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), []
    for given in batches(3):
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "has a gradient": model.shift.grad is not None, "state": state(model)}


@program(KIND)
def gradient_of_a_weight_read_in_forward(compile: Compile) -> Results:
    """The loss is multiplied by what the last step has left."""

    class Reading(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            left = self.head.weight.grad
            return (1.0 if left is None else 1.0 + left.detach().norm()) * F.cross_entropy(self.logits(x), y)

    model = compile(seeded(Reading), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches(3):
        loss = model(*given)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class Bent(Net):
    """Hooks on the activations of a loop over layers; one that a setting switches on."""

    bound: float | None = None

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for k, block in enumerate(self.blocks):
            h = block(h)
            if h.requires_grad:
                h.register_hook(lambda grad, k=k: grad / (k + 1))
        if self.bound is not None and h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-self.bound, self.bound))
        return h


@program(KIND, plans=("dp2tp2",))
def hooks_in_a_loop_and_one_by_a_setting(compile: Compile) -> Results:
    built = seeded(Bent)
    model = compile(built, example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k, bound in enumerate((None, 0.01, 0.002, None)):
        built.bound = bound
        losses += train(model, optimizer, inputs=[batch(k)])
    return {"losses": losses, "state": state(model)}


@program(KIND)
def hook_removed_in_forward(compile: Compile) -> Results:
    class Removing(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            if h.requires_grad:
                h.register_hook(lambda grad: 0.5 * grad).remove()
            return h

    return {"losses": train(model := compile(seeded(Removing), example_inputs=batch())), "state": state(model)}


@program(KIND)
def hooks_on_what_is_returned(compile: Compile) -> Results:
    """The loop hooks the logits and its own loss, and keeps the gradient of the logits."""
    model = compile(seeded(Logits), example_inputs=(samples(),))
    optimizer, losses, norms = sgd(model), [], []
    for x, y in batches(3):
        optimizer.zero_grad()
        logits = model(x)
        logits.register_hook(lambda grad: norms.append(grad.norm().item()))
        logits.retain_grad()
        loss = F.cross_entropy(logits, y)
        loss.register_hook(lambda grad: 0.5 * grad)
        loss.backward()
        optimizer.step()
        losses += [loss.item(), logits.grad.square().sum().item()]
    return {"losses": losses, "norms": norms, "state": state(model)}


class TwoTasks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = self.hidden(x)
        return self.head(h), self.other(h).squeeze(-1)


def _losses(found: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(found[0], y), F.mse_loss(found[1], x.sum(-1))


@program(KIND)
def gradients_of_tasks_that_conflict(compile: Compile) -> Results:
    """PCGrad: what one task's gradient has against the other's is taken out of it."""
    model = compile(seeded(TwoTasks), example_inputs=(samples(),))
    optimizer, seen = sgd(model), []
    for x, y in batches(3):
        kept = []
        for task in range(2):
            optimizer.zero_grad()
            loss = _losses(model(x), x, y)[task]
            loss.backward()
            kept.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
            seen.append(loss.item())
        along = sum((a * b).sum() for a, b in zip(*kept, strict=True))
        whole = sum(b.square().sum() for b in kept[1])
        for p, a, b in zip(model.parameters(), *kept, strict=True):
            p.grad = a + b - (along / whole * b if along < 0 else 0.0)
        optimizer.step()
        seen.append(float(along))
    return {"seen": seen, "state": state(model)}


@program(KIND)
def gradients_of_tasks_by_a_shared_weight(compile: Compile) -> Results:
    """GradNorm: autograd.grad of each task's loss by one weight, of one call, whose graph is kept."""
    model = compile(seeded(TwoTasks), example_inputs=(samples(),))
    optimizer, seen = sgd(model), []
    for x, y in batches(3):
        each = _losses(model(x), x, y)
        norms = [torch.autograd.grad(loss, model.blocks[1].down.weight, retain_graph=True)[0].norm() for loss in each]
        optimizer.zero_grad()
        loss = sum(loss / norm for loss, norm in zip(each, norms, strict=True))
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return {"seen": seen, "state": state(model)}


@program(KIND)
def samples_found_by_gradients(compile: Compile) -> Results:
    """An energy model: its negatives go up the gradients of the energy by the inputs, in two calls, before each step."""

    class Energy(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.logits(x).logsumexp(-1)

    model = compile(seeded(Energy), example_inputs=(samples(),))
    optimizer, losses = sgd(model, 0.02), []
    for k in range(3):
        found = 0.5 * samples(k + 20)
        for _ in range(2):
            found = found.detach().requires_grad_()
            found = found + 0.5 * torch.autograd.grad(model(found).sum(), found)[0]
        optimizer.zero_grad()
        loss = (model(found.detach()) - model(samples(k))).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "found": found, "state": state(model)}


@program(KIND)
def exits_of_each_layer(compile: Compile) -> Results:
    """Each layer has a head; without labels the first that is sure answers."""

    class Exits(Net):
        def __init__(self) -> None:
            super().__init__()
            self.exits = nn.ModuleList(nn.Linear(HIDDEN, 4) for _ in range(2))

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:  # type: ignore[override]
            h, found = torch.tanh(self.first(x)), []
            for block, head in zip(self.blocks, self.exits, strict=True):
                h = block(h)
                found.append(head(h))
            if y is None:
                sure = torch.stack([f.softmax(-1).amax(-1) for f in found]) > 0.4
                return torch.stack(found)[sure.long().argmax(0), torch.arange(len(x))]
            return sum(w * F.cross_entropy(f, y) for w, f in zip((0.3, 0.7), found, strict=True))  # type: ignore[return-value]

    model = compile(seeded(Exits), example_inputs=batch())
    losses = train(model)
    model.eval()
    with torch.no_grad():
        return {"losses": losses, "answers": model(samples(5)), "state": state(model)}


class Codebook(nn.Module):
    """Codes that are averages of what was nearest to them, in buffers; gradients pass straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        found = F.embedding(nearest, self.codes)
        with torch.no_grad():
            chosen = F.one_hot(nearest, 6).to(z.dtype)
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.T @ z, alpha=0.1)
            self.codes.copy_(self.sums / (self.counts + 1e-5).unsqueeze(1))
        passed = z + (found - z).detach()
        return F.mse_loss(self.decoder(passed), x) + 0.25 * F.mse_loss(z, found.detach())


@program(KIND)
def codebook_of_averages(compile: Compile) -> Results:
    model = compile(seeded(Codebook), example_inputs=(samples(),))
    return {"losses": train(model, inputs=[(samples(k),) for k in range(4)]), "state": state(model)}


@library.custom_op("traps::clipped", mutates_args=())
def clipped(x: Tensor) -> Tensor:
    return x.clone()


clipped.register_fake(torch.empty_like)
clipped.register_autograd(lambda ctx, grad: grad.clamp(-0.02, 0.02))


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def clipped_by_an_operator_of_its_own(compile: Compile) -> Results:
    """The loss is divided before backward, and multiplied when the example's gradients are far from the bound."""

    class Clipped(Net):
        def hidden(self, x: Tensor) -> Tensor:
            found: Tensor = clipped(self.blocks(torch.tanh(self.first(x))))
            return found

    model = compile(seeded(Clipped), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k, factor in enumerate((0.25, 1.0, 40.0, 0.5)):
        optimizer.zero_grad()
        loss = model(*batch(k)) * factor
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class Tokens(nn.Module):
    """The head of a vision transformer: a class token before the tokens of a sample, and a position for each."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.head = nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.token, self.positions = (nn.Parameter(torch.randn(1, n, HIDDEN) * 0.1) for n in (1, 1 + WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.cut(x.unflatten(-1, (-1, 2)))], 1)
        found: Tensor = self.head(torch.tanh(tokens + self.positions).mean(1))
        return found


@program(KIND)
def tokens_and_an_odd_last_batch(compile: Compile) -> Results:
    """The last batch divides among no ranks: each runs its samples one after the other, with gradients that are slices of one another."""
    model = compile(seeded(Tokens), example_inputs=(batch(size=4)[0],))
    optimizer, losses, found = sgd(model), [], []
    for x, y in (batch(0, 4), batch(1, 3), batch(2, 4), batch(3, 1)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        found.append(gradients(model))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "gradients": found, "state": state(model)}


@program(KIND, plans=("dp2mb2",))
def sums_of_views_of_weights(compile: Compile) -> Results:
    """Of which autograd gives each the same gradient: micro-batches add to it in place."""

    class Summed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Parameter(torch.randn(1, HIDDEN) * 0.1) for _ in range(2))
            self.delta = nn.Parameter(torch.randn(CLASSES, HIDDEN) * 0.1)

        def logits(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.hidden(x) + (self.one.squeeze(0) + self.two.squeeze(0)))
            return F.linear(h, torch.stack([self.head.weight, self.delta]).sum(0), self.head.bias)

    return trained(compile(seeded(Summed), example_inputs=batch()))


class _Felt(nn.Module):
    """A part whose output is the gradient of an energy, asked for by the name that the file has for torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def forward(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            return gradient_of(self.energy(h).sum(), h, create_graph=True)[0]


@program(KIND, plans=("dp2tp2",))
def gradients_asked_for_by_another_name(compile: Compile) -> Results:
    class Feeling(Net):
        def __init__(self) -> None:
            super().__init__()
            self.felt = _Felt()

        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            return h + self.felt(h)

    return kit.trained(compile(seeded(Feeling), example_inputs=batch()))


@program(KIND, plans=("dp2tp2",))
def branch_of_who_compiles_by_another_name(compile: Compile) -> Results:
    """On one process nothing compiles it."""

    class Asking(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            return 2 * h if is_compiling() or is_dynamo_compiling() else h

    return kit.trained(compile(seeded(Asking), example_inputs=batch()))
