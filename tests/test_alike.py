"""What ranks have written to parameters, beside one another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.run import alike, record, watchdog

pytestmark = pytest.mark.pure
Written = tuple[str, str, tuple[object, ...]]  # in which way, to what, and by which operands


@pytest.fixture(autouse=True)
def _of_no_call() -> Iterator[None]:
    record.phase(record.OUTSIDE)
    alike.begin_writing()
    yield
    alike.begin_writing()


def told(mine: Iterable[Written], theirs: Iterable[Written], monkeypatch: pytest.MonkeyPatch, call: int = 0) -> bool:
    """Whether a rank is told that another one has written otherwise, which has begun a call that is later by so many."""
    def of(written: Iterable[Written]) -> record.Wrote:
        for one in written:
            alike.note_written(*one)
        here, alike._written = alike._written, alike._Written()
        return record.wrote(here.what, here.total)

    other = of(theirs)
    other = record.Wrote(call=other.call + call, what=other.what, total=other.total)
    watch = object.__new__(watchdog.Watchdog)
    vars(watch).update(rank=0, _others={1: SimpleNamespace(wrote=lambda: other)})
    for one in mine:
        alike.note_written(*one)
    with monkeypatch.context() as m:
        m.setattr(watchdog, "current", lambda: watch)
        try:
            alike.check_written()
        except alike.LaunchError as error:
            return "ranks 0 and 1 have changed parameters" in str(error)
    return False


def scaled(*numbers: object) -> list[Written]:
    return [("mul_", f"layers.{k}.weight", (number,)) for k, number in enumerate(numbers)]


def test_what_is_rounded_otherwise_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    exact = torch.randn(1000, dtype=torch.float64).exp() * 10.0 ** torch.randint(-9, 9, (1000,))
    near = (exact * (1 + torch.randn(1000, dtype=torch.float64) * 2**-23)).tolist()
    assert not told(scaled(*exact.tolist()), scaled(*near), monkeypatch)
    assert not told(scaled(torch.tensor(0.5), 65536.0), scaled(0.5, 65536), monkeypatch)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (scaled(*[65536.0] * 99, 1.0), scaled(*[65536.0] * 99, 1.01)),
        (scaled(1e-3), scaled(-1e-3)),
        (scaled(0.5, 0.25), scaled(0.25, 0.5)),
        (scaled(0.5), scaled(0.5, 0.5)),
        (scaled(0.5), []),
        (scaled(0.5), [("add_", "layers.0.weight", (0.5,))]),
        (scaled(math.nan), scaled(0.5)),
        (scaled(math.inf), scaled(-math.inf)),
    ],
)  # fmt: skip
def test_other_numbers_and_parameters_are_told_of(mine: list[Written], theirs: list[Written], monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(mine, theirs, monkeypatch) and told(theirs, mine, monkeypatch)
    assert not told(mine, theirs, monkeypatch, call=1), "it may be ahead"
    assert not told(mine, mine, monkeypatch) and not told(theirs, theirs, monkeypatch)


def test_what_is_written_in_a_call_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    record.phase(record.BACKWARD)
    assert not told(scaled(0.5), [], monkeypatch)


def test_an_error_ends_a_call() -> None:
    """What is written after it is noted, also where the loop has gone on behind an error."""
    torch.manual_seed(0)
    module = autopar.compile(nn.Linear(4, 2), 1, example_inputs=(torch.randn(4, 4),))
    with pytest.raises(TypeError):
        module(torch.randn(4, 4), no="input")
    assert not record.computes()
    found = module(torch.randn(4, 4))
    with torch.no_grad():
        module.weight.add_(1.0)
    module.weight.register_hook(failing)
    with pytest.raises(ArithmeticError, match="in backward"):
        found.sum().backward()
    assert not record.computes()


def failing(grad: torch.Tensor) -> None:
    raise ArithmeticError("in backward")


def test_numbers_of_other_devices_are_not_read() -> None:
    """Which would wait for them, or cannot be."""
    assert alike._number(torch.tensor(0.5)) == 0.5 and alike._number(torch.tensor(0.5, dtype=torch.bfloat16)) == 0.5
    assert alike._number(torch.empty((), device="meta")) is None and alike._number(torch.ones(1)) is None
    with FakeTensorMode():
        assert alike._number(torch.empty(())) is None
