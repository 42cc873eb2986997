"""Gradients of a compiled module that are differentiated again are those of the same program on one process, to rounding, by every plan
without stages; what cannot be run so is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.run import WorkerPool
from benchmarks._traps import PROGRAMS
from benchmarks._traps_run import Judge

pytestmark = pytest.mark.gloo

PENALTIES = sorted(name for name, program in PROGRAMS.items() if program.kind == "penalties")
NOT_PINNED = {"gradient_penalty_of_a_critic": "pp not pinned", "changed_before_the_slope": ""}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(limit_s=60) as judge:
        yield judge


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.parametrize("name", PENALTIES)
def test_programs_with_penalties_are_right(name: str, judge: Judge) -> None:
    plans = ("dp2", "tp2", "zero3", *(p for p in PROGRAMS[name].plans if p == "dp2mb2"))
    assert [(o.plan, o.outcome, o.reason) for o in judge.outcomes(name, plans)] == [(plan, "right", "") for plan in plans]


@pytest.mark.parametrize("name", [name for name in PENALTIES if name not in NOT_PINNED])
def test_stages_refuse_them(name: str, judge: Judge) -> None:
    (outcome,) = judge.outcomes(name, ("pp2",))
    assert outcome.outcome == "refused" and "Pins(pp=1)" in outcome.reason


class Moving(nn.Module):
    """A mean of what comes, which is taken off before it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        out = self.last(torch.tanh(h - self.mean))
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        return out


def _moving(pins: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model: Any = Moving().double()
    x = torch.randn(8, 4, dtype=torch.float64).requires_grad_()
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x.detach(),), cluster="cpu", pins=pins)
    found = []
    for _ in range(2):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.pow(3).sum().backward()
        found += [float(slope.sum().detach()), float(dict(model.named_buffers())["mean"].sum())]
    return [*found, float(x.grad.pow(2).sum())]  # type: ignore[union-attr]


def test_buffers_that_a_call_reads_and_moves_are_as_they_were(pair: WorkerPool) -> None:
    expected = _moving(None)
    for pins in ({"dp": 2}, {"tp": 2}):
        for found in pair.run(_moving, pins):
            assert found == pytest.approx(expected, rel=1e-12)


def _refused() -> list[str]:
    said = []
    x = torch.randn(8, 4)
    model = autopar.compile(Moving(), 2, example_inputs=(x,), cluster="cpu", pins={"dp": 2})
    weight = model.first.weight

    def note(action: Any) -> None:
        try:
            action()
        except RuntimeError as error:
            said.append(str(error))

    note(lambda: torch.autograd.grad(model(x).sum(), weight, create_graph=True))
    given = x.clone().requires_grad_()
    out = model(given)
    with torch.no_grad():
        weight.mul_(0.5)
    note(lambda: torch.autograd.grad(out.sum(), given, create_graph=True))
    out = model(given)
    out.sum().backward()
    note(lambda: torch.autograd.grad(out.sum(), given, create_graph=True))
    out = model(given)
    note(lambda: torch.autograd.grad(out, given, torch.eye(8).view(8, 8, 1), is_grads_batched=True))
    return said


def test_what_cannot_be_run_again_is_refused(pair: WorkerPool) -> None:
    for said in pair.run(_refused):
        assert len(said) == 4
        assert "has changed mean" in said[0] and "model.original.forward" in said[0]
        assert "parameters, buffers or inputs were changed" in said[1]
        assert "second time" in said[2]
        assert "one after the other" in said[3]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def _in_bf16() -> tuple[float, float]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    norms = []
    for precision in ("fp32", "bf16"):
        options = {"pins": {"dp": 2, "zero": 3}, "precision": precision}
        model: Any = autopar.compile(_net(), 2, example_inputs=(x,), cluster="cpu", **options)
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).float().sum(), given, create_graph=True)
        slope.square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(grads) == 3 and all(g.dtype == torch.float32 for g in grads)  # the last bias has none
        norms.append(float(sum(g.norm() ** 2 for g in grads)))
    return norms[0], norms[1]


def test_lower_precisions_have_gradients_in_that_of_rest(pair: WorkerPool) -> None:
    for exact, low in pair.run(_in_bf16):
        assert low == pytest.approx(exact, rel=0.1) and low != exact
