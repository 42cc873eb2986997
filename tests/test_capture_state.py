"""What a forward does besides computing is followed exactly, or refused with its name and a remedy, whether the model has data or not."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture, run_program
from autopar.capture.calls import left_as_it_was
from autopar.capture.state import State
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure

BATCH, DIM = 4, 6
SCALE = 1.0
SEEN: list[int] = []
MASKS: dict[int, Tensor] = {}


class Model(nn.Module):
    """A linear layer, state of every kind, and a forward that is a parameter of the test."""

    shared: list[int] = []

    def __init__(self, fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.inner = Inner()
        self.register_buffer("ema", torch.zeros(DIM))
        self.register_buffer("other", torch.ones(DIM))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table_of_keys", torch.arange(2.0 * BATCH * DIM).reshape(2 * BATCH, DIM))
        self.register_buffer("lazy", None, persistent=False)  # of the state_dict: test_made.py
        self.plain = torch.zeros(DIM)
        self.count, self.flag, self.history, self.table = 0, False, [1.0], {"a": 1}
        self.options = SimpleNamespace(deep=SimpleNamespace(calls=0))
        self.cache: Any = None
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x).pow(2).sum()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return x - self.mean


def build(fn: Callable[[Any, Tensor], Tensor], device: str = "cpu") -> tuple[Model, tuple[Tensor]]:
    with torch.device(device):
        model = Model(fn)
    return model, (torch.randn(BATCH, DIM),)


def snapshot(model: nn.Module) -> list[object]:
    state = [t.clone() if isinstance(t, Tensor) and not t.is_meta else id(t) for t in (*model.parameters(), *model.buffers(), model.plain)]
    own = [str(vars(m).get(k)) for m in model.modules() for k in sorted(vars(m)) if not k.startswith("_")]
    return [*state, own, str(SEEN), str(MASKS), SCALE, str(Model.shared)]


def equal(a: list[object], b: list[object]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y for x, y in zip(a, b, strict=True))


def test_tables_of_a_module_that_held_nothing_are_empty_again() -> None:
    """Those that nothing watches too: hooks of what a module saves, names of its buffers that are not saved."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    start = State.take(model)
    tables = [name for name in vars(model[1]) if isinstance(vars(model[1])[name], (dict, set)) and not vars(model[1])[name]]
    assert len(tables) > 8
    for name in tables:
        table = vars(model[1])[name]
        table.add("mean") if isinstance(table, set) else table.update({0: print})
    start.restore()
    assert all(not vars(model[1])[name] for name in tables)


# ------------------------------------------------------------------------------------------------ buffers that are followed
def average(m: Any, x: Tensor) -> Tensor:
    m.ema = 0.9 * m.ema + 0.1 * x.mean(0)
    return m.linear(x) - m.ema


