"""Conditions on uniform draws that no draw can change are known where a model is traced; others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure


class Layers(nn.Module):
    """Layers that are left out at random, as transformers of before 5.20 ask in every call."""

    def __init__(self, chance: float, ask: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head, self.chance, self.ask = nn.Linear(4, 2), chance, ask

    def _left_out(self, x: Tensor) -> bool:
        drawn = torch.rand([])
        if self.ask == "less":
            return bool(drawn < self.chance)
        if self.ask == "more":
            return bool(1 - self.chance <= torch.rand(1))
        if self.ask == "number":
            return self.training and (drawn < self.chance).item()  # type: ignore[return-value]
        return bool(torch.rand_like(x[0, :1]).lt(self.chance))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self._left_out(x):
                x = layer(x).tanh()
        return self.head(x).sum()


@pytest.mark.parametrize("ask", ["less", "more", "number", "like"])
@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_what_no_draw_changes_is_known(chance: float, ask: str) -> None:
    program = capture(Layers(chance, ask), (torch.randn(2, 4),)).program
    assert sum(op.target == "aten.linear.default" for op in program.ops) == (4 if chance == 0.0 else 1)


@pytest.mark.parametrize("ask", ["less", "more", "like"])
def test_what_a_draw_decides_is_not(ask: str) -> None:
    with pytest.raises(CaptureError, match="lets values of a tensor decide"):
        capture(Layers(0.5, ask), (torch.randn(2, 4),))


def test_a_draw_that_was_written_to_is_none() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            drawn = torch.rand([])
            drawn.sub_(0.5)
            return self.linear(x).sum() if drawn < 0.0 else x.sum()

    with pytest.raises(CaptureError, match="lets values of a tensor decide"):
        capture(Shifted(), (torch.randn(2, 4),))


def test_the_bound_is_watched() -> None:
    model = Layers(0.0, "less")
    captured = capture(model, (torch.randn(2, 4),))
    assert captured.guards is not None and captured.guards.changed() is None
    model.chance = 0.5
    assert "chance" in (captured.guards.changed() or "")
