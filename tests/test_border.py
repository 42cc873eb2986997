"""The program around the module: outputs, modes of submodules, values that the user changes, inputs with gradients, seeds. On two
workers, beside the same on one process."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
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

    def said(action: Callable[[], Any]) -> str:
        try:
            action()
        except (ValueError, TypeError, RuntimeError) as error:
            return str(error)
        return "nothing was raised"

    return [
        said(lambda: model.float()),
        said(lambda: autopar.compile(Told(), 2, outputs="some")),
    ]


def test_what_is_not_planned_for_is_refused(pair: WorkerPool) -> None:
    for cast, outputs in pair.run(_refused, timeout_s=60):
        assert "was compiled in torch.float64" in cast
        assert "there is no outputs 'some'" in outputs


class Conditioned(nn.Module):
    """Reads x at both ends, and a vector that is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(24, 4)

    def forward(self, x: Tensor, shift: Tensor, y: Tensor) -> Tensor:
        h = self.second(F.gelu(self.first(x * (x > 0)))) * shift.exp()
        return F.cross_entropy(self.last(torch.cat([h, x], 1)), y)


def _input_gradients(pins: dict[str, Any] | None, frozen: bool = False) -> list[float]:
    x, y = batch()
    shift = torch.linspace(-1, 1, 16, dtype=torch.float64)
    model: Any = Conditioned().double()
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x, shift, y), cluster="cpu", pins=pins)
    model.requires_grad_(not frozen)
    found = []
    for factor in (1.0, 3.0):
        x, shift = x.detach().requires_grad_(), shift.detach().requires_grad_()
        loss = model(x * 1.5, shift, y) * factor
        loss.backward()
        assert x.grad is not None and shift.grad is not None
        found += [loss.item(), *x.grad.flatten().tolist(), *shift.grad.tolist()]
        assert all((p.grad is None) == frozen for p in model.parameters())
    model.requires_grad_(True)
    model(x, shift.detach(), y).backward()  # one input with a gradient, one without
    assert x.grad is not None
    found += x.grad.flatten().tolist()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [*found, norm.item()]


@pytest.mark.parametrize("plan", [*PLANS, "moments", "pp_moments", "tp_moments"])
def test_inputs_that_require_a_gradient_get_it(pair: WorkerPool, plan: str) -> None:
    moments = {"moments": {"dp": 2, "micro_batches": 2}, "pp_moments": {"pp": 2, "micro_batches": 4}}
    moments["tp_moments"] = {"tp": 2, "micro_batches": 2}
    pins = PLANS | moments
    for frozen in (False, True):
        expected = _input_gradients(None, frozen)
        for found in pair.run(_input_gradients, pins[plan], frozen, timeout_s=120):
            assert found == pytest.approx(expected, rel=1e-10, abs=1e-14)


def _frozen_while_captured(pins: dict[str, Any] | None) -> list[float]:
    model = build(pins)
    model.body[0].requires_grad_(False)
    found = steps(model)
    x, y = batch(5, size=8)
    model(x, y)["loss"].backward()  # of another size: captured while a layer is frozen
    model.body[0].requires_grad_(True)
    model.zero_grad()
    loss = model(x, y)["loss"]
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return [*found, loss.item(), norm.item()]


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_frozen_when_the_model_is_captured_again_may_thaw(pair: WorkerPool, plan: str) -> None:
    compare(pair, _frozen_while_captured, plan)


class Remembering(nn.Module):
    """Leaves tensors in attributes, for people to look at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.last: Tensor | None = None
        self.kept: list[Tensor | None] = [None]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        self.last, self.kept[0] = hidden.detach(), hidden.detach()
        return F.cross_entropy(self.head(hidden), y)


def _left(pins: dict[str, Any] | None) -> list[float]:
    """What calls have left, read in the ways in which people read; the second time it is there at once."""
    model = Remembering().double()
    model(*batch())
    module: Any = model if pins is None else autopar.compile(model, 2, example_inputs=batch(), cluster="cpu", pins=pins)
    found: list[float] = []
    for index in (1, 2):
        loss = module(*batch(index))
        last, kept = module.last, module.kept[0]
        found += [last.sum().item(), float((model.last + 1).std()), torch.mean(kept).item(), float((2 - kept)[0, 1]), float(len(last))]
        found += [*last.flatten().tolist(), *torch.cat([kept, last]).shape, float(f"{kept[0, 0]:.6f}"), float(kept.numpy()[1, 1])]
        loss.backward()
    model.eval()
    with torch.no_grad():
        seen = [(module(*batch(index)), module.last) for index in (3, 4)]
    return [*found, *(x for loss, last in seen for x in (loss.item(), last.norm().item()))]


@pytest.mark.parametrize("plan", PLANS)
def test_what_the_original_leaves_in_attributes_is_computed_where_it_is_read(pair: WorkerPool, plan: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(pair, _left, plan)


def _left_out() -> list[str]:
    """Read when the parameters have changed, and of what was copied and saved."""
    model = Remembering().double()
    module: Any = autopar.compile(model, 2, example_inputs=batch(), cluster="cpu", pins={"dp": 2})
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(*batch(1)).backward()
    assert "computed when it is read" in repr(module.last)
    of_a_copy = pickle.loads(pickle.dumps(copy.deepcopy(module.last)))
    optimizer.step()
    said = []
    for read in (lambda: module.last.sum(), lambda: model.last + 1, lambda: torch.mean(module.kept[0]), lambda: str(of_a_copy + 1)):
        try:
            said.append(str(read()))
        except (AttributeError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_what_the_original_would_have_left_in_attributes_is_not_taken_for_new(pair: WorkerPool) -> None:
    for *said, of_a_copy in pair.run(_left_out, timeout_s=60):
        assert len(said) == 3 and all("leaves " in text and "an optimizer's step" in text and "outputs='all'" in text for text in said)
        assert "the original's forward leaves there what it computes" in of_a_copy and "outputs='all'" in of_a_copy


def _seeds() -> tuple[bool, bool, bool]:
    model = autopar.compile(models.model(dropout=0.5).double(), 2, example_inputs=batch(), cluster="cpu", pins={"tp": 2})
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(*batch()).item())
    return losses[0] == losses[1], losses[0] != losses[2], model(*batch()).item() != losses[2]


def test_numbers_follow_the_users_seed(pair: WorkerPool) -> None:
    assert pair.run(_seeds, timeout_s=60) == [(True, True, True)] * 2
