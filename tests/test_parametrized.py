"""Regions with parametrized modules (weight_norm, spectral_norm) are given to other processes as they are."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from autopar.run import WorkerPool
from autopar.run.parametrized import pickled
from autopar.verify import verify


class Decides(nn.Module):
    """By a value, so that no graph holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.detach().abs().amax()) < 1e6 else x


@pytest.mark.pure
@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_a_module_comes_back_with_its_tensors(norm: object) -> None:
    module = nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh())  # type: ignore[operator]
    before = {name: t.clone() for name, t in module.state_dict().items()}
    again = pickle.loads(pickled(module))
    assert [*module.state_dict()] == [*before] and all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert [*again.state_dict()] == [*before] and all(torch.equal(t, before[name]) for name, t in again.state_dict().items())
    assert [name for name, p in again.named_parameters() if p.requires_grad] == [name for name, _ in module.named_parameters()]
    x = torch.randn(2, 4)
    assert torch.equal(again.eval()(x), module.eval()(x))


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 4, "zero": 3}, {"pp": 2, "dp": 2}])
def test_regions_with_weight_norm_are_verified(workers: WorkerPool, pins: dict[str, int]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Decides(), nn.Linear(8, 8))
    report = verify(model, (torch.randn(4, 8),), 4, loss=_squared, pins=pins, steps=2, pool=workers)
    assert report.ok, report


def _squared(y: Tensor) -> Tensor:
    return y.square().mean()
