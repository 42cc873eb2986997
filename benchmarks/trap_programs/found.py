"""Programs whose forward finds a setting where one would not look: an attribute of a dict, what a function keeps, a module by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks._traps_kit import Compile, Results, batch, program, seeded, sgd, state, train
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
