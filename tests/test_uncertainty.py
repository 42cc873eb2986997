"""Intervals about predictions: spreads of constants, of a step by what it depends on, and of memory by its terms."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import msgspec
import pytest

from autopar.errors import PlanError
from autopar.planner import Pins, Plan, make_plan
from autopar.planner.interval import spread_of
from autopar.planner.plan import MemoryPlan
from autopar.report.text import plan_text
from cost_models.cluster import HardwareFileError, load_cluster
from cost_models.memory import MemoryTerms
from cost_models.recipe import Recipe
from cost_models.uncertainty import ACCOUNT, CENTRAL, MEMORY, SPREADS, interval, memory_spread_bytes, spread_of_kind, step_spread
from cost_models.write import cluster_toml
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure


def planned(name: str, gpus: int, cluster: str = "dgx-h100", **pins: object) -> Plan:
    return make_plan(program_of(name), gpus=gpus, cluster=load_cluster(cluster), pins=Pins(**pins))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ by hand
def test_a_spread_is_the_mean_square_of_its_parts() -> None:
    half = step_spread({"a": 3.0, "b": 1.0}, {"a": 0.2, "b": 0.4})
    assert half == pytest.approx(math.sqrt(ACCOUNT**2 + 0.15**2 + 0.1**2))
    assert step_spread({}, {}) == step_spread({"a": 1.0}, {"a": 0.0}) == ACCOUNT
    assert interval(2.0, 0.1) == pytest.approx((2 * math.exp(-0.12816), 2 * math.exp(0.12816)))
    assert pytest.approx(math.sqrt(2) * 0.906194, abs=1e-4) == CENTRAL, "the error function is 0.8 at 0.906194"


def test_every_term_of_memory_has_a_spread() -> None:
    assert list(MEMORY) == [f.name for f in dataclasses.fields(MemoryTerms)]
    assert memory_spread_bytes({"parameters": 1e9, "optimizer_states": 1e9}) == 0.0, "what rests is counted"
    expected = math.hypot(MEMORY["saved_activations"] * 3e9, MEMORY["framework_context"] * 1e9)
    assert memory_spread_bytes({"saved_activations": 3e9, "framework_context": 1e9, "gradients": 5e9}) == pytest.approx(expected)


def test_kinds_of_sources() -> None:
    assert spread_of_kind("datasheet: NVIDIA") == 0.0 < spread_of_kind("measured: here") < spread_of_kind("fitted: runs")
    assert spread_of_kind("fitted: runs") < spread_of_kind("derived: 0.7 of it") < spread_of_kind("assumed: as others")
    with pytest.raises(ValueError, match="heard"):
        spread_of_kind("heard: somewhere")


# -------------------------------------------------------------------------------------------------------------- files
def test_a_figure_may_state_its_own_spread(tmp_path: Path) -> None:
    text = cluster_toml(load_cluster("dgx-h100"))
    line = next(line for line in text.splitlines() if line.startswith("context_bytes"))
    (tmp_path / "own.toml").write_text(text.replace(line, line.removesuffix(" }") + ", spread = 0.015 }"), encoding="utf-8")
    gpu = load_cluster(tmp_path / "own.toml").gpu
    assert gpu.spread("context_bytes") == 0.015 and load_cluster("dgx-h100").gpu.spread("context_bytes") == SPREADS["assumed"]
    assert gpu.spread("launch_s") == 0.25 > SPREADS["measured"], "hosts differ"
    assert gpu.spread("achievable_fraction.gather") == SPREADS["derived"]
    (tmp_path / "again.toml").write_text(cluster_toml(load_cluster(tmp_path / "own.toml")), encoding="utf-8")
    again = load_cluster(tmp_path / "again.toml").gpu
    assert (again.spreads, dict(again.sources)) == ((("launch_s", 0.25), ("context_bytes", 0.015)), dict(gpu.sources))


@pytest.mark.parametrize("spread", ["-0.1", "1.5", '"much"', "true"])
def test_a_spread_that_is_none_is_refused(tmp_path: Path, spread: str) -> None:
    text = cluster_toml(load_cluster("dgx-h100"))
    line = next(line for line in text.splitlines() if line.startswith("context_bytes"))
    (tmp_path / "bad.toml").write_text(text.replace(line, f"{line.removesuffix(' }')}, spread = {spread} }}"), encoding="utf-8")
    with pytest.raises(HardwareFileError, match="context_bytes has a `spread`"):
        load_cluster(tmp_path / "bad.toml")


# -------------------------------------------------------------------------------------------------------------- plans
@pytest.mark.parametrize(
    "name,gpus,pins",
    [
        ("stack", 1, {}),
        ("stack", 4, {"tp": 4}),
        ("deep", 4, {"pp": 2, "dp": 2, "recompute": "full"}),
        ("deep", 16, {"dp": 2, "tp": 8, "zero": 3}),
        ("tied", 4, {"dp": 4}),
    ],
)
def test_the_seconds_of_a_step_by_kind_add_up(name: str, gpus: int, pins: dict[str, int]) -> None:
    plan = planned(name, gpus, **pins)
    assert sum(plan.seconds_by_kind.values()) == pytest.approx(plan.step_time_s, rel=1e-9)
    assert list(plan.seconds_by_kind.values()) == sorted(plan.seconds_by_kind.values(), reverse=True)
    low, high = plan.step_time_interval_s
    assert low < plan.step_time_s < high and low * high == pytest.approx(plan.step_time_s**2)
    for stage in plan.stages:
        assert stage.memory.interval_bytes[0] < stage.memory.total_bytes < stage.memory.interval_bytes[1]


def test_what_lies_between_nodes_is_told_apart() -> None:
    inside, between = planned("deep", 4, dp=4), planned("deep", 16, dp=2, tp=8)
    assert "collectives in nodes" in inside.seconds_by_kind and "collectives between nodes" not in inside.seconds_by_kind
    assert "collectives between nodes" in between.seconds_by_kind


def test_less_is_known_of_hardware_whose_constants_are_assumed() -> None:
    kinds = {"matmul": 1.0, "pointwise": 1.0}
    assert spread_of(kinds, load_cluster("dgx-h100")) < spread_of(kinds, load_cluster("dgx-b200"))
    assert spread_of({"view": 1.0}, load_cluster("dgx-b200")) == ACCOUNT


def test_intervals_are_explained_and_survive_the_file(tmp_path: Path) -> None:
    plan = planned("deep", 4, dp=4)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.step_time_interval_s == plan.step_time_interval_s and again.seconds_by_kind == plan.seconds_by_kind
    text = " ".join(plan_text(again).split())
    assert "80% interval" in text and "the step depends on" in text and next(iter(plan.seconds_by_kind)) in text
    without = msgspec.structs.replace(plan, seconds_by_kind={})
    assert "the step depends on" not in plan_text(without)


def test_a_spread_in_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(planned("tied", 1), step_spread=1e6)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="step_spread"):
        Plan.load(tmp_path / "plan.json")
    assert "the step depends on" not in plan_text(msgspec.structs.replace(planned("tied", 1), step_time_s=0.0))


def test_an_interval_of_memory_ends_above_nothing() -> None:
    tiny = MemoryPlan(
        parameters_bytes=0, gradients_bytes=0, optimizer_states_bytes=0, saved_activations_bytes=0, batch_bytes=0,
        largest_temporary_bytes=0, communication_buffers_bytes=0, framework_context_bytes=0, allocator_slack_bytes=100,
    )  # fmt: skip
    low, high = tiny.interval_bytes
    assert 0 <= low < 100 < high == pytest.approx(100 + CENTRAL * MEMORY["allocator_slack"] * 100)


def test_a_software_beside_those_that_were_fitted_is_less_certain() -> None:
    """By hand: autopar's own runtime on a catalogued GPU; not where another software's recipe is priced, nor on a CPU."""
    cluster = load_cluster("dgx-h100")
    own = planned("deep", 2, dp=2)
    assert own.step_spread == pytest.approx(math.hypot(spread_of(own.seconds_by_kind, cluster), 0.12))
    reduced = make_plan(program_of("deep"), gpus=2, cluster=cluster, pins=Pins(dp=2), reduce_dtype="bf16")
    assert reduced.step_spread == pytest.approx(math.hypot(spread_of(reduced.seconds_by_kind, cluster), 0.12))
    other = make_plan(program_of("deep"), gpus=2, cluster=cluster, pins=Pins(dp=2), recipe=Recipe())
    assert other.step_spread == pytest.approx(spread_of(other.seconds_by_kind, cluster))
    host = planned("deep", 2, "cpu", dp=2)
    assert host.step_spread == pytest.approx(spread_of(host.seconds_by_kind, load_cluster("cpu")))
