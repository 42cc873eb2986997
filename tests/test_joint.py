"""Small random problems: the plan is the best of all plans, and relaxing anything never makes it slower; the benchmark `joint` has many."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import joint
from benchmarks._joint import AMPLE, Problem, Restricted, draw, planned
from cost_models.cluster import Cluster
from cost_models.rests import RESTS

pytestmark = pytest.mark.pure

EQUAL = 1 + joint.EQUAL


# of 79 the fastest form of an axis fits by its pieces alone; of 38 and 89 drafts that others wait behind do not fit after all
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 38, 79, 89])
def test_the_plan_is_the_best_of_all_plans(seed: int) -> None:
    found = joint.compared(draw(seed))
    assert found.kind in ("equal", "infeasible"), found.line()


def step_s(problem: Problem, store: Restricted, limit_bytes: float, **pins: Any) -> float:
    found = planned(problem, store, round(limit_bytes), **pins)
    assert found.step_s is None or found.bound_s <= found.step_s * EQUAL
    return float("inf") if found.step_s is None else found.step_s


@pytest.mark.parametrize("seed", [1, 4, 7, 11, 14, 18])
def test_relaxing_never_makes_a_plan_slower(seed: int) -> None:
    problem = draw(seed)
    store = problem.store()
    plan = problem.search(store, AMPLE).best()
    most = max(s.memory.upper_bytes for s in plan.stages)
    limits = [share * most for share in (0.4, 0.6, 0.75, 0.9, 1.0)]
    free = [step_s(problem, store, limit) for limit in limits]
    assert free == sorted(free, reverse=True), "more memory"
    assert free[-1] <= plan.step_time_s * EQUAL, "what it takes is enough (what it ties with may take more)"

    tight = limits[3]
    pins: dict[str, Any] = {**plan.mesh, "micro_batches": plan.micro_batches, "zero": RESTS[plan.rest].zero, "recompute": "none"}
    pins |= {"schedule": plan.schedule} | ({"virtual_stages": plan.virtual_stages} if plan.virtual_stages > 1 else {})
    pinned = step_s(problem, store, most, **pins)
    assert pinned == pytest.approx(plan.step_time_s, rel=joint.EQUAL), "a plan that is pinned as it is has a price, and the same"
    some = step_s(problem, store, tight, **pins)
    for name in pins:
        fewer = {k: v for k, v in pins.items() if k != name}
        assert step_s(problem, store, tight, **fewer) <= some * EQUAL, f"without the pin on {name}"

    faster = dataclasses.replace(problem, cluster=_faster(problem.cluster))
    for limit, before in zip(limits[3:], free[3:], strict=True):
        assert step_s(faster, faster.store(), limit) <= before * EQUAL, "faster links"
    fewer_ways = dataclasses.replace(problem, strategies=1)
    assert free[3] <= step_s(fewer_ways, fewer_ways.store(), tight) * EQUAL, "more strategies"


def _faster(cluster: Cluster) -> Cluster:
    intra = dataclasses.replace(cluster.intra, bandwidth_bytes_per_s=2 * cluster.intra.bandwidth_bytes_per_s)
    return dataclasses.replace(cluster, intra=intra)
