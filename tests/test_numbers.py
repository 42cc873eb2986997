"""Numbers that a forward makes of tensors, and returns or keeps."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.interpret import run_whole_program
from autopar.errors import CaptureError
from autopar.run import WorkerPool, wanted
from benchmarks._traps_kit import Net, batch, seeded
from benchmarks._traps_run import Judge
from tests.in_turn import in_turn

REFUSED = {"root_of_a_number": "by other operators than|cannot capture Rooted", "number_that_decides": "lets values of a tensor decide"}
RIGHT = in_turn("numbers", ("tp2",), ("pp2",), ("zero3",), without=REFUSED)


@pytest.mark.gloo
@pytest.mark.parametrize("name", RIGHT)
def test_numbers_are_those_of_one_process(name: str, judge: Judge) -> None:
    assert judge.not_right(name, RIGHT[name]) == []


@pytest.mark.gloo
@pytest.mark.parametrize("name", REFUSED)
def test_other_numbers_are_refused(name: str, judge: Judge) -> None:
    for found in judge.outcomes(name, ("tp2", "pp2")):
        assert found.outcome == "refused" and re.search(REFUSED[name], found.reason)


class Returning(Net):
    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.logits(x)
        return F.cross_entropy(logits, y), self.of(logits)


def _logits() -> tuple[Tensor, Tensor]:
    """What the model computes, and its loss."""
    model = seeded(Net)
    x, y = batch()
    with torch.no_grad():
        logits = model.logits(x)
        return logits, F.cross_entropy(logits, y)


@pytest.mark.pure
@pytest.mark.parametrize(
    "of",
    [
        lambda z: z.sum().item() * 3 - 1,
        lambda z: 100.0 * (z > 0).sum().item() / len(z),
        lambda z: (1 - (z > 0).sum().item()) / z.norm().item(),
        lambda z: [z.argmax().item() * 2, 7, z.mean().item(), 0.5],
        lambda z: z.mean(0).tolist(),
        lambda z: -z.sum().item() + z.norm().item() * z.max().item(),
        lambda z: (z > 0).sum().item() / 4,
    ],
    ids=["affine", "share", "quotient", "beside constants", "list", "of three", "of a whole number"],
)
def test_a_number_is_computed_of_what_the_program_gives(of: Callable[[Tensor], Any]) -> None:
    model = seeded(Returning, of)
    logits, loss = _logits()
    captured = capture(model, batch(), outputs=True)
    assert captured.returned is not None
    given = captured.returned.put_together(loss, {name: _value_of(captured, name) for name in captured.returned.names})
    wanted = of(logits)
    assert _kinds(given[1]) == _kinds(wanted)
    torch.testing.assert_close(given[1], wanted, rtol=1e-12, atol=1e-12)


def _value_of(captured: Any, name: str) -> Tensor:
    x, y = batch()
    program = captured.program
    inputs = dict(zip([i.value for i in program.inputs], (x, y), strict=True))
    _, *found = run_whole_program(program, {**captured.tensors, **inputs})
    return dict(zip(program.outputs, found, strict=True))[name]


def _kinds(value: Any) -> Any:
    return [type(x) for x in value] if isinstance(value, list) else type(value)


class Branching(Net):
    """A helper gives the number to code that decides by it."""

    def _norm(self, z: Tensor) -> float:
        return float(z.norm())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        logits = self.logits(x)
        norm = self._norm(logits)
        return F.cross_entropy(logits, y) * (2 if norm > 1e-6 else 1), norm


class Summing(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        logits = self.logits(x)
        norms = []
        for z in (x, logits):
            norms.append(float(z.norm()))
        return F.cross_entropy(logits, y), sum(norms)


class Adding(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        logits = self.logits(x)
        total = float(logits.norm())
        total += 1
        return F.cross_entropy(logits, y), total


class Filling(Net):
    """What it is given, and reads again."""

    def _fill(self, log: dict[str, float], z: Tensor) -> None:
        log["norm"] = float(z.norm())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
        logits = self.logits(x)
        log: dict[str, float] = {}
        self._fill(log, logits)
        return F.cross_entropy(logits, y) * (2 if log["norm"] > 1e-6 else 1), log


class Sharing(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        logits, norm = self.logits(x), 0.0

        def measure() -> None:
            nonlocal norm
            norm = float(logits.norm())

        measure()
        return F.cross_entropy(logits, y) * (2 if norm > 1e-6 else 1), norm


class First(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        logits = self.logits(x)
        return logits, float(logits.norm())


class Scaling(nn.Module):
    def forward(self, found: tuple[Tensor, float]) -> Tensor:
        return found[0].sum() * (2 if found[1] > 1e-6 else 1)


class InTurn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(First(), Scaling())


@dataclass
class Clipped:
    loss: Tensor
    norm: float

    def __post_init__(self) -> None:
        self.norm = 1.0 if self.norm > 1e-6 else self.norm


class InClipped(Net):
    def forward(self, x: Tensor, y: Tensor) -> Clipped:
        logits = self.logits(x)
        return Clipped(F.cross_entropy(logits, y), float(logits.norm()))


class OfAnObject(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        logits, log = self.logits(x), SimpleNamespace()
        log.norm = float(logits.norm())
        return F.cross_entropy(logits, y) * (2 if log.norm > 1e-6 else 1), log


class AddingToItem(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
        logits = self.logits(x)
        log = {"norm": float(logits.norm())}
        log["norm"] += 1
        return F.cross_entropy(logits, y), log


class Asking(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
        logits, log = self.logits(x), dict[str, float]()
        norm = log.setdefault("norm", float(logits.norm()))
        return F.cross_entropy(logits, y) * (2 if norm > 1e-6 else 1), log


class Hooked(Net):
    """A hook on the model takes what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda model, given, found: found[0] * (2 if found[1] > 1e-6 else 1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        logits = self.logits(x)
        return F.cross_entropy(logits, y), float(logits.norm())


class WithFloat(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        logits = self.logits(x)
        return logits, float(logits.norm())


@pytest.mark.pure
def test_a_number_that_a_loss_of_the_user_takes_is_not_one_that_is_kept() -> None:
    with pytest.raises(CaptureError, match="lets values of a tensor decide"):
        capture(seeded(WithFloat), batch()[:1], loss=lambda found: found[0].sum() * (2 if found[1] > 1e-6 else 1))
    assert capture(seeded(WithFloat), batch()[:1], outputs=None).returned is not None


@pytest.mark.pure
@pytest.mark.parametrize(
    "kind", [Branching, Summing, Adding, Filling, Sharing, InTurn, InClipped, OfAnObject, AddingToItem, Asking, Hooked]
)
def test_a_number_of_which_something_is_computed_is_not_taken_for_one_that_is_kept(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="lets values of a tensor decide|a number that it takes from a tensor"):
        capture(seeded(kind), batch()[:1] if kind is InTurn else batch(), outputs=True)


class Kept(Net):
    """By way of variables, a dict and a record."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
        logits = self.logits(x)
        norm = float(logits.norm())
        log: dict[str, Any] = {"norm": norm}
        log["largest"] = float(logits.max())
        log.update(least=float(logits.min()), pair=(norm, 1.0))
        scores = dict(log=log, mean=float(logits.mean()))
        return F.cross_entropy(logits, y), scores


@pytest.mark.pure
def test_a_number_that_goes_through_variables_to_what_is_returned_is_kept() -> None:
    captured = capture(seeded(Kept), batch(), outputs=True)
    logits, loss = _logits()
    assert captured.returned is not None
    _, scores = captured.returned.put_together(loss, {name: _value_of(captured, name) for name in captured.returned.names})
    found = [scores["log"]["norm"], scores["log"]["largest"], scores["log"]["least"], *scores["log"]["pair"], scores["mean"]]
    norm = logits.norm().item()
    torch.testing.assert_close(found, [norm, logits.max().item(), logits.min().item(), norm, 1.0, logits.mean().item()])


def _of_logits(z: Tensor) -> list[Any]:
    return [z.norm().item(), z]


def _first_call(small: int) -> tuple[str, str, list[str]]:
    """A number of the first call and of the second one, as text; what was said."""
    model = autopar.compile(seeded(Returning, _of_logits), 2, example_inputs=batch(), cluster="cpu", pins={"tp": 2})
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(wanted, "SMALL", small)
        first, second = (str(model(*batch())[1][0]) for _ in range(2))
    return first, second, [str(w.message) for w in told if "more than the loss" in str(w.message)]


@pytest.mark.gloo
@pytest.mark.parametrize("small", [2**24, 0], ids=["at once", "when it is read"])
def test_beside_much_a_number_is_computed_when_it_is_read(pair: WorkerPool, small: int) -> None:
    norm = _logits()[0].norm().item()
    for rank, (first, second, said) in enumerate(pair.run(_first_call, small, timeout_s=100)):
        assert float(second) == pytest.approx(norm) and len(said) == (small == 0 and rank == 0)
        assert ("tensor" in first) == (small == 0)


def _in_micro_batches() -> tuple[str, list[str]]:
    pins = {"dp": 2, "micro_batches": 2}
    model = autopar.compile(seeded(Returning, _of_logits), 2, example_inputs=batch(), cluster="cpu", pins=pins)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        numbers = [model(*batch())[1][0] for _ in range(2)]
    with pytest.raises(RuntimeError) as error:
        float(numbers[1])
    return str(error.value), [str(w.message) for w in told if "numbers" in str(w.message)]


@pytest.mark.gloo
def test_a_number_that_does_not_fit_the_plan_is_said_and_refused_where_it_is_used(pair: WorkerPool) -> None:
    for rank, (refused, said) in enumerate(pair.run(_in_micro_batches, timeout_s=100)):
        assert "outputs='all'" in refused or "micro-batches" in refused
        assert len(said) == (rank == 0) and all("cannot be computed as it was planned" in one and "micro" in one for one in said)
