"""The command line on its own: arguments, targets, exit codes, what is printed. What needs workers is in the other files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from autopar import cli, planning
from autopar.cli.answers import json_line
from autopar.cli.options import pins_of
from autopar.demo import SEQUENCE, corpus, draw_batches
from autopar.planner import Pins, Plan, make_plan
from autopar.planner.candidate import Draft
from autopar.planner.plan import AxisPlan, BlockMode, MemoryPlan, StagePlan
from autopar.planner.question import Question
from autopar.report.diff import differences
from autopar.report.doctor import checks, checks_text
from autopar.report.text import plan_json, plan_text
from autopar.report.units import bytes_text, count_text, seconds_text, table
from autopar.targets import TargetError, load_object, load_target

pytestmark = pytest.mark.pure

MODELS = '''
import torch
from torch import nn

NAMES = ["made_on_demand"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x).square().mean()


class Branchy(Net):
    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return self.layers(x).square().mean()


def net():
    return Net(), (torch.ones(8, 8),)


def keyword():
    return Net(), {"x": torch.ones(8, 8)}


def branchy():
    return Branchy(), (torch.ones(8, 8),)


def odd_batch():
    return Net(), (torch.ones(7, 8),)


def no_loss():
    return nn.Linear(8, 8), (torch.ones(8, 8),)


def squared(y):
    return y.square().mean()


def printing():
    print("a line of the model's own", end="")
    return net()


def with_argument(size):
    return net()


def raising():
    raise RuntimeError("the disk is on fire")


def only_model():
    return Net()


def swapped():
    return (torch.ones(8, 8),), Net()


def bare_tensor():
    return Net(), torch.ones(8, 8)


def no_inputs():
    return Net(), ()


def integer_keys():
    return Net(), {0: torch.ones(8, 8)}


built = Net()
number = 3


def __getattr__(name):
    if name in NAMES:
        return net
    raise AttributeError(name)
'''


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of targets, in the folder that is current during the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    yield path
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*argv: object) -> Ran:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(a) for a in argv])
        return Ran(stop.value.code or 0, *capsys.readouterr())

    return call


def a_plan(**changes: object) -> Plan:
    """A consistent plan, as if made for a model of two blocks on two stages of two tensor-parallel ranks."""
    memory = MemoryPlan(
        parameters_bytes=4 * 2**20, gradients_bytes=4 * 2**20, optimizer_states_bytes=8 * 2**20, saved_activations_bytes=2**20,
        batch_bytes=2**10, largest_temporary_bytes=2**19, communication_buffers_bytes=0, framework_context_bytes=0,
        allocator_slack_bytes=2**18,
    )  # fmt: skip
    stages = [
        StagePlan(
            first_op=f"linear_{i}", blocks=[f"h.{2 * i}", f"h.{2 * i + 1}"], recomputed=["h.0"] if i == 0 else [], forward_s=1e-3,
            backward_s=2e-3, communication_s=1e-4, flops=1e9, memory=memory, parameters=10**6, micro_batches_in_flight=2 - i,
        )
        for i in range(2)
    ]  # fmt: skip
    fields = dict(
        model="Net", program_hash="0123456789abcdef", gpus=4, cluster="dgx-h100", memory_limit_bytes=80 * 2**30, optimizer="adamw",
        precision="fp32", global_batch=8, samples_unit="samples", mesh={"pp": 2, "dp": 1, "tp": 2}, micro_batches=4, schedule="1f1b",
        virtual_stages=1, rest="zero0", shard=1, cuts=[7], recompute=[(0, 0, 0)],
        modes=[BlockMode(name="full", block=0, spans=[(0, 4)])], stages=stages,
        axes={"tp": AxisPlan(n=2, ops={"linear_0": "R S(0) -> S(1)", "relu": "S(1) -> S(1)"}, leaves={"w": "S(0)"})}, zero_dims={},
        step_time_s=0.02, compute_s=0.012, bubble_s=0.006, gradient_sync_s=0.0, optimizer_s=0.002, objective_s=0.02, bound_s=0.019,
        gap=0.05, work_per_step=8.0, tensor_split_share=0.9, provenance="roofline", notes=["softmax is replicated"],
        limits=["memory of stage 0"],
    )  # fmt: skip
    return Plan(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------------------ targets
@pytest.mark.parametrize("name", ["net", "keyword", "made_on_demand"])
def test_a_target_gives_model_and_inputs(models: Path, name: str) -> None:
    for target in (f"models.py:{name}", f"{models}:{name}", f"models:{name}"):
        model, inputs = load_target(target)
        assert type(model).__name__ == "Net"
        assert isinstance(inputs, tuple | dict)


@pytest.mark.parametrize(
    "target,says",
    [
        ("models", "no file or module before a colon"),
        ("models.py", "no file or module before a colon"),
        ("models.py:", "no name after a colon"),
        (":net", "no file or module"),
        ("model.py:net", "there is no file model.py; did you mean models.py"),
        ("nowhere/models.py:net", "there is no folder nowhere"),
        ("modelz:net", "there is no module 'modelz'; did you mean models?"),
        ("torch.nnn:Linear", "there is no module 'torch.nnn'"),
        ("..:net", "not the name of a module"),
        ("models.py:nett", "has no 'nett'; did you mean net"),
        ("models.py:made_on_demnad", "did you mean made_on_demand"),
        ("models.py:built", "is a model (Net)"),
        ("models.py:number", "an object of type int, not a callable"),
        ("models.py:with_argument", "takes arguments (size)"),
        ("models.py:raising", "RuntimeError: the disk is on fire"),
        ("models.py:only_model", "returned an object of type Net, not (model, example_inputs)"),
        ("models.py:swapped", "returned an object of type tuple as the model"),
        ("models.py:bare_tensor", "such as (x,)"),
        ("models.py:no_inputs", "returned no example inputs"),
        ("models.py:integer_keys", "not argument names: [0]"),
        ("broken.py:net", "SyntaxError"),
        ("needy.py:net", "No module named 'no_such_package'"),
    ],
)
def test_a_wrong_target_says_what_is_wrong(models: Path, target: str, says: str) -> None:
    (models.parent / "broken.py").write_text("def net(:\n")
    (models.parent / "needy.py").write_text("import no_such_package\n")
    with pytest.raises(TargetError) as error:
        load_target(target)
    assert says in str(error.value)
    assert isinstance(error.value, ValueError)
    assert error.value.exit_code == 2


def test_the_traceback_of_a_target_is_the_users(models: Path) -> None:
    with pytest.raises(TargetError) as error:
        load_target("models.py:raising")
    assert "models.py" in str(error.value)
    assert "targets.py" not in str(error.value)


def test_an_object_is_found_below_a_class(models: Path) -> None:
    assert load_object("models.py:Net.forward").__qualname__ == "Net.forward"


# -------------------------------------------------------------------------------------------------------------- usage
def test_help_names_every_command(run) -> None:
    ran = run("--help")
    assert ran.code == 0
    for command in ("explain", "plan", "sweep", "fit", "verify", "diff", "profile", "demo", "doctor"):
        assert command in ran.out


@pytest.mark.parametrize(
    "argv,says",
    [
        (["nosuch"], "nosuch"),
        (["plan"], "target"),
        (["plan", "models.py:net"], "--gpus"),
        (["plan", "models.py:net", "--gpus", "two"], "--gpus"),
        (["plan", "models.py:net", "--gpus", "0"], "--gpus must be 1 or more, not 0"),
        (["plan", "models.py:net", "--gpus", "-1"], "--gpus must be 1 or more"),
        (["plan", "models.py:net", "--gpus", "999999999999"], "--gpus must be 1,000,000 or less"),
        (["plan", "models.py:net", "--gpus", "2", "--memory", "lots"], "like '80GiB'"),
        (["plan", "models.py:net", "--gpus", "2", "--cluster", "dgx-h1000"], "did you mean"),
        (["plan", "models.py:net", "--gpus", "2", "--cluster", "none.toml"], "none.toml does not exist"),
        (["plan", "models.py:net", "--gpus", "2", "--pin", "tp"], "is not NAME=VALUE"),
        (["plan", "models.py:net", "--gpus", "2", "--pin", "pt=2"], "there is no pin 'pt'; did you mean"),
        (["plan", "models.py:net", "--gpus", "2", "--pin", "tp=two"], "Expected `int"),
        (["plan", "models.py:net", "--gpus", "2", "--pin", "tp=0"], "Expected `int` >= 1"),
        (["plan", "models.py:net", "--gpus", "2", "--pin", "tp=2", "--pin", "tp=1"], "given twice"),
        (["plan", "models.py:net", "--gpus", "2", "--pin", "zero=7"], "zero must be one of 0, 1, 2, 3"),
        (["plan", "models.py:net", "--gpus", "2", "--pin", "axes=2"], "there is no pin 'axes'"),
        (["plan", "models.py:net", "--gpus", "2", "--time-limit", "0"], "--time-limit must be a positive number of seconds, not 0"),
        (["plan", "models.py:net", "--gpus", "2", "-o", "no/such/plan.json"], "there is no folder"),
        (["plan", "models.py:net", "--gpus", "2", "-o", "."], "it is a folder"),
        (["plan", "models.py:no_loss", "--gpus", "2", "--loss", "models.py:number"], "needed is a function"),
        (["explain", "models.py:net"], "--gpus N is missing"),
        (["explain", "none.json"], "there is no plan file none.json"),
        (["explain", "text.json"], "not JSON"),
        (["explain", "foreign.json"], "not an autopar plan"),
        (["explain", "cut.json"], "not JSON"),
        (["explain", "damaged.json"], "damaged"),
        (["explain", "newer.json"], "version 99"),
        (["explain", "odd.json"], "contains unknown field `a b\\x1b[31mkkk"),
        (["explain", "good.json", "--gpus", "8"], "is a plan for 4 GPUs, and --gpus says 8"),
        (["explain", "good.json", "--pin", "tp=2"], "--pin is for a TARGET"),
        (["explain", "good.json", "--time-limit", "3"], "--time-limit is for a TARGET"),
        (["explain", "good.json", "--memory", "10GiB"], "is a plan, which is shown as it is, and --memory says 10GiB"),
        (["explain", "good.json", "--cluster", "dgx-a100"], "--cluster says dgx-a100"),
        (["explain", "good.json", "--optimizer", "sgd"], "--optimizer says sgd"),
        (["explain"], "TARGET is missing"),
        (["explain", "good.json", "gpus=2"], "one argument too many"),
        (["explain", "good.json", "--why", "w"], "autopar explain TARGET --plan good.json --why w"),
        (["explain", "good.json", "--why-not", "tp=2"], "autopar explain TARGET --plan good.json --why-not tp=2"),
        (["explain", "good.json", "--plan", "good.json"], "--plan is for a TARGET"),
        (["explain", "models.py:net", "--plan", "good.json", "--cluster", "cpu"], "is a plan for the cluster dgx-h100"),
        (["sweep", "models.py:net", "--gpus", "2,x"], "'x' is no positive whole number"),
        (["sweep", "models.py:net", "--gpus", ","], "lists nothing"),
        (["sweep", "models.py:net", "--gpus", "2", "--memory", "lots"], "like '80GiB'"),
        (["sweep", "models.py:net", "--gpus", "9" * 5000], "is no positive whole number"),
        (["sweep", "models.py:net", "--gpus", "2", "--memory", "9" * 400 + "GiB"], "like '80GiB'"),
        (["explain", "models.py:net", "--gpus", "2", "--cluster", "cpu", "--what-if", "batch=999999999999"], "inputs on the meta device"),
        (["explain", "models.py:net", "--gpus", "2", "--cluster", "cpu", "--what-if", "gpus=" + "9" * 5000], "needed is a positive whole"),
        (["explain", "models.py:net", "--from", "x.toml", "--why", "a"], "--from and --why exclude each other"),
        (["explain", "models.py:net", "--from", "x.toml", "--reduce-dtype", "bf16"], "--from and --reduce-dtype exclude each other"),
        (["explain", "models.py:net", "--from", "x.toml", "tp=2"], "one argument too many"),
        (["explain", "good.json", "--format", "svg", "--measured", "run.json"], "--format svg and --measured exclude each other"),
        (["explain", "models.py:net", "--gpus", "2", "--format", "html", "--why", "a"], "--format html and --why exclude each other"),
        (["explain", "models.py:net", "--gpus", "2", "--measured", "run.json", "--why-not", "tp=2"], "--measured and --why-not exclude"),
        (["fit", "models.py:net", "--cluster", "dgx-h1000"], "did you mean"),
        (["diff", "good.json", "goood.json"], "did you mean good.json"),
        (["verify", "models.py:net", "--gpus", "2", "--plan", "good.json", "--pin", "tp=2"], "exclude each other"),
        (["verify", "models.py:net", "--gpus", "2", "--steps", "0"], "--steps"),
        (["profile", "--gpus", "0"], "--gpus must be 1 or more"),
        (["profile", "--gpus", "65"], "with 65 workers was asked for, but"),
        (["profile", "-o", "no/such/cluster.toml"], "there is no folder"),
        (["profile", "--cluster", "dgx-h1000"], "did you mean"),
        (["demo", "--gpus", "0"], "--gpus must be 1 or more"),
    ],
)
def test_wrong_usage_is_said_and_exits_with_2(models: Path, run, argv: list[str], says: str) -> None:
    good = msgspec.json.encode(a_plan())
    for name, data in {
        "text.json": b"hello", "foreign.json": b"{}", "good.json": good, "cut.json": good[:100],
        "damaged.json": good.replace(b'"gpus":4', b'"gpus":"four"'), "newer.json": good.replace(b'"version":5', b'"version":99'),
        "odd.json": good[:-1] + b',"a\\nb\\u001b[31m' + b"k" * 9000 + b'":1}',
    }.items():  # fmt: skip
        (models.parent / name).write_bytes(data)
    for json_flag in ([], ["--json"] if argv[0] != "nosuch" else []):
        ran = run(*argv, *json_flag)
        assert ran.code == 2, ran
        assert says in ran.err, ran.err
        assert "Traceback" not in ran.err
        assert "odd.json" not in argv or (ran.err.count("\n") == 1 and len(ran.err) < 1000)
        if json_flag:
            assert ran.answer["exit_code"] == 2


def test_a_name_that_is_no_text_is_printed_escaped(models: Path, tmp_path: Path) -> None:
    """As the shell gives it, to a terminal that has no such character."""
    name = os.fsencode(models.parent) + b"/\xff.json"
    command = [sys.executable, "-m", "autopar", "plan", "models.py:net", "--gpus", "1", "--cluster", "cpu", "-o", name]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "AUTOPAR_CACHE": "off"}
    plain = subprocess.run(command, cwd=models.parent, env=environment, capture_output=True, timeout=200, check=False)
    assert plain.returncode == 0 and b"written to" in plain.stdout and b"udcff.json" in plain.stdout, plain.stderr
    assert os.path.exists(name)
    as_json = json_line({"written": os.fsdecode(name), "of": [1, {"x": "\udcff"}]})
    assert json.loads(as_json)["of"] == [1, {"x": "\\udcff"}]


def test_an_unexpected_error_keeps_its_traceback(models: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("autopar.targets.load_target", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan", "models.py:net", "--gpus", "1"])


def test_the_versions_are_said_without_torch() -> None:
    code = "import sys, autopar.cli as cli\ntry: cli.main(['--version'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert re.fullmatch(r"autopar \d+\.\d+\.\d+, torch 2\.\S+, Python 3\.\d+\.\d+\nFalse\n", done.stdout)


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, autopar.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


# -------------------------------------------------------------------------------------------------------------- plans
def test_plan_is_written_explained_and_compared(models: Path, run) -> None:
    ran = run("plan", "models.py:net", "--gpus", 2, "--cluster", "dgx-h100", "--pin", "dp=2", "-o", "a.json", "--json")
    assert ran.code == 0, ran.err
    assert ran.answer["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert ran.answer["written"] == "a.json"
    assert {"step_time_s", "memory_bytes", "tokens_or_samples_per_s", "gap"} <= set(ran.answer)

    ran = run("plan", "models.py:net", "--gpus", 2, "--cluster", "dgx-h100", "--pin", "tp=2", "--memory", "40GiB", "-o", "b.json")
    assert ran.code == 0, ran.err
    assert "Net on 2 x h100-sxm: tp 2" in ran.out
    assert "written to b.json" in ran.out

    told = run("explain", "b.json")
    assert run("explain", "b.json", "--precision", "fp32", "--optimizer", "adamw").out == told.out  # which it is of
    assert told.out.startswith("Net on 2 x h100-sxm: tp 2") and "tensor parallel" in told.out
    assert max(map(len, told.out.splitlines())) <= 100
    assert "strategies (" in run("explain", "b.json", "--verbose").out and "strategies (" not in told.out
    assert run("explain", "b.json", "--format", "json").answer["mesh"]["tp"] == 2
    assert run("explain", "b.json", "--format", "json", "--out", "b.explained").answer == {"written": "b.explained"}
    assert json.loads(Path("b.explained").read_text())["gpus"] == 2

    told = run("diff", "a.json", "b.json")
    assert "mesh" in told.out and "dp 2" in told.out and "tp 2" in told.out and "memory of a GPU" in told.out
    assert "mesh.tp" in run("diff", "a.json", "b.json", "-v").out
    assert {x["path"] for x in run("diff", "a.json", "b.json", "--json").answer["differences"]} >= {"mesh.tp", "mesh.dp"}
    same = run("diff", "a.json", "a.json", "--json").answer
    assert (same["equal"], same["changes"], same["differences"]) == (True, [], [])
    assert "are the same plan" in run("diff", "a.json", "a.json").out


def test_an_explanation_is_the_same_whether_it_is_told_as_it_is_found_or_written(models: Path, run) -> None:
    words = ("explain", "models.py:net", "--gpus", 2, "--cluster", "dgx-h100")
    told = run(*words)
    assert told.code == 0, told.err
    assert run(*words, "--out", "told.txt").out == "written to told.txt\n"
    assert Path("told.txt").read_text() == told.out
    assert "families of plans" in told.out and "families of plans" not in run(*words, "--no-alternatives").out


def test_a_sweep_is_text_json_a_page_and_a_picture(models: Path, run) -> None:
    words = ("sweep", "models.py:net", "--gpus", "1,2", "--cluster", "dgx-h100")
    told = run(*words)
    assert told.code == 0, told.err
    assert max(map(len, told.out.splitlines())) <= 100 and "the cheapest that fits" in told.out
    found = run(*words, "--json").answer
    assert [p["gpus"] for p in found["points"]] == [1, 2]
    assert run(*words, "--format", "html", "--out", "s.html", "--json").answer == {"written": "s.html"}
    page = Path("s.html").read_text()
    assert page.startswith("<!doctype html>") and 'data-chart="mfu"' in page
    assert run(*words, "--format", "svg").out.startswith("<svg")


def test_the_answer_is_alone_on_its_line_whatever_the_model_prints(models: Path, run) -> None:
    ran = run("plan", "models.py:printing", "--gpus", 1, "--cluster", "dgx-h100", "--json")
    assert ran.code == 0, ran.err
    assert ran.answer["gpus"] == 1
    assert "a line of the model's own" in ran.err


def test_what_a_time_limit_cut_off_is_said(models: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def stopped(*args: object, time_limit_s: float | None, **wanted: object) -> Plan:
        asked.append(time_limit_s)
        return make_plan(*args, time_limit_s=1e-9, **wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "make_plan", stopped)
    monkeypatch.setattr(Question, "draft", _one_by_one(Question.draft))
    command = ("plan", "models.py:net", "--gpus", 8, "--cluster", "dgx-h100", "--time-limit", 2.5)
    ran = run(*command)
    assert ran.code == 0 and asked == [2.5], ran.err
    told = " ".join(ran.out.split())
    assert "the search was stopped after 1e-09 s" in told and "are unexplored" in told
    assert run(*command, "--json").answer["searched"]["unexplored"] > 0 and len(asked) == 2, "what a clock has cut short is not kept"


def _one_by_one(draft):
    """Drafts that say that they are slower than all others that there are, so that these would be tried next."""

    def slower(self, *args, **wanted):
        found = draft(self, *args, **wanted)
        return found if not isinstance(found, Draft) else dataclasses.replace(found, times=dataclasses.replace(found.times, step_s=1e9))

    return slower


def test_a_loss_function_may_be_named(models: Path, run) -> None:
    ran = run("plan", "models.py:no_loss", "--gpus", 2, "--cluster", "dgx-h100", "--loss", "models.py:squared", "--json")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    "argv,code",
    [
        (["plan", "models.py:branchy", "--gpus", "2"], 4),
        (["plan", "models.py:net", "--gpus", "2", "--memory", "1KiB"], 3),
        (["plan", "models.py:odd_batch", "--gpus", "2", "--pin", "dp=2"], 3),
        (["plan", "models.py:net", "--gpus", "2", "--pin", "tp=4"], 3),
    ],
)
def test_exit_codes_of_the_passes(models: Path, run, argv: list[str], code: int) -> None:
    ran = run(*argv, "--cluster", "dgx-h100", "--json")
    assert ran.code == code, ran
    assert ran.answer["exit_code"] == code
    assert "Traceback" not in ran.err


def test_the_text_of_a_plan(golden) -> None:
    golden("plan.txt", plan_text(a_plan(), verbose=True) + "\n")


def test_the_text_leaves_out_what_there_is_not() -> None:
    whole = plan_text(a_plan(), verbose=True)
    bare = plan_text(a_plan(notes=[], limits=[], axes={}), verbose=True)
    assert "softmax is replicated" in whole
    assert "note " not in bare
    assert "what limits it" not in bare
    assert "strategies" not in bare


def test_the_json_of_a_plan_has_the_derived_figures() -> None:
    plan = a_plan()
    value = plan_json(plan)
    assert value["memory_bytes"] == plan.memory_bytes
    assert value["tokens_or_samples_per_s"] == 400.0


def test_differences_name_the_place() -> None:
    found = {path: (a, b) for path, a, b in differences({"a": [1, {"b": 2}], "c": 1}, {"a": [1, {"b": 3}, 4], "d": 1})}
    assert found == {"a[1].b": (2, 3), "a[2]": ("-", 4), "c": (1, "-"), "d": ("-", 1)}


# ------------------------------------------------------------------------------------------------- doctor, demo, units
def test_doctor_finds_what_is_needed(run) -> None:
    ran = run("doctor", "--json")
    assert ran.code == 0, ran
    assert ran.answer["ok"]
    assert {check["name"] for check in ran.answer["checks"]} >= {"python", "torch", "gloo", "solver", "cost models"}


def test_doctor_fails_when_something_needed_is_missing(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    ran = run("doctor")
    assert ran.code == 1
    assert "missing: gloo" in ran.out
    assert "gloo" in checks_text(checks())


def test_the_demos_batches_are_the_same_for_every_caller() -> None:
    text = corpus()
    first, again = draw_batches(text, 3), draw_batches(text, 3)
    assert first.shape == (3, 8, SEQUENCE)
    assert first.equal(again)
    assert b"import" in bytes(text[:100_000].tolist())


def test_seconds_and_counts() -> None:
    assert [seconds_text(s) for s in (0, 3.1e-6, 0.0124, 1.24, 1234)] == ["0 s", "3.1 us", "12.4 ms", "1.24 s", "1,234 s"]
    assert [seconds_text(s) for s in (0.9996, 999.7e-6)] == ["1,000 ms", "1,000 us"], "not 1e+03"
    assert [bytes_text(n) for n in (512, 1536, 80 * 2**30)] == ["512 B", "1.50 KiB", "80.00 GiB"]
    assert [count_text(n) for n in (950, 999.7, 10.7e6, 8.03e9)] == ["950", "1,000", "10.7M", "8.03B"]


def test_a_table_sets_figures_flush_right() -> None:
    assert table(("a", "n"), [("x", 1), ("yy", 22)], indent="").splitlines() == ["a    n", "--  --", "x    1", "yy  22"]


def test_pins_on_the_command_line_are_typed() -> None:
    pins = pins_of(["tp=2", "schedule=gpipe", "sequence_parallel=false", "recompute=full"])
    assert pins == Pins(tp=2, schedule="gpipe", sequence_parallel=False, recompute="full")
    assert pins_of(None) is None
