"""Programs whose forward reads what stands outside of its tensors, which then changes: settings, objects, functions, contexts, threads."""

from __future__ import annotations

import contextvars
import enum
import functools
import threading
import types
import weakref
from collections import ChainMap, UserDict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import torch
import torch.nn.functional as F
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


# ------------------------------------------------------------------------------------------------- reached in many ways
class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0

    def now(self) -> float:
        return self.scale


def _set(holder: Any, name: str, value: float = 0.5) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What changes a number, which is 1, and what takes that back."""
    if hasattr(holder, "__setitem__"):
        return lambda: holder.__setitem__(name, value), lambda: holder.__setitem__(name, 1.0)
    return lambda: setattr(holder, name, value), lambda: setattr(holder, name, 1.0)


@program(KIND)
def object_with_slots(compile: Compile) -> Results:
    held = Slotted()
    return _twice(compile, seeded(Scaled, lambda: held.scale), *_set(held, "scale"))


@program(KIND)
def method_of_an_object_as_an_attribute(compile: Compile) -> Results:
    held = Slotted()
    return _twice(compile, seeded(Scaled, held.now), *_set(held, "scale"))


@program(KIND)
def keyword_of_a_partial(compile: Compile) -> Results:
    def scale(k: float) -> float:
        return k

    find = functools.partial(scale, k=1.0)
    return _twice(compile, seeded(Scaled, find), *_set(find.keywords, "k"))


@program(KIND)
def reference_to_an_object(compile: Compile) -> Results:
    held = Schedule()
    held.last = 1
    reference = weakref.ref(held)
    return _twice(compile, seeded(Scaled, lambda: reference().last), *_set(held, "last"))


@program(KIND)
def array_changed_in_place(compile: Compile) -> Results:
    held = numpy.ones(2)
    return _twice(compile, seeded(Scaled, lambda: float(held[0])), lambda: held.fill(0.5), lambda: held.fill(1.0))


@program(KIND)
def set_of_names_of_the_same_size(compile: Compile) -> Results:
    held = {"a"}

    def swap(a: str, b: str) -> Callable[[], Any]:
        return lambda: (held.discard(a), held.add(b))

    return _twice(compile, seeded(Scaled, lambda: 1.0 if "a" in held else 0.5), swap("a", "b"), swap("b", "a"))


@program(KIND)
def dicts_behind_others(compile: Compile) -> Results:
    under = {"k": 1.0}
    proxy, chain, own = types.MappingProxyType(under), ChainMap({"z": 1.0}, under), UserDict(k=1.0)

    def change() -> None:
        under["k"], chain.maps[0]["z"], own["k"] = 0.5, 0.25, 3.0

    def back() -> None:
        under["k"] = chain.maps[0]["z"] = own["k"] = 1.0

    return _twice(compile, seeded(Scaled, lambda: proxy["k"] * chain["z"] * own["k"]), change, back)


@program(KIND)
def learning_rate_in_the_loss(compile: Compile) -> Results:
    """The forward reads the optimizer's param_groups and the scheduler's last rate."""
    held = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(held, 1, gamma=0.5)

    def change() -> None:
        held.step()
        schedule.step()

    def back() -> None:
        held.param_groups[0]["lr"] = 1.0

    return _twice(compile, seeded(Scaled, lambda: held.param_groups[0]["lr"] + schedule.get_last_lr()[0]), change, back)


class Acted(Net):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(super().hidden(x))


@program(KIND)
def activation_replaced(compile: Compile) -> Results:
    """A function of torch, another, and one of the user's, under an attribute."""
    model = seeded(Acted, torch.tanh)
    made = compile(model, example_inputs=batch())
    optimizer, losses = sgd(made), []
    for act in (torch.tanh, F.relu, lambda x: 2 * x, torch.tanh):
        made.act = act
        losses += train(made, optimizer, steps=2)
    return {"losses": losses, "state": state(made)}


@program(KIND)
def activation_in_a_table(compile: Compile) -> Results:
    held: dict[str, Any] = {"a": torch.tanh}
    model = seeded(Acted, lambda x: held["a"](x))
    return _twice(compile, model, lambda: held.update(a=F.relu), lambda: held.update(a=torch.tanh))


