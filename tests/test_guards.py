"""Guards notice whatever capture froze and a user may change later, say what it was and is, and cost little."""

from __future__ import annotations

import functools
import gc
import math
import operator
import re
import sys
import weakref
from collections import UserDict
from collections.abc import Callable
from itertools import repeat
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.guards import Guards
from autopar.capture.state import State
from autopar.run.grad_mode import with_gradients

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
    "default": (lambda m, f: setattr(f, "__defaults__", (0.2,)), r"the defaults of .*loss\[0\] from 0.1 to 0.2"),
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
    kept, criterion.weight = criterion.weight, torch.full((DIM,), 3.0)
    assert "loss.weight" in str(guards.changed())
    criterion.weight = kept
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
