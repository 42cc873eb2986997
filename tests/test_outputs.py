"""outputs='all': everything that the original returns, whole on every rank, in training and in evaluation, computed in parallel. And
models without a loss: the user makes one of what they return."""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.export import each_output
from autopar.errors import CaptureError, PlanError
from autopar.run import WorkerPool

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "zero3": {"dp": 2, "zero": 3}, "dp_moments": {"dp": 2, "micro_batches": 2},
    "zero2": {"dp": 2, "zero": 2}, "zero2_moments": {"dp": 2, "zero": 2, "micro_batches": 2},
    "pp_moments": {"pp": 2, "micro_batches": 4}, "pp_interleaved": {"pp": 2, "virtual_stages": 2, "micro_batches": 4},
    "tp_moments": {"tp": 2, "micro_batches": 2}, "pp_again": {"pp": 2, "recompute": "full"},
}  # fmt: skip


@dataclasses.dataclass
class Seen:
    """A record that no library knows."""

    gate: Tensor
    number: int


class Talkative(nn.Module):
    """Returns its logits, what each block makes (some on an early stage), integers, a mask, a buffer, an input, a sum over samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        hidden = []
        for block in self.blocks:
            x = x + block(x)
            hidden.append(x)
        logits = self.head(x)
        found: dict[str, Any] = {"logits": logits, "hidden": tuple(hidden), "none": None, "seen": Seen((x > 0).any(-1), 3), "s": self.scale}
        if y is not None:
            right = logits.argmax(-1) == y
            found |= {"loss": F.cross_entropy(logits, y), "accuracy": right.double().mean(), "right": right.sum(), "y": y}
        return found


def flat(found: dict[str, Any]) -> list[float]:
    """All numbers of what Talkative returns."""
    numbers: list[float] = []
    for key in sorted(found):
        value = found[key]
        if isinstance(value, Seen):
            value = (value.gate, torch.tensor(value.number))
        for tensor in value if isinstance(value, tuple) else (value,) if value is not None else ():
            numbers += tensor.double().flatten().tolist()
    return numbers


def program(pins: dict[str, Any] | None) -> list[float]:
    """Two steps, then evaluation: the same batch, half of it, and four and three samples without labels."""
    model: Any = Talkative().double()
    x, y = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x, y), cluster="cpu", pins=pins, outputs="all", verify=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        found = model(x, y)
        found["loss"].backward()
        optimizer.step()
        numbers += flat(found)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers += flat(model(x, y)) + flat(model(x[:4], y[:4])) + flat(model(x[:4]))
        warnings.simplefilter("ignore")  # it may not divide: then the original computes it
        return numbers + flat(model(x[:3]))


@pytest.mark.gloo
@pytest.mark.parametrize("plan", PLANS)
def test_all_that_the_original_returns(pair: WorkerPool, plan: str) -> None:
    expected = program(None)
    for found in pair.run(program, PLANS[plan], timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)


def _made_outside() -> tuple[float, float, bool]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    made = autopar.compile(
        Talkative(), 2, example_inputs=(x,), cluster="cpu", pins={"tp": 2}, outputs="all", loss=lambda out: out["logits"].square().mean()
    )
    loss = made(x)
    loss.backward()
    with torch.no_grad():
        return loss.item(), made(x)["logits"].square().mean().item(), loss.dim() == 0


@pytest.mark.gloo
def test_with_a_loss_of_the_user_a_call_returns_it_alone_in_training(pair: WorkerPool) -> None:
    for loss, mean, scalar in pair.run(_made_outside, timeout_s=60):
        assert scalar and loss == pytest.approx(mean, rel=1e-5)  # with loss=fn: the loss in training, all in evaluation


def _stepped() -> tuple[float, float]:
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    model = autopar.compile(Talkative(), 2, example_inputs=(x, y), cluster="cpu", pins={"dp": 2}, outputs="all")
    loss = model.train_step(x, y)
    return loss.item(), model(x, y)["loss"].item()


@pytest.mark.gloo
def test_a_training_step_returns_the_loss(pair: WorkerPool) -> None:
    for stepped, called in pair.run(_stepped, timeout_s=60):
        assert stepped == called


class Box:
    """Holds a tensor where nothing looks for it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxing(Talkative):
    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        found = super().forward(x, y)
        return {"loss": found["loss"], "box": Box(found["logits"])}


@pytest.mark.pure
def test_what_hides_tensors_is_refused() -> None:
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    with pytest.raises(CaptureError, match="returns a Box, which may hold tensors"):
        capture(Boxing(), (x, y), outputs=True)
    assert capture(Boxing(), (x, y)).program.outputs == ()


class Views(Talkative):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return {"logits": super().forward(x)["logits"]}.values()


class Numbers(Talkative):
    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        found = super().forward(x, y)
        return {"loss": found["loss"], "mean": found["logits"].mean().item() ** 0.5}


