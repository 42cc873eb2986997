"""Programs whose forward finds a setting where one would not look: an attribute of a dict, what a function keeps, a module by its name."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from benchmarks._traps_kit import HIDDEN, Compile, Logits, Results, batch, program, seeded, sgd, state, train
from benchmarks.trap_programs.elsewhere import Scaled

KIND = "elsewhere"


def _annealed(compile: Compile, find: Callable[[], float], put: Callable[[float], object]) -> Results:
    """Trained with a setting that is another in each step."""
    put(1.0)
    model = compile(seeded(Scaled, find), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step in range(3):
        losses += train(model, optimizer, inputs=[batch(step)])
        put(1.5 + step)
    return {"losses": losses, "state": state(model)}


class Rates(dict[str, float]):
    rate = 1.0


class Name(str):
    rate = 1.0


@program(KIND)
def attribute_of_a_dict(compile: Compile) -> Results:
    rates = Rates(a=1.0)
    return _annealed(compile, lambda: rates.rate * rates["a"], lambda value: setattr(rates, "rate", value))


@program(KIND)
def attribute_of_a_string(compile: Compile) -> Results:
    names: list[Any] = [Name("a")]
    return _annealed(compile, lambda: names[0].rate, lambda value: setattr(names[0], "rate", value))


@functools.lru_cache
def settings() -> SimpleNamespace:
    return SimpleNamespace(rate=1.0)


@functools.cache
def rates_of(name: str) -> dict[str, float]:
    return {"rate": 1.0, "name": float(len(name))}


@program(KIND)
def settings_that_a_function_keeps(compile: Compile) -> Results:
    """Made by the first call of `settings`, which is the forward's or the loop's."""
    settings.cache_clear()
    return _annealed(compile, lambda: settings().rate, lambda value: setattr(settings(), "rate", value))


@program(KIND)
def settings_that_the_forward_makes(compile: Compile) -> Results:
    """Nobody called `settings` before, and the loop forgets them once."""
    settings.cache_clear()
    model = compile(seeded(Scaled, lambda: settings().rate), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step in range(4):
        losses += train(model, optimizer, inputs=[batch(step)])
        settings.cache_clear() if step == 1 else setattr(settings(), "rate", 1.5 + step)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def table_that_a_function_keeps(compile: Compile) -> Results:
    return _annealed(compile, lambda: rates_of("a")["rate"], lambda value: rates_of("a").update(rate=value))


class Single:
    made: ClassVar[Any] = None
    rate = 1.0

    def __new__(cls) -> Any:
        if cls.made is None:
            cls.made = super().__new__(cls)
        return cls.made


@program(KIND)
def object_of_which_there_is_one(compile: Compile) -> Results:
    return _annealed(compile, lambda: Single().rate, lambda value: setattr(Single(), "rate", value))


class Once(type):
    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in Once.made:
            Once.made[cls] = super().__call__(*args)
        return Once.made[cls]


class Configuration(metaclass=Once):
    def __init__(self) -> None:
        self.rate = 1.0


@program(KIND)
def object_that_its_metaclass_gives(compile: Compile) -> Results:
    return _annealed(compile, lambda: Configuration().rate, lambda value: setattr(Configuration(), "rate", value))


RATES = sys.modules["rates_of_a_program"] = ModuleType("rates_of_a_program")


@program(KIND)
def module_by_its_name(compile: Compile) -> Results:
    return _annealed(compile, lambda: sys.modules["rates_of_a_program"].rate, lambda value: setattr(RATES, "rate", value))


class ForEachObject:
    """A descriptor that keeps a value for each object."""

    def __init__(self) -> None:
        self.values = weakref.WeakKeyDictionary[Any, float]()

    def __get__(self, one: Any, cls: type) -> float:
        return self.values.get(one, 1.0)

    def __set__(self, one: Any, value: float) -> None:
        self.values[one] = value


class Rated:
    rate = ForEachObject()


@program(KIND)
def rate_behind_a_descriptor(compile: Compile) -> Results:
    rated = Rated()
    return _annealed(compile, lambda: rated.rate, lambda value: setattr(rated, "rate", value))


@program(KIND)
def first_of_an_ordered_dict(compile: Compile) -> Results:
    """The loop moves another to the front."""
    rates = OrderedDict(a=1.0, b=0.5, c=2.0)
    return _annealed(compile, lambda: next(iter(rates.values())), lambda _: rates.move_to_end(next(iter(rates))))


@program(KIND)
def array_that_processes_share(compile: Compile) -> Results:
    rates = multiprocessing.Array("d", [1.0])
    return _annealed(compile, lambda: rates[0], lambda value: rates.__setitem__(0, value))


def _given() -> float:
    return 1.0


@program(KIND)
def function_of_other_code(compile: Compile) -> Results:
    """As what reloads code while it runs has it."""
    codes = {1.0: _given.__code__, 1.5: (lambda: 1.5).__code__, 2.5: (lambda: 2.5).__code__, 3.5: (lambda: 3.5).__code__}
    try:
        return _annealed(compile, _given, lambda value: setattr(_given, "__code__", codes[value]))
    finally:
        _given.__code__ = codes[1.0]


class Stage:
    rate = 1.0


@program(KIND)
def objects_in_a_set(compile: Compile) -> Results:
    stages = {Stage()}
    return _annealed(compile, lambda: sum(one.rate for one in stages), lambda value: [setattr(one, "rate", value) for one in stages])


@program(KIND)
def objects_as_keys(compile: Compile) -> Results:
    stages = {Stage(): 1.0}
    return _annealed(compile, lambda: sum(one.rate for one in stages), lambda value: [setattr(one, "rate", value) for one in stages])


def _retuned(compile: Compile, model: nn.Module, changes: Mapping[int, Callable[[], object]], steps: int) -> Results:
    """Trained by a loss outside, with a change after some of the steps."""
    made = compile(model, example_inputs=(batch()[0],))
    optimizer, losses = sgd(made), []
    for step in range(steps):
        x, y = batch(step)
        loss = F.cross_entropy(made(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        changes.get(step, list)()
    return {"losses": losses, "state": state(made)}


def _masked(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight * layer.mask * layer.settings["scale"], layer.bias) * layer.options.rate  # type: ignore[operator,index]


@program(KIND, plans=("dp2tp2",))
def settings_on_a_layer_of_torch(compile: Compile) -> Results:
    """A mask, a dict and an object on a layer of torch's own, whose forward is the user's; and a temperature, by which a hook divides."""
    model = seeded(Logits)
    up, head = model.blocks[0].up, model.head
    up.mask, up.settings, up.options = torch.ones_like(up.weight), {"scale": 1.0}, SimpleNamespace(rate=1.0)
    up.forward = MethodType(_masked, up)
    head.temperature = torch.ones(())
    head.register_forward_hook(lambda layer, given, made: made / layer.temperature)

    def rate() -> None:
        up.settings["scale"] = up.options.rate = 0.5

    changes = {
        1: lambda: setattr(up, "mask", (torch.arange(up.mask.numel()).view_as(up.mask) % 3 > 0).to(up.mask.dtype)),
        2: lambda: up.mask.mul_(0.5),
        3: rate,
        4: lambda: setattr(head, "temperature", head.temperature * 2),
    }
    return _retuned(compile, model, changes, 6)


class _Set(nn.Module):
    """A layer of the user's, with settings in a dict and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.3)
        self.settings, self.mask = {"scale": 1.0}, torch.ones(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight) * self.mask * self.settings["scale"]


@program(KIND)
def settings_of_a_parametrised_layer(compile: Compile) -> Results:
    """What is parametrised is of a class that torch makes of the user's."""

    def build() -> nn.Module:
        model = Logits()
        model.blocks = nn.Sequential(weight_norm(_Set()), spectral_norm(_Set()))
        return model

    model = seeded(build)
    changes = {
        1: lambda: model.blocks[0].settings.update(scale=0.5),
        2: lambda: setattr(model.blocks[1], "mask", torch.arange(HIDDEN) % 2 * 1.0),
    }
    return _retuned(compile, model, changes, 5)
