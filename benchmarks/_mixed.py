"""Training scripts that are mixed at random: a model of `_mixed_models`, an optimizer, and a row of actions of `_mixed_actions`.

A script is named by its seed, and where only some of its actions are run, by their places: mixed-17, mixed-17-0.3.4. So one that goes
wrong can be made as short as it still does (`shorter`), and run again by its name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks._mixed_actions import ACTIONS, OPTIMIZERS, Run
from benchmarks._mixed_models import Design, design_of
from benchmarks._traps_kit import Compile, Program, Results, state

__all__ = ["Script", "mixed_program", "script_named", "script_of", "shorter"]

_NAME = re.compile(r"mixed-(\d+)(?:-((?:\d+\.)*\d*))?")


@dataclass(frozen=True, slots=True)
class Script:
    design: Design
    optimizer: str
    actions: tuple[str, ...]

    def __str__(self) -> str:
        d = self.design
        model = f"{d.body}, norm {d.norm}, returns {d.form} (outputs={d.outputs!r}), {', '.join(sorted(d.extras)) or 'nothing more'}"
        return f"{model}; {self.optimizer}; {', '.join(self.actions)}"

    def run(self, compile: Compile) -> Results:
        run = Run(self.design, compile, self.optimizer)
        run.begin()
        for name in self.actions:
            ACTIONS[name](run)
            run.found.append(name)
        return {"found": run.found, "state": state(run.model)}


def script_of(seed: int) -> Script:
    rng = random.Random(seed)
    design, optimizer = design_of(rng), rng.choice(tuple(OPTIMIZERS))
    return Script(design, optimizer, ("step", *rng.choices(tuple(ACTIONS), k=rng.randint(4, 9)), "step"))


def script_named(name: str) -> Script:
    """Raises ValueError for what is no name of a script."""
    if (parts := _NAME.fullmatch(name)) is None:
        raise ValueError(f"{name!r} is no name of a script, as mixed-17 or mixed-17-0.3.4 are")
    script = script_of(int(parts[1]))
    if parts[2] is None:
        return script
    kept = [int(k) for k in parts[2].split(".") if k]
    return Script(script.design, script.optimizer, tuple(script.actions[k] for k in kept if k < len(script.actions)))


def mixed_program(name: str) -> Program | None:
    """The program of that name, if it is the name of a script."""
    return Program(name=name, kind="mixed", run=script_named(name).run) if _NAME.fullmatch(name) else None


def shorter(name: str) -> Iterator[str]:
    """The names of the scripts that have one action less."""
    seed, _, kept = name.removeprefix("mixed-").partition("-")
    places = [int(k) for k in kept.split(".") if k] if kept else list(range(len(script_of(int(seed)).actions)))
    for out in reversed(range(len(places))):
        yield f"mixed-{seed}-{'.'.join(str(k) for at, k in enumerate(places) if at != out)}"
