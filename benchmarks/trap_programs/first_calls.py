"""Programs whose first call does what later ones do not: it takes a mean, a scale or a copy, or begins what runs on, as a flag, a text or a
None says; and loops that set that back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, WIDTH, Compile, Results, program, seeded
from benchmarks.trap_programs.carried import KIND, Recurrent, trained_on_sequences


class _Centered(Recurrent):
    """Of a center that its first batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        if self.center is None:
            self.center = h.detach().mean((0, 1))
        return self.head(torch.relu(self.between(h - self.center)))


@program(KIND)
def a_center_of_the_first_batch(compile: Compile) -> Results:
    """Decided again after two steps."""
    model = compile(seeded(_Centered))
    return trained_on_sequences(model, lambda k: setattr(model, "center", None) if k == 2 else None, kept="center")


class _Standardized(Recurrent):
    """By a mean, in a buffer, and a deviation, a number, of its first batch, as a flag says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.deviation, self.ready = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.mean.copy_(x.mean((0, 1)))
            self.deviation, self.ready = x.std().item(), True
        h, _ = self.lstm((x - self.mean) / self.deviation)
        return self.head(torch.relu(self.between(h)))


@program(KIND)
def a_mean_of_the_first_batch_in_a_buffer(compile: Compile) -> Results:
    """Taken again after two steps."""
    model = compile(seeded(_Standardized))
    found = trained_on_sequences(model, lambda k: setattr(model, "ready", False) if k == 2 else None, kept="mean")
    return {**found, "deviation": model.deviation, "ready": model.ready}


class _Followed(Recurrent):
    """With a copy of its LSTM that it makes at its first call, and that follows slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.LSTM(WIDTH, HIDDEN, batch_first=True).requires_grad_(False)
        self.copied = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.lstm.parameters(), self.target.parameters(), strict=True):
                other.data.copy_(own.data) if not self.copied else other.data.lerp_(own.data, 0.1)
            self.copied = True
            aim = self.target(x)[0]
        h, _ = self.lstm(x)
        return self.head(torch.relu(self.between(h - 0.5 * aim)))


@program(KIND)
def a_copy_that_the_first_call_makes(compile: Compile) -> Results:
    model = compile(seeded(_Followed))
    found = trained_on_sequences(model)
    return {**found, "target": [p.detach().norm().item() for p in model.target.parameters()]}


class _Running(Recurrent):
    """Divides by the running deviation of the calls before, a number that its first call begins."""

    def __init__(self) -> None:
        super().__init__()
        self.deviation, self.begun = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        result = self.head(torch.relu(self.between(h)) / (self.deviation if self.begun else 1.0))
        now = h.detach().std().item()
        self.deviation = 0.9 * self.deviation + 0.1 * now if self.begun else now
        self.begun = True
        return result


@program(KIND)
def a_running_number_that_a_flag_begins(compile: Compile) -> Results:
    model = compile(seeded(_Running))
    return {**trained_on_sequences(model), "deviation": model.deviation}


class _RunningMean(Recurrent):
    """Subtracts a running mean, in a buffer, that its first call begins. By what it knows that it is the first is a matter of taste."""

    def __init__(self, known_by: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.begun, self.phase, self.done, self.names = False, "first", dict[str, bool](), set[str]()
        self.known_by = known_by

    def is_first(self) -> bool:
        first = {
            "flag": not self.begun, "text": self.phase == "first", "dict": not self.done.get("mean"), "set": "mean" not in self.names,
        }[self.known_by]
        if self.known_by == "flag":
            self.begun = True
        elif self.known_by == "text":
            self.phase = "later"
        elif self.known_by == "dict":
            self.done["mean"] = True
        else:
            self.names.add("mean")
        return first

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        now = h.detach().mean((0, 1))
        self.mean = now if self.is_first() else 0.9 * self.mean + 0.1 * now
        return self.head(torch.relu(self.between(h - self.mean)))


@program(KIND)
def a_running_mean_that_a_flag_begins(compile: Compile) -> Results:
    return trained_on_sequences(compile(seeded(_RunningMean, "flag")), kept="mean")


@program(KIND)
def a_running_mean_that_a_text_begins(compile: Compile) -> Results:
    return trained_on_sequences(compile(seeded(_RunningMean, "text")), kept="mean")


@program(KIND)
def a_running_mean_that_a_dict_begins(compile: Compile) -> Results:
    return trained_on_sequences(compile(seeded(_RunningMean, "dict")), kept="mean")


@program(KIND)
def a_running_mean_that_a_set_begins(compile: Compile) -> Results:
    return trained_on_sequences(compile(seeded(_RunningMean, "set")), kept="mean")
