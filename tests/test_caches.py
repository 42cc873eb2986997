"""Tables that are made for the longest batch so far: which of them a call reads is what the calls before have made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.run import WorkerPool

pytestmark = pytest.mark.gloo


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table: Tensor | None = None
        self.longest = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x) + self.of(x.shape[1]))), y)

    def of(self, length: int) -> Tensor:
        raise NotImplementedError


class Ramp(Tabled):
    """Its values depend on the longest length, which a number says."""

    def of(self, length: int) -> Tensor:
        if self.table is None or length > self.longest:
            self.table, self.longest = torch.linspace(-1, 1, length)[:, None], length
        return self.table[:length]


class RampInADict(Tabled):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Tensor] = {}

    def of(self, length: int) -> Tensor:
        if "ramp" not in self.tables or self.tables["ramp"].shape[0] < length:
            self.tables["ramp"] = torch.linspace(-1, 1, length)[:, None]
        return self.tables["ramp"][:length]


class OfEachLength(Tabled):
    """Made anew for every other length."""

    def of(self, length: int) -> Tensor:
        if self.table is None or self.table.shape[0] != length:
            self.table = torch.linspace(-1, 1, length)[:, None]
        return self.table


class Rotary(Tabled):
    """A longer table begins with a shorter one."""

    def of(self, length: int) -> Tensor:
        if self.table is None or self.table.shape[0] < length:
            self.table = torch.arange(length)[:, None].cos()
        return self.table[:length]


class Alibi(Tabled):
    """A longer table ends with a shorter one."""

    def of(self, length: int) -> Tensor:
        if self.table is None or self.table.shape[0] < length:
            self.table = (torch.arange(length) - (length - 1.0))[:, None] / 10
        return self.table[-length:]


def trained(kind: Callable[[], Tabled], lengths: list[int], pins: dict[str, Any] | None, called_before: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = kind().double()
    batches = [(torch.randn(8, length, 8).double(), torch.randn(8, length, 8).double()) for length in lengths]
    if called_before:
        with torch.no_grad():
            model(*max(batches, key=lambda given: given[0].shape[1]))
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=batches[0], cluster="cpu", pins=pins)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
    for given in batches:
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def refused(kind: Callable[[], Tabled], lengths: list[int], pins: dict[str, Any]) -> str:
    with pytest.raises(CaptureError) as found:
        trained(kind, lengths, pins, False)
    return str(found.value)


LENGTHS = pytest.mark.parametrize("lengths", [[6, 4, 6, 7, 4], [4, 6, 4]], ids=str)


@LENGTHS
@pytest.mark.parametrize("kind", [OfEachLength, Rotary, Alibi])
def test_tables_that_do_not_depend_on_longer_calls(kind: Callable[[], Tabled], lengths: list[int], pair: WorkerPool) -> None:
    expected = pytest.approx(trained(kind, lengths, None, False), rel=1e-9)
    assert pair.run(trained, kind, lengths, {"dp": 2}, False) == [expected, expected]


@LENGTHS
@pytest.mark.parametrize("kind", [Ramp, RampInADict])
def test_tables_that_do_are_refused_and_what_to_do_is_said(kind: Callable[[], Tabled], lengths: list[int], pair: WorkerPool) -> None:
    for said in pair.run(refused, kind, lengths, {"dp": 2}):
        assert "for the sizes of a batch and keeps it, " in said and "call the model once on its longest batch before" in said
    expected = pytest.approx(trained(kind, lengths, None, True), rel=1e-9)
    assert pair.run(trained, kind, lengths, {"pp": 2}, True) == [expected, expected]
