"""Backward hooks of modules, and backward pre-hooks: what they are told, what they leave, and the gradients that they give."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, Compile, Net, Results, batch, batches, program, seeded, sgd, state, train, trained

KIND = "told"
Log = list[Any]


def _norms(gradients: tuple[Tensor | None, ...]) -> list[float | None]:
    return [None if g is None else g.norm().item() for g in gradients]


@program(KIND, plans=("dp2tp2", "dp2pp2"))
def norms_of_every_layer(compile: Compile) -> Results:
    """A hook on each leaf of the model, registered before compile."""
    model = seeded(Net)
    seen: dict[str, Log] = {}
    for name, part in model.named_modules():
        if name and not list(part.children()):
            log = seen.setdefault(name, [])
            part.register_full_backward_hook(lambda m, ins, outs, log=log: log.append((_norms(ins), _norms(outs))))
    model = compile(model, example_inputs=batch())
    return {"losses": train(model), "seen": dict(sorted(seen.items())), "state": state(model)}


@program(KIND, plans=("dp2tp2", "dp2pp2"))
def activations_and_their_gradients(compile: Compile) -> Results:
    """As for a class activation map: one hook keeps what a block gives, another its gradient."""
    model = seeded(Net)
    kept: dict[str, Tensor] = {}
    model.blocks[0].register_forward_hook(lambda m, ins, out: kept.__setitem__("value", out.detach()))
    model.blocks[0].register_full_backward_hook(lambda m, ins, outs: kept.__setitem__("gradient", outs[0].detach()))
    model = compile(model, example_inputs=batch())
    optimizer, losses, maps = sgd(model), [], []
    for k in range(3):
        loss = model(*batch(k))
        optimizer.zero_grad()
        loss.backward()
        maps.append((kept["value"] * kept["gradient"].mean(0)).relu().sum().item())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "maps": maps, "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def gradients_clamped_around_blocks(compile: Compile) -> Results:
    model = seeded(Net)
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda m, outs: (outs[0].clamp(-0.01, 0.01),))
        block.register_full_backward_hook(lambda m, ins, outs: (ins[0] * 0.5,))
    return trained(compile(model, example_inputs=batch()))


@program(KIND)
def hook_of_a_block_that_leaves_an_attribute(compile: Compile) -> Results:
    """Registered after compile, taken away again later."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model, steps=1)

    def noted(part: nn.Module, ins: Any, outs: Any) -> None:
        part.slope = outs[0].norm()  # type: ignore[assignment]

    handle = model.blocks[1].register_full_backward_hook(noted)
    losses += train(model, steps=2)
    seen = model.blocks[1].slope.item()
    handle.remove()
    return {"losses": losses + train(model, steps=1), "seen": seen, "last": model.blocks[1].slope.item(), "state": state(model)}


