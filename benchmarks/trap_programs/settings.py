"""Programs whose user changes buffers, attributes and settings of the model between steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import Compile, Net, Normed, Results, batch, batches, program, seeded, sgd, state, train

KIND = "state"


@program(KIND)
def number_annealed_by_the_user(compile: Compile) -> Results:
    """model.temperature = ... between steps, set on what compile returned."""

    class Cooling(Net):
        temperature = 1.0

        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x) / self.temperature

    model = compile(seeded(Cooling), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step, given in enumerate(batches()):
        model.temperature = 1.0 / (1 + step)
        losses += train(model, optimizer, inputs=[given])
    return {"losses": losses, "state": state(model)}


@program(KIND)
def number_annealed_on_the_original(compile: Compile) -> Results:
    """The same, set on the model that was given to compile."""

    class Cooling(Net):
        temperature = 1.0

        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x) / self.temperature

    original = seeded(Cooling)
    model = compile(original, example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step, given in enumerate(batches()):
        original.temperature = 1.0 / (1 + step)
        losses += train(model, optimizer, inputs=[given])
    return {"losses": losses, "state": state(model)}


@program(KIND)
def number_of_a_submodule_annealed(compile: Compile) -> Results:
    """model.gate.strength = ... between steps."""

    class Gate(nn.Module):
        strength = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return x + self.strength * torch.sigmoid(x)

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

        def hidden(self, x: Tensor) -> Tensor:
            return self.gate(super().hidden(x))

    model = compile(seeded(Gated), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step, given in enumerate(batches()):
        model.gate.strength = 0.5 * step
        losses += train(model, optimizer, inputs=[given])
    return {"losses": losses, "state": state(model)}


@program(KIND)
def flag_switched_midway(compile: Compile) -> Results:
    """An auxiliary loss that is switched on after the first step."""

    class Auxiliary(Net):
        auxiliary = False

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.hidden(x)
            loss = F.cross_entropy(self.head(hidden), y)
            return loss + 0.1 * hidden.square().mean() if self.auxiliary else loss

    model = compile(seeded(Auxiliary), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    model.auxiliary = True
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND)
def object_with_settings(compile: Compile) -> Results:
    """A settings object in the model, changed by the user between steps."""

    class Configured(Net):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x), y, label_smoothing=self.config.smoothing)

    config = SimpleNamespace(smoothing=0.0)
    model = compile(seeded(Configured, config), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step, given in enumerate(batches()):
        config.smoothing = 0.1 * step
        losses += train(model, optimizer, inputs=[given])
    return {"losses": losses, "state": state(model)}


@program(KIND)
def batch_norm_momentum_changed(compile: Compile) -> Results:
    """The momentum of running statistics is set between steps."""
    model = compile(seeded(Normed), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    model.norm.momentum = 0.5
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND)
def dropout_rate_changed(compile: Compile) -> Results:
    """A rate of 0 that is raised to 1 midway, which leaves nothing to chance."""

    class Dropping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def logits(self, x: Tensor) -> Tensor:
            hidden = self.hidden(x)
            return self.head(hidden + self.drop(hidden))

    model = compile(seeded(Dropping), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    model.drop.p = 1.0
    return {"losses": losses + train(model, optimizer), "state": state(model)}


class _Weighted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_weight", torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), y, weight=self.class_weight)


@program(KIND)
def buffer_assigned_by_the_user(compile: Compile) -> Results:
    """model.class_weight = another tensor, between steps."""
    model = compile(seeded(_Weighted), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    model.class_weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND)
def buffer_changed_by_the_user(compile: Compile) -> Results:
    """The same in place."""
    model = compile(seeded(_Weighted), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    model.class_weight[2] = 5.0
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND, plans=("dp2mb2",))
def weights_of_a_criterion_given_anew(compile: Compile) -> Results:
    """Deferred re-weighting: the weights of classes, a buffer of the loss, become another tensor after two epochs."""

    class Labelled(Net):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.logits(x), y

    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
    model = compile(seeded(Labelled), loss=lambda out: criterion(*out))
    losses = train(model, steps=2)
    criterion.weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    losses += train(model, steps=2)
    criterion.register_buffer("weight", torch.tensor([4.0, 3.0, 2.0, 1.0]))
    return {"losses": losses + train(model, steps=2), "state": state(model)}
