"""What the compiler has never heard of, one of each kind: each is one value that is added in one place."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, library, nn

from autopar import axes
from autopar.axes import AxisSpec
from autopar.capture import capture
from autopar.catalog import OpView, rule
from autopar.catalog.rule import register
from autopar.compiler import emit
from autopar.errors import PlanError
from autopar.ir import Program, R, S, Span, Strategy
from autopar.measure import Pricer
from autopar.planner import Pins, Plan, lower, make_plan, modes
from autopar.planner.lower import on_axes
from autopar.planner.modes import Recompute
from autopar.report.text import plan_text
from cost_models import cluster as catalogue
from cost_models import pipeline, pools, rests
from cost_models.actions import Action, validate
from cost_models.cluster import load_cluster
from cost_models.pools import Pool
from cost_models.rests import Rest
from tests.planner_programs import captured_of, program_of

pytestmark = pytest.mark.pure


@library.custom_op("planner_toy::rows", mutates_args=())
def rows(x: Tensor, w: Tensor) -> Tensor:
    """Each row times its own weights, then its softmax over columns: rows are independent, columns are not."""
    return (x * w).softmax(-1)


@rows.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w, y = ctx.saved_tensors
    inner = y * (grad - (grad * y).sum(-1, keepdim=True))
    return inner * w, (inner * x).sum(tuple(range(x.ndim - w.ndim)))


rows.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output))


class Toy(nn.Module):
    def __init__(self, length: int = 512, width: int = 64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return rows(x, self.w).pow(2).mean()


def _rule(view: OpView) -> Iterator[Strategy]:
    for g in view.splits(view.outs[0].shape[0]):
        yield view.strategy([S(0, g), R], [S(0, g)])
    for g in view.splits(view.outs[0].shape[1]):
        yield view.strategy([S(1, g), S(0, g)], [S(1, g)])


@pytest.fixture
def toy() -> Program:
    return capture(Toy(), {"x": torch.randn(8, 512, 64)}).program


def _strategy(plan: Plan, axis: str) -> str:
    (name,) = [op for op in plan.axes[axis].ops if op.startswith("rows")]
    return plan.axes[axis].ops[name]


def test_an_operator_is_one_rule(toy: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load_cluster("dgx-a100")
    assert "S(" not in _strategy(make_plan(toy, 2, cluster, pins=Pins(tp=2)), "tp"), "without a rule it is split over samples at most"
    monkeypatch.setattr(rule, "RULES", dict(rule.RULES))
    register("planner_toy.rows", _rule)
    assert _strategy(make_plan(toy, 2, cluster, pins=Pins(dp=2)), "dp") == "S(0) R -> S(0)"
    plan = make_plan(toy, 2, cluster, pins=Pins(tp=2))
    assert _strategy(plan, "tp") == "S(1) S(0) -> S(1)"
    assert any(op.target.startswith("planner_toy.rows") for op in lower(toy, plan).stages[0].ops)
    assert make_plan(toy, 1, cluster, pins=Pins(micro_batches=4)).micro_batches == 4, "the same line splits it over time"
    with pytest.raises(ValueError, match="two rules for planner_toy.rows"):
        register("planner_toy.rows", _rule)


def test_a_gpu_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(catalogue.CATALOGUE, tmp_path / "cost_models", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(catalogue, "CATALOGUE", tmp_path / "cost_models")
    known = (tmp_path / "cost_models" / "gpus" / "a100-80gb.toml").read_text()
    kept = [line for line in known.splitlines() if not line.startswith("aliases")]
    (tmp_path / "cost_models" / "gpus" / "toy-9000.toml").write_text("\n".join(kept))
    box = (tmp_path / "cost_models" / "clusters" / "dgx-a100.toml").read_text().splitlines()
    mine = ["gpu = 'toy-9000'" if line.startswith("gpu =") else line for line in box if not line.startswith("aliases")]
    (tmp_path / "mine.toml").write_text("\n".join(mine))
    plan = make_plan(program_of("pair"), 2, load_cluster(tmp_path / "mine.toml"))
    assert plan.cluster == "mine" and "toy-9000" in plan.provenance
    assert plan.objective_s == make_plan(program_of("pair"), 2, load_cluster("dgx-a100")).objective_s


def _eager(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
    """Twice as many forwards ahead as 1F1B."""
    ahead = min(2 * (ranks - rank), micro_batches)
    actions = [Action(rank, "F", i) for i in range(ahead)]
    for i in range(micro_batches):
        actions.append(Action(rank, "B", i))
        actions += [Action(rank, "F", ahead + i)] if ahead + i < micro_batches else []
    return actions


def test_a_schedule_is_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="'gpipe', '1f1b'"):
        Pins(schedule="eager")
    monkeypatch.setitem(pipeline.SCHEDULES, "eager", pipeline.Schedule(name="eager", actions=_eager))
    for stages, m in itertools.product((1, 2, 3), (1, 2, 4, 8)):
        validate(pipeline.schedule("eager", stages, m))
    captured, _ = captured_of("stack")
    plans = {
        name: make_plan(captured.program, 2, load_cluster("dgx-a100"), pins=Pins(pp=2, micro_batches=8, schedule=name))
        for name in ("1f1b", "eager", "gpipe")
    }
    held = {name: [s.micro_batches_in_flight for s in plan.stages] for name, plan in plans.items()}
    assert held == {"1f1b": [2, 1], "eager": [4, 2], "gpipe": [8, 8]}
    plans["eager"].save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plans["eager"]
    assert "eager" in emit(captured, plans["eager"])


def _held(plan: Plan) -> list[tuple[int, int, int]]:
    """Of each stage the bytes of parameters, optimizer states, and in all but the allocator's slack."""
    memory = [s.memory for s in plan.stages]
    return [(m.parameters_bytes, m.optimizer_states_bytes, m.total_bytes - m.allocator_slack_bytes) for m in memory]


