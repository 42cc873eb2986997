"""The program around the module: outputs, modes of submodules, values that the user changes, inputs with gradients, seeds. On two
workers, beside the same on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.run import WorkerPool
from tests import wrong_models as models

pytestmark = pytest.mark.gloo

PLANS: dict[str, dict[str, Any]] = {"dp": {"dp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "zero3": {"dp": 2, "zero": 3}}


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


def batch(seed: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    x, y = models.batch(size, seed)
    return x.double(), y


class Told(nn.Module):
    """Returns a dict; has a number that a user may anneal, batch norm, and a method like Hugging Face's generate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.temperature = 2.0
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.body(x)) / self.temperature
        return {"logits": logits} if y is None else {"loss": F.cross_entropy(logits, y), "logits": logits}

    def generate(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).argmax(-1)


def build(pins: dict[str, Any] | None, **options: Any) -> Any:
    model = Told().double()
    return model if pins is None else autopar.compile(model, 2, example_inputs=batch(), cluster="cpu", pins=pins, **options)


def steps(model: Any, count: int = 2, start: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(start, start + count):
        optimizer.zero_grad()
        loss = model(*batch(step))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(pair: WorkerPool, program: Callable[..., list[float]], plan: str) -> None:
    expected = program(None)
    for found in pair.run(program, PLANS[plan], timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-11)


def _outputs(pins: dict[str, Any] | None) -> list[float]:
    model = build(pins, outputs="all")
    found = steps(model)
    model.eval()
    with torch.no_grad():
        told = model(*batch(7))
        found += [told["loss"].item(), *told["logits"].flatten().tolist()]
        found += model(batch(8, size=6)[0])["logits"].flatten().tolist()  # without labels, of another size
    model.train()
    found += steps(model)
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_outputs_beside_the_loss_in_evaluation(pair: WorkerPool, plan: str) -> None:
    compare(pair, _outputs, plan)


def _refused_outputs() -> list[str]:
    model = build({"tp": 2})
    found = model(*batch())
    said = []
    for read in (lambda: found["logits"], lambda: found.logits, lambda: list(found)):
        try:
            read()
        except AttributeError as error:
            said.append(str(error))
    assert found.loss is found and found[0] is found and float(found["loss"].detach()) == found.item()
    return said


def test_other_outputs_say_how_to_get_them(pair: WorkerPool) -> None:
    for said in pair.run(_refused_outputs, timeout_s=60):
        assert len(said) == 3
        assert all("the original returns dict with keys ['loss', 'logits']" in text and "outputs='all'" in text for text in said)


def _generated(pins: dict[str, Any] | None) -> list[float]:
    model = build(pins)
    losses = steps(model)
    model.eval()
    x = batch(9)[0]
    return losses + [float(v) for v in (model.generate(x) if pins is None else autopar.generate(model, x))]


@pytest.mark.parametrize("plan", ["tp", "pp"])
def test_the_originals_generate(pair: WorkerPool, plan: str) -> None:
    compare(pair, _generated, plan)


def _annealed(pins: dict[str, Any] | None) -> list[float]:
    model = build(pins)
    found = []
    for temperature in (2.0, 1.5, 2.0):
        model.temperature = temperature
        found += steps(model)
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_number_that_the_user_anneals_is_followed(pair: WorkerPool, plan: str) -> None:
    compare(pair, _annealed, plan)


def _frozen_norm(pins: dict[str, Any] | None) -> list[float]:
    model = build(pins)
    found = steps(model)
    model.body[1].eval()
    found += steps(model, start=2)
    model.train()
    found += steps(model, start=4)
    with torch.inference_mode():
        found.append(model(*batch(9))["loss"].item())
    return found


@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_the_mode_of_one_submodule_is_followed(pair: WorkerPool, plan: str) -> None:
    compare(pair, _frozen_norm, plan)


def _frozen_later(pins: dict[str, Any] | None) -> list[float]:
    model = build(pins)
    found = steps(model)
    model.body[0].weight.requires_grad_(False)
    found += steps(model, start=2)
    assert model.body[0].weight.grad is None
    model.body[0].weight.requires_grad_(True)
    return found + steps(model, start=4)


@pytest.mark.parametrize("plan", PLANS)
def test_a_parameter_may_be_frozen_for_a_while(pair: WorkerPool, plan: str) -> None:
    compare(pair, _frozen_later, plan)


def _refused() -> list[str]:
    model = build({"dp": 2})
    x, y = batch()
    frozen = Told().double()
    frozen.head.requires_grad_(False)
    thawed = autopar.compile(frozen, 2, example_inputs=batch(), cluster="cpu", pins={"dp": 2})
    thawed.head.weight.requires_grad_(True)

    def said(action: Callable[[], Any]) -> str:
        try:
            action()
        except (ValueError, TypeError) as error:
            return str(error)
        return "nothing was raised"

    return [
        said(lambda: model(x.clone().requires_grad_(), y)),
        said(lambda: thawed(x, y)),
        said(lambda: model.float()),
        said(lambda: autopar.compile(Told(), 2, outputs="some")),
    ]


def test_what_is_not_planned_for_is_refused(pair: WorkerPool) -> None:
    for inputs, thawed, cast, outputs in pair.run(_refused, timeout_s=60):
        assert "input 'x' requires a gradient" in inputs and "x.detach()" in inputs
        assert "parameter head.weight did not require a gradient when the model was compiled" in thawed
        assert "was compiled in torch.float64" in cast
        assert "there is no outputs 'some'" in outputs


def _seeds() -> tuple[bool, bool, bool]:
    model = autopar.compile(models.model(dropout=0.5).double(), 2, example_inputs=batch(), cluster="cpu", pins={"tp": 2})
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(*batch()).item())
    return losses[0] == losses[1], losses[0] != losses[2], model(*batch()).item() != losses[2]


def test_numbers_follow_the_users_seed(pair: WorkerPool) -> None:
    assert pair.run(_seeds, timeout_s=60) == [(True, True, True)] * 2
