"""Buffers that a part changes which runs as it is written: running statistics, counters and banks that it writes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.run.launch import WorkerPool
from autopar.run.region import REGION

pytestmark = pytest.mark.gloo

SAMPLES, WIDTH = 8, 6
PLANS: dict[str, dict[str, Any]] = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "zero3": {"dp": 2, "zero": 3}}


class Part(nn.Module):
    """Chooses by values, which no graph holds. It normalises over the batch, counts its calls, and keeps what it was given in a bank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("bank", torch.zeros(3, WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x)) * self.scale + self.bank.mean(0)
        if self.training:
            self.calls += 1
            self.bank[int(self.calls) % 3] = h.detach().mean(0)
        return h if float(h.detach().sum()) > -1e9 else -h


class Net(nn.Module):
    def __init__(self, part: type[nn.Module] = Part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.part(self.part(self.first(x))))).square().mean()


def batch() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained(model: Any, evaluates: Any) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        loss = model(batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    evaluates.eval()
    with torch.no_grad():
        losses.append(float(model(batch())))
    state = model.full_state_dict() if isinstance(model, autopar.ParallelModule) else model.state_dict()
    return losses, {name: t.detach().clone() for name, t in state.items()}


def trained_on_rank(pins: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model: Any = autopar.compile(Net().double(), gpus=2, example_inputs=(batch(),), cluster="cpu", pins=pins)
    return trained(model, model)


@pytest.mark.parametrize("plan", PLANS)
def test_buffers_of_parts_are_what_one_process_makes_of_them(plan: str, pair: WorkerPool) -> None:
    plain = Net().double()
    losses, state = trained(plain, plain)
    assert state["part.calls"] == 8 and state["part.norm.num_batches_tracked"] == 8
    for found, theirs in pair.run(trained_on_rank, PLANS[plan]):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, t in state.items():
            torch.testing.assert_close(theirs[name], t, rtol=1e-10, atol=1e-12, msg=name)


def test_only_what_is_written_is_given_back() -> None:
    program = capture(Net(), (batch().float(),)).program
    regions = [op for op in program.ops if op.target == REGION]
    assert len(regions) == 2 and all(len(op.outputs) == 6 for op in regions)  # the bank, the calls, and three of the norm
    named = {b.value: b.fqn for b in program.buffers}
    written = {named[buffer] for buffer, _ in program.mutations}
    statistics = {f"part.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert written == {"part.calls", "part.bank", *statistics}


def test_the_model_is_left_as_it_was() -> None:
    model = Net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    capture(model, (batch().float(),))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


class Shared(Part):
    """One buffer by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.register_buffer("again", self.calls)


class Assigns(Part):
    """Puts another tensor in the place of a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 0.5
        return super().forward(x)


class Parameter(Part):
    """Writes to a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.mul_(0.5).add_(x.detach().mean(0))
        return super().forward(x) + self.kept


@pytest.mark.parametrize(
    ("part", "says"), [(Shared, "its tensor"), (Assigns, "the attribute scale"), (Parameter, "its tensor kept")], ids=lambda x: str(x)
)
def test_what_else_a_part_changes_is_refused(part: type[nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=f"it changes {says}"):
        capture(Net(part), (batch().float(),))
