"""An operator, a GPU and a schedule that the compiler has never heard of: each is one thing that is added in one place."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, library, nn

from autopar.capture import capture
from autopar.catalog import OpView, rule
from autopar.catalog.rule import register
from autopar.compiler import emit
from autopar.errors import PlanError
from autopar.ir import Program, R, S, Strategy
from autopar.planner import Pins, Plan, lower, make_plan
from cost_models import cluster as catalogue
from cost_models import pipeline
from cost_models.actions import Action, validate
from cost_models.cluster import load_cluster
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
    assert plan.step_time_s == make_plan(program_of("pair"), 2, load_cluster("dgx-a100")).step_time_s


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
