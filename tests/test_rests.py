"""How parameters, gradients and optimizer states rest: the table, what follows from a row in the planner, and a row of one's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autopar.compiler import emit
from autopar.errors import Infeasible, PlanError
from autopar.measure import Pricer
from autopar.planner import Pins, Plan, make_plan
from autopar.planner.exchange import Exchange
from autopar.planner.price import ParamBytes
from autopar.run import WorkerPool, launch
from cost_models.cluster import Cluster, load_cluster
from cost_models.collectives import collective_time_s
from cost_models.recipe import Recipe
from cost_models.rests import RESTS, Rest, rest_of
from tests.planner_programs import captured_of, program_of
from tests.test_planner_recipe import NUMBERS, priced
from tests.test_run_training import _train

MIB = 2**20
LATE = Rest(name="zero4", zero=4, title="gathered where used, gradients whole until the end of the step", parameters=True, states=True)


# ---------------------------------------------------------------------------------------------------------------- the table
@pytest.mark.pure
def test_what_follows_from_a_row() -> None:
    found = {name: (row.gathered, row.reduced) for name, row in RESTS.items()}
    assert found == {
        "zero0": ("never", "step"), "zero1": ("step", "step"), "zero2": ("step", "pass"), "zero3": ("use", "pass"),
        "hybrid1": ("step", "step"), "hybrid2": ("step", "pass"), "hybrid3": ("use", "pass"),
    }  # fmt: skip
    with pytest.raises(ValueError, match="states must be in parts too"):
        Rest(name="half", zero=5, title="", gradients=True)
    with pytest.raises(ValueError, match="'zero9' is not one of zero0"):
        rest_of("zero9")


@pytest.mark.pure
def test_over_how_many_ranks_parts_lie() -> None:
    whole, plain, hybrid = RESTS["zero0"], RESTS["zero3"], RESTS["hybrid3"]
    assert [list(row.shards(16, 8)) for row in (whole, plain, hybrid)] == [[1], [16], [8]]
    assert [list(row.shards(4, 8)) for row in (whole, plain, hybrid)] == [[1], [4], []], "one node: there are no copies"
    assert [list(row.shards(1, 8)) for row in (whole, plain, hybrid)] == [[1], [], []]
    assert list(hybrid.shards(12, 8)) == [6], "groups divide the data axis"
    assert [list(row.shards(16, 8, 4)) for row in (whole, plain, hybrid)] == [[], [], [4]]
    assert [list(row.shards(16, 8, 16)) for row in (whole, plain, hybrid)] == [[], [16], []]
    assert [list(row.shards(16, 8, 3)) for row in (whole, plain, hybrid)] == [[], [], []]


# ---------------------------------------------------------------------------------------------------------------- the planner
def _cluster() -> Cluster:
    found = load_cluster("dgx-a100")
    return dataclasses.replace(found, gpu=dataclasses.replace(found.gpu, context_bytes=0))


def _planned(gpus: int, name: str = "stack", **pins: Any) -> Plan:
    return make_plan(program_of(name), gpus, _cluster(), pins=Pins(**pins))


@pytest.mark.pure
def test_pins_choose_a_row() -> None:
    plan = _planned(16, "wide", dp=16, zero=3)
    assert (plan.rest, plan.shard) in (("zero3", 16), ("hybrid3", 8))
    plans = {shard: _planned(16, "wide", dp=16, zero=3, shard=shard) for shard in (2, 8, 16)}
    assert {shard: (p.rest, p.shard, p.zero) for shard, p in plans.items()} == {
        2: ("hybrid3", 2, 3), 8: ("hybrid3", 8, 3), 16: ("zero3", 16, 3)
    }  # fmt: skip
    assert plan.step_time_s <= min(plans[8].step_time_s, plans[16].step_time_s) * (1 + 1e-9)
    states = [p.stages[0].memory.optimizer_states_bytes for p in plans.values()]
    assert states[0] == 4 * states[1] == 8 * states[2]
    assert _planned(4, dp=4, zero=2).rest == "zero2"
    assert {_planned(4, dp=4, shard=2).rest} <= {"hybrid1", "hybrid2", "hybrid3"}, "zero is free"
    assert _planned(4, dp=4, shard=1).rest == "zero0"


@pytest.mark.pure
def test_rests_that_cannot_be_are_refused_with_the_reason() -> None:
    with pytest.raises(Infeasible, match="shard=3: the parts of a parameter cannot lie so over the 4 ranks"):
        _planned(4, dp=4, shard=3)
    with pytest.raises(Infeasible, match="zero=2: there is no data axis"):
        _planned(2, tp=2, zero=2)
    with pytest.raises(PlanError, match="zero=0 leaves every parameter whole"):
        Pins(zero=0, shard=2)
    with pytest.raises(PlanError, match="shard must be a positive"):
        Pins(shard=0)


@pytest.mark.pure
def test_zero_2_keeps_gradients_in_parts_over_micro_batches() -> None:
    plain = Recipe(accumulates=True)
    held = {zero: priced(plain, dp=2, zero=zero, micro_batches=4).stages[0].memory for zero in (1, 2, 3)}
    assert [m.gradients_bytes for m in held.values()] == [2 * NUMBERS, NUMBERS, NUMBERS]
    assert [m.optimizer_states_bytes for m in held.values()] == [2 * NUMBERS] * 3
    assert held[2].parameters_bytes == held[1].parameters_bytes > held[3].parameters_bytes
    own = {zero: priced(Recipe(bucket_bytes=64, optimizer_passes=1.0), dp=4, zero=zero, micro_batches=2) for zero in (1, 2)}
    totals = [c.stages[0].memory.total_bytes for c in own.values()]
    assert totals[1] < totals[0]


@pytest.mark.pure
@pytest.mark.parametrize("m", [1, 2, 4])
def test_zero_2_reduces_in_every_pass(m: int) -> None:
    """Nothing hidden, one bucket: ZeRO-1 scatters gradients once a step, ZeRO-2 once a micro-batch."""
    nbytes = 2.0 * NUMBERS
    recipe = Recipe(overlaps_reduction=False, bucket_bytes=2 * NUMBERS)
    once, often = (priced(recipe, dp=2, zero=zero, micro_batches=m) for zero in (1, 2))
    scatter_s = once.estimator.pricer.collective_s("reduce_scatter", nbytes, "dp")
    assert often.step_time_s - once.step_time_s == pytest.approx((m - 1) * scatter_s, rel=1e-6, abs=1e-12)
    hidden = [priced(Recipe(bucket_bytes=64), dp=2, zero=zero, micro_batches=m) for zero in (1, 2)]
    assert hidden[0].step_time_s <= hidden[1].step_time_s * (1 + 1e-9)


@pytest.mark.pure
@pytest.mark.parametrize("name", ["hybrid1", "hybrid2", "hybrid3"])
def test_groups_exchange_on_two_levels(name: str) -> None:
    """16 ranks, 8 of them in a node: parts are exchanged in the node, and summed by 8 pairs over the nodes at the same time."""
    cluster, nbytes = _cluster(), 64 * MIB
    param = ParamBytes(local_bytes=nbytes, resting_bytes=nbytes // 8, numel=nbytes // 4, resting_numel=nbytes // 32, trainable=True)
    recipe = Recipe(overlaps_reduction=False, overlaps_gathers=False, bucket_bytes=nbytes)
    pricer = Pricer(cluster, {"pp": 1, "dp": 16, "tp": 1}, None, recipe)
    made = Exchange(rest=RESTS[name], shard=8, micro_batches=1, pricer=pricer, recipe=recipe)
    gather, scatter = (collective_time_s(kind, nbytes, 8, cluster, ranks_per_node=8) for kind in ("all_gather", "reduce_scatter"))
    summed = collective_time_s("all_reduce", nbytes // 8, 2, cluster, ranks_per_node=1)
    everything = made.step_s({param: 1}, 1.0, 1.0) + made.pass_s({param: 1}, 1.0)
    if name == "hybrid3":
        everything += made.unit_s(nbytes, scattered=nbytes)
    assert everything == pytest.approx(gather + scatter + summed, rel=1e-9)
    assert gather < collective_time_s("all_gather", nbytes, 16, cluster, ranks_per_node=8)


# ---------------------------------------------------------------------------------------------------------------- a row of one's own
@pytest.mark.pure
def test_a_rest_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, _ = captured_of("stack")
    with pytest.raises(PlanError, match="zero must be one of 0, 1, 2, 3"):
        Pins(zero=4)
    monkeypatch.setitem(RESTS, LATE.name, LATE)
    plans = {zero: _planned(4, dp=4, zero=zero, micro_batches=2) for zero in (1, 3, 4)}
    memory = {zero: plan.stages[0].memory for zero, plan in plans.items()}
    assert memory[4].parameters_bytes == memory[3].parameters_bytes < memory[1].parameters_bytes
    assert memory[4].gradients_bytes > memory[3].gradients_bytes
    assert Plan.from_json(plans[4].to_json()) == plans[4] and plans[4].rest == "zero4"
    assert 'rest="zero4"' in emit(captured, plans[4])


def _train_with(row: Rest, form: dict[str, Any]) -> dict[str, float]:
    RESTS[row.name] = row
    try:
        return _train(form)
    finally:
        del RESTS[row.name]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "form",
    [
        {"dp": 4, "micro_batches": 2}, {"dp": 2, "tp": 2, "sequence": True, "recomputed": True}, {"pp": 2, "dp": 2, "micro_batches": 4},
        {"dp": 4, "shard": 2, "micro_batches": 2},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_of_ones_own_trains_as_one_process(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    for worst in workers.run(_train_with, LATE, {**form, "zero": 4}, timeout_s=60):
        assert max(worst.values()) < 1e-11, worst


def _train_all(forms: list[dict[str, Any]]) -> list[float]:
    return [max(_train(form).values()) for form in forms]


@pytest.mark.gloo
def test_groups_beside_the_tensor_and_pipeline_axes() -> None:
    """On 8 ranks, where groups of two, their copies and another axis are all there."""
    forms = [
        {"dp": 4, "tp": 2, "zero": 3, "shard": 2, "micro_batches": 2},
        {"dp": 4, "tp": 2, "zero": 2, "shard": 2, "micro_batches": 2, "sequence": True},
        {"pp": 2, "dp": 4, "zero": 1, "shard": 2, "micro_batches": 2},
    ]
    for worst in launch(_train_all, forms, gpus=8):
        assert max(worst) < 1e-11, dict(zip(map(str, forms), worst, strict=True))
