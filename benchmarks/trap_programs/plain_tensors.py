"""Programs whose modules keep tensors in plain attributes that each call changes, and programs that hold on to what was there before."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import CLASSES, HIDDEN, WIDTH, Compile, Net, Results, batch, program, seeded, sgd, state, train

KIND = "plain"


class _Averaging(Net):
    """Subtracts a running mean of its activations, which is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


@program(KIND)
def mean_in_an_attribute(compile: Compile) -> Results:
    """Read in the loop after each step; it is in no state_dict."""
    model = compile(seeded(_Averaging), example_inputs=batch())
    optimizer, seen = sgd(model), []
    for k in range(3):
        optimizer.zero_grad()
        model(*batch(k)).backward()
        optimizer.step()
        seen.append(model.mean.norm().item())
    return {"seen": seen, "mean": model.mean.clone(), "keys": sorted(model.state_dict()), "state": state(model)}


@program(KIND)
def mean_in_an_attribute_evaluated_first(compile: Compile) -> Results:
    """Planned on the first call, which evaluates, as Lightning's sanity check does."""
    model = compile(seeded(_Averaging))
    losses = []
    for k in range(2):
        model.eval()
        with torch.no_grad():
            losses.append(model(*batch(9)).item())
        model.train()
        losses += train(model, inputs=[batch(k)])
    return {"losses": losses, "mean": model.mean.clone(), "state": state(model)}


