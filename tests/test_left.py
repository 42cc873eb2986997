"""What a call leaves in attributes and containers is left after a call of the program too, or stands there as left out; what only the first
call computes is refused; caches are neither."""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.guards import Guards
from autopar.capture.once import Followed
from autopar.errors import CaptureError
from autopar.run.left_out import LeftOut

pytestmark = pytest.mark.pure

BATCH, DIM = 4, 6
LAST: dict[str, Any] = {"size": 0}
TASK, COUNT = "none", 0


class Model(nn.Module):
    of_all = 0

    def __init__(self, fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("shift", torch.zeros(DIM))
        self.sizes: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=2)
        self.table: dict[str, Any] = {}
        self.options = SimpleNamespace(size=0)
        self.ready, self.made, self.number = False, None, 1.0
        self.calls, self.tally, self.shapes = 0, Counter[str](), set[Any]()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x).pow(2).sum()


def build(fn: Callable[[Any, Tensor], Tensor], **attributes: Any) -> tuple[Any, Guards]:
    torch.manual_seed(0)
    model = Model(fn)
    vars(model).update(attributes)
    guards = capture(model, (torch.randn(BATCH, DIM),)).guards
    assert guards is not None and guards.changed() is None
    return model, guards


def everything(m: Any, x: Tensor) -> Tensor:
    global TASK
    h = m.linear(x)
    m.size, m.pair, m.options.size, TASK = len(x), (tuple(x.shape), "a"), x.shape[1], "mean"
    m.sizes.clear()
    m.sizes.append([len(x), h])
    m.recent.extend((h, len(x)))
    m.table["h"], m.table["names"] = h, OrderedDict(a=1, b=[h])
    m.nothing, LAST["size"] = None, len(x)
    m.share = h.mean().item()
    return h


def left_out(value: object, path: str) -> bool:
    return isinstance(value, LeftOut) and path in repr(value)


def test_what_a_call_sets_is_there_after_it_and_tensors_are_left_out() -> None:
    global TASK
    model, guards = build(everything)
    assert not hasattr(model, "size") and model.sizes == [] and LAST["size"] == 0 and TASK == "none"
    try:
        for _ in range(2):  # also where the user has changed it
            guards.leave({})
            assert (model.size, model.pair, model.options.size, TASK) == (BATCH, ((BATCH, DIM), "a"), DIM, "mean")
            assert model.nothing is None and LAST["size"] == BATCH
            assert len(model.sizes) == 1 and model.sizes[0][0] == BATCH and left_out(model.sizes[0][1], "sizes[0][1]")
            assert left_out(model.recent[0], "recent[0]") and model.recent[1] == BATCH and model.recent.maxlen == 2
            assert left_out(model.table["h"], "table['h']") and list(model.table["names"]) == ["a", "b"]
            assert model.table["names"]["a"] == 1 and left_out(model.table["names"]["b"][0], "table['names']['b'][0]")
            assert left_out(model.share, "share")
            assert guards.changed() is None
            model.sizes.clear()
            model.size, model.table["h"], LAST["size"] = 0, 0, 3
    finally:
        TASK = "none"
        LAST["size"] = 0


def test_a_number_of_values_that_is_what_it_was_before_is_left_out() -> None:
    """The values of another batch make it another."""

    def counted(m: Any, x: Tensor) -> Tensor:
        many = x.abs() > 100
        m.ready = many.any().item()
        m.number, m.calls = 1 + many.float().mean().item(), many.sum().item()
        m.table["many"], m.sizes[:] = many.sum().item(), [many.sum().item()]
        return m.linear(x)

    model, guards = build(counted, table={"many": 0}, sizes=[0])
    guards.leave({})
    assert left_out(model.number, "number") and left_out(model.calls, "calls") and left_out(model.ready, "ready")
    assert left_out(model.table["many"], "table['many']") and left_out(model.sizes[0], "sizes[0]")


def test_a_text_of_a_value_is_left_out() -> None:
    def told(m: Any, x: Tensor) -> Tensor:
        h = m.linear(x)
        m.made = f"mean {h.mean().item():.3f}"
        return h

    model, guards = build(told)
    guards.leave({})
    assert left_out(model.made, "made")


