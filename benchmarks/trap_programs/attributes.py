"""What the user notes on parameters and buffers themselves: widths for mup, masks, flags, rates of optimizers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    CLASSES,
    HIDDEN,
    Compile,
    Net,
    Results,
    batch,
    batches,
    gradients,
    program,
    seeded,
    sgd,
    state,
    train,
    trained,
)

KIND = "attributes"


class Width:
    """How wide a layer is beside the one that its rates were found for."""

    def __init__(self, base: int, width: int) -> None:
        self.base, self.width = base, width

    def ratio(self) -> float:
        return self.width / self.base


class Readout(nn.Linear):
    """Its outputs shrink as it gets wider."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.weight.width.ratio())


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = Readout(HIDDEN, CLASSES)
        for p in self.parameters():
            p.width = Width(4, HIDDEN)


class Gained(nn.Linear):
    """Some of its kind have a gain."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "gain", 1.0)


class WithGain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = Gained(HIDDEN, CLASSES)


@program(KIND)
def width_noted_on_weights(compile: Compile) -> Results:
    """mup: the forward divides by it, and so do the rates of groups."""
    model = compile(seeded(Wide), example_inputs=batch())
    groups = [{"params": [p], "lr": 0.1 / p.width.ratio()} for p in model.parameters() if p.dim() == 2]
    losses = train(model, torch.optim.SGD(groups))
    return {"losses": losses, "state": state(model), "widths": [float(p.width.ratio()) for p in model.parameters()]}


@program(KIND)
def width_of_another_base_midway(compile: Compile) -> Results:
    """What is noted changes inside of the object that holds it."""
    model = compile(seeded(Wide), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer)
    model.head.weight.width.base = 8
    losses += train(model, optimizer)
    model.head.weight.width = Width(2, HIDDEN)
    losses += train(model, optimizer)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def gain_given_to_a_weight_later(compile: Compile) -> Results:
    """An attribute that is not there when the model is compiled, and goes again."""
    model = compile(seeded(WithGain), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer)
    model.head.weight.gain = 0.5
    losses += train(model, optimizer)
    del model.head.weight.gain
    losses += train(model, optimizer)
    return {"losses": losses, "state": state(model), "has": float(hasattr(model.head.weight, "gain"))}


@program(KIND)
def mask_noted_on_a_weight(compile: Compile) -> Results:
    """Pruning by hand: the mask stands beside the weight, and is another one later."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.weight.mask, self.bias)

    class Pruned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = Masked(HIDDEN, CLASSES)
            self.head.weight.mask = (self.head.weight.detach().abs() > 0.05).float()

    model = compile(seeded(Pruned), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer)
    model.head.weight.mask = torch.ones(CLASSES, HIDDEN).tril()
    losses += train(model, optimizer)
    model.head.weight.mask[0] = 1.0
    losses += train(model, optimizer)
    return {"losses": losses, "state": state(model), "gradients": gradients(model)}


@program(KIND)
def decay_and_rates_noted_on_parameters(compile: Compile) -> Results:
    """As state-space models do: groups are made of what each parameter says of itself, before compiling and after."""
    model = seeded(Net)
    for name, p in model.named_parameters():
        p._no_weight_decay = p.dim() < 2
        if name.startswith("head"):
            p._optim = {"lr": 0.05}
    model = compile(model, example_inputs=batch())
    groups: list[dict[str, Any]] = []
    for p in model.parameters():
        decay = 0.0 if getattr(p, "_no_weight_decay", False) else 0.1
        groups.append({"params": [p], "weight_decay": decay, "lr": getattr(p, "_optim", {"lr": 0.01})["lr"]})
    losses = train(model, torch.optim.AdamW(groups))
    return {"losses": losses, "state": state(model), "decayed": [g["weight_decay"] for g in groups]}


@program(KIND)
def shift_noted_on_a_table(compile: Compile) -> Results:
    """Of a buffer; the batch is another size at the end."""

    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.linspace(-1, 1, HIDDEN))
            self.table.shift = 3

        def hidden(self, x: Tensor) -> Tensor:
            return super().hidden(x) + self.table.roll(self.table.shift)

    model = compile(seeded(Shifted), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer)
    model.table.shift = 1
    losses += train(model, optimizer)
    losses += train(model, optimizer, inputs=[batch(7, 24)])
    return {"losses": losses, "state": state(model), "shift": model.table.shift}


@program(KIND)
def flag_on_a_weight_read_as_written(compile: Compile) -> Results:
    """By a layer that looks at what it has computed."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            if float(found.detach().abs().amax()) > 1e6:
                found = found / 2
            return found * self.weight.gain

    class Flagged(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = Layer(HIDDEN, CLASSES)
            self.head.weight.gain = 0.5

    model = compile(seeded(Flagged), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer)
    model.head.weight.gain = 2.0
    losses += train(model, optimizer)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def layers_of_other_gains(compile: Compile) -> Results:
    """Of layers that are alike but for what is noted on their weights."""

    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(Gained(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)))
            for k, (layer, _) in enumerate(self.blocks):
                layer.weight.gain = 1.0 + 0.25 * (k % 2)

    model = compile(seeded(Deep), example_inputs=batch())
    losses = train(model)
    for layer, _ in model.blocks:
        layer.weight.gain = 0.5
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def evaluated_with_what_is_noted(compile: Compile) -> Results:
    """A copy, made before compiling, is what is compared with."""
    model = seeded(Wide)
    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters()):
        q.width = copy.copy(p.width)
    model = compile(model, example_inputs=batch())
    found = trained(model)
    other.load_state_dict(found["state"])
    model.eval()
    with torch.no_grad():
        losses = [float(model(*given)) for given in batches()]
        before = [float(other(*given)) for given in batches()]
    return {**found, "evaluated": losses, "by_the_copy": before}
