"""Tensors in plain attributes of modules that calls change are followed as buffers; who holds what was there before keeps it."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.as_buffers import as_buffers
from autopar.capture.state import State
from autopar.errors import CaptureError
from benchmarks._traps_run import Judge
from tests.in_turn import in_turn
from tests.stateful_models import SEEN, build, equal, snapshot
from tests.test_capture_state import run_three_times

pure = pytest.mark.pure
REFUSED = {
    "buffer_that_follows_a_parameter": "has been given the memory of the parameter head.weight",
    "two_buffers_made_one_by_the_loop": "are one tensor since the last call",
}
HERE = in_turn("plain", ("dp2",), ("pp2",), ("zero3",), without=REFUSED)
HERE |= {"buffer_written_in_place_that_the_loop_holds": ("pp2",)}  # where a mistake showed


@pytest.mark.gloo
@pytest.mark.parametrize("name", HERE)
def test_they_are_those_of_one_process(name: str, judge: Judge) -> None:
    assert judge.not_right(name, HERE[name]) == []


@pytest.mark.gloo
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_right_is_refused(name: str, judge: Judge) -> None:
    found = judge.not_right(name, ("dp2", "zero3", "pp2"))
    assert {"zero3", "pp2"} <= {plan for plan, _, _ in found}
    for plan, verdict, text in found:
        assert verdict == "refused" and REFUSED[name] in text, (plan, text)


def average(m: Any, x: Tensor) -> Tensor:
    m.plain = 0.9 * m.plain + x.mean(0)
    return m.linear(x) - m.plain


def average_that_is_not_used(m: Any, x: Tensor) -> Tensor:
    m.plain = 0.9 * m.plain + x.mean(0)
    return m.linear(x)


def in_place(m: Any, x: Tensor) -> Tensor:
    m.plain.add_(x.mean(0))
    return m.linear(x) - m.plain


@pure
@pytest.mark.parametrize("fn", [average, average_that_is_not_used, in_place], ids=lambda f: f.__name__)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_they_become_buffers_of_no_state_dict(fn: Any, device: str) -> None:
    model, inputs = build(fn, device)
    plain, names, keys = model.plain, list(dict(model.named_buffers())), list(model.state_dict())
    captured = capture(model, inputs)
    (buffer,) = (b for b in captured.program.buffers if b.fqn == "plain")
    assert (buffer.mutated, buffer.persistent, buffer.assigned) == (True, False, fn is not in_place)
    assert [name for name, _ in model.named_buffers() if name not in names] == ["plain"] and list(model.state_dict()) == keys
    assert model.plain is plain and (device == "meta" or torch.equal(plain, torch.zeros_like(plain)))
    assert any("plain" in note for note in captured.program.notes)
    if device == "cpu":
        with torch.no_grad():
            run_three_times(captured, model, [torch.randn(*inputs[0].shape) for _ in range(3)])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), torch.tensor(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.linear(x) / self.calls).pow(2).sum()


@pure
def test_a_count_of_one_element_is_as_it_was_before() -> None:
    """torch.export has its value, and adds to it."""
    model = Counting()
    captured = capture(model, (torch.randn(8, 6),))
    assert model.calls.item() == 0
    (buffer,) = captured.program.buffers
    assert buffer.fqn == "calls" and captured.tensors[buffer.value].item() == 0


def beside_what_is_refused(m: Any, x: Tensor) -> Tensor:
    m.plain = 0.9 * m.plain + x.mean(0)
    SEEN.append(len(SEEN))
    return m.linear(x) - m.plain


@pure
def test_what_cannot_be_captured_is_left_with_its_attributes() -> None:
    model, inputs = build(beside_what_is_refused)
    before, attributes = snapshot(model), list(vars(model))
    with pytest.raises(CaptureError, match="changes"):
        capture(model, inputs)
    assert equal(before, snapshot(model)) and list(vars(model)) == attributes
    assert "plain" in vars(model) and "plain" not in model._buffers


def made_one_and_written(m: Any, x: Tensor) -> Tensor:
    m.other = m.ema
    m.ema.add_(x.detach().mean(0))
    return m.linear(x) - m.other


@pure
def test_buffers_that_the_forward_makes_one_and_writes_to_are_refused() -> None:
    """Later calls would write to both."""
    with pytest.raises(CaptureError, match="makes one tensor of the buffers other and ema"):
        capture(*build(made_one_and_written))


class Shared(nn.Module):
    """A tensor under two names, of which one is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.one = torch.zeros(6)
        self.other = self.one

    def forward(self, x: Tensor) -> Tensor:
        self.one.add_(x.detach().mean(0))
        return (self.linear(x) - self.other).pow(2).sum()


class OfTheClass(nn.Module):
    """A name that the class has too, which is found before a buffer is."""

    mean: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.mean = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return (self.linear(x) - self.mean).pow(2).sum()


class Answering(nn.Module):
    """Has any name that is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.one = nn.Linear(6, 6), torch.zeros(6)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("linear", "forward") else 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.one = 0.5 * self.one + x.detach().mean(0)
        return (self.linear(x) - self.one).pow(2).sum()


@pure
@pytest.mark.parametrize("kind", [Shared, OfTheClass, Answering])
def test_what_cannot_be_a_buffer_stays_an_attribute(kind: type[nn.Module]) -> None:
    """An input of the program, where it is assigned; what is written in place is refused."""
    model, name = kind(), "mean" if kind is OfTheClass else "one"
    if kind is Shared:
        with pytest.raises(CaptureError, match="what to do: .*buffer"):
            capture(model, (torch.randn(8, 6),))
    else:
        captured = capture(model, (torch.randn(8, 6),))
        assert captured.guards is not None and [leaf.name for leaf in captured.guards.varied.leaves] == [name]
    assert not model._buffers and not model._non_persistent_buffers_set
    assert as_buffers(model, [name], State.take(model)) is None


class Means(deque[Tensor]):
    """A container of a class of its own."""


class InOther(OfTheClass):
    def __init__(self) -> None:
        super().__init__()
        self.means = Means((torch.zeros(6), torch.ones(6)))

    def forward(self, x: Tensor) -> Tensor:
        self.means = Means(0.5 * mean + x.detach().mean(0) for mean in self.means)
        return (self.linear(x) - self.means[0] * self.means[1]).pow(2).sum()


class FromNone(OfTheClass):
    began: Any

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.began = None

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.began = mean if self.began is None else 0.5 * self.began + mean
        return (self.linear(x) - self.began).pow(2).sum()


class LateBuffer(FromNone):
    def begin(self) -> None:
        self.register_buffer("began", None)


@pure
@pytest.mark.parametrize(
    ("kind", "remedy"), [(InOther, "each tensor in an attribute of its own"), (LateBuffer, "begin with a tensor of its shape")]
)
def test_the_remedy_says_how_it_would_be_followed(kind: type[nn.Module], remedy: str) -> None:
    with pytest.raises(CaptureError, match=remedy):
        capture(kind(), (torch.randn(8, 6),))


@pure
def test_what_begins_with_none_is_followed_after_a_call() -> None:
    model, x = FromNone(), torch.randn(8, 6)
    model(x)
    captured = capture(model, (x,))
    assert [b.fqn for b in captured.program.buffers] == ["began"]
