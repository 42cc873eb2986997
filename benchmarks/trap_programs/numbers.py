"""Models that return numbers for a log, which they make of tensors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._traps_kit import CLASSES, Compile, Net, Results, batch, batches, program, seeded, sgd, state

KIND = "numbers"
MORE = ("hybrid3", "dp2tp2")


class Logging(Net):
    """Numbers taken from tensors and computed of these, beside what is known."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
        logits = self.logits(x)
        loss = F.cross_entropy(logits, y)
        right = (logits.argmax(1) == y).sum()
        count = right.item()
        right *= 2
        return loss, {
            "lr": 0.1, "loss": loss.item(), "right": count, "accuracy": 100.0 * count / len(y), "wrong": 1 - right.item(), "step": 3,
            "names": ["a", "b"], "seen": {1, 2}, "norm": float(logits.norm()), "logits": logits,
        }  # fmt: skip


def _rounded(log: dict[str, Any]) -> str:
    """As a file of lines has it."""
    kept = {key: round(x, 9) if isinstance(x, float) else x for key, x in log.items() if not isinstance(x, (Tensor, set))}
    return json.dumps(kept)


@program(KIND, plans=MORE)
def log_of_each_step(compile: Compile) -> Results:
    model = compile(seeded(Logging), example_inputs=batch())
    optimizer, found, total = sgd(model), list[str](), 0.0
    for given in batches(3):
        loss, log = model(*given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(_rounded(log))
        total += log["loss"] + log["right"]
    sets = [float(x) for x in log["seen"]]
    return {"found": found, "total": total, "sets": sets, "logits": log["logits"].detach(), "state": state(model)}


@program(KIND)
def log_that_is_asked_for(compile: Compile) -> Results:
    """With outputs="all"."""
    model = compile(seeded(Logging), example_inputs=batch(), outputs="all")
    found = [_rounded(model(*given)[1]) for given in batches(2)]
    model.eval()
    with torch.no_grad():
        found.append(_rounded(model(*batch(7))[1]))
    return {"found": found}


@program(KIND)
def log_that_nobody_reads(compile: Compile) -> Results:
    model = compile(seeded(Logging), example_inputs=batch())
    optimizer, found = sgd(model), list[Tensor]()
    for given in batches(3):
        optimizer.zero_grad()
        loss, log = model(*given)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), torch.tensor(log["step"])]
    return {"found": found, "names": sorted(log), "state": state(model)}


@dataclass
class Scores:
    loss: Tensor
    accuracy: float
    hits: int
    of_classes: list[float]


class InScores(Net):
    def forward(self, x: Tensor, y: Tensor) -> Scores:
        logits = self.logits(x)
        right = logits.argmax(1) == y
        return Scores(F.cross_entropy(logits, y), float(right.double().mean()), right.sum().item(), logits.mean(0).tolist())


@program(KIND, plans=MORE)
def fields_that_are_numbers(compile: Compile) -> Results:
    model = compile(seeded(InScores), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for given in batches(3):
        scores = model(*given)
        scores.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [scores.accuracy, scores.hits, *scores.of_classes]
        assert isinstance(scores.hits, int) and isinstance(scores.accuracy, float) and len(scores.of_classes) == CLASSES
    return {"found": found, "state": state(model)}


class Rooted(Net):
    """A number that is computed otherwise."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        logits = self.logits(x)
        return F.cross_entropy(logits, y), logits.square().mean().item() ** 0.5


@program(KIND)
def root_of_a_number(compile: Compile) -> Results:
    model = compile(seeded(Rooted), example_inputs=batch())
    _, root = model(*batch())
    return {"root": f"{root:.6f}"}


@program(KIND, remedy_of="root_of_a_number")
def root_of_a_returned_number(compile: Compile) -> Results:
    """The same, of what the call returns."""

    class Squared(Net):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
            logits = self.logits(x)
            return F.cross_entropy(logits, y), logits.square().mean().item()

    model = compile(seeded(Squared), example_inputs=batch())
    _, square = model(*batch())
    return {"root": f"{math.sqrt(square):.6f}"}


class Keeping(Net):
    """Leaves what it computes of numbers in an attribute."""

    accuracy: float

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.logits(x)
        self.accuracy = 100 * (logits.argmax(1) == y).sum().item() / y.size(0)
        return F.cross_entropy(logits, y)


@program(KIND)
def share_in_an_attribute(compile: Compile) -> Results:
    model = compile(seeded(Keeping), example_inputs=batch(), outputs="all")
    optimizer, found = sgd(model), list[float]()
    for given in batches(3):
        model(*given).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.accuracy)
    return {"found": found, "state": state(model)}


class Boosting(Net):
    """By a number of the batch, which a graph would hold as it was."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        logits = self.logits(x)
        norm = float(logits.detach().norm())
        return F.cross_entropy(logits, y) * (2.0 if norm > 1 else 1.0), norm


@program(KIND)
def number_that_decides(compile: Compile) -> Results:
    model = compile(seeded(Boosting), example_inputs=batch())
    found = [model(*given)[1] for given in batches(2)]
    return {"found": found}


class Sparse(Net):
    """Says beside what it computes how much of it is not zero."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        hidden = torch.relu(self.hidden(x))
        share = (hidden > 0).sum().item() / hidden.numel()
        return self.head(hidden), share


@program(KIND, plans=MORE)
def share_beside_logits(compile: Compile) -> Results:
    """The loss is made outside; then the model is evaluated."""
    model = compile(seeded(Sparse), example_inputs=batch()[:1])
    optimizer, found = sgd(model), list[float]()
    for x, y in batches(3):
        logits, share = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), share]
    model.eval()
    with torch.no_grad():
        found.append(model(batch(5)[0])[1])
    return {"found": found, "state": state(model)}