def test_the_time_that_no_call_reads_is_left_out() -> None:
    """Nor what else is another number in each call by itself."""

    def timed(m: Any, x: Tensor) -> Tensor:
        m.started = time.perf_counter()
        h = m.linear(x)
        m.table["took"], m.number = time.perf_counter() - m.started, random.random()
        m.sizes.append(time.perf_counter())
        return h

    model, guards = build(timed)
    for _ in range(2):
        assert guards.changed() is None
        guards.leave({})
    assert left_out(model.started, "started") and left_out(model.table["took"], "table['took']") and left_out(model.number, "number")
    assert len(model.sizes) == 2 and left_out(model.sizes[0], "sizes[0]")


def test_the_time_that_the_next_call_reads_is_refused() -> None:
    def timed(m: Any, x: Tensor) -> Tensor:
        h = m.linear(x) * (1 if time.perf_counter() > m.number else 2)
        m.number = time.perf_counter()
        return h

    with pytest.raises(CaptureError, match="number"):
        build(timed)


class Key:
    """Keeps its hash, as classes of keys do: a large number."""

    def __init__(self) -> None:
        self.kept: int | None = None

    def __hash__(self) -> int:
        if self.kept is None:
            self.kept = 2**62 + 1
        return self.kept


KEYS = [Key()]


def test_a_hash_that_an_object_keeps_stays_with_it() -> None:
    def looked_up(m: Any, x: Tensor) -> Tensor:
        return m.linear(x) * (2 if KEYS[0] in {KEYS[0]: 1} else 1)

    try:
        _, guards = build(looked_up)
        guards.leave({})
        assert KEYS[0].kept == 2**62 + 1
    finally:
        KEYS[0].kept = None


def test_a_list_that_the_loop_puts_there_is_filled() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.sizes.clear()
        m.sizes.append(m.linear(x).mean())
        return m.linear(x)

    model, guards = build(forward)
    for _ in range(2):
        model.sizes = mine = []
        assert guards.changed() is None
        guards.leave({})
        assert model.sizes is mine and left_out(mine[0], "sizes[0]")


