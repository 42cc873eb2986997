"""What the forward reads beyond the model is watched: classes, contexts, threads, what functions keep, objects of unusual kinds."""

from __future__ import annotations

import contextvars
import functools
import importlib
import itertools
import logging
import multiprocessing
import os
import random
import re
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from queue import Queue, SimpleQueue
from types import CellType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.guards import Guards
from autopar.errors import CaptureError
from benchmarks.trap_programs.found import ForEachObject, Once, Single

pytestmark = pytest.mark.pure

DIM = 4


class ReadsTheEnvironment(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() * float(os.environ.get("A_SCALE_OF_A_TEST", "1"))


def test_an_environment_that_the_forward_reads_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    guards, unread = Guards.take(ReadsTheEnvironment()), Guards.take(nn.Linear(DIM, DIM))
    monkeypatch.setenv("A_SCALE_OF_A_TEST", "0.5")
    assert "os.environ" in str(guards.changed()) and unread.changed() is None
    monkeypatch.delenv("A_SCALE_OF_A_TEST")
    assert guards.changed() is None


class Options:
    scale = 1.0
    table = {"a": 1.0}  # noqa: RUF012

    def now(self) -> float:
        return self.scale * FACTOR


class Further(Options):
    pass


FACTOR = 1.0
CONTEXT = contextvars.ContextVar("context", default=1.0)
THREAD = threading.local()


class ReadsElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = Further()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = 2.0 if torch.are_deterministic_algorithms_enabled() else Options.table["a"]
        return x.mean() * found * self.options.now() * CONTEXT.get() * THREAD.scale


def test_classes_objects_contexts_and_threads_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    THREAD.scale = 1.0
    guards, unread = Guards.take(ReadsElsewhere()), Guards.take(nn.Linear(DIM, DIM))
    changes: list[tuple[Callable[[], Any], str]] = [
        (lambda: monkeypatch.setattr(Options, "scale", 0.5), "Options.scale from 1.0 to 0.5"),
        (lambda: monkeypatch.setattr(Further, "scale", 0.5, raising=False), "Further.scale from nothing to 0.5"),
        (lambda: monkeypatch.setattr(Options, "now", lambda _: 1.0), "Options.now"),
        (lambda: monkeypatch.setitem(Options.table, "a", 2.0), "Options.table['a'] from 1.0 to 2.0"),
        (lambda: monkeypatch.setitem(globals(), "FACTOR", 2.0), "FACTOR of"),
        (lambda: monkeypatch.setattr(THREAD, "scale", 2.0), f"THREAD of {__name__}.scale from 1.0 to 2.0"),
    ]
    for change, said in changes:
        assert guards.changed() is None
        change()
        assert said in str(guards.changed())
        monkeypatch.undo()
    token = CONTEXT.set(0.5)
    assert "CONTEXT of" in str(guards.changed()) and ".get() from 1.0 to 0.5" in str(guards.changed())
    CONTEXT.reset(token)
    assert guards.changed() is None
    torch.use_deterministic_algorithms(True)
    try:
        assert "torch.are_deterministic_algorithms_enabled()" in str(guards.changed()) and unread.changed() is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert guards.changed() is None


def _own_kinds() -> dict[str, Any]:
    class Word(str):
        pass

    class Number(float):
        pass

    class Kind(Enum):
        ONE = 1

    class Pair(NamedTuple):
        a: int

    class OwnPair(Pair):
        pass

    class Slotted(list[int]):
        __slots__ = ("rate",)

    bases = {
        "a dict": dict, "a list": list, "a tuple": tuple, "a set": set, "a deque": deque, "an ordered dict": OrderedDict,
    }  # fmt: skip
    made = {name: type("Own", (base,), {"__module__": __name__})() for name, base in bases.items()}
    long = type("Own", (list,), {"__module__": __name__})([1.0] * 3000)
    made |= {"a string": Word("a"), "a number": Number(1.0), "a member": Kind.ONE, "a named tuple": OwnPair(1)}
    return made | {"a long list": long, "a list with a slot": Slotted([1])}


@pytest.mark.parametrize("what", _own_kinds())
def test_attributes_of_what_is_of_a_builtin_kind_are_watched(what: str) -> None:
    one = _own_kinds()[what]

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.setting, self.within = one, {"deep": [one]}

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * getattr(self.setting, "rate", 1.0)

    guards = Guards.take(Holding())
    assert guards.changed() is None
    if what != "a list with a slot":
        one.note = 1
        assert guards.changed() is None
    one.rate = 2.0
    assert "setting.rate from nothing to 2.0" in str(guards.changed())
    guards = Guards.take(Holding())
    one.rate = 3.0
    assert "setting.rate from 2.0 to 3.0" in str(guards.changed())
    guards = capture(Counting(one), (torch.ones(2, DIM),)).guards
    assert guards is not None and [leaf.name for leaf in guards.varied.leaves] == ["setting.rate"] and one.rate == 3.0
    guards.varied.move((3.0,))
    assert one.rate == 4.0 and guards.changed() is None and "setting.rate" in str(guards.varied.changed((99.5,)))


class Counting(nn.Module):
    """Its forward counts in an attribute, and computes with that."""

    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.linear, self.setting = nn.Linear(DIM, DIM), setting

    def forward(self, x: Tensor) -> Tensor:
        self.setting.rate += 1.0
        return self.linear(x).sum() * (1.0 if self.setting.rate < 100 else 2.0)


@functools.lru_cache
def config_of(name: str) -> SimpleNamespace:
    return SimpleNamespace(rate=1.0, name=name, calls=0)


@functools.cache
def tensors_of(name: str) -> SimpleNamespace:
    return SimpleNamespace(table=torch.ones(2), name=name)


@functools.cache
def table_of(name: str, *, size: int = 1) -> dict[str, float]:
    return {"rate": 1.0 * size}


class ReadsWhatIsKept(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum() * config_of("a").rate * table_of("b", size=1)["rate"] + tensors_of("a").table.sum()


@pytest.mark.parametrize("before", [True, False], ids=["kept before", "made by the first call"])
@pytest.mark.parametrize("data", [True, False])
def test_what_a_function_keeps_is_watched(before: bool, data: bool) -> None:
    for function in (config_of, table_of, tensors_of):
        function.cache_clear()
    if before:
        ReadsWhatIsKept(DIM, DIM)(torch.ones(2, DIM))
    with torch.device("cpu" if data else "meta"):
        guards = capture(ReadsWhatIsKept(DIM, DIM), (torch.ones(2, DIM),)).guards
    assert guards is not None and guards.changed() is None
    config_of("of the loop").rate, table_of("of the loop")["rate"] = 5.0, 5.0
    config_of("a").note = "not read"
    assert type(tensors_of("a").table) is Tensor
    tensors_of("a").table = torch.ones(2)  # tensors of a trace are others
    assert guards.changed() is None
    for change, says in (
        (lambda value: setattr(config_of("a"), "rate", value), r"what config_of of .* keeps for \('a'\).rate from 1.0 to 2.0"),
        (lambda value: table_of("b", size=1).update(rate=value), r"what table_of of .* keeps for \('b', \*, 'size', 1\)\['rate'\] from"),
    ):
        change(2.0)
        assert re.search(says, str(guards.changed()))
        change(1.0)
        assert guards.changed() is None
    for function in (config_of, table_of):  # which may give others now
        function.cache_clear()
    assert guards.changed() is None
    config_of("a").rate = 3.0
    assert "('a').rate from 1.0 to 3.0" in str(guards.changed())


def test_what_each_call_changes_in_what_a_function_keeps_is_refused() -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            config_of("a").calls += 1
            return super().forward(x).sum() * (1.0 if config_of("a").calls < 99 else 2.0)

    config_of.cache_clear()
    with pytest.raises(CaptureError, match=r"keeps for \('a'\).calls from \d to \d"):
        capture(Counting(DIM, DIM), (torch.ones(2, DIM),))


class Rating(Once):
    @property
    def factor(self) -> float:
        return Factors.factor


class Factors:
    factor = 1.0


class OneByItsClass(metaclass=Rating):
    def __init__(self) -> None:
        self.rate, self.note = 1.0, 0


class Sharing:
    shared: ClassVar[dict[str, float]] = {"rate": 1.0}

    def __init__(self) -> None:
        self.__dict__ = self.shared
        self.rate: float


class Defaulting(dict[str, float]):
    default = 1.0

    def __missing__(self, key: str) -> float:
        return Defaulting.default


OF_A_TEST = sys.modules["settings_of_a_test"] = ModuleType("settings_of_a_test")
FOUND_BY_A_CALL: dict[str, tuple[Callable[[], float], Callable[[float], object]]] = {
    "one by __new__": (lambda: Single().rate, lambda value: setattr(Single(), "rate", value)),
    "one by its class's class": (lambda: OneByItsClass().rate, lambda value: setattr(OneByItsClass(), "rate", value)),
    "property of its class's class": (lambda: OneByItsClass.factor, lambda value: setattr(Factors, "factor", value)),
    "objects that share": (lambda: Sharing().rate, lambda value: Sharing.shared.update(rate=value)),
    "default of a dict": (lambda: Defaulting()["a"], lambda value: setattr(Defaulting, "default", value)),
    "import by name": (lambda: importlib.import_module("settings_of_a_test").rate, lambda value: setattr(OF_A_TEST, "rate", value)),
    "modules by name": (lambda: sys.modules["settings_of_a_test"].rate, lambda value: setattr(OF_A_TEST, "rate", value)),
    "thread": (lambda: threading.current_thread().rate, lambda value: setattr(threading.current_thread(), "rate", value)),  # type: ignore[attr-defined]
    "logger": (lambda: float(logging.getLogger("a_logger").level), lambda value: logging.getLogger("a_logger").setLevel(int(10 * value))),
    "errors of numpy": (
        lambda: {"warn": 1.0, "raise": 2.0}[numpy.geterr()["over"]], lambda value: numpy.seterr(over="warn" if value == 1 else "raise")
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND_BY_A_CALL)
def test_settings_that_are_found_by_a_call_are_watched(what: str) -> None:
    find, put = FOUND_BY_A_CALL[what]

    class Holding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum() * find()

    put(1.0)
    guards = capture(Holding(DIM, DIM), (torch.ones(2, DIM),)).guards
    try:
        assert guards is not None and guards.changed() is None
        if what == "one by its class's class":
            OneByItsClass().note = 1
            assert guards.changed() is None
        put(2.0)
        assert guards.changed() is not None
        put(1.0)
        assert guards.changed() is None
    finally:
        put(1.0)
        vars(threading.current_thread()).pop("rate", None)


class Described:
    rate = ForEachObject()
    inner: float
    note: int

    @classmethod
    def factor(cls) -> float:
        return 1.0


class OfUnusualKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.described, self.ordered, self.table = Described(), OrderedDict(a=1.0, b=2.0, c=3.0), {"a": 1.0, "b": 2.0}
        self.shared, self.memory, self.queue = multiprocessing.Array("d", [1.0]), memoryview(bytearray(b"ab")), SimpleQueue[int]()
        self.act = lambda x: x * 1.0
        self.cell = CellType(1.0)
        self.weak = weakref.WeakValueDictionary({"a": self.described})

    def forward(self, x: Tensor) -> Tensor:
        numbers = [self.described.rate, self.described.factor(), next(iter(self.ordered.values())), next(iter(self.table)) == "a"]
        numbers += [self.shared[0], self.memory[0], self.queue.qsize(), self.weak["a"].rate, self.cell.cell_contents]
        return self.act(x).sum() * sum(numbers)


OF_UNUSUAL_KINDS: dict[str, tuple[Callable[[OfUnusualKinds], object], str]] = {
    "behind a descriptor": (lambda m: setattr(m.described, "rate", 2.0), r"Described.rate.values.data"),
    "class method": (lambda m: setattr(Described, "factor", classmethod(lambda cls: 2.0)), "Described.factor from classmethod to another"),
    "order": (lambda m: m.ordered.move_to_end("a"), r"ordered.keys\(\) from 3 keys in an order to another 3 keys in an order"),
    "order of a dict": (lambda m: m.table.update(a=m.table.pop("a")), r"table.keys\(\) from 2 keys in an order to another"),
    "array of processes": (lambda m: m.shared.__setitem__(0, 2.0), "shared from .* of 1 to another"),
    "memory": (lambda m: m.memory.__setitem__(0, 0), "memory from memory of 2 bytes to another"),
    "queue": (lambda m: m.queue.put(1), "queue from queue of 0 to queue of 1"),
    "code": (lambda m: setattr(m.act, "__code__", (lambda x: x * 2.0).__code__), "the code of OfUnusualKinds.* from code to another"),
    "cell": (lambda m: setattr(m.cell, "cell_contents", 2.0), "cell from 1.0 to 2.0"),
    "weak reference": (lambda m: m.weak.__setitem__("a", m.weak.setdefault("b", Described())), "weak.data"),
}


@pytest.mark.parametrize("what", OF_UNUSUAL_KINDS)
def test_settings_of_unusual_kinds_are_watched(what: str) -> None:
    change, says = OF_UNUSUAL_KINDS[what]
    model, factor = OfUnusualKinds(), vars(Described)["factor"]
    guards = Guards.take(model)
    try:
        for _ in range(2):
            assert guards.changed() is None
        change(model)
        found = guards.changed()
        assert found is not None and re.search(says, found), found
    finally:
        Described.factor = factor  # type: ignore[method-assign]


def _in_a_queue(kind: type[Any], one: object) -> Any:
    queue = kind()
    queue.put(one)
    return queue


WITHOUT_A_PLACE: dict[str, Callable[[Any], Any]] = {
    "set": lambda one: {one, 1},
    "frozen set": lambda one: frozenset({one}),
    "key": lambda one: {one: 1.0, "a": 2.0},
    "weak set": lambda one: weakref.WeakSet([one]),
    "weak key": lambda one: weakref.WeakKeyDictionary({one: 1.0}),
    "queue": lambda one: _in_a_queue(Queue, one),
    "simple queue": lambda one: _in_a_queue(SimpleQueue, one),
    "array": lambda one: numpy.array([one, None], dtype=object),
}


@pytest.mark.parametrize("what", WITHOUT_A_PLACE)
def test_objects_that_have_no_place_of_their_own_are_watched(what: str) -> None:
    one = Described()
    holding = WITHOUT_A_PLACE[what](one)

    class Holding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * next(found.inner for found in holding if isinstance(found, Described))

    one.inner = 1.0
    guards = Guards.take(Holding())
    assert guards.changed() is None
    one.note = 1
    assert guards.changed() is None
    one.inner = 2.0
    assert re.search(r"holding, which .* closes over.*\{Described \d+\}.inner from 1.0 to 2.0", str(guards.changed()))


def test_the_order_of_a_dict_is_put_back() -> None:
    class Reordering(nn.Linear):
        table = OrderedDict(a=1.0, b=2.0)

        def forward(self, x: Tensor) -> Tensor:
            self.table.move_to_end("a")
            return super().forward(x).sum()

    model = Reordering(DIM, DIM)
    capture(model, (torch.ones(2, DIM),))
    assert list(model.table) == ["a", "b"]


def test_what_the_loop_takes_from_is_no_change() -> None:
    """The forward asks whether there are an iterator and a generator, and takes from neither."""

    class Holding(nn.Linear):
        def __init__(self) -> None:
            super().__init__(DIM, DIM)
            self.batches, self.draws, self.counter, self.rate = iter(range(9)), numpy.random.default_rng(0), itertools.count(), [1.5]
            self.seeds = random.Random(0)

        def forward(self, x: Tensor) -> Tensor:
            there = [self.batches, self.draws, self.counter, self.seeds]
            return super().forward(x).sum() * self.rate[0] * (1.0 if None not in there else 2.0)

    model = Holding()
    guards = capture(model, (torch.ones(2, DIM),)).guards
    assert guards is not None
    for _ in range(3):
        next(model.batches), next(model.counter), model.draws.random(), model.seeds.random()
        model.rate = [1.5]  # another list, which is looked into
        assert guards.changed() is None
    model.draws = numpy.random.default_rng(0)
    assert guards.changed() is None
    model.batches = None  # type: ignore[assignment]
    assert "batches from iterator (range_iterator) to None" in str(guards.changed())


def test_a_slot_that_the_forward_fills_is_empty_again() -> None:
    class Slotted:
        __slots__ = ("scale",)

    class Filling(nn.Linear):
        def __init__(self) -> None:
            super().__init__(DIM, DIM)
            self.slotted = Slotted()

        def forward(self, x: Tensor) -> Tensor:
            self.slotted.scale = 2.0
            return super().forward(x).sum()

    model = Filling()
    capture(model, (torch.ones(2, DIM),))
    assert not hasattr(model.slotted, "scale")
