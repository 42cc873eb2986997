"""Tensors that a model keeps in attributes from one call to the next are inputs and outputs of its programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.left import LeftOut
from autopar.capture.state import State
from autopar.errors import CaptureError
from autopar.run import WorkerPool
from autopar.run.forms import GROWN
from autopar.run.varying import NUMBERS, Kind
from benchmarks._traps_kit import batch, train
from benchmarks._traps_run import Judge
from benchmarks.trap_programs.carried import Cached
from benchmarks.trap_programs.histories import Counted
from tests.in_turn import in_turn
from tests.stateful_models import build, equal, snapshot

pure = pytest.mark.pure
HERE = in_turn("carried", ("dp2",), ("pp2",))


@pytest.mark.gloo
@pytest.mark.parametrize("name", HERE)
def test_they_are_those_of_one_process(name: str, judge: Judge) -> None:
    assert judge.not_right(name, HERE[name]) == []


@pytest.mark.gloo
def test_what_grows_in_each_call_is_not_captured_each_time(pair: WorkerPool) -> None:
    assert pair.run(_generated) == [["keys"]] * 2


def _generated() -> list[str]:
    """What is said of 8 calls that keep more and more."""
    model = autopar.compile(Cached(), gpus=2, example_inputs=(torch.randn(4, 3, 8),), cluster="cpu", pins={"dp": 2})
    model.eval()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            model(torch.ones(4, 3, 8))
    said = [str(w.message) for w in caught if "is of another size in each" in str(w.message)]
    assert len(model._forms._used) <= 1 + 1 + GROWN
    return ["keys" for text in said if "cache['keys']" in text]


@pytest.mark.gloo
def test_a_count_beside_a_state_is_an_input(pair: WorkerPool) -> None:
    assert pair.run(_programs_of_counts) == [True] * 2


def _programs_of_counts() -> bool:
    """Whether two programs do for six calls: the first one, and one that takes the count."""
    model = autopar.compile(Counted(), gpus=2, example_inputs=batch(), cluster="cpu", pins={"dp": 2})
    train(model, steps=6)
    return len(model._forms._used) <= 2


def average_that_begins_with_none(m: Any, x: Tensor) -> Tensor:
    m.cache = x.mean(0) if m.cache is None else 0.9 * m.cache + 0.1 * x.mean(0)
    return m.linear(x) - m.cache


def memory(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    if m.cache is not None:
        h = h + m.cache
    m.cache = x
    return h


def pair(m: Any, x: Tensor) -> Tensor:
    a, b = m.cache if m.cache is not None else (x.mean(0), x.mean(0))
    m.cache = 0.5 * a, [b + 1][0]
    return m.linear(x) - a * b


def varied(captured: Captured) -> list[tuple[str, object]]:
    assert captured.guards is not None
    return [(leaf.name, leaf.kind) for leaf in captured.guards.varied.leaves]


@pure
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("fn", "names"), [(average_that_begins_with_none, [""]), (memory, [""]), (pair, ["[0]", "[1]"])])
def test_what_begins_with_none_has_two_programs(fn: Callable[..., Tensor], names: list[str], device: str) -> None:
    """One holds while there is None, the other one takes what a call has left."""
    model, inputs = build(fn, device)
    before = snapshot(model)
    first = capture(model, inputs)
    assert equal(before, snapshot(model)) and varied(first) == []
    assert first.guards is not None and first.guards.changed() is None
    given = [x.to(device) for x in inputs]
    model(*given)
    assert "cache" in (first.guards.changed() or "")
    later = capture(model, inputs, again=True)
    shape = tuple((model.cache[0] if fn is pair else model.cache).shape)
    assert varied(later) == [(f"cache{name}", Kind(torch.float32, shape)) for name in names]
    assert [i.path[0] for i in later.program.inputs].count(NUMBERS) == len(names)
    model(*given)
    assert later.guards is not None and later.guards.changed() is None, "others of their kind"
    model.cache = None
    assert first.guards.changed() is None


@pure
def test_another_structure_is_another_program() -> None:
    model, inputs = build(pair, "cpu")
    model(*inputs)
    guards = capture(model, inputs, again=True).guards
    assert guards is not None

    def said() -> str:
        changed = guards.changed()
        return changed or guards.varied.changed(guards.varied.values(lambda _: None, lambda place: place.now())) or ""

    a, b = model.cache
    assert said() == ""
    for other in ((a, b, b), [a, b], (a, None), (a, b[:1]), (a, b.double()), (a, b.requires_grad_()), None):
        model.cache = other
        assert "cache" in said(), other
        b = b.detach()
    model.cache = (b, a)
    assert said() == ""


class Attached(nn.Module):
    """Of which each call computes with the graph of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.names = nn.Linear(6, 6), [f"state_{k}" for k in range(8)]
        for name in self.names:
            setattr(self, name, torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for name in self.names:
            h = torch.tanh(h + getattr(self, name))
            setattr(self, name, h.mean(0))
        return h.pow(2).sum()


@pure
def test_gradients_go_through_what_requires_one() -> None:
    """Compared with autograd's of the model itself, in capture. The inputs stand in the order of the attributes, in every process."""
    model, x = Attached(), torch.randn(8, 6)
    begun = capture(model, (x,))
    assert varied(begun) == [(name, Kind(torch.float32, (6,))) for name in model.names]
    model(x)
    held = [getattr(model, name) for name in model.names]
    later = capture(model, (x,), again=True)
    assert varied(later) == [(name, Kind(torch.float32, (6,), True)) for name in model.names]
    assert all(later.program.types[i.value].grad for i in later.program.inputs if i.path[0] == NUMBERS)
    assert all(getattr(model, name) is one and one.grad_fn is not None for name, one in zip(model.names, held, strict=True))
    with torch.no_grad():
        assert varied(capture(model, (x,), again=True, trains=False)) == varied(begun)


class Switching(nn.Module):
    """What its first call does differently, a method in an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.update = nn.Linear(6, 6), self.begin
        self.register_buffer("mean", torch.zeros(6))

    def begin(self, now: Tensor) -> None:
        self.mean, self.update = now, self.go_on

    def go_on(self, now: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * now

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.update(h.detach().mean(0))
        return (h - self.mean).pow(2).sum()


@pure
def test_a_method_that_the_first_call_puts_in_the_place_of_another_is_left() -> None:
    model = Switching()
    guards = capture(model, (torch.randn(8, 6),)).guards
    assert guards is not None and guards.changed() is None and model.update == model.begin
    guards.leave({})
    assert model.update == model.go_on and "update" in (guards.changed() or "")


class OfABuffer(Switching):
    """Finds its buffer in a dict after the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {"mean": None}

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        now, known = h.detach().mean(0), self.found["mean"]
        self.mean = self.found["mean"] = now if known is None else 0.9 * known + 0.1 * now
        return (h - self.mean).pow(2).sum()


@pure
def test_what_the_parallel_module_would_not_leave_is_no_beginning() -> None:
    """A running mean would begin anew in each call."""
    model = OfABuffer()
    with pytest.raises(CaptureError, match="call 2 in a row"):
        capture(model, (torch.randn(8, 6),))
    assert model.found == {"mean": None}


def first_call_only(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    if not m.flag:
        m.flag, h = True, h * 2
    return h


@pure
def test_what_the_first_call_alone_computes_is_not_what_later_ones_do() -> None:
    model, inputs = build(first_call_only, "cpu")
    guards = capture(model, inputs).guards
    assert guards is not None and guards.changed() is None and not model.flag
    guards.leave({})
    assert model.flag and "flag" in (guards.changed() or "")
    with pytest.raises(CaptureError, match="flag from False to True"):
        capture(*build(first_call_only, "meta"))


@pure
def test_texts_that_the_first_call_sets_are_flags_without_data() -> None:
    def phased(m: Any, x: Tensor) -> Tensor:
        h = m.linear(x)
        m.ema = h.detach().mean(0) if m.cache == "first" else 0.9 * m.ema + 0.1 * h.detach().mean(0)
        m.cache = "later"
        return h - m.ema

    model, inputs = build(phased, "meta")
    model.cache = "first"
    with pytest.raises(CaptureError, match="changes cache from 'first' to 'later', and whether later calls compute the same"):
        capture(model, inputs)


def written_in_place(m: Any, x: Tensor) -> Tensor:
    m.cache[0].add_(x.detach().mean(0))
    return m.linear(x) - m.cache[0]


def kept_of_the_first_call(m: Any, x: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = m.linear(x).detach().mean(0)
    return m.linear(x) - m.cache


@pure
def test_what_the_first_call_computes_is_a_constant_of_later_ones() -> None:
    model, inputs = build(kept_of_the_first_call, "cpu")
    first = capture(model, inputs)
    assert varied(first) == [] and first.guards is not None and first.guards.place("cache") is not None
    model(*inputs)
    assert "cache" in (first.guards.changed() or "")
    later = capture(model, inputs, again=True)
    (constant,) = (b for b in later.program.buffers if b.fqn is None)
    assert varied(later) == [] and torch.equal(later.tensors[constant.value], model.cache)
    kept, model.cache = model.cache, None
    assert first.guards.changed() is None and later.guards is not None and "cache" in (later.guards.changed() or "")
    model.cache = kept
    assert later.guards.changed() is None


@pure
def test_what_is_written_in_place_in_a_tuple_is_refused() -> None:
    model, inputs = build(written_in_place, "cpu")
    model.cache = torch.zeros(6), torch.zeros(6)
    before = snapshot(model)
    with pytest.raises(CaptureError, match="cache"):
        capture(model, inputs)
    assert equal(before, snapshot(model))


@pure
def test_what_calls_read_is_left_by_the_program() -> None:
    """Of a program of the loss alone, too; what they do not read is computed when the loop reads it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.linear(x)
        m.cache, m.seen = h.detach().mean(0) if m.cache is None else 0.5 * m.cache + h.detach().mean(0), h
        return h - m.cache

    model, inputs = build(forward, "cpu")
    guards = capture(model, inputs).guards
    assert guards is not None and guards.place("cache") is not None and guards.place("seen") is None
    given = torch.ones(6)
    guards.leave({guards.place("cache") or "": given})
    try:
        assert model.cache is given and isinstance(model.seen, LeftOut)
        assert "cache" in State.take(model).tensors
    finally:
        model.cache = None
