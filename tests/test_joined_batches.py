"""Batches that are put behind one another, `model(torch.cat([a, b]))`: each rank computes of its samples of both."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.compiler import plan_of
from autopar.planner.plan import parse_strategy
from autopar.run import WorkerPool
from autopar.verify import TOLERANCE, verify

BATCH, DIM = 12, 6


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 10))


class Views(Joined):
    """Each sample's two views are alike, and all others are not."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(self.layers(torch.cat([a, b])), dim=1)
        count = a.shape[0]
        alike = (z @ z.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
        return F.cross_entropy(alike, torch.cat([torch.arange(count) + count, torch.arange(count)]))


class Classified(Joined):
    """Two batches of samples with the same labels."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        labels = torch.cat([a[:, 0] > 0, a[:, 0] > 0]).long()
        return F.cross_entropy(self.layers(torch.cat([a, b])), labels)


class Averaged(Joined):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layers(torch.cat([a, b])).square().mean()


class Adversarial(Joined):
    """Labels that are made in the forward, the same for all samples of a batch."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        true, false, count = self.layers(a), self.layers(b), len(a)
        right, wrong = (F.binary_cross_entropy_with_logits(x, x.new_full((count, 10), y)) for x, y in ((true, 1.0), (false, 0.0)))
        return right + wrong + F.cosine_embedding_loss(true, false, -torch.ones(count))


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, DIM, generator=generator), torch.randn(BATCH, DIM, generator=generator)


@pytest.mark.pure
@pytest.mark.parametrize("model", [Views, Classified, Averaged])
def test_products_of_joined_batches_are_split(model: type[Joined]) -> None:
    plan = plan_of(capture(model(), inputs()), 4, cluster="cpu", pins={"dp": 4})
    split = {name: parse_strategy(text).splits_work for name, text in plan.axes["dp"].ops.items()}
    assert all(split[name] for name in split if name.startswith(("linear", "matmul", "cat", "layers"))), split


@pytest.mark.gloo
def test_labels_made_in_the_forward_are_exact(workers: WorkerPool) -> None:
    for pins in ({"dp": 2, "tp": 2, "micro_batches": 3}, {"dp": 2, "pp": 2, "micro_batches": 2}):
        report = verify(Adversarial(), inputs(), 4, pins=pins, steps=2, pool=workers)
        assert report.ok and max(report.loss, report.gradient, report.parameter) < TOLERANCE, report


@pytest.mark.gloo
@pytest.mark.parametrize("model", [Views, Classified, Averaged])
def test_joined_batches_are_exact(model: type[Joined], workers: WorkerPool) -> None:
    for pins in ({"dp": 4}, {"dp": 2, "tp": 2}):
        report = verify(model(), inputs(), 4, pins=pins, steps=2, pool=workers)
        assert report.ok and max(report.loss, report.gradient, report.parameter) < TOLERANCE, report
