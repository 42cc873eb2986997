"""Calls that do the same are traced once: the program is that of tracing every call, names included, and what differs is told apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar.capture.traced as traced_model
from autopar.capture import capture
from autopar.capture.repeats import Repeated, repeated
from autopar.capture.state import State
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure

SCALES: list[float] = []


class Layer(nn.Module):
    def __init__(self, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale, self.number = scale, 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.up(self.norm(x))[..., : 3 * x.shape[-1]].chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = F.gelu(torch.cat([y, k, q, v], dim=-1)).pow(2)
        return x + self.down(y) * self.scale


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.enter, self.layers, self.leave = nn.Linear(8, 8), nn.ModuleList(layers), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x)
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(self.leave(h).pow(2), y)


class Between(Stack):
    """What lies between the layers has operators, and reads what a layer returned a second time."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, every = self.enter(x), []
        mask = torch.ones(4, 4, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            every.append(layer(h, mask))
            h = F.gelu(every[-1]) + h
        return F.mse_loss(self.leave(h), y) + torch.stack(every).pow(2).mean()


class Again(Stack):
    """The first layer is called a second time."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x)
        for layer in (*self.layers, self.layers[0]):
            h = layer(h)
        return F.mse_loss(self.leave(h), y)


class Statistics(nn.Module):
    """Its buffers change in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(self.norm(x.flatten(0, 1)).view(x.shape))
        self.seen.add_(h.detach().mean((0, 1)))
        return x + F.relu(h) * 2 - torch.sigmoid(h)


class Counting(Layer):
    """Which layer it is, it counts in a global."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        SCALES.append(1.0 + len(SCALES))
        return super().forward(x) * SCALES[-1]


class Numbered(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * (self.number + 1)


class Wired(Layer):
    """The operators of one of them have other operands, of the same kinds."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.up(self.norm(x))[..., : 3 * x.shape[-1]].chunk(3, dim=-1)
        q, k = (k, q) if self.number == 3 else (q, k)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.down(F.gelu(torch.cat([y, k, q, v], dim=-1)))


class Typed(Layer):
    """The constants of one of them are equal to those of the others, and of another type."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.masked_fill(x > 1, (False if self.number == 3 else 0)))


class Marked(Layer):
    """One of them returns another of two results, which begins elsewhere in memory."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return torch.stack([y, y.sin()])[1 if self.number == 3 else 0]


class Frozen(Layer):
    """One of them computes without gradients."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.set_grad_enabled(self.number != 3):
            return super().forward(x)


class Outside(Layer):
    """It reads a tensor that is neither argument nor its own."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = [table]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * self.table[0]


class Pair(Layer):
    """It returns its argument beside what it makes, and a number."""

    def forward(self, x: Any, mask: Tensor | None = None) -> Any:
        return super().forward(x[0]), x[1], 3


class Pairs(Stack):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h: Any = (self.enter(x), self.enter(x).sin(), 3)
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(self.leave(h[0]) * h[1], y)


def numbered(kind: type[Layer], count: int = 5) -> list[nn.Module]:
    layers = [kind() for _ in range(count)]
    for number, layer in enumerate(layers):
        layer.number = number
    return list(layers)


def tied() -> nn.Module:
    layers = [Layer() for _ in range(6)]
    layers[4].up = layers[2].up
    return Stack(list(layers))


def two_names() -> nn.Module:
    layer = Layer()
    return Stack([Layer(), layer, Layer(), layer, Layer()])


def alternating() -> nn.Module:
    return Stack([Layer(scale=1.0 + k % 2) for k in range(8)])


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "equal": (lambda: Stack([Layer() for _ in range(6)]), 5),
    "between": (lambda: Between([Layer() for _ in range(6)]), 5),
    "alternating": (alternating, 6),
    "statistics": (lambda: Stack([Statistics() for _ in range(4)]), 3),
    "numbered": (lambda: Stack(numbered(Numbered)), 0),
    "wired": (lambda: Stack(numbered(Wired)), 3),
    "typed": (lambda: Stack(numbered(Typed)), 3),
    "marked": (lambda: Stack(numbered(Marked)), 2),
    "frozen": (lambda: Stack(numbered(Frozen)), 2),
    "outside": (lambda: Stack([Outside(torch.ones(8)) for _ in range(4)]), 0),
    "pairs": (lambda: Pairs([Pair() for _ in range(4)]), 3),
    "tied": (tied, 0),
    "two names": (two_names, 0),
    "called twice": (lambda: Again([Layer() for _ in range(6)]), 4),
    "untrained": (lambda: Stack([Layer().requires_grad_(k != 3) for k in range(6)]), 4),
    "wider": (lambda: Stack([Layer(), Layer(), nn.Sequential(nn.Linear(8, 16), Layer(16), nn.Linear(16, 8)), Layer()]), 2),
}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        return MODELS[name][0]().train(), {"x": torch.zeros(2, 4, 8), "y": torch.zeros(2, 4, 8)}


@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_that_of_tracing_every_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built(name)
    found = repeated(model, None, ((), inputs), State.take(model))
    assert len(found.same) == MODELS[name][1], found.same
    with monkeypatch.context() as m:
        m.setattr(traced_model, "flatten", _only_with_stand_ins if found.same else traced_model.flatten)
        once = capture(model, inputs)
    monkeypatch.setattr(traced_model, "repeated", lambda *_, **__: Repeated())
    every = capture(model, inputs)
    assert once.program == every.program
    assert list(once.tensors) == list(every.tensors)


_flatten = traced_model.flatten


def _only_with_stand_ins(model: Any, exported: Any, start: Any, regions: Any, stand_ins: Any = None) -> Any:
    assert stand_ins is not None, "the calls were not made from one another"
    return _flatten(model, exported, start, regions, stand_ins)


def test_state_outside_of_the_calls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that count how often any of them was called compute different things; no later call may be made from an earlier one."""
    SCALES.clear()
    with torch.device("meta"):
        model, x = Stack([Counting() for _ in range(4)]), torch.zeros(2, 4, 8)
    assert not repeated(model, None, ((x, x), {}), State.take(model)).same
    assert not SCALES, "what the call changed is put back"


def test_noting_operators_is_no_question_of_the_models() -> None:
    """Whether gradients are wanted is watched only where code of the model asks for it."""
    model, inputs = built("equal")
    assert len(repeated(model, None, ((), inputs), State.take(model)).same) == 5
    guards = capture(model, inputs).guards
    assert guards is not None
    with torch.no_grad():
        assert guards.changed() is None


def test_real_tensors_are_left_to_the_whole_trace() -> None:
    model, x = Stack([Layer() for _ in range(4)]), torch.zeros(2, 4, 8)
    assert not repeated(model, None, ((x, x), {}), State.take(model)).same


class Drawing(Stack):
    """Draws from Python's generator. with_it: the loss depends on it."""

    with_it = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        drawn = random.random()
        return super().forward(x, y) * (drawn if self.with_it else 1.0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_that_are_drawn_for_nothing_are_no_part_of_what_repeats(device: str) -> None:
    """Beside repeated layers, also where no data says what the loss would be."""
    with torch.device(device):
        model, given = Drawing([Layer() for _ in range(4)]), (torch.ones(2, 4, 8), torch.ones(2, 4, 8))
    assert len(capture(model, given).program.ops) > 0
    model.with_it = True
    with pytest.raises(CaptureError, match="random numbers drawn from random"):
        capture(model, given)
