"""How far rounding alone moves a model, and what verification says of errors beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compiler import plan_of
from autopar.planner import Plan
from autopar.reference import Reference, reference
from autopar.report.verification import verification_json, verification_text
from autopar.rounding import rounding_of
from autopar.verify import Report, verify_plan, with_rounding
from autopar.verify_rank import Found, Task

pytestmark = pytest.mark.pure


class Net(nn.Module):
    """turns: how often a map that doubles a difference is applied to what the layers give: 2**turns of one rounding comes out."""

    def __init__(self, turns: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.turns = nn.Linear(6, 8), nn.Linear(8, 1), turns

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = torch.sigmoid(self.last(torch.tanh(self.first(x))))
        for _ in range(self.turns):
            h = 4 * h * (1 - h)
        h = h if mask is None else torch.where(mask == 1, h, -100.0 * h)
        return F.mse_loss(h, x[:, :1])


class Noisy(Net):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + torch.randn_like(x), mask)


def batch() -> Tensor:
    return torch.rand(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Workers:
    """They find what the original does, but for what is changed."""

    def __init__(self, ref: Reference, changed: dict[str, Any]) -> None:
        self.ref, self.changed = ref, changed

    def run(self, function: Any, task: Task, timeout_s: float | None = None) -> list[Found]:
        ref = self.ref
        later = tuple(ref.later_losses[ref.later.index(call)] for call in task.later)
        right = Found(
            losses=ref.losses, gradients=ref.gradients, state=ref.parameters, buffers=ref.buffers, final=ref.final, later=later, parts={}
        )
        return [dataclasses.replace(right, **self.changed), right]


def original(model: nn.Module, inputs: tuple[Tensor, ...] | None = None) -> tuple[Reference, Plan]:
    ref = reference(model, inputs or (batch(),), steps=2, later=True)
    return ref, plan_of(ref.captured, 2, cluster="cpu", pins={"dp": 2})


def off(ref: Reference, plan: Plan, by: float, **changed: Any) -> Report:
    """The report of a plan whose gradient of a weight is off by a share of its largest number."""
    wrong = ref.gradients["first.weight"].clone()
    wrong[0, 0] += by * wrong.abs().max()
    workers = Workers(ref, {"gradients": {**ref.gradients, "first.weight": wrong}, **changed})
    return with_rounding(verify_plan(ref, plan, workers), ref)  # type: ignore[arg-type]


def test_what_is_well_conditioned_moves_by_roundings() -> None:
    ref, plan = original(Net())
    moved = rounding_of(ref)
    assert moved is not None
    assert all(0.0 < error < 1e-13 for kind, error in moved.by_kind().items() if kind != "buffer"), moved
    assert set(moved.by_kind()) == {"loss", "gradient", "parameter", "buffer", "evaluation", "batches"}
    found = off(ref, plan, 1e-8)
    assert not found.ok and not found.within_rounding
    assert "the plan moves it further" in verification_text(found)
    assert verification_json(found)["rounding"]["gradient"] < 1e-13


def test_what_is_badly_conditioned_is_not_verified_and_said_to_be_so() -> None:
    ref, plan = original(Net(turns=28))
    found = off(ref, plan, 1e-8)
    assert found.rounding is not None and found.rounding.gradient > 1e-8
    assert not found.ok and found.within_rounding
    assert "badly conditioned" in verification_text(found) and "--steps 1" in verification_text(found)
    assert verification_json(found)["within_rounding"] is True


@pytest.mark.parametrize("by", [1e-2, float("nan"), float("inf")])
def test_more_than_rounding_is_not_put_down_to_it(by: float) -> None:
    ref, plan = original(Net(turns=28))
    found = off(ref, plan, by)
    assert not found.ok and not found.within_rounding
    assert "badly conditioned" not in verification_text(found)


def test_a_second_error_that_rounding_does_not_explain() -> None:
    ref, plan = original(Net(turns=28))
    loss = (ref.losses[0] * 2, *ref.losses[1:])
    assert off(ref, plan, 1e-8).within_rounding
    assert not off(ref, plan, 1e-8, losses=loss).within_rounding


def test_copies_that_differ_are_never_rounding() -> None:
    ref, plan = original(Net(turns=28))
    found = off(ref, plan, 1e-8, parts={"first.weight": "other bits"})
    assert found.within_rounding  # one rank alone holds it
    assert not dataclasses.replace(found, copies_equal=False).within_rounding


def test_nothing_is_measured_where_all_is_within_the_tolerance() -> None:
    ref, plan = original(Net())
    found = off(ref, plan, 0.0)
    assert found.ok and found.rounding is None and not found.within_rounding
    assert "rounding" not in verification_text(found)


def test_the_model_that_was_given_is_not_trained() -> None:
    model = Net()
    before = {name: p.clone() for name, p in model.named_parameters()}
    ref, _ = original(model)
    first = rounding_of(ref)
    assert first == rounding_of(ref)
    assert all(torch.equal(p, before[name]) and p.dtype == torch.float32 for name, p in model.named_parameters())


def test_a_mask_in_floating_numbers_stays_what_it_is() -> None:
    ref, _ = original(Net(), (batch(), (torch.arange(8) % 2).double()[:, None]))
    moved = rounding_of(ref)
    assert moved is not None and moved.loss < 1e-13


def test_random_numbers_are_drawn_again_alike() -> None:
    ref, _ = original(Noisy())
    moved = rounding_of(ref)
    assert moved is not None and 0.0 < moved.loss < 1e-12
