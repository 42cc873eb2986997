"""Wrong use is met with a message that says what was found and what to do, and with the right exit code: in Python and on the
command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import autopar
from autopar import cli
from tests import wrong_models as models

pytestmark = pytest.mark.pure

ON_CPU = {"cluster": "cpu"}


def code_of(*argv: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in argv])
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model, inputs = models.net()
    autopar.plan(model, 2, example_inputs=inputs, pins={"dp": 2}, **ON_CPU).save(path)
    return path


# -------------------------------------------------------------------------------------------------- refused at once
@pytest.mark.parametrize(
    "wishes,says",
    [
        ({"gpus": 0}, "gpus must be a positive number of GPUs, not 0"),
        ({"gpus": -2}, "not -2"),
        ({"gpus": True}, "not True"),
        ({"gpus": 10**12}, "at most 1,000,000 GPUs, not for 1,000,000,000,000"),
        ({"memory": 10**400}, "positive number of bytes"),
        ({"gpus": 2.0}, "not 2.0"),
        ({"cluster": "dgx-h10"}, "there is no cluster 'dgx-h10' in the catalogue; did you mean dgx-h100"),
        ({"memory": "lots"}, "like '80GiB'"),
        ({"memory": 0}, "positive number of bytes"),
        ({"optimizer": "adamm"}, "there is no optimizer 'adamm'; did you mean adam"),
        ({"precision": "fp99"}, "there is no precision 'fp99'; did you mean"),
        ({"pins": {"pt": 2}}, "there is no pin 'pt'; did you mean"),
        ({"pins": {"tp": "two"}}, "the pin tp must be a positive whole number, not 'two'"),
        ({"pins": {"zero": 4}}, "zero must be one of 0, 1, 2, 3"),
        ({"pins": {"micro_batch": 2, "micro_batches": 2}}, "not both"),
        ({"pins": "tp=2"}, "pins must be autopar.Pins or a mapping"),
    ],
)
def test_wishes_are_checked_before_anything_is_captured(wishes: dict, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for capture in ("autopar.planning.capture", "autopar.compiler.captured_alike"):
        monkeypatch.setattr(capture, lambda *_, **__: pytest.fail("captured"))
    model, inputs = models.net()
    for call in (autopar.plan, autopar.compile):
        with pytest.raises((ValueError, autopar.PlanError)) as error:
            call(model, **({"gpus": 2, **ON_CPU} | wishes), example_inputs=inputs)
        assert says in str(error.value)


@pytest.mark.parametrize(
    "inputs,says",
    [
        ({"x": torch.ones(4, 8)}, "the inputs (x) do not fit Net.forward"),
        ({"x": torch.ones(4, 8), "labels": torch.ones(4)}, "missing a required argument: 'y'"),
        ((torch.ones(4, 8),), "missing a required argument: 'y'"),
        ((), "missing a required argument: 'x'"),
        (torch.ones(4, 8), "for one input: (x,)"),
    ],
)
def test_example_inputs_fit_the_forward(inputs: object, says: str) -> None:
    with pytest.raises(ValueError) as error:
        autopar.plan(models.model(), 2, example_inputs=inputs, **ON_CPU)
    assert says in str(error.value)
    assert error.value.exit_code == 2


# ------------------------------------------------------------------------------------------------ refused at planning
def test_data_dependent_control_flow() -> None:
    model, inputs = models.branching()
    with pytest.raises(autopar.CaptureError) as error:
        autopar.plan(model, 2, example_inputs=inputs, **ON_CPU)
    assert "if x.sum() > 0:" in str(error.value)
    assert "wrong_models.py" in str(error.value)
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    "target,wishes,says",
    [
        ("odd", {"pins": {"dp": 2}}, "dp=2: a global batch of 7 does not divide into 2 ranks"),
        ("net", {"pins": {"micro_batches": 3}}, "does not divide into"),
        ("net", {"pins": {"tp": 3}}, "pinned axes must divide and fill the GPUs"),
        ("net", {"pins": {"dp": 1, "zero": 3}}, "there is no data axis to shard parameters over"),
        ("net", {"memory": "64MiB"}, "The binding constraint is memory"),
        ("unruled", {"pins": {"micro_batches": 2}}, "autopar_tests.reversed_samples.default"),
    ],
)
def test_what_no_plan_satisfies(target: str, wishes: dict, says: str) -> None:
    model, inputs = getattr(models, target)()
    with pytest.raises(autopar.Infeasible) as error:
        autopar.plan(model, 2, example_inputs=inputs, **(ON_CPU | wishes))
    assert says in str(error.value)
    assert error.value.exit_code == 3


def test_the_shortfall_of_memory_is_named() -> None:
    model, inputs = models.net()
    with pytest.raises(autopar.Infeasible, match=r"is \d+\.\d+ MiB short of 64\.00 MiB"):
        autopar.plan(model, 2, example_inputs=inputs, memory="64MiB", **ON_CPU)


def test_an_operator_without_a_rule_is_listed() -> None:
    model, inputs = models.unruled()
    plan = autopar.plan(model, 2, example_inputs=inputs, pins={"dp": 2}, **ON_CPU)
    assert any("without a rule" in note and "autopar_tests.reversed_samples.default x2" in note for note in plan.notes)


def test_another_precision_than_the_models_is_said() -> None:
    model, inputs = models.net()
    plan = autopar.plan(model.double(), 2, example_inputs=(inputs[0].double(), inputs[1]), pins={"dp": 2}, precision="bf16", **ON_CPU)
    assert plan.precision == "fp64"
    assert any("nothing is cast" in note for note in plan.notes)


# -------------------------------------------------------------------------------------------------------- plan files
@pytest.mark.parametrize(
    "content,says",
    [
        (b"", "is not JSON"),
        (b'{"format": "autopar-plan", "versi', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b'{"name": "left-pad", "version": "1.0.0"}', "is not an autopar plan"),
        (b"[1, 2]", "is not an autopar plan"),
        (b'{"format": "autopar-plan", "version": 99}', "is a plan of version 99"),
        (b'{"format": "autopar-plan", "version": 5, "model": "Net"}', "is a damaged plan"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(autopar.PlanError) as error:
        autopar.compile(models.model(), 2, plan=path)
    assert says in str(error.value)
    assert code_of("explain", path) == 2
    assert code_of("diff", path, path, "--json") == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert json.loads(captured.out.splitlines()[-1])["error"] == "PlanError"


@pytest.mark.parametrize(
    "change,says",
    [
        ({"mesh": {"pp": 1, "dp": 3, "tp": 1}}, "is not one of 2 GPUs"),
        ({"schedule": "2f2b"}, "unknown schedule"),
        ({"cuts": [3]}, "stages and cuts"),
        ({"axes": {"dp": {"n": 2, "ops": {"linear": "S(0) -> X"}, "leaves": {}}}}, "not a layout: 'X'"),
        ({"axes": {}}, "no strategies"),
        ({"gpus": "many"}, "is a damaged plan"),
    ],
)
def test_a_plan_that_was_changed_by_hand(tmp_path: Path, plan_file: Path, change: dict, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(plan_file.read_text()) | change))
    model, inputs = models.net()
    with pytest.raises(autopar.PlanError) as error:
        autopar.compile(model, 2, plan=path, example_inputs=inputs)
    assert says in str(error.value)


def test_an_unsound_strategy_is_not_run(tmp_path: Path, plan_file: Path) -> None:
    stated = json.loads(plan_file.read_text())
    name = next(name for name, text in stated["axes"]["dp"]["ops"].items() if name.startswith("linear"))
    stated["axes"]["dp"]["ops"][name] = "S(0) S(0) R -> S(0)"
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(stated))
    model, inputs = models.net()
    with pytest.raises(autopar.PlanError, match="has no strategy"):
        autopar.compile(model, 2, plan=path, example_inputs=inputs)


def test_a_plan_for_another_model_batch_or_number_of_gpus(plan_file: Path) -> None:
    for target in (models.wider, models.odd):
        model, inputs = target()
        with pytest.raises(autopar.PlanError, match="made for another model or batch"):
            autopar.compile(model, 2, plan=plan_file, example_inputs=inputs)
    with pytest.raises(autopar.PlanError, match="the plan is for 2 GPUs, not for 4"):
        autopar.compile(models.model(), 4, plan=plan_file)
    with pytest.raises(ValueError, match="exclude each other"):
        autopar.compile(models.model(), 2, plan=plan_file, pins={"dp": 2})


# ------------------------------------------------------------------------------------------- more GPUs than the world has
def test_a_world_that_is_too_small() -> None:
    model, inputs = models.net()
    planned = autopar.compile(model, 2, example_inputs=inputs, pins={"dp": 2}, **ON_CPU)
    assert planned.plan.gpus == 2
    assert "class " in planned.source
    for deferred in (planned, autopar.compile(model, 2, **ON_CPU)):
        with pytest.raises(autopar.LaunchError) as error:
            deferred(*inputs)
        assert "compiled for 2 processes and runs in a world of 1" in str(error.value)
        assert "torchrun --nproc-per-node=2" in str(error.value)
        assert error.value.exit_code == 2
        with pytest.raises(autopar.LaunchError, match="after the first call"):
            deferred.full_state_dict()
        assert not hasattr(deferred, "full_state_dict") and hasattr(deferred, "state_dict")


# ---------------------------------------------------------------------------------------------------- on the command line
@pytest.mark.parametrize(
    "target,options,code,says",
    [
        ("net", ["--gpus", 0], 2, "--gpus must be 1 or more"),
        ("net", ["--gpus", 2, "--optimizer", "adamm"], 2, "did you mean adam"),
        ("net", ["--gpus", 2, "--precision", "fp99"], 2, "did you mean"),
        ("net", ["--gpus", 2, "--cluster", "dgx-h10"], 2, "did you mean dgx-h100"),
        ("net", ["--gpus", 2, "--pin", "pt=2"], 2, "there is no pin 'pt'"),
        ("net", ["--gpus", 2, "--pin", "tp=3"], 3, "pinned axes must divide"),
        ("net", ["--gpus", 2, "--memory", "64MiB"], 3, "MiB short"),
        ("odd", ["--gpus", 2, "--pin", "dp=2"], 3, "does not divide into 2 ranks"),
        ("missing", ["--gpus", 2], 2, "missing a required argument: 'y'"),
        ("branching", ["--gpus", 2], 4, "if x.sum() > 0"),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], target: str, options: list[object], code: int, says: str) -> None:
    cluster = [] if "--cluster" in options else ["--cluster", "cpu"]
    for command in ("plan", "verify") if not {"--optimizer", "--precision"} & set(map(str, options)) else ("plan",):
        assert code_of(command, f"tests.wrong_models:{target}", *options, *cluster, "--json") == code
        captured = capsys.readouterr()
        assert says in captured.err
        assert json.loads(captured.out.splitlines()[-1])["exit_code"] == code
        assert "Traceback" not in captured.err


def test_a_plan_file_is_explained_without_its_model(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("explain", plan_file) == 0
    assert "dp=2" in capsys.readouterr().out
    assert code_of("explain", plan_file, "--json") == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert any(s["split"] == "samples" and s["operators"].get("linear") == 3 for s in answer["strategies"])
    assert code_of("verify", "tests.wrong_models:wider", "--gpus", 2, "--plan", plan_file) == 2
    assert "made for another model" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- AUTOPAR_DEBUG
def test_each_debug_level_says_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    marks = {1: "autopar: planning took", 2: "what limits it", 4: "MANIFEST = Manifest("}
    model, inputs = models.net()
    for level in (0, 1, 2, 3, 4):
        monkeypatch.setenv("AUTOPAR_DEBUG", str(level))
        autopar.compile(model, 2, example_inputs=inputs, pins={"dp": 2}, **ON_CPU)
        found = capsys.readouterr().err
        for wanted, mark in marks.items():
            assert (mark in found) is (level >= wanted)
        assert bool(list(tmp_path.glob("*.lp"))) is (level >= 3)
    monkeypatch.setenv("AUTOPAR_DEBUG", "yes")
    with pytest.raises(ValueError, match="AUTOPAR_DEBUG must be 0, 1, 2, 3 or 4"):
        autopar.plan(model, 2, example_inputs=inputs, pins={"dp": 2}, **ON_CPU)