@program(KIND)
def mean_in_an_attribute_set_by_the_loop(compile: Compile) -> Results:
    """To zeros between epochs, by another tensor, in place, and in a part of it."""
    model = compile(seeded(_Averaging), example_inputs=batch())
    losses = train(model)
    model.mean = torch.zeros(HIDDEN)
    losses += train(model)
    model.mean.zero_()
    losses += train(model)
    with torch.no_grad():
        model.mean[: HIDDEN // 2] = 0.5
    losses += train(model)
    return {"losses": losses, "mean": model.mean.clone(), "state": state(model)}


class _Whitened(nn.Module):
    """A mean and a count of calls, under no_grad in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.calls = torch.zeros(1, HIDDEN), torch.tensor(0)

    @torch.no_grad()
    def update(self, h: Tensor) -> None:
        self.calls += 1
        self.center = self.center + (h.mean(0, keepdim=True) - self.center) / self.calls

    def forward(self, h: Tensor) -> Tensor:
        self.update(h)
        return h - self.center


class _Twice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = _Whitened(), _Whitened()

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.after(self.blocks(self.before(torch.tanh(self.first(x)))))
        return h


@program(KIND, plans=("dp2tp2",))
def centers_in_parts(compile: Compile) -> Results:
    model = compile(seeded(_Twice), example_inputs=batch())
    losses = train(model)
    of = {"before": model.before.center.clone(), "after": model.after.center.clone(), "calls": model.after.calls.item()}
    return {"losses": losses, **of, "state": state(model)}


class _InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            self.total.mul_(0.5).add_(h.detach().mean(0))
        return h * (1 + self.total)


@program(KIND)
def total_that_the_loop_holds(compile: Compile) -> Results:
    """By a name from before compile and one from before the first call, both of which follow what is written in place."""
    net = seeded(_InPlace)
    early = net.total
    model = compile(net)
    late = model.total
    losses = train(model)
    return {"losses": losses, "early": early.clone(), "late": late.clone(), "now": model.total.clone()}


@program(KIND)
def total_begun_anew_by_the_loop(compile: Compile) -> Results:
    """Another tensor of the loop's, to which the forward then adds, read on all ranks."""
    model = compile(seeded(_InPlace))
    losses = train(model)
    model.total = torch.zeros(HIDDEN)
    losses += train(model)
    return {"losses": losses, "norm": model.total.norm().item(), "total": model.total.clone()}


def _held_means(model: Any) -> Results:
    """What is assigned anew leaves the tensor before it as it is."""
    means: list[Tensor] = []
    optimizer = sgd(model)
    for k in range(3):
        optimizer.zero_grad()
        model(*batch(k)).backward()
        optimizer.step()
        means.append(model.mean)
    return {f"mean {k}": mean.clone() for k, mean in enumerate(means)}


@program(KIND)
def means_that_the_loop_holds(compile: Compile) -> Results:
    return _held_means(compile(seeded(_Averaging), example_inputs=batch()))


@program(KIND)
def buffers_that_the_loop_holds(compile: Compile) -> Results:
    """The same with a buffer, also as it stands in a state_dict from before the last step."""

    class Registered(_Averaging):
        def __init__(self) -> None:
            super().__init__()
            del self.mean
            self.register_buffer("mean", torch.zeros(HIDDEN))

    model = compile(seeded(Registered), example_inputs=batch())
    train(model)
    kept = model.state_dict()["mean"]
    return {**_held_means(model), "kept": kept.clone()}


@program(KIND)
def buffer_written_in_place_that_the_loop_holds(compile: Compile) -> Results:
    class Registered(_InPlace):
        def __init__(self) -> None:
            super().__init__()
            del self.total
            self.register_buffer("total", torch.zeros(HIDDEN))

    net = seeded(Registered)
    early = net.total
    model = compile(net, example_inputs=batch())
    late = model.total
    losses = train(model)
    return {"losses": losses, "early": early.clone(), "late": late.clone(), "state": state(model)}


class _Sum(Net):
    def __init__(self) -> None:
        super().__init__()
        self.running, self.batches = torch.tensor(0.0), 0

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = super().forward(x, y)
        self.running = self.running + loss.detach()
        self.batches += 1
        return loss


@program(KIND)
def running_loss_in_an_attribute(compile: Compile) -> Results:
    """Beside a count that is a number; printed and begun anew by the loop."""
    model, said = compile(seeded(_Sum), example_inputs=batch()), []
    for _ in range(2):
        train(model)
        said.append(f"{float(model.running) / model.batches:.4f}")
        model.running, model.batches = torch.tensor(0.0), 0
    return {"said": said, "state": state(model)}


class _Stateful(nn.Module):
    """Goes on from batch to batch with the state that the last one has left, cut off from its graph."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Linear(WIDTH, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)
        self.samples = samples
        self.reset()

    def reset(self) -> None:
        self.h, self.c = torch.zeros(1, self.samples, HIDDEN), torch.zeros(1, self.samples, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, (h, c) = self.rnn(torch.relu(self.embed(x)), (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return F.cross_entropy(self.head(out).flatten(0, 1), y.flatten())


@program(KIND)
def recurrent_state_from_batch_to_batch(compile: Compile) -> Results:
    """Truncated backpropagation through time; a method of the model begins each epoch anew."""
    x, y = (torch.stack([batch(k)[i] for k in range(6)], 1) for i in (0, 1))
    model, losses = compile(seeded(_Stateful, len(x))), []
    for _ in range(2):
        model.reset()
        losses += train(model, inputs=[(x[:, k : k + 2], y[:, k : k + 2]) for k in (0, 2, 4)])
    return {"losses": losses, "h": model.h.clone(), "c": model.c.clone(), "state": state(model)}


class _Imprinted(Net):
    """A head made of weights, as of prototypes: a buffer that the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prototypes", torch.zeros(CLASSES, HIDDEN))

    def logits(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.head(h) + h @ self.prototypes.T


@program(KIND, plans=("dp2tp2",))
def buffer_set_from_a_parameter(compile: Compile) -> Results:
    """Which lies otherwise than the buffer does."""
    model = compile(seeded(_Imprinted), example_inputs=batch())
    losses = train(model)
    model.prototypes = model.head.weight.detach().clone() * 0.5
    losses += train(model)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def buffer_that_follows_a_parameter(compile: Compile) -> Results:
    """It has the parameter's memory, which is in parts."""
    model = compile(seeded(_Imprinted), example_inputs=batch())
    losses = train(model)
    model.prototypes = model.head.weight.data
    losses += train(model)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def total_evaluated_first(compile: Compile) -> Results:
    model = compile(seeded(_InPlace))
    model.eval()
    with torch.no_grad():
        losses = [model(*batch(9)).item()]
    model.train()
    losses += train(model)
    return {"losses": losses, "total": model.total.clone()}


class _Snapshots(Net):
    """A buffer that is written in place, and one that the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.zeros(HIDDEN))
        self.register_buffer("then", torch.zeros(HIDDEN))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        self.now.mul_(0.5).add_(h.detach().mean(0))
        return h - self.then


@program(KIND)
def two_buffers_made_one_by_the_loop(compile: Compile) -> Results:
    """On one process what is written to the one is in the other."""
    model = compile(seeded(_Snapshots), example_inputs=batch())
    losses = train(model)
    model.then = model.now
    losses += train(model)
    return {"losses": losses, "state": state(model)}


@program(KIND, remedy_of="two_buffers_made_one_by_the_loop")
def snapshot_of_a_buffer_by_the_loop(compile: Compile) -> Results:
    model = compile(seeded(_Snapshots), example_inputs=batch())
    losses = train(model)
    model.then = model.now.clone()
    losses += train(model)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def buffer_that_becomes_itself(compile: Compile) -> Results:
    """Another object with the same memory: who holds the one before sees what is written."""

    class Detached(_InPlace):
        def hidden(self, x: Tensor) -> Tensor:
            h = Net.hidden(self, x)
            self.total = self.total.mul_(0.5).add_(h.detach().mean(0)).detach()
            return h * (1 + self.total)

    model = compile(seeded(Detached), example_inputs=batch())
    held = model.total
    losses = train(model)
    return {"losses": losses, "held": held.clone(), "now": model.total.clone()}
