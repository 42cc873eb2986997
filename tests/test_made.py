"""Buffers that the first call of a model makes: those of the state_dict are there from the start and are what calls compute with; caches
are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.compiler import plan_of
from autopar.errors import CaptureError
from autopar.run import WorkerPool
from autopar.verify import reference, verify_plan

BATCH, DIM = 8, 16


class Scaled(nn.Module):
    """A table that its first call makes. registered: None stands in its place before."""

    def __init__(self, *, persistent: bool, registered: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.persistent = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, 4), persistent
        if registered:
            self.register_buffer("table", None, persistent=persistent)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if getattr(self, "table", None) is None:
            self.register_buffer("table", 1 / (1 + torch.arange(2 * DIM, device=x.device)), persistent=self.persistent)
        return F.cross_entropy(self.b((self.a(x) * self.table).tanh()), y)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, DIM), torch.randint(4, (BATCH,))


@pytest.mark.pure
@pytest.mark.parametrize("registered", [True, False])
def test_those_of_the_state_dict_are_buffers_of_the_program(registered: bool) -> None:
    model = Scaled(persistent=True, registered=registered)
    buffers = capture(model, inputs()).program.buffers
    assert [b.fqn for b in buffers] == ["table"] and getattr(model, "table", None) is None  # the model is left as it was
    assert not [b for b in capture(Scaled(persistent=False, registered=registered), inputs()).program.buffers if b.fqn]


@pytest.mark.pure
def test_without_data_they_are_refused() -> None:
    with torch.device("meta"):
        model, batch = Scaled(persistent=True), inputs()
    with pytest.raises(CaptureError, match="makes the buffer table"):
        capture(model, batch)


def train_on_rank(persistent: bool) -> tuple[list[str], list[str], list[float]]:
    """The names of the state before and after a call, and losses: of two calls, and of one with another table."""
    torch.manual_seed(0)
    model, batch = autopar.compile(Scaled(persistent=persistent), gpus=2, example_inputs=inputs(), pins=autopar.Pins(tp=2)), inputs()
    before, losses = sorted(model.state_dict()), [model(*batch).item(), model(*batch).item()]
    state = model.full_state_dict()
    if persistent:
        model.load_state_dict(state | {"table": torch.zeros(2 * DIM)})
        losses.append(model(*batch).item())
    return before, sorted(state), losses


@pytest.mark.gloo
@pytest.mark.parametrize("persistent", [True, False])
def test_the_state_and_what_is_computed_are_the_models(persistent: bool, two_workers: WorkerPool) -> None:
    torch.manual_seed(0)
    model, batch = Scaled(persistent=persistent), inputs()
    losses = [model(*batch).item(), model(*batch).item()]
    after = sorted(model.state_dict())
    if persistent:
        model.load_state_dict(model.state_dict() | {"table": torch.zeros(2 * DIM)})
        losses.append(model(*batch).item())
    for before, found, others in two_workers.run(train_on_rank, persistent):
        assert before == found == after
        assert others == pytest.approx(losses, rel=1e-5)


@pytest.mark.gloo
@pytest.mark.parametrize("persistent", [True, False])
def test_they_are_verified(persistent: bool, two_workers: WorkerPool) -> None:
    ref = reference(Scaled(persistent=persistent), inputs())
    assert ("table" in ref.buffers) == persistent
    report = verify_plan(ref, plan_of(ref.captured, 2, cluster="cpu", pins={"tp": 2}), two_workers)
    assert report.ok and any("not compared: table" in note for note in report.notes) == (not persistent)
