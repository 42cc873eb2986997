"""What goes over the border of a model beside its batch: its own weights as inputs, buffers and attributes with gradients, modules of
another kind, calls in which nothing of what is trained takes part."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    CLASSES,
    HIDDEN,
    Compile,
    Logits,
    Net,
    Results,
    batch,
    batches,
    program,
    seeded,
    sgd,
    state,
    stepped,
    trained,
)  # fmt: skip

KIND = "border"


class Weighed(Net):
    """A classifier whose logits are multiplied by weights of the classes [4] that the call gives."""

    def forward(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.logits(x) * weights, y)


class Adapted(nn.Module):
    """A frozen layer with a trained addition of rank 2, which can be switched off."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.base, self.on = base.requires_grad_(False), True
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=draw) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x)
        return h + x @ self.down.T @ self.up.T if self.on else h


def adapted(build: type[Net]) -> Any:
    """A model of which every linear layer is Adapted."""
    model = seeded(build)
    for seed, (name, layer) in enumerate(list(model.named_modules())):
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, Adapted(layer, seed))
    return model


def switch(model: nn.Module, *, on: bool) -> None:
    for part in model.modules():
        if isinstance(part, Adapted):
            part.on = on


# ------------------------------------------------------------------------------------------------------- weights as inputs
@program(KIND)
def own_weight_as_an_input(compile: Compile) -> Results:
    """The loop gives the model one of its own weights, whose gradient comes from both places."""

    class Bounded(Net):
        def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(self.logits(x), y) + 0.1 * weight.pow(2).sum()

    model = compile(seeded(Bounded), example_inputs=(*batch(), torch.ones(CLASSES, HIDDEN)))
    return {"losses": stepped(model, lambda x, y: model(x, y, model.head.weight)), "state": state(model)}


