"""torch.nn.utils.clip_grad_norm_ of parts: the figures of the original, by one collective, in whatever order a rank has them."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.run import WorkerPool, comm, reductions
from tests.test_parts import batch, one, stepped

pytestmark = pytest.mark.gloo

PLANS: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2}, "zero1": {"dp": 2, "zero": 1}, "zero3": {"dp": 2, "zero": 3}}
ORDERS = (2.0, 1, 3.0, math.inf)


def _compiled(pins: dict[str, Any] | None) -> Any:
    if pins is None:
        return one()
    gpus = math.prod(size for name, size in pins.items() if name != "zero")
    return autopar.compile(one(), gpus=gpus, example_inputs=batch(), cluster="cpu", pins=pins)


def _clipped(pins: dict[str, Any] | None) -> list[Any]:
    """Norms and what is left of gradients, of each order; gradients that are not finite; and how often norms were reduced."""
    found: list[Any] = []
    count = 0
    plain = comm.all_reduce_

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args, **options)

    for order in ORDERS:
        model = stepped(_compiled(pins))
        params = list(model.parameters())
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            params.reverse()  # as a set of parameters may be
        with mock.patch.object(reductions.comm, "all_reduce_", counted):
            if order != math.inf:
                found.append(nn.utils.get_total_norm([p.grad for p in params], order).item())
                found.append(nn.utils.clip_grad_norm_(params, 0.1, order).item())
            else:
                found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, order).item())
        found.append([p.grad.norm().item() for p in model.parameters()])
    calls = count
    with torch.no_grad():
        next(model.parameters()).grad.view(-1)[0] = math.nan
    found.append(math.isnan(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()))
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    except RuntimeError as error:
        found.append(str(error)[:40])
    return [*found, calls]


def test_copies_of_parts_count_once(workers: WorkerPool) -> None:
    *expected, _ = _clipped(None)
    for *found, _ in workers.run(_clipped, {"dp": 2, "tp": 2}):
        assert found[:2] == pytest.approx(expected[:2], rel=1e-9)


@pytest.mark.parametrize("plan", PLANS)
def test_norms_are_those_of_the_original_by_one_collective(plan: str, pair: WorkerPool) -> None:
    *expected, _ = _clipped(None)
    for *found, calls in pair.run(_clipped, PLANS[plan]):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == (pytest.approx(theirs, rel=1e-9) if not isinstance(theirs, str) else theirs)
        assert 6 <= calls <= 6 + len(list(one().parameters())), "one for each of six, and for a largest value one by one"
