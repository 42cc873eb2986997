"""Parameters that are frozen when the model is compiled and train later: heads first, gradual unfreezing, adapters and then biases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
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
    gradients,
    program,
    seeded,
    sgd,
    state,
    stepped,
    train,
)
from benchmarks.trap_programs.local import mean_of_ranks, part_of

KIND = "unfrozen"


def _head_alone(build: Callable[[], nn.Module]) -> Any:
    """A model of which the head trains."""
    model = seeded(build).requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def _trains(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad]


@program(KIND)
def all_after_the_head(compile: Compile) -> Results:
    """Two stages of transfer learning: the head, then everything by another optimizer."""
    model = compile(_head_alone(Net), example_inputs=batch())
    losses = train(model, torch.optim.AdamW(_trains(model.parameters()), lr=1e-2))
    model.requires_grad_(True)
    losses += train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return {"losses": losses, "state": state(model), "gradients": gradients(model)}


@program(KIND)
def layers_one_after_the_other(compile: Compile) -> Results:
    """From the last block to the first, each with a group of its own at a lower rate; evaluated in between."""
    model = compile(_head_alone(Net), example_inputs=batch())
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.2, momentum=0.9)
    losses, rate = train(model, optimizer, steps=2), 0.1
    for part in (model.blocks[1], model.blocks[0], model.first):
        part.requires_grad_(True)
        optimizer.add_param_group({"params": list(part.parameters()), "lr": rate})
        losses, rate = losses + train(model, optimizer, steps=2), rate / 2
        model.eval()
        with torch.no_grad():
            losses.append(model(*batch(9)).item())
        model.train()
    return {"losses": losses, "state": state(model)}


@program(KIND)
def unfrozen_and_frozen_again(compile: Compile) -> Results:
    """By turns the first layer and the head train, of which the one was frozen at first."""
    model = compile(_head_alone(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for turn in range(4):
        model.first.requires_grad_(turn % 2 == 1)
        model.head.requires_grad_(turn % 2 == 0)
        losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


class Adapted(nn.Module):
    """A layer with an addition of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class WithAdapters(Net):
    """Frozen but for the adapters of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up = Adapted(block.up)


@program(KIND)
def biases_after_adapters(compile: Compile) -> Results:
    """The biases of what is adapted are unfrozen, and all that trains is clipped together."""
    model = compile(seeded(WithAdapters), example_inputs=batch())
    losses = train(model, torch.optim.AdamW(_trains(model.parameters()), lr=1e-2))
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or name.endswith("bias"))
    norms: list[float] = []
    both = _trains(model.parameters())
    losses += train(
        model, torch.optim.AdamW(both, lr=1e-2), before_step=lambda: norms.append(nn.utils.clip_grad_norm_(both, 0.1).item())
    )
    return {"losses": losses, "norms": norms, "state": state(model)}


@program(KIND)
def unfrozen_amid_accumulation(compile: Compile) -> Results:
    """Between the two backward passes of one step, after which the first layer has the gradient of one."""
    model = compile(_head_alone(InDict), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step in range(3):
        optimizer.zero_grad()
        for k in (0, 1):
            loss = model(*batch(2 * step + k))["loss"] / 2
            loss.backward()
            losses.append(loss.item())
            model.first.requires_grad_(True)
        optimizer.step()
    return {"losses": losses, "state": state(model)}


@program(KIND)
def unfrozen_with_a_loss_outside(compile: Compile) -> Results:
    """The loss is made of what the model returns, and of the norm of what trains."""
    model = compile(_head_alone(Logits), example_inputs=batch()[:1])

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + 1e-2 * torch.stack([p.square().sum() for p in _trains(model.parameters())]).sum()

    losses = stepped(model, loss)
    model.blocks.requires_grad_(True)
    losses += stepped(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return {"losses": losses, "state": state(model)}


@program(KIND)
def unfrozen_of_local_batches(compile: Compile) -> Results:
    """Each rank loads its own part, and makes the mean loss of it."""
    model = compile(_head_alone(Logits), example_inputs=batch()[:1], local_batch=True)
    optimizer, losses = sgd(model), []
    for index, given in enumerate(batches(4)):
        model.first.requires_grad_(index > 1)
        x, y = part_of(model, *given)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(mean_of_ranks(loss))
    return {"losses": losses, "state": state(model)}


class Tied(nn.Module):
    """Tokens through a table that is also the output layer, of which the table is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.out.weight = self.table.weight
        self.table.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.out(torch.tanh(self.mix(self.table(tokens[:, :-1])))).flatten(0, 1), tokens[:, 1:].flatten())