@program(KIND)
def input_computed_of_own_weight(compile: Compile) -> Results:
    """What the loop computes of a weight, elementwise, is an input in a dict; also in evaluation."""

    class Named(Weighed):
        def forward(self, x: Tensor, y: Tensor, given: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(x, y, given["weights"])

    model = compile(seeded(Named), example_inputs=(*batch(), {"weights": torch.ones(CLASSES)}))
    losses = stepped(model, lambda x, y: model(x, y, {"weights": model.head.bias.exp()}))
    with torch.no_grad():
        losses.append(model(*batch(5), {"weights": model.head.bias}).item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def weight_of_another_model_as_an_input(compile: Compile) -> Results:
    """A model that is compiled too gives its weight, and is trained through it."""
    first = compile(seeded(Logits), example_inputs=(batch()[0],))
    second = compile(seeded(Weighed), example_inputs=(*batch(), torch.ones(CLASSES)))
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    losses = stepped(second, lambda x, y: F.cross_entropy(first(x), y) + second(x, y, first.head.bias), both)
    return {"losses": losses, "first": state(first), "second": state(second)}


# --------------------------------------------------------------------------------------------------- gradients of what is held
@program(KIND)
def buffer_that_is_trained(compile: Compile) -> Results:
    """register_buffer of a tensor that requires a gradient, which the loop gives to the optimizer."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(CLASSES, requires_grad=True))

        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x) * self.scale

    model = compile(seeded(Scaled), example_inputs=batch())
    return trained(model, torch.optim.SGD([*model.parameters(), model.scale], 0.1))


@program(KIND)
def zero_that_is_given_a_gradient(compile: Compile) -> Results:
    """A zero in a buffer, which requires a gradient in training, so that the sum of losses does without any of them."""

    class Summed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("zero", torch.tensor(0.0), persistent=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self.zero
            if self.training:
                loss.requires_grad_()
            return loss + F.cross_entropy(self.logits(x), y)

    return trained(compile(seeded(Summed), example_inputs=batch()))


@program(KIND)
def buffer_computed_of_a_parameter_outside(compile: Compile) -> Results:
    """Before each call the loop sets a buffer to what it computes of a parameter of its own, which is to be trained."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(CLASSES))

        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x) * self.scale

    outside = nn.Parameter(torch.zeros(CLASSES))
    model = compile(seeded(Scaled), example_inputs=batch())

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        model.scale = outside.exp()
        return model(x, y)

    losses = stepped(model, loss_of, torch.optim.SGD([*model.parameters(), outside], 0.1))
    return {"losses": losses, "outside": outside}


@program(KIND)
def attribute_that_is_trained_later(compile: Compile) -> Results:
    """A plain tensor in an attribute requires a gradient after compiling."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(CLASSES)

        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x) * self.scale

    plain = seeded(Scaled)
    model = compile(plain, example_inputs=batch())
    plain.scale.requires_grad_()
    losses = stepped(model, lambda x, y: model(x, y), torch.optim.SGD([*model.parameters(), plain.scale], 0.1))
    return {"losses": losses, "scale": plain.scale}


@program(KIND)
def scripted_part(compile: Compile) -> Results:
    """A part of the model is a module of TorchScript."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.linear(x))

    class Scripted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.script(Part())

        def hidden(self, x: Tensor) -> Tensor:
            return self.part(super().hidden(x))

    return trained(compile(seeded(Scripted), example_inputs=batch()))


# ------------------------------------------------------------------------------------------------ calls without what is trained
@program(KIND)
def reference_without_adapters(compile: Compile) -> Results:
    """The reference of a preference loss is the model with its adapters switched off, in a first call without gradients."""
    model = compile(adapted(Net), example_inputs=batch())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    references: list[float] = []

    def loss_of(*given: Tensor) -> Tensor:
        switch(model, on=False)
        with torch.no_grad():
            references.append(model(*given).item())
        switch(model, on=True)
        return (model(*given) - references[-1]).abs()

    return {"losses": stepped(model, loss_of, optimizer), "references": references, "state": state(model)}


@program(KIND)
def reference_logits_without_adapters(compile: Compile) -> Results:
    """The same where the loop makes the loss of logits, and tries a backward pass where nothing is trained."""
    model = compile(adapted(Logits), example_inputs=(batch()[0],))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        switch(model, on=False)
        with torch.no_grad():
            reference = model(x).log_softmax(1)
        switch(model, on=True)
        found = model(x).log_softmax(1)
        return F.nll_loss(found, y) + F.kl_div(found, reference, log_target=True, reduction="batchmean")

    losses = stepped(model, loss_of, optimizer)
    switch(model, on=False)
    try:
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        raised = False
    except Exception:  # noqa: BLE001  (of torch on one process, of autopar on several)
        raised = True
    return {"losses": losses, "raised": raised, "state": state(model)}


@program(KIND)
def one_norm_of_two_views(compile: Compile) -> Results:
    """A norm without weights over the activations of two views, of which one is used transposed: redundancy reduction."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 8))
            self.norm = nn.BatchNorm1d(8, affine=False)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            u, v = self.encoder(a), self.encoder(b)
            across = self.norm(u).T @ self.norm(v) / len(a)
            spread = F.relu(1 - (u.var(0) + 1e-4).sqrt()).mean()
            return (across.diagonal() - 1).square().sum() + 0.005 * across.square().sum() + spread

    views = [(x, x.roll(1, 1) + 0.1) for x, _ in batches()]
    model = compile(seeded(Views), example_inputs=views[0])
    return trained(model, sgd(model, 0.01), inputs=views)


# ------------------------------------------------------------------------------------------------- what the example happened to be
@program(KIND)
def one_tensor_in_the_example_alone(compile: Compile) -> Results:
    """A language model is compiled with its words as their own labels, and trained with labels of their own; its code compares objects."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(20, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 20)

        def forward(self, words: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
            h = self.head(torch.tanh(self.mix(self.embed(words))))
            loss = F.cross_entropy(h[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return loss if weights is labels or weights is None else loss * weights.mean()

    def words(index: int) -> Tensor:
        return torch.randint(20, (12, 6), generator=torch.Generator().manual_seed(index))

    example = words(0)
    model = compile(seeded(Words), example_inputs=(example, example))
    return trained(model, inputs=[(words(1), words(2)), (words(3), words(3)), (example, example), (words(4), words(5))])


@program(KIND)
def transposed_in_the_example_alone(compile: Compile) -> Results:
    """The forward asks how its input lies in memory; the first batch lies otherwise than those that follow."""

    class Asks(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(self.logits(x), y)
            return loss if x.is_contiguous() else loss * 2

    x, y = batch()
    model = compile(seeded(Asks), example_inputs=(x.T.contiguous().T, y))
    return trained(model, inputs=[batch(1), (batch(2)[0].T.contiguous().T, batch(2)[1]), batch(3)])


@program(KIND)
def statistics_of_casts_that_change_nothing(compile: Compile) -> Results:
    """Under no_grad activations are cast to the dtype that they have, and used afterwards: gradients go through them all the same."""

    class Watched(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            with torch.no_grad():
                self.largest = torch.maximum(self.largest, h.to(x.dtype).abs().amax())
                same = h.type_as(x)
            return same / (1 + self.largest)

    return trained(compile(seeded(Watched), example_inputs=batch()))


# ------------------------------------------------------------------------------------------------------ numbers that are kept
@program(KIND)
def accuracy_kept_as_a_number(compile: Compile) -> Results:
    """`self.accuracy = float(...)` in the forward, which the loop does not look at (what stands there says what to do)."""

    class Counted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy, self.logged = 0.0, {"largest": 0.0}

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x)
            self.accuracy = float((logits.argmax(1) == y).double().mean())
            self.logged["largest"] = float(logits.detach().abs().max())
            return F.cross_entropy(logits, y)

    return trained(compile(seeded(Counted), example_inputs=batch()))


@program(KIND)
def number_kept_and_used(compile: Compile) -> Results:
    """The number that is kept weighs the loss of the same call, and is compared in the next one."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x)
            if self.scale > 2:
                logits = logits * 2
            self.scale = float(logits.detach().abs().max())
            return F.cross_entropy(logits, y) * self.scale

    return trained(compile(seeded(Scaled), example_inputs=batch()))


@program(KIND)
def number_kept_and_used_in_the_next_call(compile: Compile) -> Results:
    """The number that is kept weighs the loss of the next call."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x)
            loss = F.cross_entropy(logits, y) * self.scale
            self.scale = float(logits.detach().abs().max())
            return loss

    return trained(compile(seeded(Scaled), example_inputs=batch()))


@program(KIND)
def numbers_of_numpy(compile: Compile) -> Results:
    """Mixing weights that numpy draws, and numbers of steps, are arguments of the call; Python's numbers in between."""

    class Mixed(Net):
        def forward(self, x: Tensor, y: Tensor, share: float, step: int = 0, late: bool = False) -> Tensor:  # type: ignore[override]
            logits = self.logits(x)
            loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y.flip(0))
            return loss * 2 if late else loss / (1 + step)

    draw = np.random.default_rng(0)
    model = compile(seeded(Mixed), example_inputs=(*batch(), draw.beta(0.4, 0.4), np.int64(1)))
    given = [(*batch(1), draw.beta(0.4, 0.4), np.int64(1)), (*batch(2), np.float32(0.25), 1, np.bool_(True)), (*batch(3), 0.25, 1, True)]
    return trained(model, inputs=given)


@program(KIND)
def list_of_the_model_among_the_outputs(compile: Compile) -> Results:
    """What the model returns has a list that it holds, to which the loop appends, and one that each call makes."""

    class Named(Net):
        def __init__(self) -> None:
            super().__init__()
            self.names = ["first"]

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {"loss": super().forward(x, y) * len(self.names), "names": self.names, "made": [len(x)]}

    model = compile(seeded(Named), example_inputs=batch(), outputs="all")
    lengths: list[int] = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        found = model(x, y)
        found["names"].append("another")
        found["made"].append(0)
        lengths.extend((len(model.names), len(found["names"]), len(found["made"])))
        return found["loss"]

    return {"losses": stepped(model, loss_of), "lengths": lengths, "state": state(model)}
