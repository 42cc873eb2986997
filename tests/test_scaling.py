"""Losses that a GradScaler scales, where backward has run inside of the call: it begins from the scale."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.run import WorkerPool
from autopar.run.scaling import Scaling


@pytest.mark.pure
def test_what_is_expected_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[torch.amp.GradScaler] = []
    monkeypatch.setattr(gc, "get_referrers", lambda *_: [*alive, object()])
    scaling = Scaling()
    assert scaling.begin() == 1 and scaling.left_of(torch.tensor(8.0), 1.0).item() == 8
    alive.append(torch.amp.GradScaler("cpu", init_scale=64.0))
    assert scaling.begin() == 64
    assert scaling.left_of(torch.tensor(16.0), 64.0).item() == 0.25  # a loss that is divided among four calls
    alive[0].scale(torch.ones(()))
    alive[0].update(128.0)
    assert scaling.begin() == 32
    assert scaling.left_of(torch.tensor(1.0), 32.0).item() == 1 / 32  # and one that is not scaled
    assert scaling.begin() == 1
    alive.clear()
    alive += [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (4.0, 16.0)]
    assert scaling.begin() == 1
    scaling.left_of(torch.tensor(16.0), 1.0)
    assert scaling.begin() == 16
    alive.clear()
    assert scaling.begin() == 1


class Own(torch.amp.GradScaler):
    pass


@pytest.mark.pure
def test_scalers_of_any_class_are_found_that_are_enabled() -> None:
    usual, own, off = torch.amp.GradScaler("cpu"), Own("cpu"), Own("cpu", enabled=False)
    scaling = Scaling()
    scaling.begin()
    found = [*map(id, scaling._alive())]
    assert id(usual) in found and id(own) in found and id(off) not in found


class Small(nn.Module):
    """Its gradients are smaller than float16's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x).float(), y) * 1e-6


def _gradients_lost(pins: dict[str, Any]) -> float:
    """The most by which a gradient is off, relative to its norm, of three steps whose scale is halved between."""
    torch.manual_seed(0)
    one = Small()
    torch.manual_seed(0)
    model = autopar.compile(Small(), gpus=2, cluster="cpu", precision="fp16", pins=pins)
    scaler, optimizer, off = torch.amp.GradScaler("cpu", init_scale=2.0**16), torch.optim.SGD(model.parameters(), 0.0), 0.0
    for k in range(3):
        generator = torch.Generator().manual_seed(k)
        x, y = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        one.zero_grad()
        model.zero_grad()
        one(x, y).backward()
        scaler.scale(model(x, y)).backward()
        scaler.unscale_(optimizer)
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            assert p.grad is not None
            off = max(off, float((p.grad - q.grad.float()).norm() / p.grad.norm()))
        scaler.update(2.0 ** (15 - k))
    return off


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"pp": 2}, {"pp": 2, "micro_batches": 2}, {"dp": 2, "micro_batches": 2}, {"tp": 2}], ids=str)
def test_small_gradients_are_kept(pins: dict[str, Any], pair: WorkerPool) -> None:
    assert max(pair.run(_gradients_lost, pins, timeout_s=60)) < 0.02
