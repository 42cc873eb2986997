"""A plan is completed for what the model computes now: what rests stays, what was there keeps its strategy, the rest is sound."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.compiler import emit, plan_of
from autopar.errors import PlanError
from autopar.ir import Program, refs
from autopar.planner import Plan, complete, lower
from autopar.planner.lower import on_axes
from autopar.planner.match import matched
from autopar.planner.moments import derived_from_inputs
from autopar.render import load
from autopar.run.manifest import Manifest
from cost_models.cluster import load_cluster

WIDTH, BATCH = 16, 8
pytestmark = pytest.mark.pure


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.up, self.down, self.side = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.uses_side, self.uses_batch_norm = 1.0, False, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        h = h if self.scale == 1.0 else h * self.scale
        h = self.batch_norm(h) if self.uses_batch_norm else h
        return x + h + torch.tanh(self.side(h)) if self.uses_side else x + h


class Model(nn.Module):
    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.order: tuple[int, ...] = (0, 1, 2, 3)
        for layer in self.layers:
            layer.uses_batch_norm = batch_norm

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for k in self.order:
            h = self.layers[k](h)
        return F.mse_loss(self.head(h), y)


def captured(model: nn.Module, size: int = BATCH) -> Captured:
    return capture(model, (torch.randn(size, WIDTH), torch.randn(size, WIDTH)), check=False)


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"dp": 2}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2mb2": (2, {"pp": 2, "micro_batches": 2}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "dp2tp2mb2": (4, {"dp": 2, "tp": 2, "micro_batches": 2}),
    "pp2tp2": (4, {"pp": 2, "tp": 2}),
    "recomputed": (2, {"pp": 2, "recompute": "full"}),
}


@functools.cache
def planned(name: str, batch_norm: bool = False) -> tuple[Captured, Plan, Manifest]:
    gpus, pins = PLANS[name]
    found = captured(Model(batch_norm))
    plan = plan_of(found, gpus, pins=pins, cluster="cpu")
    return found, plan, load(emit(found, plan)).MANIFEST


def completed(name: str, model: Model, *, batch_norm: bool = False, size: int = BATCH) -> tuple[Captured, Plan, Manifest]:
    old, plan, manifest = planned(name, batch_norm)
    now = captured(model, size)
    found = complete(plan, old.program, now.program, manifest, load_cluster("cpu"))
    return now, found, load(emit(now, found)).MANIFEST  # every strategy is checked against the rules here


def scaled() -> Model:
    model = Model()
    model.layers[1].scale = 0.5
    return model


def with_sides() -> Model:
    model = Model()
    model.layers[0].uses_side = model.layers[3].uses_side = True
    return model


def shorter() -> Model:
    model = Model()
    model.order = (0, 1, 3)
    return model


def rests(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    return {p.name: (dict(p.layouts), p.zero_dim, p.rest) for p in manifest.params}


def wrong_stages(found: Captured, plan: Plan, known: Manifest) -> list[str]:
    """Operators that read what does not rest on their stage."""
    here = {p.value: p.fqn for p in found.program.params} | {b.value: b.fqn for b in found.program.buffers if b.fqn}
    rest = {x.name: x.stages for x in (*known.params, *known.buffers)}
    stages = lower(found.program, plan).stages
    return [f"{op.name} {r}" for s in stages for op in s.ops for r in refs(op) if r in here and s.index not in rest[here[r]]]


@pytest.mark.parametrize("change", [scaled, with_sides, shorter])
@pytest.mark.parametrize("name", PLANS)
def test_what_rests_stays_and_what_is_kept_does_as_before(name: str, change: Any) -> None:
    old, plan, manifest = planned(name)
    now, found, theirs = completed(name, change())
    assert rests(theirs) == rests(manifest)
    assert wrong_stages(now, found, manifest) == []
    assert (found.mesh, found.micro_batches, found.schedule, found.zero) == (plan.mesh, plan.micro_batches, plan.schedule, plan.zero)
    before, after = on_axes(old.program, plan), on_axes(now.program, found)
    for a, b, programs in (
        (before.data, after.data, (old.program, now.program)),
        *((a, b, (before.moments.body, after.moments.body)) for a, b in zip(before.inner, after.inner, strict=True)),
    ):
        if a is None or b is None:
            assert a is b
            continue
        same = matched(*programs)
        kept = [op for op, was in same.items() if b.ops[op] == a.ops[was]]
        assert len(kept) >= 0.9 * len(same) > 0
        heavy = [op.name for op in programs[1].ops if op.name in same and op.target == "aten.linear.default"]
        assert heavy and set(heavy) <= set(kept)


def test_the_completed_plan_is_the_same_every_time() -> None:
    assert completed("dp2tp2mb2", with_sides())[1].to_json() == completed("dp2tp2mb2", with_sides())[1].to_json()


def test_a_program_that_has_not_changed_keeps_its_plan() -> None:
    for name in PLANS:
        _, plan, _ = planned(name)
        found = completed(name, Model())[1]
        assert (found.axes, found.cuts, found.recompute, found.program_hash) == (plan.axes, plan.cuts, plan.recompute, plan.program_hash)


def test_blocks_are_recomputed_by_their_places() -> None:
    old, plan, _ = planned("recomputed")
    assert len(plan.recompute) == 4
    model = Model()
    model.order = (1, 2, 3)
    now, found, _ = completed("recomputed", model)
    blocks = on_axes(now.program, found).rank.blocks
    assert [blocks[b].prefixes[k] for b, k, _ in found.recompute] == ["layers.1", "layers.2", "layers.3"]
    assert sum(call.recomputed_whole for stage in lower(now.program, found).stages for call in stage.calls) == 3


def test_statistics_stay_on_their_stage_when_they_are_not_updated_any_more() -> None:
    model = Model(batch_norm=True)
    for k in (1, 3):
        model.layers[k].batch_norm.eval()
    for name in ("dp2", "tp2", "pp2", "zero3"):
        now, found, theirs = completed(name, model, batch_norm=True)
        known = planned(name, True)[2]
        assert wrong_stages(now, found, known) == []
        lies = {b.name: dict(b.layouts) for b in known.buffers}
        assert all(dict(b.layouts) == lies[b.name] for b in theirs.buffers if not b.constant)


def test_layers_that_are_not_used_rest_with_their_neighbours() -> None:
    manifest = planned("pp2")[2]
    stages = {p.name: p.stages for p in manifest.params}
    for k in range(4):
        assert stages[f"layers.{k}.side.weight"] == stages[f"layers.{k}.up.weight"]
    assert stages["layers.0.up.weight"] != stages["layers.3.up.weight"]


def test_another_order_of_the_stages_is_refused() -> None:
    model = Model()
    model.order = (3, 1, 2, 0)
    with pytest.raises(PlanError, match=r"needs layers\.\d\.\S+, which rests on stage 0, after \S+, which rests on stage 1, was used"):
        completed("pp2", model)


def test_a_parameter_that_was_not_there_is_refused() -> None:
    model = Model()
    model.layers[2].bias = nn.Parameter(torch.zeros(WIDTH))
    with pytest.raises(PlanError, match=r"layers\.2\.bias was not in the model"):
        completed("tp2", model)


@pytest.mark.parametrize(
    "name,size,count",
    [("pp2mb2", 7, 7), ("pp2mb2", 6, 2), ("pp2mb2", 3, 1), ("dp2tp2mb2", 12, 2), ("dp2tp2mb2", 6, 3), ("dp2tp2mb2", 9, 9), ("dp2", 9, 3)],
)
def test_a_batch_that_does_not_divide_into_micro_batches_has_no_larger_ones(name: str, size: int, count: int) -> None:
    """Of 8 samples each rank was planned to have 4 at a time, in dp2tp2mb2 2."""
    assert completed(name, Model(), size=size)[1].micro_batches == count


@pytest.mark.parametrize("name", ["dp2", "zero3", "dp2tp2mb2"])
def test_a_batch_that_does_not_divide_among_ranks_is_whole_on_each(name: str) -> None:
    _, _, manifest = planned(name)
    now, found, odd = completed(name, Model(), size=7)
    assert [x.layouts["dp"] for x in manifest.inputs] == ["S(0)", "S(0)"]
    assert {x.layouts.get("dp", "I") for x in odd.inputs} == {"I"}
    assert {str(x) for strategy in on_axes(now.program, found).data.ops.values() for x in (*strategy.inputs, *strategy.outputs)} == {"I"}
    assert rests(odd) == rests(manifest)


def test_what_cannot_be_split_is_whole_in_one_piece() -> None:
    assert completed("dp2", Model(batch_norm=True), batch_norm=True, size=9)[1].micro_batches == 1


def test_operators_are_matched_by_their_places_and_not_by_their_names() -> None:
    old, new = captured(Model()).program, captured(scaled()).program
    same = matched(old, new)
    module = {op.name: (op.module, op.target) for op in old.ops}
    added = [op for op in new.ops if op.name not in same]
    assert [(op.module, op.target) for op in added] == [("layers.1", "aten.mul.Tensor")]
    assert all((op.module, op.target) == module[same[op.name]] for op in new.ops if op.name in same)
    assert len(set(same.values())) == len(same) == len(old.ops)


def test_every_operator_that_computes_is_still_in_one_stage() -> None:
    now, found, _ = completed("pp2", with_sides())
    program: Program = on_axes(now.program, found).rank
    derived = derived_from_inputs(program)
    placed = [op.name for stage in lower(now.program, found).stages for op in stage.ops if op.name not in derived]
    assert sorted(placed) == sorted(op.name for op in program.ops if op.name not in derived)


def test_a_dim_that_is_taken_for_the_batch_may_be_odd() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[1].square().mean()

    even, odd = (capture(TimeFirst(), (torch.randn(length, 3, WIDTH),), check=False) for length in (6, 5))
    plan = plan_of(even, 2, pins={"dp": 2}, cluster="cpu")
    manifest = load(emit(even, plan)).MANIFEST
    found = complete(plan, even.program, odd.program, manifest, load_cluster("cpu"))
    assert {x.layouts.get("dp", "I") for x in load(emit(odd, found)).MANIFEST.inputs} == {"I"}
