"""Layers that are each given an input of their own are folded as others are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.planner.fold import fold

pytestmark = pytest.mark.pure
LAYERS = 6


class Layer(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return x + torch.tanh(super().forward(x)) * mask


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(16, 16) for _ in range(LAYERS)), nn.Linear(16, 4)

    def forward(self, x: Tensor, masks: Sequence[Tensor], y: Tensor) -> Tensor:
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, mask)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("shape", [(8, 1), (16,), (8, 16)])
def test_inputs_of_layers_that_are_folded_are_no_inputs_of_the_folded_program(shape: tuple[int, ...]) -> None:
    masks = [torch.rand(shape) for _ in range(LAYERS)]
    program = capture(Masked(), (torch.randn(8, 16), masks, torch.randint(4, (8,)))).program
    folded = fold(program)
    assert len(folded.ops) < len(program.ops)
    assert {x.value for x in folded.inputs} < {x.value for x in program.inputs}
    assert all(x.value in folded.types for x in folded.leaves)
