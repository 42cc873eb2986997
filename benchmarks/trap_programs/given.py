"""Tensors that a forward leaves in attributes and containers, which the loop reads: where a call gives what the model returns, they are
there too, with their gradients where the loss is made outside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, WIDTH, Block, Compile, Logits, Net, Results, batch, batches, program, seeded, sgd, state, stepped


class _Noted(Block):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.size = found.square().mean()
        return found


class _NotedNet(Logits):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Noted(), _Noted())


@program("left")
def sizes_of_blocks_in_a_loss_outside(compile: Compile) -> Results:
    """Each block leaves a term of the loss."""
    model = compile(seeded(_NotedNet), example_inputs=(batch()[0],))
    losses = stepped(model, lambda x, y: F.cross_entropy(model(x), y) + 0.1 * sum(block.size for block in model.blocks))
    return {"losses": losses, "state": state(model)}


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        self.divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(-1).mean()
        return self.decoder(mean)


@program("left")
def divergence_in_a_loss_outside(compile: Compile) -> Results:
    """An attribute of the model itself."""
    model = compile(seeded(_Variational), example_inputs=(batch()[0],))
    losses = stepped(model, lambda x, y: F.mse_loss(model(x), x) + 0.1 * model.divergence)
    return {"losses": losses, "state": state(model), "last": model.divergence}


@program("left")
def states_of_a_teacher_and_a_student(compile: Compile) -> Results:
    """Hooks put states into dicts of the loop."""
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    student, teacher = seeded(Logits), seeded(Logits).requires_grad_(False)
    student.blocks[0].register_forward_hook(lambda module, given, found: ours.__setitem__("state", found))
    teacher.blocks[0].register_forward_hook(lambda module, given, found: theirs.__setitem__("state", found))
    model = compile(student, example_inputs=(batch()[0],))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        teacher(x)
        return F.cross_entropy(logits, y) + F.mse_loss(ours["state"], 0.5 * theirs["state"])

    return {"losses": stepped(model, loss), "state": state(model)}


class _Attended(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.first(x)[:, None] * torch.linspace(0, 1, 5)[:, None]
        found, weights = self.attention(h, h, h)
        self.weights = {"first": weights.detach(), "count": 2}
        return {"loss": F.cross_entropy(self.head(found.mean(1)), y)}


@program("left")
def attention_looked_at(compile: Compile) -> Results:
    """Beside a loss of the model's own, with outputs='all'."""
    model = compile(seeded(_Attended), example_inputs=batch(), outputs="all")
    optimizer, losses, weights = sgd(model), [], []
    for x, y in batches():
        optimizer.zero_grad()
        loss = model(x, y)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights.append(model.weights["first"].clone())
    return {"losses": losses, "weights": weights, "count": model.weights["count"], "state": state(model)}


class _Listed(Logits):
    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.mask is None:
            self.mask = (torch.arange(HIDDEN) % 2 == 0).to(x.dtype)
        self.states = []
        h = torch.tanh(self.first(x)) * self.mask
        for block in self.blocks:
            h = block(h)
            self.states.append(h)
        return self.head(h)


@program("left")
def states_in_a_list_beside_a_cache(compile: Compile) -> Results:
    """The list is made anew in each call, and read in evaluation too."""
    model = compile(seeded(_Listed), example_inputs=(batch()[0],))
    losses = stepped(model, lambda x, y: F.cross_entropy(model(x), y) + 0.1 * sum(h.square().mean() for h in model.states))
    model.eval()
    with torch.no_grad():
        model(batch(5)[0])
    return {"losses": losses, "states": list(model.states), "state": state(model)}


class _WithStates(Logits):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        h = self.hidden(x)
        return self.head(h), h


@program("left")
def states_returned_and_used(compile: Compile) -> Results:
    """Beside what is computed of them."""
    model = compile(seeded(_WithStates), example_inputs=(batch()[0],))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits, h = model(x)
        return F.cross_entropy(logits, y) + 0.1 * F.normalize(h, dim=-1).sum(1).square().mean()

    return {"losses": stepped(model, loss), "state": state(model)}


@program("left")
def gradient_of_states_kept(compile: Compile) -> Results:
    """By retain_grad: what comes by the logits is part of it."""
    model = compile(seeded(_WithStates), example_inputs=(batch()[0],))
    x, y = batch(1)
    logits, h = model(x)
    h.retain_grad()
    (F.cross_entropy(logits, y) + h.square().mean()).backward()
    return {"gradient": h.grad}


@program("left")
def gradient_of_states_asked_for(compile: Compile) -> Results:
    """By torch.autograd.grad."""
    model = compile(seeded(_WithStates), example_inputs=(batch()[0],))
    x, y = batch(1)
    logits, h = model(x)
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y) + h.square().mean(), h)
    return {"gradient": gradient}
