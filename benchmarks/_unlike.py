"""A model of few parameters and many operators, of which hardly two of one layer can be decided as one: a mixture of experts that all see
every token, each a module of its own."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DenseExperts"]


class DenseExperts(nn.Module):
    """Token ids and labels, int64 [batch, length] -> the mean loss."""

    def __init__(self, width: int = 512, experts: int = 8, layers: int = 6, vocabulary: int = 32000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts: Any = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts))
            for _ in range(layers)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights = gate(x).softmax(-1).unbind(-1)
            x = x + sum(weight[..., None] * expert(x) for weight, expert in zip(weights, experts, strict=True))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
