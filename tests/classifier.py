"""A small classifier and its batches, for tests of what goes around a module."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["STEPS", "Classifier", "built"]

STEPS = 3
Kind = TypeVar("Kind", bound=nn.Module)


class Classifier(nn.Module):
    """The loss of samples [batch, 8] of 4 classes; their logits without the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.down(torch.relu(self.up(x)))
        return logits if y is None else F.cross_entropy(logits, y)


def built(kind: type[Kind]) -> tuple[Kind, list[tuple[Tensor, Tensor]]]:
    """A model with the same first weights on every process, and batches."""
    torch.manual_seed(0)
    return kind(), [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(STEPS)]
