"""What a forward changes that cannot be followed is refused with its name and a remedy, whether the model has data or not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.stateful_models import BATCH, DIM, SEEN, build, equal, snapshot

pytestmark = pytest.mark.pure

SCALE = 1.0


# ------------------------------------------------------------------------------------------------------------ what is refused
def number(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return m.linear(x) * m.count


def dict_entry(m: Any, x: Tensor) -> Tensor:
    m.table["a"] *= 2
    return m.linear(x) * m.table["a"]


def class_attribute(m: Any, x: Tensor) -> Tensor:
    type(m).shared.append(1)
    return m.linear(x)


def global_number(m: Any, x: Tensor) -> Tensor:
    global SCALE
    SCALE = SCALE * 0.5
    return m.linear(x) * SCALE


def global_list(m: Any, x: Tensor) -> Tensor:
    SEEN.append(len(SEEN))
    return m.linear(x)


def lazy_buffer_average(m: Any, x: Tensor) -> Tensor:
    m.lazy = x.mean(0) if m.lazy is None else 0.9 * m.lazy + 0.1 * x.mean(0)
    return m.linear(x)


def counting_closure() -> Callable[..., Tensor]:
    calls = 0

    def closure(m: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return m.linear(x) * calls

    return closure


def ticking_closure() -> Callable[..., Tensor]:
    ticks = itertools.count()

    def ticks_on(m: Any, x: Tensor) -> Tensor:
        next(ticks)
        return m.linear(x)

    return ticks_on


def other_shape(m: Any, x: Tensor) -> Tensor:
    m.ema = torch.cat([m.ema, m.ema])
    return m.linear(x)


def other_dtype(m: Any, x: Tensor) -> Tensor:
    m.steps = m.steps + 0.5
    return m.linear(x)


def buffer_removed(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x) * m.ema
    m.ema = None
    return y


def parameter_replaced(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    m.linear.weight = nn.Parameter(m.linear.weight.detach() * 0.9)
    return y


def parameter_clamped(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data.clamp_(-x.abs().amax(), x.abs().amax())
    return m.linear(x)


def parameter_data_assigned(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data = m.linear.weight.data * x.mean()
    return m.linear(x)


def frozen_in_the_forward(m: Any, x: Tensor) -> Tensor:
    m.linear.bias.requires_grad_(False)
    return m.linear(x)


def seed_set(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return m.linear(x) * torch.rand(DIM, device=x.device)


def tensors_for_someone_else() -> Callable[..., Tensor]:
    kept: dict[str, Tensor] = {}

    def keeps(m: Any, x: Tensor) -> Tensor:
        kept["h"] = h = m.linear(x)
        return h

    return keeps


def input_written(m: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return m.linear(x)


def input_written_through_a_view(m: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0
    return m.linear(x)


def input_turned(m: Any, x: Tensor) -> Tensor:
    x.unsqueeze_(0)
    return m.linear(x)


def python_draw(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * 2 if random.random() < 0.02 else m.linear(x)


def python_shuffle(m: Any, x: Tensor) -> Tensor:
    order = list(range(DIM))
    random.shuffle(order)
    return m.linear(x)[:, order] * x


def with_graph(m: Any, x: Tensor) -> Tensor:
    m.ema = 0.9 * m.ema + m.linear(x).mean(0)
    return m.linear(x) - m.ema


REFUSED: dict[Callable[..., Tensor], str] = {
    class_attribute: r"Model\.shared",
    global_list: "SEEN of",
    lazy_buffer_average: "changes lazy",
    ticking_closure(): r"ticks, which .* closes over from count\(\d\) to count\(\d\)",
    other_shape: r"buffer ema, which is float32\[6\], float32\[12\]",
    other_dtype: r"buffer steps, which is int64\[\], float32\[\]",
    buffer_removed: "buffer ema, which is .* nothing",
    parameter_replaced: r"replaces the parameter linear\.weight",
    parameter_clamped: r"changes a parameter in place: linear\.weight",
    parameter_data_assigned: r"changes a parameter in place: linear\.weight",
    frozen_in_the_forward: r"requires_grad of the parameter linear\.bias",
    seed_set: "sets the seed",
    input_written: "writes to its input x",
    input_written_through_a_view: "writes to its input x",
    input_turned: "what to do",
    python_shuffle: "random numbers drawn from random",
    python_draw: "random numbers drawn from random",
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fn", REFUSED, ids=lambda f: f.__name__)
def test_other_state_is_refused(fn: Callable[..., Tensor], device: str) -> None:
    model, inputs = build(fn, device)
    random.seed(0)  # one in fifty draws would take the other branch of a rare one
    before, drawn = snapshot(model), random.getstate()
    with pytest.raises(CaptureError, match=REFUSED[fn]) as refused:
        capture(model, inputs)
    assert "what to do:" in str(refused.value)
    assert equal(before, snapshot(model)) and SCALE == 1.0
    assert random.getstate() == drawn
    assert not any(isinstance(t, torch._subclasses.FakeTensor) for t in (*model.buffers(), *model.parameters()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_for_someone_else_are_outputs_beside_the_loss(device: str) -> None:
    model, inputs = build(tensors_for_someone_else(), device)
    found = capture(model, inputs)
    assert found.guards is not None and found.returned is None and len(found.program.outputs) == 1
    assert found.guards.place("kept, which tensors_for_someone_else.keeps closes over['h']") == found.program.outputs[0]


NUMBERS = {number: "count", dict_entry: "table['a']", global_number: "SCALE of", counting_closure(): "calls, which"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fn", NUMBERS, ids=lambda f: f.__name__)
def test_numbers_that_calls_change_are_inputs(fn: Callable[..., Tensor], device: str) -> None:
    model, inputs = build(fn, device)
    before = snapshot(model)
    guards = capture(model, inputs).guards
    assert guards is not None
    (leaf,) = guards.varied.leaves
    assert NUMBERS[fn] in leaf.name and [place.path for place, _ in guards.varied.moved] == [leaf.name]
    assert equal(before, snapshot(model)) and SCALE == 1.0


def test_the_line_that_writes_to_an_input_is_named() -> None:
    class Masked(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            input[:, 0].zero_()
            return super().forward(input).sum()

    with pytest.raises(CaptureError, match=r"its input input\n  at test_state_refused.py:\d+: input\[:, 0\].zero_\(\)"):
        capture(Masked(DIM, DIM), (torch.randn(BATCH, DIM),))


def test_a_graph_that_is_kept_from_call_to_call_is_refused() -> None:
    with pytest.raises(CaptureError, match="called a second time, fails: .*\n.*detach"):
        capture(*build(with_graph))


def takes_from_an_iterator(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * next(m.cache)


def numbers() -> Iterator[float]:
    """Its variables are the same after each step, and a list is gone through."""
    while True:
        yield from [1.0, 1.0, 1.0]


def in_a_queue() -> Callable[[], float]:
    queue = SimpleQueue[float]()
    for _ in range(9):
        queue.put(1.0)
    return queue.get


ITERATORS: dict[str, Callable[[], Any]] = {
    "cycle": lambda: itertools.cycle([1.0, 1.0]),
    "cycle, gone round": lambda: (found := itertools.cycle([1.0, 1.0]), next(found), next(found))[0],
    "list": lambda: iter([1.0] * 9),
    "range": lambda: iter(range(1, 9)),
    "dict": lambda: iter({1.0: 0, 1.5: 0, 2.0: 0, 2.5: 0}),
    "array": lambda: iter(numpy.ones(9)),
    "expression": lambda: (1.0 for _ in range(9)),
    "generator": numbers,
    "map": lambda: map(abs, [1.0] * 9),
    "zip": lambda: map(sum, zip(numbers(), itertools.repeat(0.0))),
    "slice": lambda: itertools.islice(numbers(), 9),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("what", ITERATORS)
def test_iterators_that_the_forward_takes_from_are_refused(what: str, device: str) -> None:
    """All of them give the same number in each call: what they compute tells nothing."""
    model, inputs = build(takes_from_an_iterator, device)
    model.cache = ITERATORS[what]()

    with pytest.raises(CaptureError, match=r"cache from iterator \(.*\) to another iterator"):
        capture(model, inputs)
    model.fn = lambda m, x: m.linear(x) * (1.0 if m.cache is not None else 2.0)
    assert capture(model, inputs).guards is not None


@pytest.mark.parametrize("made", [lambda: itertools.cycle([1.0, 1.0]).__next__, in_a_queue], ids=["next", "queue"])
def test_methods_of_iterators_and_queues_are_followed(made: Callable[[], Callable[[], float]]) -> None:
    model, inputs = build(lambda m, x: m.linear(x) * m.cache())
    model.cache = made()
    with pytest.raises(CaptureError, match=r"cache.__self__ from (iterator \(cycle\)|queue of \d)"):
        capture(model, inputs)


def test_an_iterator_that_does_not_tell_how_far_it_is_is_refused_where_it_can_be_reached() -> None:
    model, inputs = build(takes_from_an_iterator)
    model.cache = itertools.pairwise(itertools.repeat(1.0))
    model.fn = lambda m, x: m.linear(x) * next(m.cache)[0]
    with pytest.raises(CaptureError, match="cache is an iterator .* does not tell"):
        capture(model, inputs)
    model.fn = lambda m, x: m.linear(x)
    assert capture(model, inputs).guards is not None


DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "random.Random": lambda: random.Random(0).random,
    "generator of numpy": lambda: numpy.random.default_rng(0).random,
    "twister of numpy": lambda: numpy.random.Generator(numpy.random.MT19937(0)).random,
    "older one of numpy": lambda: numpy.random.RandomState(0).rand,
    "bits of numpy": lambda: numpy.random.PCG64(0).random_raw,
}


@pytest.mark.parametrize("what", DRAWS)
def test_generators_that_the_forward_draws_from_are_refused(what: str) -> None:
    model, inputs = build(lambda m, x: m.linear(x) * (1.0 if m.cache() >= 0 else 2.0))
    model.cache = DRAWS[what]()
    with pytest.raises(CaptureError, match=r"cache.__self__ from random generator to another"):
        capture(model, inputs)
    random_one = model.cache.__self__
    model.cache, model.fn = random_one, lambda m, x: m.linear(x) * (1.0 if m.cache is not None else 2.0)
    guards = capture(model, inputs).guards
    assert guards is not None and guards.changed() is None


def test_an_alias_of_a_buffer_is_not_parted() -> None:
    def average(m: Any, x: Tensor) -> Tensor:
        m.ema = 0.9 * m.ema + 0.1 * x.mean(0)
        return m.linear(x) - m.ema

    model, inputs = build(average)
    model.inner.register_buffer("alias", model.ema)
    with pytest.raises(CaptureError, match="whose tensor is also another buffer"):
        capture(model, inputs)


def test_an_input_that_is_a_dict_is_not_emptied() -> None:
    class Popped(nn.Linear):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch.pop("x")).sum()

    with pytest.raises(CaptureError, match=r"changes its inputs: at .*'x'"):
        capture(Popped(DIM, DIM), ({"x": torch.randn(BATCH, DIM)},))


class Encoder(nn.Linear):
    """Returns the dict that it is given, with what it has computed. writes: also to a tensor in it."""

    writes = False

    def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        if self.writes:
            batch["x"].add_(1.0)
        batch["h"] = super().forward(batch["x"])
        batch["x"] = batch["x"] * 2
        return batch


def test_a_dict_that_is_given_and_returned_may_be_written_to() -> None:
    given = {"x": torch.randn(BATCH, DIM), "y": torch.ones(BATCH)}
    found = capture(Encoder(DIM, DIM), (given,), outputs=True)
    assert sorted(given) == ["x", "y"]
    assert found.returned is not None and found.returned.into == (0, ("x", "h"))
    by_name = capture(Encoder(DIM, DIM), {"batch": given}, outputs=True)
    assert by_name.returned is not None and by_name.returned.into == ("batch", ("x", "h"))


def test_a_tensor_in_a_dict_that_is_returned_is_not_written_to() -> None:
    model = Encoder(DIM, DIM)
    model.writes = True
    with pytest.raises(CaptureError, match="writes to its input|changes its inputs"):
        capture(model, ({"x": torch.randn(BATCH, DIM)},), outputs=True)


def test_a_dict_that_is_written_to_and_not_returned_is_refused() -> None:
    class Other(Encoder):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            found: Tensor = super().forward(batch)["h"]
            return found.sum()

    with pytest.raises(CaptureError, match=r"changes its inputs: at .*'x'.*'h'"):
        capture(Other(DIM, DIM), ({"x": torch.randn(BATCH, DIM)},), outputs=True)