def cached(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        m.made, m.ready = torch.arange(DIM) * 0.5, True
    m.size = len(x)
    return m.linear(x * m.made)


def test_a_cache_and_its_flag_are_not_left() -> None:
    model, guards = build(cached)
    guards.leave({})
    assert (model.ready, model.made, model.size) == (False, None, BATCH)


def closing() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def counts(m: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return m.linear(x)

    return counts


def all_kinds(m: Any, x: Tensor) -> Tensor:
    global COUNT
    if m.calls is None:
        m.calls = 0
    m.calls += 1
    m.options.size = len(x) + m.options.size
    m.tally["train" if m.training else "eval"] += 1
    Model.of_all += 2
    COUNT += 1
    return m.linear(x)


def counts_of(m: Any) -> tuple[Any, ...]:
    return m.calls, m.options.size, dict(m.tally), Model.of_all, COUNT


def test_what_is_counted_and_not_read_is_added_to_by_each_call() -> None:
    global COUNT
    try:
        model, guards = build(all_kinds)
        assert counts_of(model) == (0, 0, {}, 0, 0)
        for n in (1, 2):
            guards.leave({})
            assert guards.changed() is None
            assert counts_of(model) == (n, BATCH * n, {"train": n}, 2 * n, n)
        model.calls, model.options.size, COUNT = 10, 0, 5  # as the loop wishes
        model.tally.clear()
        assert guards.changed() is None
        guards.leave({})
        assert counts_of(model) == (11, BATCH, {"train": 1}, 6, 6)
    finally:
        Model.of_all = COUNT = 0


def test_what_the_loop_puts_in_the_place_of_an_object_is_counted_and_left_in() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.options.size += len(x)
        m.table["of"]["calls"] += 1
        m.table["of"]["last"] = len(x)
        m.table["of"]["sizes"].add(len(x))
        return m.linear(x)

    def table() -> dict[str, Any]:
        return {"of": {"calls": 0, "sizes": set()}}

    class Holding(Model):
        def __init__(self) -> None:
            super().__init__(forward)
            self.table = table()

    torch.manual_seed(0)
    model = Holding()
    guards = capture(model, (torch.randn(BATCH, DIM),)).guards
    assert guards is not None
    for _ in range(2):
        model.options, model.table = SimpleNamespace(size=0), table()
        assert guards.changed() is None
        guards.leave({})
        assert model.options.size == BATCH and model.table == {"of": {"calls": 1, "last": BATCH, "sizes": {BATCH}}}


def test_a_count_in_a_closure_is_added_to() -> None:
    counts = closing()
    _, guards = build(counts)
    guards.leave({})
    guards.leave({})
    assert counts.__closure__ is not None and counts.__closure__[0].cell_contents == 2


def compared(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.linear(x) * (2 if m.calls > 3 else 1)


def compared_in_silence(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    try:
        factor = 2 if int(m.calls) > 3 else 1
    except TypeError:
        factor = 1
    return m.linear(x) * factor


def in_a_text(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    assert f"call {m.calls}" != "call 7"
    return m.linear(x)


def as_a_factor(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x) * max(1, m.calls - 3)
    m.calls += 1
    return h


def as_a_key(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.linear(x) * {3: 2.0}.get(m.calls, 1.0)


def in_two_places(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    m.number = m.calls
    return m.linear(x)


def in_a_hook(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    h = m.linear(x)
    h.register_hook(lambda grad: grad * m.calls if m.calls > 3 else grad)
    return h


def in_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    def body(h: Tensor) -> Tensor:
        m.calls += 1
        return m.linear(h).tanh()

    found: Tensor = torch.utils.checkpoint.checkpoint(body, m.linear(x), use_reentrant=False)
    return found


def test_counts_that_go_down_and_in_fractions_are_those_of_the_original() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.left -= 1
        m.seconds += 0.1
        m.seconds += 0.2  # whose rounding is not that of 0.3
        m.share = m.share - 0.7 + 2
        return m.linear(x)

    model, guards = build(forward, left=5, seconds=0.0, share=1.5)
    other = build(forward, left=5, seconds=0.0, share=1.5)[0]
    for n in range(1, 8):
        guards.leave({})
        other(torch.randn(BATCH, DIM))
        assert guards.changed() is None
        assert (model.left, model.seconds, model.share) == (other.left, other.seconds, other.share) and model.left == 5 - n


@pytest.mark.parametrize("change", [lambda t: t * 2.0, lambda t: t / 2 + 1, lambda t: 4 - t * 2, lambda t: t + t, lambda t: abs(t - 3)])
def test_a_number_that_changes_otherwise_than_by_adding_is_that_of_the_original(change: Callable[[float], float]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.share = change(m.share)
        return m.linear(x)

    model, guards = build(forward, share=1.5)
    expected = 1.5
    for _ in range(5):
        guards.varied.move(guards.varied.values(lambda path: None, lambda place: place.now()))
        expected = change(expected)
        assert model.share == expected and guards.changed() is None


def test_a_number_that_code_wants_to_know_holds_for_that() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.share = round(m.share + 0.6)
        return m.linear(x)

    model, guards = build(forward, share=1.5)
    guards.varied.move((1.5,))
    assert model.share == 2 and "share" in str(guards.varied.changed((2,)))  # which is whole from then on
    guards = build(forward, share=2)[1]
    assert guards.varied.changed((2,)) is None and "share" in str(guards.varied.changed((3,)))


@pytest.mark.parametrize("fn", [compared, compared_in_silence, in_a_text, as_a_factor, as_a_key])
def test_a_count_that_is_read_is_an_input(fn: Callable[[Any, Tensor], Tensor]) -> None:
    """And the program holds while what the code asks of it is answered as it was."""
    model, guards = build(fn)
    (leaf,) = guards.varied.leaves
    assert leaf.name == "calls" and model.calls == 0
    assert guards.varied.changed((0,)) is None
    assert any(guards.varied.changed((n,)) is not None for n in range(1, 8))


@pytest.mark.parametrize("fn", [in_two_places, in_a_hook, in_a_checkpoint])
def test_a_count_that_others_read_is_refused(fn: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"each call .*(calls|number) from 1 to 2.*\n  what to do: .*let the loop set it"):
        build(fn)


def test_what_a_call_adds_to_a_set_is_there_after_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.shapes.add(tuple(x.shape))
        return m.linear(x)

    model, guards = build(forward)
    guards.leave({})
    assert model.shapes == {(BATCH, DIM)} and guards.changed() is None


def test_a_set_that_a_call_makes_is_there_after_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.shapes, m.made = m.shapes | {len(x)}, frozenset(x.shape)
        return m.linear(x)

    model, guards = build(forward)
    guards.leave({})
    assert (model.shapes, model.made) == ({BATCH}, {BATCH, DIM}) and guards.changed() is None


def test_what_the_loop_does_with_what_is_left_does_not_last() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.made, m.table["names"] = [len(x), {"a"}], OrderedDict(sizes=[x.shape[1]])
        return m.linear(x)

    model, guards = build(forward)
    for _ in range(3):
        guards.leave({})
        assert guards.changed() is None
        assert model.made == [BATCH, {"a"}] and model.table == {"names": OrderedDict(sizes=[DIM])}
        kept: Any = model.made
        guards.leave({})
        assert model.made is kept  # nothing is made where nothing has changed
        kept.append(1)
        kept[1].add("b")
        model.table["names"]["sizes"].clear()


def test_a_set_that_marks_what_a_cache_has_is_not_left() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if len(x) not in m.shapes:
            m.table[len(x)] = torch.arange(DIM) * 0.5
            m.shapes.add(len(x))
        return m.linear(x * m.table[len(x)])

    model, guards = build(forward)
    guards.leave({})
    assert model.shapes == set() and model.table == {}


def test_what_stands_for_a_tensor_refuses_to_be_used() -> None:
    value: Any = LeftOut("a.last")
    uses: list[Callable[[], object]] = [
        lambda: value == 1, lambda: value != "a", lambda: value + 1, lambda: 1 + value, lambda: value.mean(), lambda: torch.mean(value),
        lambda: sum([value]), lambda: value[0], lambda: 1 in value, lambda: f"{value:.2f}", lambda: bool(value), lambda: value(),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(AttributeError, match=r"a\.last: the original's forward leaves there what it computes.*outputs='all'"):
            use()
    assert {value: 1} and "not left" in repr(value)


# -------------------------------------------------------------------------------------------------- what only the first call does
def mean_kept(m: Any, x: Tensor) -> Tensor:
    if m.made is None:
        m.made = x.mean(0).detach()
    return m.linear(x - m.made)


def mean_in_a_buffer(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        m.shift.copy_(x.mean(0))
        m.ready = True
    return m.linear(x - m.shift)


def buffer_assigned(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        m.shift, m.ready = x.detach().mean(0), True
    return m.linear(x - m.shift)


def norm_of_the_weights(m: Any, x: Tensor) -> Tensor:
    if m.made is None:
        m.made = m.linear.weight.detach().norm()
    return m.linear(x) / m.made


def number_kept(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        m.number, m.ready = x.std().item(), True
    return m.linear(x) / m.number


@pytest.mark.parametrize("fn", [mean_kept, mean_in_a_buffer, buffer_assigned, norm_of_the_weights, number_kept], ids=lambda f: f.__name__)
def test_what_the_first_call_computes_and_later_ones_keep_has_a_program_of_its_own(fn: Callable[..., Tensor]) -> None:
    """Which holds for no later call."""
    model = Model(fn)
    guards = capture(model, (torch.randn(BATCH, DIM),)).guards
    assert guards is not None and guards.changed() is None and not model.ready and model.made is None
    first, x = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    with torch.no_grad():
        model(first)
    assert guards.changed() is not None
    kept = model.made, model.shift.clone(), model.number
    captured = capture(model, (x,))  # which compares it with the model
    assert captured.guards is not None and captured.guards.changed() is None
    assert model.made is kept[0] and torch.equal(model.shift, kept[1]) and model.number == kept[2]


def zeros_of_its_shape(m: Any, x: Tensor) -> Tensor:
    if m.made is None:
        m.made = torch.zeros_like(x) + x.new_ones(DIM) + m.shift
    return m.linear(x) + m.made


def test_a_cache_of_shapes_and_constants_is_none_of_that() -> None:
    build(zeros_of_its_shape)


def test_what_is_computed_from_tensors_is_followed_through_memory() -> None:
    x, other, buffer = torch.randn(3), torch.randn(3), torch.zeros(3)
    with Followed([x]) as followed:
        a = (x * 2).detach() + 0
        b, c, d = (x + other)[1:].view(-1), other * 2, torch.empty_like(x).fill_(1)
        buffer[:2].copy_(x[:2])
    assert followed.has(b) and followed.has(buffer) and not followed.has(c) and not followed.has(d) and not followed.has(other)
    assert not followed.has(3) and followed.has(a)