@program(KIND)
def function_rebound_in_a_closure(compile: Compile) -> Results:
    act = torch.tanh

    def change(to: Any) -> None:
        nonlocal act
        act = to

    return _twice(compile, seeded(Acted, lambda x: act(x)), lambda: change(F.relu), lambda: change(torch.tanh))


def _helper(x: Tensor) -> Tensor:
    return torch.tanh(x)


@program(KIND)
def function_of_the_file_replaced(compile: Compile) -> Results:
    def change(to: Any) -> None:
        globals()["_helper"] = to

    known = _helper
    return _twice(compile, seeded(Acted, lambda x: _helper(x)), lambda: change(F.relu), lambda: change(known))


@program(KIND)
def property_of_the_class_replaced(compile: Compile) -> Results:
    class Own(Net):
        scale = property(lambda _: 1.0)

        @staticmethod
        def other() -> float:
            return 1.0

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y) * self.scale * self.other()

    made = compile(seeded(Own), example_inputs=batch())
    optimizer = sgd(made)
    losses = train(made, optimizer)
    Own.scale = property(lambda _: 0.5)
    losses += train(made, optimizer)
    Own.other = staticmethod(lambda: 3.0)
    return {"losses": losses + train(made, optimizer), "state": state(made)}


@program(KIND)
def prior_replaced(compile: Compile) -> Results:
    """A distribution: its scale is another, is written in place, and then it is another itself."""

    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.prior = torch.distributions.Normal(torch.zeros(()), torch.ones(()))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            h = self.hidden(x)
            return F.cross_entropy(self.head(h), y) - 0.1 * self.prior.log_prob(h).mean()

    made = compile(seeded(Own), example_inputs=batch())
    optimizer = sgd(made)
    losses = train(made, optimizer)
    made.prior.scale = torch.full((), 2.0)
    losses += train(made, optimizer)
    made.prior.scale.fill_(3.0)
    losses += train(made, optimizer)
    made.prior = torch.distributions.Normal(torch.ones(()), torch.ones(()))
    return {"losses": losses + train(made, optimizer), "state": state(made)}


