"""A plan made from one trace of a model is run on another, in which the same operators have other numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from autopar.capture import Captured, capture, program_hash
from autopar.cli import app
from autopar.compiler import build, emit
from autopar.errors import PlanError
from autopar.ir import Program
from autopar.planner import Pins, Plan, lower, make_plan
from autopar.planner.names import named_alike, named_as
from cost_models.cluster import load_cluster

ROOT = Path(__file__).parent


class Chatty(nn.Module):
    """Its forward adds zeros on meta alone, which compute nothing and take a number all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.is_meta:
                x.relu()
                layer(x)
            x = x + F.relu(layer(x))
        return self.last(x).pow(2).mean()


def model() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Chatty(), {"x": torch.randn(8, 16)}


def on_meta() -> Captured:
    real, inputs = model()
    return capture(copy.deepcopy(real).to("meta"), {k: t.to("meta") for k, t in inputs.items()})


def planned(program: Program, **pins: Any) -> Plan:
    gpus = pins.get("dp", 1) * pins.get("tp", 1) * pins.get("pp", 1)
    return make_plan(program, gpus, load_cluster("cpu"), pins=Pins(**pins))


PINS = [{"dp": 2}, {"tp": 2}, {"pp": 2, "micro_batches": 2, "recompute": "full"}, {"dp": 2, "tp": 2, "pp": 2}]


@pytest.mark.pure
@pytest.mark.parametrize("pins", PINS, ids=str)
def test_the_same_source_as_of_a_plan_in_the_programs_own_names(pins: dict[str, Any]) -> None:
    meta, real = on_meta().program, capture(*model())
    names = [[op.name for op in program.ops] for program in (meta, real.program)]
    assert program_hash(meta) == program_hash(real.program) and names[0] != names[1], "the case is none"
    made = planned(meta, **pins)
    assert {*made.operators} <= {*names[0]} and all(names[0][index] == name for name, index in made.operators.items())
    read = named_as(real.program, Plan.from_json(made.to_json()))
    own = planned(real.program, **pins)
    for plan in (read, own):
        assert all(names[1][index] == name for name, index in plan.operators.items())
    cleared = [msgspec.structs.replace(x, planning_s={}) for x in (read, own)]
    assert cleared[0] == cleared[1]
    assert emit(real, read) == emit(real, own)
    assert named_as(real.program, own) is own


@pytest.mark.pure
def test_what_two_plans_both_name_is_compared_under_one_name() -> None:
    meta, real = on_meta().program, capture(*model()).program
    ours, theirs = planned(real, dp=2), planned(meta, dp=2)
    assert ours.axes != theirs.axes
    assert named_alike(ours, theirs).axes == ours.axes
    other = msgspec.structs.replace(theirs, program_hash="0" * 64)
    assert named_alike(ours, other) is other


@pytest.mark.pure
def test_a_plan_for_another_program_keeps_its_names() -> None:
    """So that the refusal speaks of what the plan says."""
    meta, real = on_meta().program, capture(*model())
    made = msgspec.structs.replace(planned(meta, tp=2), program_hash="0" * 64)
    assert named_as(real.program, made) is made
    with pytest.raises(PlanError, match="another model"):
        emit(real, made)


@pytest.mark.pure
@pytest.mark.parametrize("places", [{}, "swapped", "beyond", "equal"], ids=str)
def test_places_that_a_file_states_wrongly_run_nothing_that_no_rule_allows(places: Any) -> None:
    """Without places, or with wrong ones, a plan fits under its own names or is refused."""
    meta, real = on_meta().program, capture(*model())
    made = planned(meta, tp=2)
    at = dict(made.operators)
    first, second = (next(name for name in at if name.startswith(word)) for word in ("linear", "relu"))
    at |= {"swapped": {first: at[second], second: at[first]}, "beyond": {first: 10**9}, "equal": {first: at[second]}}.get(str(places), {})
    stated = msgspec.structs.replace(made, operators=at if places else {})
    with pytest.raises(PlanError, match=r"operator|strategy|strategies"):
        lower(real.program, named_as(real.program, stated))


@pytest.mark.gloo
def test_a_plan_of_a_model_on_meta_is_built_and_verified_for_the_real_one(tmp_path: Path) -> None:
    made = planned(on_meta().program, tp=2)
    real, inputs = model()
    compiled = build(real, inputs, 2, loss=None, decide=lambda captured: made)
    assert compiled.plan.axes == planned(compiled.captured.program, tp=2).axes
    made.save(tmp_path / "plan.json")
    target = f"{ROOT / 'test_planner_names.py'}:model"
    run = CliRunner().invoke(app, ["verify", target, "--gpus", "2", "--plan", str(tmp_path / "plan.json")])
    assert run.exit_code == 0, run.output
    shown = CliRunner().invoke(app, ["explain", target, "--plan", str(tmp_path / "plan.json")])
    assert shown.exit_code == 0, shown.output
    planned(capture(*model()).program, tp=2).save(tmp_path / "own.json")
    differs = CliRunner().invoke(app, ["diff", str(tmp_path / "own.json"), str(tmp_path / "plan.json"), "--json"])
    assert '"details":[]' in differs.output, differs.output