class _Two(nn.Module):
    """Two results of two arguments, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, None]:
        return torch.tanh(self.left(x)), scale * self.right(y), None


class _WithTwo(Net):
    def __init__(self) -> None:
        super().__init__()
        self.two = _Two()

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        first, second, _ = self.two(h, h.square(), 0.5)
        return first + second


@program(KIND, plans=("dp2tp2",))
def hook_of_several_arguments_and_results(compile: Compile) -> Results:
    """It keeps them, and gives another gradient of one: a pipeline would have them on one rank."""
    model = seeded(_WithTwo)
    seen: Log = []

    def hook(part: nn.Module, ins: Any, outs: Any) -> tuple[Tensor | None, ...]:
        seen.append((_norms(ins), _norms(outs)))
        return 0.25 * ins[0], *ins[1:]

    model.two.register_full_backward_hook(hook)
    model = compile(model, example_inputs=batch())
    return {"losses": train(model), "seen": seen, "state": state(model)}


class _Again(Net):
    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(3):
            h = self.blocks[0](h)
        return h


@program(KIND)
def hook_of_a_block_that_is_called_again(compile: Compile) -> Results:
    model = seeded(_Again)
    seen: Log = []
    model.blocks[0].register_full_backward_hook(lambda m, ins, outs: seen.append(outs[0].norm().item()))
    model = compile(model, example_inputs=batch())
    return {"losses": train(model), "seen": seen, "state": state(model)}


@program(KIND, plans=("dp2pp2",))
def hooks_where_the_loss_is_made_outside(compile: Compile) -> Results:
    """Of the whole and of a block; the loss is scaled, gradients are added up, and one call is never differentiated."""

    class Scores(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.logits(x)

    model = seeded(Scores)
    seen: Log = []
    for part in (model, model.blocks[1]):
        part.register_full_backward_hook(lambda m, ins, outs: seen.append(_norms(outs)))
    model = compile(model, example_inputs=batch()[:1])
    optimizer, losses = sgd(model), []
    for k, (x, y) in enumerate(batches()):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        losses += [loss.item(), model(x).detach().sum().item()]
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "seen": seen, "state": state(model)}


@program(KIND)
def hooks_and_a_loss_that_is_scaled_and_kept(compile: Compile) -> Results:
    """The loss inside: half of it in each of two calls for a step, and a call without backward."""
    model = seeded(Net)
    seen: Log = []
    model.blocks[0].register_full_backward_hook(lambda m, ins, outs: seen.append(_norms(outs)))
    model = compile(model, example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k in range(4):
        loss = model(*batch(k)) / 2
        loss.backward()
        losses += [loss.item(), model(*batch(k)).item()]
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "seen": seen, "state": state(model)}


class _LossAndFeatures(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        h = self.hidden(x)
        return F.cross_entropy(self.head(h), y), h


@program(KIND)
def clamped_gradients_of_the_loss_and_of_features(compile: Compile) -> Results:
    """A penalty on what is returned beside the loss: the hook is to be given both gradients at once."""
    model = seeded(_LossAndFeatures)
    model.blocks[1].register_full_backward_hook(lambda m, ins, outs: (ins[0].clamp(-0.005, 0.005),))
    model = compile(model, example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k in range(3):
        loss, features = model(*batch(k))
        loss = loss + 0.1 * features.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def hook_that_halves_more_from_step_to_step(compile: Compile) -> Results:
    model = seeded(Net)
    scale = {"by": 1.0}

    def hook(part: nn.Module, ins: Any, outs: Any) -> tuple[Tensor]:
        scale["by"] *= 0.5
        return (ins[0] * scale["by"],)

    model.blocks[1].register_full_backward_hook(hook)
    return trained(compile(model, example_inputs=batch()))


@program(KIND)
def hook_that_scales_by_what_is_set_before_backward(compile: Compile) -> Results:
    """Between the call and backward: a pipeline has computed gradients by then."""
    model = seeded(Net)
    scale = {"by": 1.0}
    model.blocks[1].register_full_backward_hook(lambda m, ins, outs: (ins[0] * scale["by"],))
    model = compile(model, example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k in range(3):
        loss = model(*batch(k))
        scale["by"] = 1 / (k + 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def hook_above_what_is_frozen_midway(compile: Compile) -> Results:
    """Then none of its arguments needs a gradient, and it is told so; it says what it sees."""
    model = seeded(Net)
    said = io.StringIO()
    model.blocks[1].register_full_backward_hook(lambda m, ins, outs: print(f"{_norms(ins)} {outs[0].norm().item():.3f}"))
    with contextlib.redirect_stdout(said):
        model = compile(model, example_inputs=batch())
        losses = train(model, steps=2)
        for part in (model.first, model.blocks[0]):
            part.requires_grad_(False)
        losses += train(model, steps=2)
    lines = [("None" in line, line.split()[-1]) for line in said.getvalue().splitlines()]
    return {"losses": losses, "lines": lines, "state": state(model)}


@program(KIND, plans=("dp2pp2",))
def gradients_of_the_batch_and_of_what_takes_it(compile: Compile) -> Results:
    """A saliency map, and a hook on the first layer, whose argument is a leaf that needs a gradient."""
    model = seeded(Net)
    seen: Log = []
    model.first.register_full_backward_hook(lambda m, ins, outs: seen.append((_norms(ins), _norms(outs))))
    x, y = batch()
    model = compile(model, example_inputs=(x.requires_grad_(), y))
    losses, maps = [], []
    for k in range(3):
        x, y = batch(k)
        loss = model(x.requires_grad_(), y)
        loss.backward()
        losses.append(loss.item())
        maps.append(x.grad)
    return {"losses": losses, "seen": seen, "maps": maps}


def _without_what_is_not_finite(grad: Tensor) -> Tensor:
    return torch.where(torch.isfinite(grad), grad, torch.zeros_like(grad))


class _Guarded(torch.autograd.Function):
    """The identity, whose backward lets nothing pass that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _without_what_is_not_finite(grads[0])


class _Quiet(torch.autograd.Function):
    """The identity, which lets no gradient of a batch pass if one is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.zeros_like(grads[0]) if torch.isnan(grads[0]).any() else grads[0]


def _one_batch_is_broken(compile: Compile, function: Any) -> Results:
    model = compile(seeded(_Rooted, function), example_inputs=batch())
    optimizer, slopes = sgd(model), []
    for k in range(4):
        x, y = batch(k)
        if k == 2:
            x = x.clone()
            x[1] = float("nan")
        optimizer.zero_grad()
        model(x, y).backward()
        slopes.append(model.first.weight.grad.norm().item())
        model.blocks.zero_grad()
        model.head.zero_grad()
        optimizer.step()
    return {"slopes": slopes, "state": state(model)}


class _Rooted(Net):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.blocks(self.function.apply(torch.tanh(self.first(torch.nan_to_num(x)))) + 0 * x.sum(-1, keepdim=True))
        return h


@program(KIND, plans=("dp2tp2",))
def guarded_against_what_is_not_finite(compile: Compile) -> Results:
    """Element by element."""
    return _one_batch_is_broken(compile, _Guarded)


@program(KIND, plans=("dp2tp2",))
def guarded_against_a_batch_that_is_not_finite(compile: Compile) -> Results:
    """Of the whole batch, also where the ranks have parts of it."""
    return _one_batch_is_broken(compile, _Quiet)


SEEN: Log = []


class _Counted(torch.autograd.Function):
    """The identity, whose backward writes down what comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        SEEN.append(grads[0].norm().item())
        return grads[0]


@program(KIND)
def function_whose_backward_writes_down_norms(compile: Compile) -> Results:
    """A pipeline would have them on one rank."""
    SEEN.clear()
    model = compile(seeded(_WithCounted), example_inputs=batch())
    return {"losses": train(model), "seen": list(SEEN), "state": state(model)}


class _WithCounted(Net):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.blocks[1](_Counted.apply(self.blocks[0](torch.tanh(self.first(x)))))
        return h


def _doubled(grad: Tensor) -> None:
    grad.mul_(2.0)


@program(KIND)
def hooks_that_write_to_gradients(compile: Compile) -> Results:
    """And return nothing."""

    class Doubling(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            if h.requires_grad:
                h.register_hook(lambda grad: _doubled(grad))
            return self.blocks(h)

    def halved(part: nn.Module, ins: Any, outs: Any) -> None:
        ins[0].mul_(0.5)

    model = seeded(Doubling)
    model.blocks[1].register_full_backward_hook(halved)
    return trained(compile(model, example_inputs=batch()))