class WithTeacher(Net):
    """Its teacher is in a list, so that it is none of its modules; its distance to it is learned."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teachers = [teacher]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            wanted = self.teachers[0](x)
        return super().forward(x, y) + F.mse_loss(self.logits(x), wanted)


@program(KIND)
def mode_of_a_module_beside_the_model(compile: Compile) -> Results:
    """A teacher in a list is put into training mode, in which it drops everything."""
    teacher = seeded(lambda: nn.Sequential(nn.Linear(8, 4), nn.Dropout(1.0))).eval()
    return _twice(compile, seeded(WithTeacher, teacher), teacher.train, teacher.eval)


class Mode(enum.Enum):
    PLAIN = 1
    HALVED = 2


class Moded(Net):
    mode = Mode.PLAIN

    def forward(self, x: Tensor, y: Tensor, mode: Mode | None = None) -> Any:
        return super().forward(x, y) * (0.5 if Mode.HALVED in (mode, self.mode) else 1.0)


@program(KIND)
def mode_as_an_input(compile: Compile) -> Results:
    """A member of an Enum is an argument of the call."""
    made = compile(seeded(Moded), example_inputs=(*batch(), Mode.PLAIN))
    return {"losses": train(made, inputs=[(*batch(0), Mode.PLAIN), (*batch(1), Mode.HALVED)]), "state": state(made)}


@program(KIND, remedy_of="mode_as_an_input")
def mode_as_an_attribute(compile: Compile) -> Results:
    model = seeded(Moded)
    return _twice(compile, model, lambda: setattr(model, "mode", Mode.HALVED), lambda: setattr(model, "mode", Mode.PLAIN))


class Hook:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, module: nn.Module, given: Any, found: Tensor) -> Tensor:
        return found * self.scale


@program(KIND)
def hook_with_a_number(compile: Compile) -> Results:
    """An object is a forward hook, and a method of another is."""
    one, two = Hook(), Hook()
    model = seeded(Net)
    model.first.register_forward_hook(one)
    model.head.register_forward_hook(two.__call__)
    made = compile(model, example_inputs=batch())
    optimizer = sgd(made)
    losses = train(made, optimizer)
    one.scale = 0.5
    losses += train(made, optimizer)
    two.scale = 2.0
    return {"losses": losses + train(made, optimizer), "state": state(made)}


@program(KIND)
def long_tables(compile: Compile) -> Results:
    """A list of 3,000 numbers, a dict of as many, and an array of 160,000 bytes, each changed in one place."""
    rates, table, array = [1.0] * 3000, dict.fromkeys(range(3000), 1.0), numpy.ones(20000)

    def change(to: float) -> Callable[[], None]:
        def write() -> None:
            rates[7], table[2999], array[19999] = to, 2 * to, 3 * to

        return write

    return _twice(compile, seeded(Scaled, lambda: rates[7] * table[2999] * float(array[19999])), change(0.5), change(1.0))


@program(KIND)
def settings_of_a_module_that_is_imported_inside(compile: Compile) -> Results:
    """Read through an import in the function, and through a name in a closure."""
    import benchmarks.trap_programs.elsewhere as here

    def find() -> float:
        from benchmarks.trap_programs.elsewhere import STEP

        return (1.0 - STEP / 10) * (1.0 - here.STEP / 20)

    def change(to: int) -> Callable[[], None]:
        return lambda: setattr(here, "STEP", to)

    return _twice(compile, seeded(Scaled, find), change(5), change(0))


class Lazily:
    """Made by the first call that asks for it."""

    known: Lazily | None = None

    def __init__(self) -> None:
        self.scale = 1.0

    @classmethod
    def get(cls) -> Lazily:
        if cls.known is None:
            cls.known = cls()
        return cls.known


@program(KIND)
def object_made_by_the_first_call(compile: Compile) -> Results:
    def back() -> None:
        Lazily.known = None

    back()
    return _twice(compile, seeded(Scaled, lambda: Lazily.get().scale), lambda: setattr(Lazily.get(), "scale", 0.5), back)


class Epochs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.rates, self.chosen = 0, {"late": 0.5}, ["early"]
        self.early, self.late = 1.0, 0.5

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.chosen[0] = "late" if epoch > 1 else "early"

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) * (1.0 if self.epoch < 3 else 0.5) * getattr(self, self.chosen[0])


@program(KIND)
def epochs_told_by_a_method(compile: Compile) -> Results:
    made = compile(seeded(Epochs), example_inputs=batch())
    optimizer, losses = sgd(made), []
    for epoch in range(5):
        made.set_epoch(epoch)
        losses += train(made, optimizer, steps=2)
    made.late = 0.25
    return {"losses": losses + train(made, optimizer), "state": state(made)}


class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.history, self.best = 0, [0.0], {"loss": 9.0}


@program(KIND)
def counters_that_no_code_reads(compile: Compile) -> Results:
    """More steps than forms are kept: a counter, a history and the best loss, kept on the model by the loop."""
    model = seeded(Counted)
    made = compile(model, example_inputs=batch())
    optimizer, losses = sgd(made), []
    for index in range(80):
        losses += train(made, optimizer, inputs=[batch(index)])
        model.steps += 1
        model.history.append(losses[-1])
        made.best["loss"] = min(made.best["loss"], losses[-1])
    return {"losses": losses[-5:], "steps": made.steps, "best": made.best["loss"], "history": len(made.history), "state": state(made)}


@program(KIND)
def layer_that_takes_its_shape_from_the_batch(compile: Compile) -> Results:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(16)

    made = compile(seeded(Own), example_inputs=batch())
    return {"losses": train(made), "state": state(made)}


@program(KIND, remedy_of="layer_that_takes_its_shape_from_the_batch")
def layer_that_has_taken_its_shape(compile: Compile) -> Results:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(16)

    model = seeded(Own)
    model(*batch())
    made = compile(model, example_inputs=batch())
    return {"losses": train(made), "state": state(made)}
