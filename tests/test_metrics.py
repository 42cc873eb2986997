"""Metrics that bring together what each rank has seen: each rank sees all samples."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import autopar
from autopar.run import WorkerPool
from autopar.run.metrics import Metrics
from tests.classifier import Classifier, built


@pytest.fixture(autouse=True)
def _none_left() -> None:
    """Of other tests: metrics refer to themselves."""
    gc.collect()


def said(metrics: Metrics, training: bool = True) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics.look(training)
    return [str(w.message) for w in caught]


@pytest.mark.pure
def test_metrics_that_add_up_over_ranks_are_named_once() -> None:
    kept = torchmetrics.SumMetric(), torchmetrics.MeanMetric(sync_on_compute=False)
    metrics = Metrics(4, rank=0)
    (message,) = said(metrics)
    assert message.startswith("SumMetric: ") and "4 times as large" in message and "sync_on_compute=False" in message
    assert said(metrics) == said(metrics, training=False) == []
    assert said(Metrics(4, rank=1)) == said(Metrics(1, rank=0)) == []
    kept[0].sync_on_compute = False
    assert said(Metrics(4, rank=0)) == []


@pytest.mark.pure
def test_metrics_that_are_made_for_evaluation_are_looked_for_then() -> None:
    metrics = Metrics(2, rank=0)
    for _ in range(5):
        assert said(metrics) == []
    made = torchmetrics.SumMetric()
    assert said(metrics) == [] and len(said(metrics, training=False)) == 1
    made.reset()


@pytest.mark.pure
def test_metrics_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("ignite.metrics.metric")

    class Metric:
        pass

    class Matrix(Metric):
        pass

    library.Metric = Metric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ignite.metrics.metric", library)
    kept = Matrix()
    (message,) = said(Metrics(2, rank=0))
    assert message.startswith(f"{type(kept).__name__}: ")


def counted(pins: dict[str, Any], sync: bool) -> tuple[float, list[str]]:
    """How many samples a metric has counted, and what was said."""
    model, batches = built(Classifier)
    module = autopar.compile(model, 2, example_inputs=batches[0], pins=pins)
    seen = torchmetrics.SumMetric(sync_on_compute=sync)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            module(*batch).backward()
            seen.update(torch.tensor(float(len(batch[0]))))
        found = seen.compute().item()
    return found, [str(w.message) for w in caught if "bring together" in str(w.message)]


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_what_they_count_is_said_to_be_too_much(pins: dict[str, Any], pair: WorkerPool) -> None:
    _, batches = built(Classifier)
    samples = sum(len(batch[0]) for batch in batches)
    told = pair.run(counted, pins, True)
    assert [found for found, _ in told] == [2 * samples] * 2
    assert [len(said) for _, said in told] == [1, 0] and "2 times as large" in told[0][1][0]
    assert pair.run(counted, pins, False) == [(samples, [])] * 2


class Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def counted_locally() -> tuple[float, list[str]]:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    module = autopar.compile(Local(), 2, example_inputs=(x,), pins={"dp": 2}, local_batch=True)
    seen = torchmetrics.SumMetric()
    mine = x[4 * torch.distributed.get_rank() :][:4]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(mine).backward()
        seen.update(torch.tensor(float(len(mine))))
        found = seen.compute().item()
    return found, [str(w.message) for w in caught if "bring together" in str(w.message)]


@pytest.mark.gloo
def test_of_parts_of_the_batch_they_count_each_sample_once(pair: WorkerPool) -> None:
    assert pair.run(counted_locally) == [(8, [])] * 2
