"""F.batch_norm of parts, whose running statistics are written to without being counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.run import WorkerPool

pytestmark = pytest.mark.gloo


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)).square().mean()


def _in_turns(pins: dict[str, int] | None) -> list[Any]:
    """Steps of functional weights, which are computed of parameters, and statistics in frozen parameters."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model: Any = Normed()
    if pins is not None:
        model = autopar.compile(model, gpus=2, pins=pins, example_inputs=(torch.ones(4, 6),))
    x, found = torch.rand(4, 6), []
    weights = dict(model.named_parameters())
    statistics = nn.Parameter(torch.zeros(4), requires_grad=False), nn.Parameter(torch.ones(4), requires_grad=False)
    for _ in range(3):
        h = F.linear(x, weights["layer.weight"], weights["layer.bias"])
        loss = F.batch_norm(h, *statistics, weights["norm.weight"], weights["norm.bias"], training=True).pow(3).mean()
        loss = loss + F.batch_norm(h, None, None, weights["norm.weight"], weights["norm.bias"], training=True).pow(3).sum()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        weights = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        found.append(loss.item())
    return [*found, *(t.tolist() for t in statistics)]


@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_weights_computed_of_parts_have_gradients(pins: dict[str, int], pair: WorkerPool) -> None:
    expected = _flat(pair.run(_in_turns, None)[0])
    for found in pair.run(_in_turns, pins):
        assert _flat(found) == pytest.approx(expected, rel=1e-9)


def _flat(found: list[Any]) -> list[float]:
    return [x for one in found for x in (one if isinstance(one, list) else [one])]
