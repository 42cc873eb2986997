"""Guards notice whatever capture froze and a user may change later, say what it was and is, and cost little."""

from __future__ import annotations

import contextvars
import functools
import gc
import importlib
import itertools
import logging
import math
import multiprocessing
import operator
import os
import random
import re
import sys
import threading
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from enum import Enum
from itertools import repeat
from queue import Queue, SimpleQueue
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.guards import Guards
from autopar.capture.state import State
from autopar.errors import CaptureError
from autopar.run.grad_mode import with_gradients
from benchmarks.trap_programs.found import ForEachObject

pytestmark = pytest.mark.pure

DIM = 4
TEMPERATURE = 2.0
SETTINGS: dict[str, Any] = {"scale": 1.0, "sizes": [1, 2]}
TABLE = torch.ones(DIM)


def helper(x: Tensor) -> Tensor:
    return x / TEMPERATURE * SETTINGS["scale"] + TABLE


class Child(nn.Linear):
    kind = "child"

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.rate, self.names, self.pair = 0.5, {"a", "b"}, (1, (2.0, "x"))

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        rate = self.rate if "a" in self.names and self.kind == "child" else self.pair[0]
        return super().forward(x) * rate + shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child, self.drop = Child(), nn.Dropout(0.1)
        self.weights, self.steps, self.history = torch.ones(DIM), 0, [1, [2, 3]]
        self.config = SimpleNamespace(alpha=1.0, inner=SimpleNamespace(beta=[1.0]))
        self.table: dict[str, Any] = {"a": {"b": 1}}
        self.register_buffer("seen", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = helper(self.drop(self.child(x))) * self.config.alpha * getattr(self, "optional", 1.0) * self.weights + self.steps
        return x * self.history[0] * self.table["a"]["b"] * self.config.inner.beta[0]


def build() -> tuple[Net, Callable[[Tensor], Tensor], Guards, dict[str, Any]]:
    model, held = Net(), {"classes": torch.ones(DIM), "margin": 1.0}
    margin, classes, options = 1.0, torch.ones(DIM), held

    def loss(out: Tensor, smoothing: float = 0.1) -> Tensor:
        return (out * classes * options["margin"]).sum() * margin * smoothing

    return model, loss, Guards.take(model, loss), held


def set_global(name: str, value: Any) -> Callable[[Net, Any], None]:
    return lambda model, loss: globals().__setitem__(name, value)


def cell(loss: Any, name: str) -> Any:
    return loss.__closure__[loss.__code__.co_freevars.index(name)]


def set_cell(name: str, value: Any) -> Callable[[Net, Any], None]:
    return lambda model, loss: setattr(cell(loss, name), "cell_contents", value)


CHANGES: dict[str, tuple[Callable[[Net, Any], object], str]] = {
    "number": (lambda m, f: setattr(m.child, "rate", 0.25), "child.rate from 0.5 to 0.25"),
    "number of torch's module": (lambda m, f: setattr(m.drop, "p", 0.2), "drop.p from 0.1 to 0.2"),
    "type": (lambda m, f: setattr(m, "steps", False), "steps from 0 to False"),
    "plain tensor": (lambda m, f: setattr(m, "weights", torch.ones(DIM)), "weights from tensor .* to another tensor"),
    "plain tensor in place": (lambda m, f: m.weights.mul_(2), "weights, written in place"),
    "plain tensor that is trained": (lambda m, f: m.weights.requires_grad_(), "weights, .* given another requires_grad"),
    "list": (lambda m, f: m.history.append(1), "history from list of 2 to list of 3"),
    "list in a list": (lambda m, f: m.history[1].__setitem__(0, 9), r"history\[1\]\[0\] from 2 to 9"),
    "dict in a dict": (lambda m, f: m.table["a"].update(b=2), r"table\['a'\]\['b'\] from 1 to 2"),
    "set": (lambda m, f: m.child.names.add("c"), "child.names"),
    "tuple": (lambda m, f: setattr(m.child, "pair", (1, (2.0, "y"))), "child.pair"),
    "config": (lambda m, f: setattr(m.config, "alpha", 2.0), "config.alpha from 1.0 to 2.0"),
    "config, deep": (lambda m, f: m.config.inner.beta.__setitem__(0, 3.0), r"config.inner.beta\[0\] from 1.0 to 3.0"),
    "attribute removed": (lambda m, f: delattr(m, "steps"), "steps from 0 to nothing"),
    "attribute added that the code reads": (lambda m, f: setattr(m, "optional", 2.0), "optional from nothing to 2.0"),
    "class attribute": (lambda m, f: setattr(Child, "kind", "other"), "Child.kind from 'child' to 'other'"),
    "global": (set_global("TEMPERATURE", 3.0), "TEMPERATURE of .* from 2.0 to 3.0"),
    "global container": (lambda m, f: SETTINGS.update(scale=2.0), r"SETTINGS of .*\['scale'\] from 1.0 to 2.0"),
    "global tensor": (lambda m, f: TABLE.add_(1), "TABLE of .*, written in place"),
    "cell": (set_cell("margin", 2.0), "margin, which .*loss closes over from 1.0 to 2.0"),
    "tensor in a cell": (set_cell("classes", torch.ones(DIM)), "classes, which .*loss closes over"),
    "container in a cell": (lambda m, f: cell(f, "options").cell_contents.update(margin=3.0), r"options.*\['margin'\] from 1.0 to 3.0"),
    "default": (lambda m, f: setattr(f, "__defaults__", (0.2,)), "the defaults of .*loss from .0.1,. to .0.2,."),
    "keyword default": (
        lambda m, f: Child.forward.__kwdefaults__.update(shift=1.0),
        r"the keyword defaults of Child.forward\['shift'\] from 0.0 to 1.0",
    ),
    "submodule": (lambda m, f: setattr(m, "child", Child()), r"child \(the module\)"),
    "submodule added": (lambda m, f: m.add_module("more", nn.Identity()), "_modules from the names child, drop"),
    "parameter added": (lambda m, f: m.child.register_parameter("gain", nn.Parameter(torch.ones(1))), "child._parameters"),
    "buffer removed": (lambda m, f: delattr(m, "seen"), "_buffers"),
    "hook": (lambda m, f: m.child.register_forward_hook(lambda *_: None), "child._forward_hooks"),
    "pre-hook": (lambda m, f: m.drop.register_forward_pre_hook(lambda *_: None), "drop._forward_pre_hooks"),
    "backward hook": (lambda m, f: m.drop.register_full_backward_hook(lambda *_: None), "drop._backward_hooks"),
    "forward of an instance": (lambda m, f: setattr(m.drop, "forward", lambda x: x), "drop.forward"),
    "forward of a class": (lambda m, f: setattr(Child, "forward", nn.Linear.forward), "Child.forward"),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    forward, defaults = Child.forward, dict(Child.forward.__kwdefaults__ or {})
    yield
    Child.forward, Child.kind = forward, "child"  # type: ignore[method-assign]
    Child.forward.__kwdefaults__ = defaults
    globals().update(TEMPERATURE=2.0)
    SETTINGS.update(scale=1.0)


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_is_named(what: str) -> None:
    change, says = CHANGES[what]
    model, loss, guards, _ = build()
    assert guards.changed() is None
    change(model, loss)
    for _ in range(2):
        found = guards.changed()
        assert found is not None
        assert re.search(says, found), found


def test_a_hook_that_is_removed_is_a_change() -> None:
    model = Net()
    handle = model.child.register_forward_hook(lambda *_: None)
    guards = Guards.take(model)
    handle.remove()
    assert "child._forward_hooks" in str(guards.changed())


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Held:
    """Reaches its numbers in many ways."""

    scale = 1.0

    def __init__(self) -> None:
        self.inner = {"a": [Slotted()]}

    def method(self) -> float:
        return self.inner["a"][0].scale * self.scale


class HookOfMany:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, module: nn.Module, given: Any, found: Tensor) -> Tensor:
        return found * self.scale


class OfMany(nn.Module):
    @property
    def factor(self) -> float:
        return 1.0

    @staticmethod
    def static() -> float:
        return 1.0

    def __init__(self, held: Held, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        super().__init__()
        self.partial = functools.partial(helper)
        self.bound, self.reference, self.act, self.builtin = held.method, weakref.ref(held), torch.tanh, {"a": 1.0}.get
        self.array, self.wide, self.names = numpy.ones(2), numpy.ones(3), {"a"}
        self.optimizer, self.schedule = optimizer, schedule
        self.proxy, self.data = MappingProxyType({"a": 1.0}), UserDict(a=1.0)
        self.prior = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
        self.by_name, self.which = 1.0, "by_name"
        self.count, self.log, self.best = 0, [0.0], {"loss": 1.0}
        self.register_forward_hook(HookOfMany())

    def forward(self, x: Tensor) -> Tensor:
        numbers = [self.bound(), self.reference().scale, self.builtin("a"), self.array[0], self.proxy["a"], self.data["a"], self.factor]
        numbers += [self.optimizer.param_groups[0]["lr"], self.schedule.get_last_lr()[0], getattr(self, self.which), self.static()]
        x = self.act(self.partial(x)) + self.prior.log_prob(x) * ("a" in self.names)
        return torch.log(x.abs() + 1).sum() * sum(numbers)


@pytest.fixture
def of_many() -> tuple[OfMany, Held]:
    held = Held()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    return OfMany(held, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)), held


IN_MANY_WAYS: dict[str, tuple[Callable[[OfMany, Held], object], str]] = {
    "keyword of a partial": (lambda m, h: m.partial.keywords.update(k=1), "partial.keywords"),
    "partial": (lambda m, h: setattr(m, "partial", functools.partial(helper)), "partial from partial to another partial"),
    "slot, deep": (lambda m, h: setattr(h.inner["a"][0], "scale", 2.0), "scale from 1.0 to 2.0"),
    "attribute in front of the class's": (lambda m, h: setattr(h, "scale", 2.0), "scale from nothing to 2.0"),
    "bound method": (lambda m, h: setattr(m, "bound", Held().method), "bound from method to another method"),
    "function": (lambda m, h: setattr(m, "act", torch.relu), "act from builtin_function_or_method to another"),
    "function by another": (lambda m, h: setattr(m, "act", lambda x: x), "act from builtin_function_or_method to function"),
    "array in place": (lambda m, h: m.array.fill(2.0), "array from array of 16 bytes to another"),
    "set of as many": (lambda m, h: (m.names.clear(), m.names.add("b")), "names from set of 1 to another set of 1"),
    "learning rate": (lambda m, h: m.optimizer.param_groups[0].update(lr=0.2), r"optimizer.param_groups\[0\]\['lr'\] from 0.1 to 0.2"),
    "schedule": (lambda m, h: m.schedule._last_lr.__setitem__(0, 0.2), r"schedule._last_lr\[0\] from 0.1 to 0.2"),
    "behind a proxy": (lambda m, h: gc.get_referents(m.proxy)[0].update(a=2.0), r"proxy\['a'\] from 1.0 to 2.0"),
    "dict of the user": (lambda m, h: m.data.update(a=2.0), r"data.data\['a'\] from 1.0 to 2.0"),
    "distribution": (lambda m, h: m.prior.scale.fill_(2.0), "prior.scale, written in place"),
    "name in data": (lambda m, h: setattr(m, "by_name", 2.0), "by_name from 1.0 to 2.0"),
    "behind a method of a dict": (lambda m, h: m.builtin.__self__.update(a=2.0), r"builtin.__self__\['a'\] from 1.0 to 2.0"),
    "hook": (lambda m, h: setattr(m._forward_hooks[next(iter(m._forward_hooks))], "scale", 2.0), r"_forward_hooks\[0\].scale from 1.0 to"),
    "property": (lambda m, h: setattr(OfMany, "factor", property(lambda _: 2.0)), "OfMany.factor from property to another property"),
    "static method": (lambda m, h: setattr(OfMany, "static", staticmethod(lambda: 2.0)), "OfMany.static from staticmethod to another"),
}


@pytest.mark.parametrize("what", IN_MANY_WAYS)
def test_what_code_reaches_in_many_ways_is_watched(what: str, of_many: tuple[OfMany, Held], monkeypatch: pytest.MonkeyPatch) -> None:
    change, says = IN_MANY_WAYS[what]
    before = {name: vars(OfMany)[name] for name in ("factor", "static")}
    guards = Guards.take(of_many[0])
    try:
        for _ in range(2):
            assert guards.changed() is None
        change(*of_many)
        found = guards.changed()
        assert found is not None and re.search(says, found), found
    finally:
        for name, value in before.items():
            setattr(OfMany, name, value)


def test_what_no_code_reads_is_the_users_own_affair(of_many: tuple[OfMany, Held]) -> None:
    """A counter of steps, a history, the best loss: the forward reads none, though torch.log is called as one of them."""
    model, held = of_many
    guards = Guards.take(model)
    taken = []
    for step in range(3):
        model.count += 1
        model.log.append(0.5)
        model.best["loss"] = float(step)
        held.note = step  # type: ignore[attr-defined]
        model.wide.fill(step)
        before = guards._values
        assert guards.changed() is None
        taken.append(guards._values is not before)
    assert taken == [True, False, False], "a picture is taken once, for the attribute that is new"


class ByMadeNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate_1, self.other = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * getattr(self, f"rate_{x.dim()}")


class ByAllNames(ByMadeNames):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * sum(v for k, v in vars(self).items() if k.startswith("rate"))


class Lazily(nn.Module):
    """Makes an object of settings in the first call, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.held is None:
            self.held = SimpleNamespace(scale=1.0)
        return self.linear(x).sum() * self.held.scale


def test_what_the_first_call_makes_may_be_there_or_not_and_is_watched() -> None:
    model, x = Lazily(), torch.randn(2, DIM)
    guards = capture(model, (x,)).guards
    assert guards is not None and model.held is None and guards.changed() is None
    model(x)
    assert guards.changed() is None
    model.held.scale = 0.5
    assert "held.scale from nothing to 0.5" in str(guards.changed())
    model.held = None
    assert guards.changed() is None


def test_modules_that_functions_import_and_long_containers_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    table, array = [1.0] * 3000, numpy.ones(20000)

    def loss(out: Tensor) -> Tensor:
        from tests import test_guards as here

        return out.sum() * here.TEMPERATURE * table[0] * array[0]

    guards = Guards.take(nn.Linear(DIM, DIM), loss)
    monkeypatch.setattr(sys.modules["tests.test_guards"], "TEMPERATURE", 5.0)
    assert "TEMPERATURE of tests.test_guards from 2.0 to 5.0" in str(guards.changed())
    monkeypatch.undo()
    table[2999] = 0.0
    assert "table, which" in str(guards.changed()) and "from list of 3000 to another list of 3000" in str(guards.changed())
    table[2999] = 1.0
    assert guards.changed() is None
    array[19999] = 0.0
    assert "from array of 160000 bytes" in str(guards.changed())


@pytest.mark.parametrize("kind", [ByMadeNames, ByAllNames])
def test_where_code_makes_names_all_attributes_are_watched(kind: type[ByMadeNames]) -> None:
    model = kind()
    guards = Guards.take(model)
    model.rate_1 = 2.0
    assert "rate_1 from 1.0 to 2.0" in str(guards.changed())


def test_what_the_runtime_and_training_do_is_no_change() -> None:
    model, _, guards, _ = build()
    modes = guards.modes()
    model.child.eval()
    assert guards.modes() != modes
    model.child.weight = nn.Parameter(torch.zeros(2, 2))
    model.child._parameters["bias"] = nn.Parameter(torch.zeros(1), requires_grad=False)
    model._buffers["seen"] = torch.ones(2)
    model.child.weight.requires_grad_(False)
    model.child.weight.grad = None
    model.note = "of the user's own, which no code reads"  # type: ignore[assignment]
    assert guards.changed() is None


def test_equal_values_in_other_objects_are_no_change_and_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, guards, _ = build()
    model.child.rate = float("0.5")
    model.history = [1, [2, 3]]
    model.table = {"a": {"b": 1}}
    taken: list[int] = []
    take = Guards.changed.__globals__["State"].take
    monkeypatch.setattr(Guards.changed.__globals__["State"], "take", lambda *a: (taken.append(1), take(*a))[1])
    assert guards.changed() is None and guards.changed() is None
    assert len(taken) == 1
    model.history[1].append(4)  # the new objects are watched
    assert "history[1]" in str(guards.changed())


def test_slots_that_are_filled_and_emptied_are_changes() -> None:
    model = nn.CrossEntropyLoss()
    guards = Guards.take(model)
    model.weight = torch.ones(3)
    assert "_buffers from the names (none) to the names weight" in str(guards.changed())
    guards = Guards.take(model)
    model.weight = torch.zeros(3)
    assert guards.changed() is None
    model.weight = None
    assert "_buffers from the names weight to the names (none)" in str(guards.changed())
    layer = nn.Linear(2, 2, bias=False)
    guards = Guards.take(layer)
    layer.bias = nn.Parameter(torch.zeros(2))
    assert "_parameters from the names weight to the names weight, bias" in str(guards.changed())


def test_hooks_of_all_modules_are_watched() -> None:
    model = Net()
    guards = Guards.take(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "the hooks of all modules (forward_hooks) from 0 hooks to 1 hooks" in str(guards.changed())
    finally:
        handle.remove()
    assert guards.changed() is None


def test_the_default_dtype_is_watched() -> None:
    guards, before = Guards.take(Net()), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert "torch.get_default_dtype(), on which what its forward computes may depend: from torch.float32 to" in str(guards.changed())
    finally:
        torch.set_default_dtype(before)
    assert guards.changed() is None


class ReadsTheEnvironment(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() * float(os.environ.get("A_SCALE_OF_A_TEST", "1"))


def test_an_environment_that_the_forward_reads_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    guards, unread = Guards.take(ReadsTheEnvironment()), Guards.take(Net())
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
    guards, unread = Guards.take(ReadsElsewhere()), Guards.take(Net())
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
    with pytest.raises(CaptureError, match=r"setting.rate from 4.0 to 5.0"):
        capture(Counting(one), (torch.ones(2, DIM),))


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


class OneByNew:
    made: ClassVar[Any] = None
    rate = 1.0

    def __new__(cls) -> Any:
        if cls.made is None:
            cls.made = super().__new__(cls)
        return cls.made


class Once(type):
    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in Once.made:
            Once.made[cls] = super().__call__(*args)
        return Once.made[cls]

    @property
    def factor(cls) -> float:
        return Factors.factor


class Factors:
    factor = 1.0


class OneByItsClass(metaclass=Once):
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
    "one by __new__": (lambda: OneByNew().rate, lambda value: setattr(OneByNew(), "rate", value)),
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
        self.weak = weakref.WeakValueDictionary({"a": self.described})

    def forward(self, x: Tensor) -> Tensor:
        numbers = [self.described.rate, self.described.factor(), next(iter(self.ordered.values())), next(iter(self.table)) == "a"]
        numbers += [self.shared[0], self.memory[0], self.queue.qsize(), self.weak["a"].rate]
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
    class Filling(nn.Linear):
        def __init__(self) -> None:
            super().__init__(DIM, DIM)
            self.slotted = Slotted()
            del self.slotted.scale

        def forward(self, x: Tensor) -> Tensor:
            self.slotted.scale = 2.0
            return super().forward(x).sum()

    model = Filling()
    capture(model, (torch.ones(2, DIM),))
    assert not hasattr(model.slotted, "scale")


def test_settings_of_torch_that_code_reads_are_watched() -> None:
    def loss(out: Tensor) -> Tensor:
        return out.sum() * (2.0 if torch.backends.cudnn.benchmark else math.pi)

    guards, unread = Guards.take(nn.Linear(DIM, DIM), loss), Guards.take(nn.Linear(DIM, DIM))
    before = torch.backends.cudnn.benchmark
    assert guards.changed() is None
    with torch.backends.cudnn.flags(benchmark=not before):
        assert f"torch.backends.cudnn.benchmark from {before} to {not before}" in str(guards.changed()) and unread.changed() is None
    assert guards.changed() is None


class AsksForGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).square().mean()
        return y * 3.0 if torch.is_grad_enabled() else y + 1.0 if torch.is_inference_mode_enabled() else y


def test_a_forward_that_asks_whether_gradients_are_wanted_is_captured_for_each_answer() -> None:
    model, x = AsksForGradients(), torch.randn(4, 2)
    captured = capture(model, (x,))
    assert captured.guards is not None and captured.guards.changed() is None
    with torch.no_grad():
        assert "whether gradients are wanted" in str(captured.guards.changed())
        with with_gradients():
            other = capture(model, (x,))
        assert other.guards is not None and other.guards.changed() is None
    with torch.inference_mode():
        assert "to torch.inference_mode()" in str(other.guards.changed())
        with with_gradients():
            third = capture(model, (x,))
    assert len({str(c.program.ops) for c in (captured, other, third)}) == 3
    assert torch.is_grad_enabled.__module__ != "autopar.capture.around"
    plain = capture(nn.Sequential(nn.Linear(2, 2), nn.Flatten(0)), (x,), loss=torch.sum)
    with torch.no_grad():
        assert plain.guards is not None and plain.guards.changed() is None


def test_recurrent_layers_may_get_other_parameters() -> None:
    """They hold their parameters in a list beside the registry."""
    model = nn.Sequential(nn.GRU(DIM, DIM))
    guards = Guards.take(model)
    model[0].weight_ih_l0 = nn.Parameter(torch.zeros(1))
    assert guards.changed() is None
    model[0].num_layers = 2
    assert "0.num_layers from 1 to 2" in str(guards.changed())


def test_callable_objects_partials_and_methods_as_loss() -> None:
    class Weighted:
        def __init__(self) -> None:
            self.factor = 1.0

        def __call__(self, out: Tensor) -> Tensor:
            return out.sum() * self.factor * TEMPERATURE

        def method(self, out: Tensor) -> Tensor:
            return self(out)

    def partly(weight: list[float], out: Tensor) -> Tensor:
        return out.sum() * weight[0]

    owner, weight = Weighted(), [1.0]
    for loss in (owner, owner.method, functools.partial(partly, weight), functools.partial(owner.method)):
        guards = Guards.take(nn.Linear(DIM, DIM), loss)
        assert guards.changed() is None
        owner.factor, weight[0] = owner.factor * 2, weight[0] * 2
        assert guards.changed() is not None, loss


def test_a_module_as_loss() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(DIM), label_smoothing=0.1)
    guards = Guards.take(nn.Linear(DIM, DIM), criterion)
    criterion.label_smoothing = 0.2
    assert "label_smoothing from 0.1 to 0.2" in str(guards.changed())
    criterion.label_smoothing = 0.1
    assert guards.changed() is None
    criterion.weight.mul_(2)
    assert "loss.weight, written in place" in str(guards.changed())


def test_the_mode_of_a_module_beside_the_model_is_watched() -> None:
    beside, criterion = nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.1))
    model = Net()
    model.config.alpha = [beside]  # which the forward reads
    guards = Guards.take(model, criterion)
    for module, said in ((beside, "config.alpha[0].training from True to False"), (criterion, "loss.training from True to False")):
        module.eval()
        assert said in str(guards.changed())
        module.train()
        assert guards.changed() is None
    model.eval()  # of the model's own modules `modes` says it
    assert guards.changed() is None


def test_containers_that_load_on_access_are_not_asked() -> None:
    class Loading(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> object:
            raise AssertionError("asked")

        __iter__ = keys = values = items = __getitem__  # type: ignore[assignment]

    model = Net()
    model.table = Loading(a=1)
    guards = Guards.take(model)
    assert guards.changed() is None
    dict.__setitem__(model.table, "a", 2)
    assert "table['a'] from 1 to 2" in str(guards.changed())


def test_capture_hands_on_guards_that_hold() -> None:
    model, loss, _, held = build()
    captured = capture(model, (torch.randn(3, DIM),), loss=loss)
    assert captured.guards is not None
    assert captured.guards.changed() is None
    held["margin"] = 2.0
    assert "'margin'" in str(captured.guards.changed())


def test_an_unchanged_model_is_asked_without_a_call_into_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 modules: a few thousand comparisons by identity, and no picture is taken."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(500)))
    guards = Guards.take(model)
    monkeypatch.setattr(Guards.changed.__globals__["State"], "take", lambda *_: pytest.fail("a picture was taken"))
    assert guards.changed() is None
    entries = sum(len(x) for x in (guards._dicts, guards._containers, guards._lists, guards._cells, guards._owners, guards._registries))
    assert entries < 15 * 500
    assert all(map(operator.is_, map(dict.get, guards._dicts, guards._keys, repeat(None)), guards._values))


def test_what_pytest_calls_for_an_assert_is_not_the_models_code() -> None:
    """Names that it puts into a file lead to all that runs tests, and from there to capture itself."""

    class Checked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[-1] == DIM, x.shape
            return super().forward(x)

    code = State.take(Checked(DIM, DIM), torch.sum).reached
    assert {f.__qualname__.rpartition(".")[2] for f in code.functions} == {"forward"}
    assert {name for _, name, _ in code.scopes.values()} == {__name__}