def average_of_activations(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.ema = 0.9 * m.ema + 0.1 * h.mean(0).detach()
    return h * m.ema


def average_that_the_loss_does_not_use(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.ema = 0.9 * m.ema + h.mean(0)  # which keeps the graph; no gradient flows through it
    return h


def old_value_in_the_loss(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x) * m.ema.view(-1, 2).flatten() + m.ema * m.other
    m.ema = 0.9 * m.ema + h.detach().mean(0)
    m.other = m.other * 1.5
    return h


def queue(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    keys = m.table_of_keys.clone().detach()
    m.table_of_keys = torch.cat([h.detach(), m.table_of_keys[:-BATCH]])
    return h @ keys.T


def data_assigned(m: Any, x: Tensor) -> Tensor:
    m.ema.data = 0.9 * m.ema.data + x.mean(0)
    return m.linear(x) * m.ema


def data_written(m: Any, x: Tensor) -> Tensor:
    m.ema.data.mul_(0.9).add_(m.linear(x).data.mean(0))
    return m.linear(x) * m.ema


def counter(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.steps = m.steps + 1
    return m.linear(x) / m.steps


def registered_again(m: Any, x: Tensor) -> Tensor:
    m.register_buffer("ema", m.ema + x.mean(0))
    return m.linear(x) - m.ema


def swapped(m: Any, x: Tensor) -> Tensor:
    m.ema, m.other = m.other, m.ema + x.mean(0)
    return m.linear(x) * m.ema


def rotated_view(m: Any, x: Tensor) -> Tensor:
    old = m.ema
    m.ema = m.other.view(2, 3).t().reshape(-1)
    m.other = old.view(3, 2).t().reshape(-1) + x.mean(0)
    return m.linear(x) * m.ema


def in_a_submodule_twice(m: Any, x: Tensor) -> Tensor:
    return m.inner(m.inner(m.linear(x)))


def assigned_then_written(m: Any, x: Tensor) -> Tensor:
    m.ema = m.ema + x.mean(0)
    m.ema.mul_(2)
    m.other.add_(m.ema)
    return m.linear(x) * m.other


FOLLOWED = [
    average, average_of_activations, average_that_the_loss_does_not_use, old_value_in_the_loss, queue, data_assigned, data_written,
    counter, registered_again, swapped, rotated_view, in_a_submodule_twice, assigned_then_written,
]  # fmt: skip


def run_three_times(captured: Captured, model: Model, batches: list[Tensor]) -> None:
    """The program and the model go through the same losses and buffers, from batch to batch."""
    program = captured.program
    values = {k: v.detach().clone() for k, v in captured.tensors.items()}
    for x in batches:
        values[program.inputs[0].value] = x
        found = run_program(program, values)
        torch.testing.assert_close(found, model(x).detach(), rtol=1e-5, atol=1e-6)
        for buffer in program.buffers:
            if buffer.fqn is not None:
                torch.testing.assert_close(values[buffer.value], model.get_buffer(buffer.fqn).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fn", FOLLOWED, ids=lambda f: f.__name__)
def test_buffers_that_the_forward_assigns_are_mutated(fn: Callable[..., Tensor]) -> None:
    model, inputs = build(fn)
    before, objects = snapshot(model), [id(b) for b in model.buffers()]
    captured = capture(model, inputs)
    assert captured.program.mutations
    assert equal(before, snapshot(model))
    assert objects == [id(b) for b in model.buffers()]
    assert captured.guards is not None and captured.guards.changed() is None
    with torch.no_grad():
        run_three_times(captured, model, [torch.randn(BATCH, DIM) for _ in range(3)])


@pytest.mark.parametrize("fn", FOLLOWED, ids=lambda f: f.__name__)
def test_without_data_the_program_is_the_same(fn: Callable[..., Tensor]) -> None:
    real, meta = (capture(*build(fn, device)).program for device in ("cpu", "meta"))
    assert real.mutations == meta.mutations and real.ops == meta.ops


# ------------------------------------------------------------------------------------------------------------ what is refused
def number(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return m.linear(x) * m.count


def list_that_grows(m: Any, x: Tensor) -> Tensor:
    m.history.append(m.linear(x).detach())
    return m.linear(x)


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


def plain_average(m: Any, x: Tensor) -> Tensor:
    m.plain = 0.9 * m.plain + x.mean(0)
    return m.linear(x) - m.plain


def plain_average_that_is_not_used(m: Any, x: Tensor) -> Tensor:
    m.plain = 0.9 * m.plain + x.mean(0)
    return m.linear(x)


def average_that_begins_with_none(m: Any, x: Tensor) -> Tensor:
    m.cache = x.mean(0) if m.cache is None else 0.9 * m.cache + 0.1 * x.mean(0)
    return m.linear(x)


def lazy_buffer_average(m: Any, x: Tensor) -> Tensor:
    m.lazy = x.mean(0) if m.lazy is None else 0.9 * m.lazy + 0.1 * x.mean(0)
    return m.linear(x)


def memory(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    if m.cache is not None:
        h = h + m.cache
    m.cache = x
    return h


def plain_in_place(m: Any, x: Tensor) -> Tensor:
    m.plain.add_(x.mean(0))
    return m.linear(x) - m.plain


def first_call_only(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    if not m.flag:
        m.flag, h = True, h * 2
    return h


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


def mode_changed(m: Any, x: Tensor) -> Tensor:
    m.inner.eval()
    return m.linear(x)


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
    number: r"count from 1 to 2",
    list_that_grows: r"history from list of 2 to list of 3",
    dict_entry: r"table\['a'\] from 2 to 4",
    class_attribute: r"Model\.shared",
    global_number: r"SCALE of .*test_capture_state from 0\.5 to 0\.25",
    global_list: "SEEN of",
    plain_average: "changes plain",
    plain_average_that_is_not_used: "changes plain",
    average_that_begins_with_none: "changes cache",
    lazy_buffer_average: "changes lazy",
    memory: "cache",
    plain_in_place: "changes plain",
    first_call_only: "flag from False to True",
    counting_closure(): r"calls, which .*closure closes over from 1 to 2",
    ticking_closure(): r"ticks, which .* closes over from count\(\d\) to count\(\d\)",
    other_shape: r"buffer ema, which is float32\[6\], float32\[12\]",
    other_dtype: r"buffer steps, which is int64\[\], float32\[\]",
    buffer_removed: "buffer ema, which is .* nothing",
    parameter_replaced: r"replaces the parameter linear\.weight",
    parameter_clamped: r"changes a parameter in place: linear\.weight",
    parameter_data_assigned: r"changes a parameter in place: linear\.weight",
    frozen_in_the_forward: r"requires_grad of the parameter linear\.bias",
    seed_set: "sets the seed",
    tensors_for_someone_else(): r"kept, which .* closes over\['h'\]",
    mode_changed: r"inner\.training from True to False",
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
    assert equal(before, snapshot(model))
    assert random.getstate() == drawn
    assert not any(isinstance(t, torch._subclasses.FakeTensor) for t in (*model.buffers(), *model.parameters()))


def test_the_line_that_writes_to_an_input_is_named() -> None:
    class Masked(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            input[:, 0].zero_()
            return super().forward(input).sum()

    with pytest.raises(CaptureError, match=r"its input input\n  at test_capture_state.py:\d+: input\[:, 0\].zero_\(\)"):
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


# -------------------------------------------------------------------------------------------------- what is no obstacle
def mask_made_once(m: Any, x: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = torch.ones(DIM, DIM, device=x.device).tril()
    return m.linear(x) @ m.cache


def masks_by_size(m: Any, x: Tensor) -> Tensor:
    if DIM not in MASKS:
        MASKS[DIM] = torch.arange(DIM, dtype=torch.float32, device=x.device)
    return m.linear(x) * MASKS[DIM]


def lazy_buffer(m: Any, x: Tensor) -> Tensor:
    if m.lazy is None:
        m.lazy = torch.arange(DIM, dtype=torch.float32, device=x.device)
    return m.linear(x) * m.lazy


def size_remembered(m: Any, x: Tensor) -> Tensor:
    m.count = max(m.count, x.shape[0])
    return m.linear(x)


def activations_left(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.cache = [h, {"mean": h.mean()}]
    return h + m.cache[1]["mean"]


def list_made_anew(m: Any, x: Tensor) -> Tensor:
    m.history = []
    for _ in range(2):
        m.history.append(m.linear(x))
    return sum(m.history)  # type: ignore[return-value]


def draw_without_effect(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * 2 if random.random() < 0.0 else m.linear(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fn", [mask_made_once, masks_by_size, lazy_buffer, size_remembered, draw_without_effect], ids=lambda f: f.__name__)
def test_caches_are_no_state(fn: Callable[..., Tensor], device: str) -> None:
    MASKS.clear()
    model, inputs = build(fn, device)
    before = snapshot(model)
    captured = capture(model, inputs)
    assert equal(before, snapshot(model)) and not captured.written
    assert captured.guards is not None and captured.guards.changed() is None
    assert model.lazy is None
    if device == "cpu":
        model(*inputs)  # what the forward itself writes is not watched
        assert captured.guards.changed() is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fn", [activations_left, list_made_anew], ids=lambda f: f.__name__)
def test_tensors_that_each_call_leaves_are_named(fn: Callable[..., Tensor], device: str) -> None:
    model, inputs = build(fn, device)
    before = snapshot(model)
    captured = capture(model, inputs)
    assert equal(before, snapshot(model))
    assert captured.written and all(path.startswith(("cache", "history")) for path in captured.written)
    assert any("the forward leaves tensors in" in note for note in captured.program.notes)


@functools.lru_cache
def causal(n: int, device: str = "cpu") -> Tensor:
    return torch.ones(n, n, device=device).tril()


@functools.cache
def tables(n: int, device: str = "cpu") -> tuple[dict[str, Tensor], int]:
    return {"sin": torch.arange(n, device=device).sin()}, n


def cached_functions(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) @ causal(DIM, x.device.type) + tables(DIM, x.device.type)[0]["sin"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_function_caches_keep_no_tensor_without_data(device: str) -> None:
    for function in (causal, tables):
        function.cache_clear()
    captured = capture(*build(cached_functions, device))
    assert type(causal(DIM, device)) is Tensor
    assert type(tables(DIM, device)[0]["sin"]) is Tensor
    assert device == "meta" or torch.equal(tables(DIM, "cpu")[0]["sin"], torch.arange(DIM).sin())
    assert captured.program.mutations == ()
    again = capture(*build(cached_functions))  # with real tensors in the caches
    with torch.no_grad():
        model, (x,) = build(cached_functions)
        values = {**capture(model, (x,)).tensors, again.program.inputs[0].value: x}
        torch.testing.assert_close(run_program(capture(model, (x,)).program, values), model(x))


@dataclass(frozen=True)
class Table:
    values: Tensor


def in_a_closure() -> tuple[nn.Module, Callable[[int], Table]]:
    @functools.lru_cache
    def table(n: int) -> Table:
        return Table(torch.arange(n).sin())

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + table(DIM).values).square().mean()

    return Cached(), table


def in_an_attribute() -> tuple[nn.Module, Callable[[int], Table]]:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(DIM, DIM), functools.cache(lambda n: Table(torch.arange(n).sin()))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + self.table(DIM).values).square().mean()

    model = Cached()
    return model, model.table


@pytest.mark.parametrize("made", [in_a_closure, in_an_attribute])
def test_function_caches_are_found_where_no_global_names_them(made: Callable[[], tuple[nn.Module, Callable[[int], Table]]]) -> None:
    model, table = made()
    x = torch.randn(4, DIM)
    captured = capture(model, (x,))
    assert type(table(DIM).values) is Tensor
    with torch.no_grad():
        found = run_program(captured.program, {**captured.tensors, captured.program.inputs[0].value: x})
        torch.testing.assert_close(found, model(x))


def test_weight_norm_and_spectral_norm_of_both_kinds() -> None:
    """Their pre-forward hooks assign the weight anew."""
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(DIM, DIM))
    model = nn.Sequential(
        old, nn.utils.spectral_norm(nn.Linear(DIM, DIM)), nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM)),
    )  # fmt: skip
    captured = capture(model, (torch.randn(BATCH, DIM),), loss=torch.sum)
    assert captured.guards is not None and captured.guards.changed() is None
    assert len(captured.program.mutations) >= 2


def test_forward_hooks_run_in_the_trace_if_they_only_compute() -> None:
    model, inputs = build(lambda m, x: m.linear(x))
    plain = capture(model, inputs).program
    handle = model.linear.register_forward_hook(lambda m, args, out: out * 2)
    assert len(capture(model, inputs).program.ops) == len(plain.ops) + 1
    handle.remove()
    calls: list[int] = []
    model.linear.register_forward_hook(lambda m, args, out: calls.append(1))
    with pytest.raises(CaptureError, match="calls, which .* closes over"):
        capture(model, inputs)
    assert calls == []


# ------------------------------------------------------------------------------------------------------------- losses
def test_a_loss_over_a_list_of_parameters_is_refused_and_over_the_model_is_right() -> None:
    model = nn.Linear(DIM, DIM)
    params, x = list(model.parameters()), (torch.randn(BATCH, DIM),)
    with pytest.raises(CaptureError, match=r"the parameter weight that(.|\n)*test_capture_state.py(.|\n)*model.parameters\(\)"):
        capture(model, x, loss=lambda out: out.sum() + sum(p.pow(2).sum() for p in params))
    captured = capture(model, x, loss=lambda out: out.sum() + sum(p.pow(2).sum() for p in model.parameters()))
    assert {"pow"} <= {op.target.split(".")[1] for op in captured.program.ops}


@pytest.mark.parametrize("outside", [nn.Parameter(torch.ones(DIM)), torch.ones(DIM, requires_grad=True)], ids=["parameter", "tensor"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_with_gradients_that_are_not_the_models_are_refused(outside: Tensor, device: str) -> None:
    model, inputs = build(lambda m, x: m.linear(x), device)
    weights = outside.detach().to(device).requires_grad_()
    weights = nn.Parameter(weights) if isinstance(outside, nn.Parameter) else weights
    with pytest.raises(CaptureError, match="requires a gradient|a parameter(.|\n)*not the model's"):
        capture(nn.Linear(DIM, DIM, device=device), inputs, loss=lambda out: (out * weights).sum())
    model.history = [weights]
    model.fn = lambda m, x: m.linear(x) * m.history[0]
    with pytest.raises(CaptureError, match="requires a gradient|a parameter(.|\n)*not the model's"):
        capture(model, inputs)


def test_a_frozen_teacher_is_a_constant() -> None:
    teacher = nn.Linear(DIM, DIM)

    def distilled(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return m.linear(x) - target

    model, inputs = build(distilled)
    captured = capture(model, inputs)
    assert captured.guards is not None and captured.guards.changed() is None
    with torch.no_grad():
        teacher.weight.mul_(2)
    assert "teacher" in str(captured.guards.changed())


def test_a_loss_that_keeps_state_is_refused() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, out: Tensor) -> Tensor:
            self.scale = 0.9 * self.scale + 0.1 * out.detach().abs().mean()
            return out.sum() / self.scale

    with pytest.raises(CaptureError, match=r"loss\.scale"):
        capture(nn.Linear(DIM, DIM), (torch.randn(BATCH, DIM),), loss=Averaged())


# --------------------------------------------------------------------------------------------------- arguments and numbers
class Variadic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, *parts: Tensor, scale: float = 2.0, bias: float = 1.0) -> Tensor:
        return sum(self.linear(p).sum() for p in parts) * scale + bias  # type: ignore[return-value]


def test_star_args_and_defaults() -> None:
    captured = capture(Variadic(), (torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)))
    assert [i.path for i in captured.program.inputs] == [(0,), (1,)]
    assert dict(captured.defaults) == {"scale": 2.0, "bias": 1.0}


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(m.linear(x).view(BATCH, -1, 2).contiguous())
    y = torch.view_as_complex(torch.stack([x[:, :3], x[:, 3:]], -1))
    return torch.view_as_real((z * y.conj()).conj() * torch.fft.fft(z).conj()).flatten(1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_conjugated_complex_tensors(device: str) -> None:
    capture(*build(complex_numbers, device))


def conjugated_constant(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(m.linear(x).view(BATCH, -1, 2).contiguous())
    return torch.view_as_real(z * m.cache).flatten(1)


def test_a_conjugated_constant() -> None:
    model, inputs = build(conjugated_constant)
    model.cache = torch.randn(3, dtype=torch.complex64).conj()
    captured = capture(model, inputs)
    assert captured.guards is not None and captured.guards.changed() is None


def scalar_that_is_asserted(m: Any, x: Tensor) -> Tensor:
    limit = int(x.abs().max()) + 1
    torch._check(limit > 0)
    return m.linear(x) * torch.clamp(x, max=limit)


def test_values_that_become_numbers_are_refused_as_such() -> None:
    with pytest.raises(CaptureError, match="what to do:"):
        capture(*build(scalar_that_is_asserted))


def test_a_forward_of_the_users_own_can_be_undone() -> None:
    """As verify=True does, which runs the original once."""

    def everything(m: Any, x: Tensor) -> Tensor:
        m.ema, m.count, m.cache = m.ema + 1, m.count + 1, x
        m.history.append(2.0)
        m.plain.add_(1)
        m.other.mul_(3)
        SEEN.append(1)
        return m.linear(x)

    model, (x,) = build(everything)
    before, objects = snapshot(model), [id(b) for b in model.buffers()]
    with left_as_it_was(model):
        model(x)
        assert not equal(before, snapshot(model))
    assert equal(before, snapshot(model))
    assert objects == [id(b) for b in model.buffers()] and model.cache is None


class Followed(nn.Module):
    """A frozen network of one weight under two names, which `move` changes in each call before it is asked."""

    def __init__(self, move: Callable[[Any], None]) -> None:
        super().__init__()
        self.move = move
        self.online, self.target = (nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(2))
        self.target[2].weight = self.target[0].weight
        self.target.requires_grad_(False)
        self.started = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.move(self)
            aim = self.target(x)
        return (self.online(x) - aim).square().mean()


def pairs(m: Any) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return [(m.target[0].weight, m.online[0].weight), (m.target[0].bias, m.online[0].bias), (m.target[2].bias, m.online[2].bias)]


def moved_in_place(m: Any) -> None:
    for old, new in pairs(m):
        old.mul_(0.9).add_(new, alpha=0.1)


def moved_by_data(m: Any) -> None:
    for old, new in pairs(m):
        old.data = old.data * 0.9 + new.data * 0.1


def moved_by_its_data(m: Any) -> None:
    for old, new in pairs(m):
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


def moved_by_lerp(m: Any) -> None:
    for old, new in pairs(m):
        old.lerp_(new, 0.1)


def copied_over(m: Any) -> None:
    for old, new in pairs(m):
        old[:3].copy_(new[:3])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("move", [moved_in_place, moved_by_data, moved_by_its_data, moved_by_lerp, copied_over], ids=lambda f: f.__name__)
def test_frozen_parameters_that_the_forward_writes_to_are_buffers(move: Callable[[Any], None], device: str) -> None:
    with torch.device(device):
        torch.manual_seed(0)
        model, x = Followed(move), torch.randn(BATCH, DIM)
    before = snapshot_of(model)
    found = capture(model, (x,))
    written = {b.fqn: b.aliases for b in found.program.buffers if b.parameter}
    assert written == {"target.0.weight": ("target.2.weight",), "target.0.bias": (), "target.2.bias": ()}
    assert all(b.mutated for b in found.program.buffers if b.parameter) and len(found.program.mutations) == 3
    assert {p.fqn for p in found.program.params} == {f"online.{k}.{kind}" for k in (0, 2) for kind in ("weight", "bias")}
    assert device == "meta" or all(torch.equal(a, b) for a, b in zip(before, snapshot_of(model), strict=True))
    assert all(isinstance(p, nn.Parameter) and not p.requires_grad for p in model.target.parameters())


def snapshot_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_a_call_that_writes_to_none_has_them_as_buffers_if_others_do() -> None:
    model, inputs = Followed(lambda m: None), (torch.randn(BATCH, DIM),)
    assert not any(b.parameter for b in capture(model, inputs).program.buffers)
    found = capture(model, inputs, written=["target.0.weight", "target.0.bias"]).program
    assert [(b.fqn, b.mutated) for b in found.buffers if b.parameter] == [("target.0.weight", False), ("target.0.bias", False)]


def test_what_the_first_call_alone_writes_to_a_frozen_parameter_is_refused() -> None:
    def started(m: Any) -> None:
        if not m.started:
            for old, new in pairs(m):
                old.data.copy_(new.data)
            m.started = True

    with pytest.raises(CaptureError, match=r"(?s)the first call of Followed computes target.*call the model once"):
        capture(Followed(started), (torch.randn(BATCH, DIM),))


def test_a_frozen_parameter_that_is_written_in_a_lower_precision_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)frozen parameter target.0.weight, which rests in torch.float32.*rounded away.*autocast"):
        capture(Followed(moved_in_place), (torch.randn(BATCH, DIM),), dtype=torch.bfloat16)


def test_a_parameter_that_is_written_to_unless_it_is_traced_is_refused() -> None:
    def moved(m: Any) -> None:
        if not torch.compiler.is_compiling():
            moved_in_place(m)

    with pytest.raises(CaptureError, match=r"writes to target.0.weight, .*and a trace of it does not"):
        capture(Followed(moved), (torch.randn(BATCH, DIM),))


def test_a_gradient_that_the_forward_reads_is_refused() -> None:
    class Reading(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sum() * (1.0 if self.weight.grad is None else 2.0)

    with pytest.raises(CaptureError, match=r"(?s)reads the gradient of a parameter.*self.weight.grad is None"):
        capture(Reading(DIM, DIM), (torch.randn(BATCH, DIM),))
