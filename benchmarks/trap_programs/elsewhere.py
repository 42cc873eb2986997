"""Programs whose forward reads what stands outside of the model, which then changes: classes of settings, objects, contexts, threads."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks._traps_kit import Compile, Net, Results, batch, program, seeded, sgd, state, train

KIND = "elsewhere"


class Scaled(Net):
    """Its loss is multiplied by what a function finds elsewhere."""

    def __init__(self, find: Callable[[], float]) -> None:
        super().__init__()
        self.find = find

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) * self.find()


def _twice(compile: Compile, model: nn.Module, change: Callable[[], Any], back: Callable[[], Any]) -> Results:
    """Trained before and after a change, and after it is taken back."""
    made = compile(model, example_inputs=batch())
    optimizer = sgd(made)
    losses = train(made, optimizer)
    change()
    try:
        losses += train(made, optimizer)
    finally:
        back()
    return {"losses": losses + train(made, optimizer), "state": state(made)}


class Settings:
    scale = 1.0
    weights: ClassVar[dict[str, float]] = {"loss": 1.0}

    @staticmethod
    def product() -> float:
        return Settings.scale * Settings.weights["loss"]


@program(KIND)
def class_of_settings_by_name(compile: Compile) -> Results:
    def find() -> float:
        return Settings.scale

    return _twice(compile, seeded(Scaled, find), lambda: setattr(Settings, "scale", 0.5), lambda: setattr(Settings, "scale", 1.0))


@program(KIND)
def class_of_settings_through_its_method(compile: Compile) -> Results:
    model = seeded(Scaled, Settings.product)
    return _twice(compile, model, lambda: Settings.weights.update(loss=0.5), lambda: Settings.weights.update(loss=1.0))


@program(KIND)
def class_of_settings_as_an_attribute(compile: Compile) -> Results:
    class Local(Settings):
        pass

    class Own(Net):
        settings = Local

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y) * self.settings.scale

    return _twice(compile, seeded(Own), lambda: setattr(Local, "scale", 0.25), lambda: delattr(Local, "scale"))


@program(KIND)
def class_of_settings_by_default(compile: Compile) -> Results:
    class Local:
        scale = 1.0

    def find(settings: type[Local] = Local) -> float:
        return settings.scale

    return _twice(compile, seeded(Scaled, find), lambda: setattr(Local, "scale", 0.25), lambda: setattr(Local, "scale", 1.0))


STEP = 0


class Schedule:
    """Of which an object is an attribute of the model: its method reads a global and the class."""

    last = 10

    def now(self) -> float:
        return 1.0 - STEP / self.last


@program(KIND)
def object_with_a_method_that_reads_a_global(compile: Compile) -> Results:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.schedule = Schedule()

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y) * self.schedule.now()

    def change() -> None:
        global STEP
        STEP = 5

    def back() -> None:
        global STEP
        STEP = 0

    return _twice(compile, seeded(Own), change, back)


@program(KIND)
def class_behind_an_object(compile: Compile) -> Results:
    """`Schedule.last` of the class, where the model has an object of it."""
    schedules = [Schedule()]

    def find() -> float:
        return schedules[0].last / 10

    return _twice(compile, seeded(Scaled, find), lambda: setattr(Schedule, "last", 5), lambda: setattr(Schedule, "last", 10))


_FACTOR = contextvars.ContextVar("factor", default=1.0)


@program(KIND)
def context_variable(compile: Compile) -> Results:
    return _twice(compile, seeded(Scaled, lambda: _FACTOR.get()), lambda: _FACTOR.set(0.5), lambda: _FACTOR.set(1.0))


_LOCAL = threading.local()


@program(KIND)
def local_of_the_thread(compile: Compile) -> Results:
    _LOCAL.scale = 1.0
    model = seeded(Scaled, lambda: _LOCAL.scale)
    return _twice(compile, model, lambda: setattr(_LOCAL, "scale", 0.5), lambda: setattr(_LOCAL, "scale", 1.0))


@program(KIND)
def deterministic_algorithms_asked_for(compile: Compile) -> Results:
    model = seeded(Scaled, lambda: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)
    return _twice(compile, model, lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False))
