"""Inputs whose first dims differ: states of layers, sequences that come time first, lists of sequences of different lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import BATCH, CLASSES, WIDTH, Compile, Net, Results, batch, program, seeded, sgd, state, trained

KIND = "lengths"
MORE = ("dp2tp2",)


class Recurrent(nn.Module):
    """Classes of each step of sequences [batch, length], and the states after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.out = nn.Embedding(16, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, states = self.layers(self.embed(x), states)
        return self.out(h), states


def _by_windows(model: Any, states: tuple[Tensor, Tensor] | None) -> Results:
    words = torch.randint(16, (BATCH, 19), generator=torch.Generator().manual_seed(3))
    optimizer, losses = sgd(model), []
    for k in range(0, 18, 6):
        logits, states = model(words[:, k : k + 6], states)
        states = (states[0].detach(), states[1].detach())
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, k + 1 : k + 7].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "states": states, "state": state(model)}


@program(KIND, plans=MORE)
def states_carried_over(compile: Compile) -> Results:
    """Truncated backpropagation through time: an LSTM is given the states of the window before; the first window has none."""
    return _by_windows(compile(seeded(Recurrent), example_inputs=(torch.zeros(BATCH, 6, dtype=torch.long),)), None)


@program(KIND, plans=MORE)
def states_from_the_first_window(compile: Compile) -> Results:
    """The same with states in the example: two inputs [layers, batch, width] beside one [batch, length]."""
    states = (torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH))
    return _by_windows(compile(seeded(Recurrent), example_inputs=(torch.zeros(BATCH, 6, dtype=torch.long), states)), states)


@program(KIND, plans=MORE)
def sequences_time_first(compile: Compile) -> Results:
    """Sequences [length, batch, width], of an odd length, and labels [batch]."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.out(self.layer(x)[1][-1]), y)

    inputs = [(torch.stack([x, x.roll(1, 1), x.square(), -x, x.cos()]), y) for x, y in map(batch, range(3))]
    return trained(compile(seeded(TimeFirst), example_inputs=inputs[0]), inputs=inputs)


class Packing(nn.Module):
    """The last states of sequences [batch, length, width], each of its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.layer(packed)[1][-1]


class PackedInside(Packing):
    """The model itself packs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.out(super().forward(x, lengths)), y)


class PackedByAPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.states, self.out = Packing(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.states(x, lengths)), y)


def _given(index: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = batch(index)
    lengths = 3 + (torch.arange(BATCH) * (index + 3)) % 6
    return (x[:, None] + torch.arange(8.0)[:, None]).masked_fill(torch.arange(8)[:, None] >= lengths[:, None, None], 0.0), lengths, y


def _packed(compile: Compile, model: type[nn.Module]) -> Results:
    return trained(compile(seeded(model), example_inputs=_given(0)), inputs=[_given(i) for i in range(3)])


@program(KIND)
def packed_by_the_model(compile: Compile) -> Results:
    """pack_padded_sequence with lengths of the batch, in the model's own forward."""
    return _packed(compile, PackedInside)


@program(KIND, remedy_of="packed_by_the_model", plans=MORE)
def packed_by_a_part(compile: Compile) -> Results:
    """The same in a submodule, which runs as it is written."""
    return _packed(compile, PackedByAPart)


@program(KIND, plans=MORE)
def packed_by_the_model_with_its_loss_outside(compile: Compile) -> Results:
    """The same in a model that returns logits: the loop has the loss."""

    class Logits(Packing):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            logits: Tensor = self.out(super().forward(x, lengths))
            return logits

    model = compile(seeded(Logits), example_inputs=_given(0)[:2])
    optimizer, losses = sgd(model), []
    for x, lengths, y in map(_given, range(3)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, lengths), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def list_of_sequences(compile: Compile) -> Results:
    """A list of 12 sequences of different lengths, which the forward pads; each batch has other lengths."""

    class Padded(Net):
        def forward(self, parts: list[Tensor], y: Tensor) -> Tensor:  # type: ignore[override]
            counts = torch.tensor([len(x) for x in parts])
            return super().forward(nn.utils.rnn.pad_sequence(parts, batch_first=True).sum(1) / counts[:, None], y)

    def given(index: int) -> tuple[list[Tensor], Tensor]:
        x, y = batch(index)
        return [row.expand(2 + (k + index) % 3, -1).cumsum(0) for k, row in enumerate(x)], y

    return trained(compile(seeded(Padded), example_inputs=given(0)), inputs=[given(i) for i in range(3)])
