"""What verification says of a module that is right but for one number: workers that compute what one process does, and one thing else."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from autopar.compiler import plan_of
from autopar.planner import Plan
from autopar.verify import Reference, Report, reference, verify_plan
from autopar.verify_rank import Found, Task
from benchmarks import _models

pytestmark = pytest.mark.pure

WEIGHT = "0.weight"


@functools.cache
def original() -> tuple[Reference, Plan]:
    model, inputs, loss = _models.mlp()
    model.append(torch.nn.BatchNorm1d(8))
    ref = reference(model, inputs, loss=loss, steps=2, later=True)
    return ref, plan_of(ref.captured, 2, cluster="cpu", pins={"dp": 2})


class Workers:
    """changed: of what rank 0 finds; others: of what rank 1 does."""

    def __init__(self, changed: dict[str, Any], others: dict[str, Any]) -> None:
        self.ranks = changed, others

    def run(self, function: Any, task: Task, timeout_s: float | None = None) -> list[Found]:
        ref = original()[0]
        later = tuple(ref.later_losses[ref.later.index(call)] for call in task.later)
        right = Found(
            losses=ref.losses, gradients=ref.gradients, state=ref.parameters, buffers=ref.buffers, final=ref.final, later=later,
            parts={WEIGHT: "the same bits"},
        )  # fmt: skip
        return [dataclasses.replace(right, **rank) for rank in self.ranks]


def report(changed: dict[str, Any], others: dict[str, Any] | None = None) -> Report:
    ref, plan = original()
    return verify_plan(ref, plan, Workers(changed, others or {}))  # type: ignore[arg-type]


def test_what_is_the_same_verifies() -> None:
    found = report({})
    assert found.ok and found.evaluation == found.batches == found.loss == found.gradient == 0.0


@pytest.mark.parametrize("by", [1e-8, 1e-2, float("nan")])
@pytest.mark.parametrize("kind", ["losses", "later"])
def test_a_loss_that_is_off(kind: str, by: float) -> None:
    ref = original()[0]
    right = ref.losses if kind == "losses" else ref.later_losses
    for k in range(len(right)):
        found = report({kind: (*right[:k], right[k] * (1 + by), *right[k + 1 :])})
        assert not found.ok, (kind, k)


@pytest.mark.parametrize("by", [1e-8, 1e-2, float("nan")])
@pytest.mark.parametrize(("kind", "name"), [("gradients", WEIGHT), ("state", WEIGHT), ("buffers", "9.running_mean"), ("final", WEIGHT)])
def test_a_tensor_that_is_off_in_one_place(kind: str, name: str, by: float) -> None:
    """By a share of the largest number in it, or of a step of the optimizer where there is none as large; or that is missing."""
    ref = original()[0]
    right = {"gradients": ref.gradients, "state": ref.parameters, "buffers": ref.buffers, "final": ref.final}[kind]
    wrong = right[name].clone()
    wrong.view(-1)[0] += by * max(1e-4, wrong.abs().max().item())
    found = report({kind: {**right, name: wrong}})
    assert not found.ok
    where = {"gradients": found.gradient_at, "buffers": found.buffer_at}.get(kind, found.parameter_at)
    assert where == name
    assert not report({kind: {k: v for k, v in right.items() if k != name}}).ok


def test_copies_whose_bits_differ() -> None:
    found = report({}, {"parts": {WEIGHT: "other bits"}})
    assert not found.ok and found.unequal == (WEIGHT,)
