"""Gradients of what a model returns or leaves beside its loss."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.run import WorkerPool
from autopar.run.unread import Loss
from benchmarks._traps_kit import HIDDEN, InDict, Net, batch, seeded
from benchmarks._traps_run import Judge
from tests.in_turn import in_turn

pytestmark = pytest.mark.gloo

HERE = in_turn("beside", ("tp2",), ("pp2",), ("zero3",))


@pytest.mark.parametrize("name", HERE)
def test_gradients_are_those_of_one_process(name: str, judge: Judge) -> None:
    assert judge.not_right(name, HERE[name]) == []


def test_a_method_that_reads_is_run_as_planned(judge: Judge) -> None:
    assert judge.not_right("more_than_the_loss_in_a_method", ("tp2", "pp2")) == []


class Deep(InDict):
    """Enough layers for four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)))

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = self.more(super().hidden(x))
        return found


def _steps(pins: dict[str, Any] | None, outputs: str = "loss") -> tuple[list[float], list[bool], list[str]]:
    """Losses and norms of gradients of three steps; whether each ran as one whose loss is made outside; what was said."""
    model: Any = seeded(Deep)
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=batch(), cluster="cpu", pins=pins, outputs=outputs)
    found, ran = list[float](), list[bool]()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in range(3):
            out = model(*batch(index))
            loss = out["loss"] + 0.1 * out["logits"].square().mean()
            loss.backward()
            found += [loss.item(), *(p.grad.norm().item() for p in model.parameters())]
            model.zero_grad()
            ran.append(pins is not None and model._ran.open)
    return found, ran, [str(w.message) for w in told if "is trained by what it returns" in str(w.message)]


ONE = {"dp": 1, "tp": 1, "pp": 2}


@pytest.mark.parametrize(
    ("pins", "later"),
    [
        ({"tp": 2}, True), ({"dp": 2, "zero": 3, "micro_batches": 2}, True), (ONE | {"schedule": "1f1b", "micro_batches": 4}, True),
        (ONE | {"schedule": "interleaved", "virtual_stages": 2, "micro_batches": 4}, False),
    ],
    ids=["tp2", "zero3mb2", "1f1b", "interleaved"],
)  # fmt: skip
@pytest.mark.parametrize("outputs", ["loss", "all"])
def test_later_calls_are_computed_to_be_trained(pair: WorkerPool, pins: dict[str, Any], later: bool, outputs: str) -> None:
    expected, _, _ = _steps(None)
    for rank, (found, ran, said) in enumerate(pair.run(_steps, pins, outputs, timeout_s=200)):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert ran == [False, later, later] and len(said) == (rank == 0)


def _told() -> tuple[str, bool, float, float]:
    """What is refused; what a trained call gives, and its loss as `train_step` has it, beside that of the call before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = autopar.compile(seeded(InDict), 2, example_inputs=batch(), cluster="cpu", pins={"tp": 2})
        out = model(*batch())
        penalty = out["logits"].square().mean()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        with pytest.raises(RuntimeError) as error:
            penalty.backward()
        first = model(*batch())
        first["logits"].sum().backward()
        second = model(*batch())
        assert isinstance(second, Loss) and second["logits"].requires_grad and [*second] == ["loss", "logits"]
        return str(error.value), model._ran.open, second.item(), model.train_step(*batch()).item()


def test_what_cannot_be_differentiated_is_refused(pair: WorkerPool) -> None:
    for changed, is_open, loss, again in pair.run(_told, timeout_s=100):
        assert "beside its loss" in changed and "parameters, buffers or inputs were changed" in changed
        assert is_open and loss == again


class Twofold(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(x)
        return logits.square().mean(), logits, self.head.weight


def _own_weight() -> tuple[float, float]:
    """The gradient of a weight that is returned, beside that of the loss alone."""
    norms = list[float]()
    for _ in range(2):
        model = autopar.compile(seeded(Twofold), 2, example_inputs=batch(), cluster="cpu", pins={"tp": 2})
        loss, _, weight = model(*batch())
        (loss + (weight.square().sum() if not norms else 0)).backward()
        norms.append(model.head.weight.grad.norm().item())
    return norms[0], norms[1]


def test_a_parameter_among_what_is_returned_is_trained(pair: WorkerPool) -> None:
    model = seeded(Twofold)
    wanted = list[float]()
    for weighted in (True, False):
        model.zero_grad()
        loss, _, weight = model(*batch())
        (loss + (weight.square().sum() if weighted else 0)).backward()
        wanted.append(model.head.weight.grad.norm().item())
    for found in pair.run(_own_weight, timeout_s=100):
        assert found == pytest.approx(tuple(wanted), rel=1e-6)


def _of_parts(pins: dict[str, Any] | None, outputs: str) -> list[float]:
    """Losses of three steps, and norms of gradients, where each rank is given its part of the batch and makes a penalty of that."""
    model: Any = seeded(InDict)
    rank = 0
    if pins is not None:
        rank = torch.distributed.get_rank()
        model = autopar.compile(
            model, 2, example_inputs=batch(), cluster="cpu", pins=pins, outputs=outputs, local_batch=True
        )  # fmt: skip
    found = list[float]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(3):
            given = batch(index)
            out = model(*(given if pins is None else (t.chunk(2)[rank] for t in given)))
            (out["loss"] + 0.1 * out["logits"].square().mean()).backward()
            found += [out["loss"].item(), *(p.grad.norm().item() for p in model.parameters())]
            model.zero_grad()
    return found


@pytest.mark.parametrize("pins", [{"dp": 2}, {"dp": 2, "zero": 3}], ids=["dp2", "zero3"])
@pytest.mark.parametrize("outputs", ["loss", "all"])
def test_of_parts_of_the_batch_the_mean_is_trained(pair: WorkerPool, pins: dict[str, Any], outputs: str) -> None:
    expected = _of_parts(None, "loss")
    for found in pair.run(_of_parts, pins, outputs, timeout_s=200):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