@program(KIND)
def unfrozen_of_two_names(compile: Compile) -> Results:
    """A weight that two modules share."""
    inputs = [(torch.randint(WIDTH, (12, 5), generator=torch.Generator().manual_seed(k)),) for k in range(3)]
    model = compile(seeded(Tied), example_inputs=inputs[0])
    losses = train(model, inputs=inputs)
    model.out.weight.requires_grad_(True)
    return {"losses": losses + train(model, inputs=inputs), "state": state(model)}


@program(KIND)
def unfrozen_with_its_statistics(compile: Compile) -> Results:
    """A batch norm that is frozen and in evaluation mode at first."""
    plain = seeded(Normed)
    plain.norm.requires_grad_(False).eval()
    model = compile(plain, example_inputs=batch())
    losses = train(model)
    model.norm.requires_grad_(True).train()
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def unfrozen_and_copied(compile: Compile) -> Results:
    """A deep copy of what was unfrozen trains on its own."""
    model = compile(_head_alone(Net), example_inputs=batch())
    losses = train(model)
    model.blocks.requires_grad_(True)
    losses += train(model)
    other = copy.deepcopy(model)
    losses += train(other, steps=2)
    return {"losses": losses, "state": state(model), "of the copy": state(other)}


@program(KIND)
def unfrozen_with_hooks(compile: Compile) -> Results:
    """A hook on a frozen weight is told of its gradients as soon as there are any, and halves them."""
    model = compile(_head_alone(Net), example_inputs=batch())
    model.first.requires_grad_(True)
    seen: list[Any] = []
    model.first.bias.register_hook(lambda grad: grad / 2)
    model.first.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    return {"losses": train(model), "seen": seen, "state": state(model)}


class Stopping(Net):
    """Gradients stop before the blocks where they do not train, as code does that would save the work."""

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if not any(p.requires_grad for p in self.blocks.parameters()):
            h = self.blocks(h.detach())
        else:
            h = self.blocks(h)
        return h


@program(KIND)
def frozen_where_the_forward_asks(compile: Compile) -> Results:
    """The blocks are frozen after compile, upon which the layer before them has no gradient either, and unfrozen again."""
    model = compile(seeded(Stopping), example_inputs=batch())
    optimizer, losses = sgd(model), train(model, steps=2)
    model.blocks.requires_grad_(False)
    losses += train(model, optimizer, steps=2)
    model.blocks.requires_grad_(True)
    return {"losses": losses + train(model, optimizer, steps=2), "state": state(model)}


@program(KIND)
def unfrozen_where_the_forward_asks(compile: Compile) -> Results:
    """The blocks are frozen when the model is compiled."""
    plain = seeded(Stopping)
    plain.blocks.requires_grad_(False)
    model = compile(plain, example_inputs=batch())
    losses = train(model, steps=2)
    model.blocks.requires_grad_(True)
    return {"losses": losses + train(model, steps=2), "state": state(model)}


class WithoutGradients(Net):
    """Its first layers run under no_grad until a step that is counted, as of encoders that are fine-tuned later on."""

    def __init__(self) -> None:
        super().__init__()
        self.tunes = False

    def hidden(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.tunes and torch.is_grad_enabled()):
            h = torch.tanh(self.first(x))
        return self.blocks(h)


@program(KIND)
def unfrozen_by_the_forward(compile: Compile) -> Results:
    """What runs under no_grad at first is frozen then, and is tuned later."""
    plain = seeded(WithoutGradients)
    plain.first.requires_grad_(False)
    model = compile(plain, example_inputs=batch())
    losses = train(model, steps=2)
    model.first.requires_grad_(True)
    model.tunes = True
    return {"losses": losses + train(model, steps=2), "state": state(model)}