class Drawing(Talkative):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)["logits"] * torch.tensor([random.random() for _ in range(len(x))], device=x.device)[:, None]


@pytest.mark.pure
@pytest.mark.parametrize(
    "model,outputs,says",
    [
        (Views, None, "returns a dict_values, which may hold tensors that are not seen\n  what to do: return tensors in tuples, lists"),
        (Numbers, True, r"a number that it takes from a tensor by int\(\).*\n  what to do: return the tensor, and take \.item\(\)"),
        (Drawing, None, "depends on random numbers drawn from random"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_of_what_cannot_be_returned_the_reason_is_said(model: type[nn.Module], outputs: bool | None, says: str, device: str) -> None:
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    with pytest.raises(CaptureError, match=says):
        capture(model().to(device), (x, y) if model is Numbers else (x,), outputs=outputs)


@pytest.mark.pure
def test_the_program_says_what_it_returns() -> None:
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    captured = capture(Talkative(), (x, y), outputs=True)
    program, returned = captured.program, captured.returned
    assert returned is not None and returned.has_loss
    assert len(program.outputs) == 10 and set(returned.names) == set(program.outputs)
    shapes = sorted(program.types[v].shape for v in program.outputs)
    assert shapes == sorted([(8, 4), *[(8, 8)] * 4, (8,), (3,), (), (), (8,)])
    assert any("10 tensors beside the loss" in note for note in program.notes)
    assert len(capture(Talkative(), (x, y)).program.ops) < len(program.ops)


class Plain(Talkative):
    """Returns no loss: logits, what its first block makes, a mask, and a parameter's exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        found = super().forward(x)
        return {"logits": found["logits"], "first": found["hidden"][0], "gate": found["seen"].gate, "scale": self.temperature.exp()}


def loss_outside(pins: dict[str, Any] | None) -> list[float]:
    """Three steps with a loss made of other outputs each time, the last with an input that requires a gradient; then evaluation."""
    model: Any = Plain().double()
    x, y = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x,), cluster="cpu", pins=pins, verify=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        given = (x + step).requires_grad_(step == 2)
        found = model(given)
        loss = F.cross_entropy(found["logits"] * found["scale"], y)
        if step:
            loss = loss + found["first"].square().mean()
        loss.backward()
        numbers += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
    assert given.grad is not None
    numbers += given.grad.flatten().tolist()
    with torch.no_grad():
        return numbers + model(x[:4])["logits"].flatten().tolist() + model(x)["gate"].double().tolist()


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["dp", "tp", "pp", "zero2", "zero3", "pp_moments", "pp_again"])
def test_a_loss_outside_of_the_model(pair: WorkerPool, plan: str) -> None:
    expected = loss_outside(None)
    for found in pair.run(loss_outside, PLANS[plan], timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-11, abs=1e-14)


def _refused() -> list[str]:
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    said: list[str] = []

    def note(call: Any) -> None:
        try:
            call()
        except (RuntimeError, ValueError, PlanError) as error:
            said.append(str(error))

    model = autopar.compile(Plain(), 2, example_inputs=(x,), cluster="cpu", pins={"dp": 2})
    loss = model(x)["logits"].sum()
    loss.backward()
    note(loss.backward)
    note(lambda: model.train_step(x))
    staged = autopar.compile(Talkative(), 2, example_inputs=(x, y), cluster="cpu", pins={"pp": 2, "micro_batches": 4})
    note(lambda: staged(x))
    for pins in ({"pp": 2, "schedule": "1f1b"}, {"dp": 2, "micro_batches": 2}):
        note(lambda pins=pins: autopar.compile(Plain(), 2, example_inputs=(x,), cluster="cpu", pins=pins))  # type: ignore[misc]
    return said


@pytest.mark.gloo
def test_what_a_loss_outside_excludes_is_said(pair: WorkerPool) -> None:
    words = ("a second time", "returns no loss, and train_step needs one", "pin schedule=gpipe", "Pin schedule=gpipe",
             "give loss=fn")  # fmt: skip
    for said in pair.run(_refused, timeout_s=60):
        assert len(said) == len(words)
        assert all(word in text for word, text in zip(words, said, strict=True)), said


@pytest.mark.pure
@pytest.mark.parametrize("more", [{"loss": torch.sum}, {"verify": True}])
def test_trained_outputs_leave_the_loss_to_the_loop(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leaves the loss to be made outside"):
        autopar.compile(nn.Linear(2, 2), 2, cluster="cpu", outputs="trained", **more)


@pytest.mark.pure
def test_trained_outputs_are_those_of_a_model_without_a_loss() -> None:
    x, y = torch.randn(4, 3), torch.randint(2, (4,))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.layer(x)
            return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}

    assert not capture(Both(), (x, y), loss=each_output, outputs=True).program.own_loss
    assert capture(Both(), (x, y), outputs=True).program.own_loss
