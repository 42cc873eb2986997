"""A model with state of every kind, whose forward is a parameter of the test, and pictures of what it holds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

BATCH, DIM = 4, 6
SEEN: list[int] = []
MASKS: dict[int, Tensor] = {}


class Model(nn.Module):
    """A linear layer, state of every kind, and a forward that is a parameter of the test."""

    shared: list[int] = []

    def __init__(self, fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.inner = Inner()
        self.register_buffer("ema", torch.zeros(DIM))
        self.register_buffer("other", torch.ones(DIM))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table_of_keys", torch.arange(2.0 * BATCH * DIM).reshape(2 * BATCH, DIM))
        self.register_buffer("lazy", None, persistent=False)  # of the state_dict: test_made.py
        self.plain = torch.zeros(DIM)
        self.count, self.flag, self.history, self.table = 0, False, [1.0], {"a": 1}
        self.options = SimpleNamespace(deep=SimpleNamespace(calls=0))
        self.cache: Any = None
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x).pow(2).sum()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return x - self.mean


def build(fn: Callable[[Any, Tensor], Tensor], device: str = "cpu") -> tuple[Model, tuple[Tensor]]:
    with torch.device(device):
        model = Model(fn)
    return model, (torch.randn(BATCH, DIM),)


def snapshot(model: nn.Module) -> list[object]:
    state = [t.clone() if isinstance(t, Tensor) and not t.is_meta else id(t) for t in (*model.parameters(), *model.buffers(), model.plain)]
    own = [str(vars(m).get(k)) for m in model.modules() for k in sorted(vars(m)) if not k.startswith("_")]
    return [*state, own, str(SEEN), str(MASKS), str(Model.shared)]


def equal(a: list[object], b: list[object]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y for x, y in zip(a, b, strict=True))