def test_an_axis_is_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An axis inside tp, over which operators are divided again."""
    with pytest.raises(PlanError, match="no mesh axis 'toy'"):
        Pins(axes={"toy": 2})
    monkeypatch.setitem(axes.AXES, "toy", AxisSpec(name="toy", title="toy parallel", divides="operators", within_node=True))
    captured, _ = captured_of("wide")
    cluster = load_cluster("dgx-a100")
    assert {plan.mesh["toy"] for plan in [make_plan(captured.program, 2, cluster, pins=Pins(dp=1, tp=1, pp=1))]} == {2}
    plan = make_plan(captured.program, 8, cluster, pins=Pins(dp=2, tp=2, axes={"toy": 2}))
    assert plan.mesh == {"pp": 1, "dp": 2, "tp": 2, "toy": 2} and set(plan.axes) == {"dp", "tp", "toy"}
    rank = on_axes(captured.program, plan).rank
    weights = {p.fqn: dict(p.layouts) for p in rank.params}
    assert any(x["tp"].is_shard and x["toy"].is_shard for x in weights.values()), "the same parameters are cut over both"
    moved = [op for op in rank.ops if op.target.startswith("autopar.C.") and op.kwarg("axis") == "toy"]
    assert moved, "values change their layout over it"
    pricer = Pricer(cluster, plan.mesh)
    assert plan.stages[0].communication_s >= sum(pricer.op(op, rank).communication_s for op in moved) > 0
    assert "toy 2" in plan_text(plan) and "toy parallel" in plan_text(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    emitted = emit(captured, plan)
    assert "mesh.toy" in emitted and "mesh.tp" in emitted


def test_a_rest_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer states and gradients in parts over those of a node, pinned by a number of its own."""
    with pytest.raises(PlanError, match="zero must be one of 0, 1, 2, 3"):
        Pins(zero=7)
    row = Rest(name="toy", zero=7, title="toy parts", states=True, gradients=True, over="node")
    monkeypatch.setitem(rests.RESTS, "toy", row)
    captured, _ = captured_of("wide")
    plans = {zero: make_plan(captured.program, 16, load_cluster("dgx-a100"), pins=Pins(dp=16, zero=zero)) for zero in (0, 7)}
    assert (plans[7].rest, plans[7].shard) == ("toy", 8)
    (_, whole, _), (_, parts, _) = _held(plans[0])[0], _held(plans[7])[0]
    assert parts < whole / 4
    assert "toy parts" in plan_text(plans[7]) and 'rest="toy"' in emit(captured, plans[7])


def test_a_mode_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of every block runs again."""
    with pytest.raises(PlanError, match="recompute must be 'none', 'selective', 'full' or 'auto'"):
        Pins(recompute="half")
    half = Recompute(name="half", offers=lambda ledger, liveness, block: [(Span(block.start, block.start + len(block) // 2),)])
    monkeypatch.setitem(modes.RECOMPUTES, "half", half)
    captured, _ = captured_of("stack")
    cluster = load_cluster("dgx-a100")
    plans = {
        name: make_plan(captured.program, 2, cluster, pins=Pins(pp=2, micro_batches=4, recompute=name)) for name in ("none", "half", "full")
    }
    assert [m.name for m in plans["half"].modes] == ["half"] and plans["half"].modes[0].operators
    (span,) = plans["half"].modes[0].spans
    assert span[0] == 0 and span[1] == plans["full"].modes[0].spans[0][1] // 2
    seconds = [sum(s.backward_s for s in plans[name].stages) for name in ("none", "half", "full")]
    kept = [sum(s.memory.saved_activations_bytes for s in plans[name].stages) for name in ("none", "half", "full")]
    assert seconds[0] < seconds[1] < seconds[2] and kept[0] > kept[1]
    assert "recompute(" in emit(captured, plans["half"])


def test_a_pool_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running average of every parameter, which rests as the parameter's optimizer states do."""
    captured, _ = captured_of("wide")
    cluster = load_cluster("dgx-a100")

    def planned(limit: int | None = None, **pins: int) -> Plan:
        return make_plan(captured.program, 4, cluster, memory_limit_bytes=limit, pins=Pins(dp=4, micro_batches=1, **pins))

    before = {zero: planned(zero=zero) for zero in (0, 3)}
    average = Pool(
        name="average", title="averages of parameters", lives="always", row="optimizer_states",
        of_parameter=lambda p, how: p.resting_bytes if p.trainable else 0,
    )  # fmt: skip
    monkeypatch.setitem(pools.POOLS, "average", average)
    for zero, plan in before.items():
        (_, states, total), (_, more, in_all) = _held(plan)[0], _held(planned(zero=zero))[0]
        assert (more - states, in_all - total) == (states // 2, states // 2), "AdamW keeps two numbers for each of a parameter"
    between = (before[0].stages[0].memory.upper_bytes + planned(zero=0).stages[0].memory.upper_bytes) // 2
    assert planned(limit=between).zero > 0, "what fitted whole does so no more"
    with pytest.raises(ValueError, match="'averages', which is not one of the account's"):
        Pool(name="average", title="", lives="always", row="averages", of_parameter=lambda p, how: 0)
