"""Gradients of a compiled module that are differentiated again are those of the same program on one process, to rounding, by every plan;
what cannot be run again is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.run import WorkerPool
from benchmarks._traps_run import Judge
from tests.in_turn import in_turn

pytestmark = pytest.mark.gloo

WITHOUT_STAGES = ("gradient_penalty_of_a_critic",)  # of which a model is one piece
PENALTIES = in_turn("penalties", ("dp2",), ("tp2",), ("zero3",), ("pp2",), without=WITHOUT_STAGES)
PENALTIES |= dict.fromkeys((*WITHOUT_STAGES, "steps_within_a_step"), ("dp2", "tp2", "zero3"))


@pytest.fixture(scope="module")
def four() -> Iterator[WorkerPool]:
    with WorkerPool(4) as pool:
        yield pool


@pytest.mark.parametrize("name", PENALTIES)
def test_programs_with_penalties_are_right(name: str, judge: Judge) -> None:
    assert judge.not_right(name, PENALTIES[name]) == []


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
    for pins in ({"dp": 2}, {"tp": 2}, {"pp": 2}):
        for found in pair.run(_moving, pins):
            assert found == pytest.approx(expected, rel=1e-12)


class Layered(nn.Module):
    """A stack with dropout, whose last layer has the weight of the first."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Dropout(rate)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.last(x).square().mean()


def _layered(pins: dict[str, Any] | None, gpus: int, rate: float) -> tuple[list[float], float]:
    """Losses of three steps with a penalty; by how much the slope of the second run differs from that of the first."""
    torch.manual_seed(0)
    model: Any = Layered(rate).double()
    data = torch.randn(4, 8, 8, dtype=torch.float64)
    if pins is not None:
        model = autopar.compile(model, gpus, example_inputs=(data[0],), cluster="cpu", pins=pins)
    optimizer, losses, off = torch.optim.SGD(model.parameters(), lr=0.1), [], 0.0
    for x in data[1:]:
        x = x.clone().requires_grad_()
        loss = model(x)
        (slope,) = torch.autograd.grad(8 * loss, x, create_graph=True)
        total = loss + slope.square().sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    if rate:
        loss = model(x)
        again = torch.autograd.grad(loss, x, create_graph=True)[0]
        off = float((torch.autograd.grad(loss, x)[0] - again).abs().max())
    return losses, off


STAGED: list[tuple[int, dict[str, Any]]] = [
    (2, {"pp": 2, "micro_batches": 2}), (2, {"pp": 2, "micro_batches": 4, "schedule": "interleaved"}),
    (4, {"dp": 2, "pp": 2, "zero": 1, "micro_batches": 2}), (4, {"tp": 2, "pp": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("gpus", "pins"), STAGED, ids=str)
def test_stages_whose_first_and_last_share_a_weight(gpus: int, pins: dict[str, Any], pair: WorkerPool, four: WorkerPool) -> None:
    expected, _ = _layered(None, 1, 0.0)
    for found, _ in (pair if gpus == 2 else four).run(_layered, pins, gpus, 0.0):
        assert found == pytest.approx(expected, rel=1e-12)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(self.table(ids)))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def _tied_after_an_odd_batch() -> float:
    """Of two data ranks and two stages: the most that the weights differ from one process, and copies of the table from one another."""
    torch.manual_seed(0)
    one = Tied().double()
    torch.manual_seed(0)
    model = autopar.compile(Tied().double(), gpus=4, cluster="cpu", pins={"dp": 2, "pp": 2})
    optimizers = [torch.optim.SGD(m.parameters(), 0.3) for m in (one, model)]
    for k, size in enumerate((8, 5, 8)):
        ids = torch.randint(16, (size, 6), generator=torch.Generator().manual_seed(k))
        for m, optimizer in zip((one, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(ids)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
    here = model.at_rest("table.weight")
    own = (here - one.table.weight).abs().max().item() if here.numel() else 0.0
    return max(own, *((p - q).abs().max().item() for p, q in zip(one.parameters(), model.parameters(), strict=True)))


@pytest.mark.gloo
def test_copies_of_a_tied_weight_on_stages_stay_one_after_an_odd_batch(four: WorkerPool) -> None:
    """Whose form reads it on the first stage alone, and rests on both."""
    assert max(four.run(_tied_after_an_odd_batch)) < 1e-12


def test_the_second_run_draws_what_the_first_drew(pair: WorkerPool) -> None:
    for pins in ({"dp": 2}, {"tp": 2}, {"pp": 2, "micro_batches": 2}):
        for _, off in pair.run(_layered, pins, 2, 0.3):
            assert off == 0


def _told(pins: dict[str, Any] | None) -> list[list[str]]:
    """What hooks are told of, in each part of the loop; in whatever order."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    given = torch.randn(8, 4, dtype=torch.float64)
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(given,), cluster="cpu", pins=pins)
    said, parts = list[str](), list[list[str]]()
    weight = next(iter(model.parameters()))
    weight.register_hook(lambda g: said.append(f"weight {float(g.detach().norm()):.9g}"))
    for k in range(2):
        x = (given + k).requires_grad_()
        x.register_hook(lambda g: said.append(f"input {float(g.detach().norm()):.9g}"))
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        parts.append(sorted(said))
        (slope.square().sum() + model(x).mean()).backward()
        weight.requires_grad_(k > 0)  # between a call and its gradient
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        weight.requires_grad_(True)
        parts.append(sorted(said))
    return parts


def test_hooks_are_told_once(pair: WorkerPool) -> None:
    expected = _told(None)
    assert list(map(len, expected)) == [1, 4, 5, 8]
    for pins in ({"dp": 2}, {"tp": 2}):
        for found in pair.run(_told, pins):
            assert found == expected


def _kept(pins: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 3).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x,), cluster="cpu", pins=pins)
    kept: list[torch.Tensor] = []

    def keep(param: nn.Parameter) -> None:
        assert param.grad is not None
        kept.append(param.grad)

    weight = next(iter(model.parameters()))
    weight.register_post_accumulate_grad_hook(keep)
    for k in range(3):
        (model(x + k).square().mean()).backward()
        if k == 1:
            weight.grad = None  # the one that is kept lives on
    return [float(g.norm()) for g in kept]


def test_hooks_may_keep_the_gradients_that_they_see(pair: WorkerPool) -> None:
    expected = _kept(None)
    assert len(expected) == 3
    for pins in ({"dp": 2}, {"tp": 2}):
        for found in pair.run(_kept, pins):
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
