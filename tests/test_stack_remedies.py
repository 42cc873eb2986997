"""What another training software cannot run, and what does not fit as it is configured, is refused with remedies that were planned."""

import json
from dataclasses import replace

import pytest
from explain_cases import CASES, study_of
from planner_programs import captured_of

from autopar.cli import main
from autopar.cli.stacks import planner_of
from autopar.errors import Infeasible, PlanError
from autopar.planner import Pins
from autopar.planner.answer import ended_by_user
from autopar.report.explanation import cut_short, explanation_of
from autopar.stacks import STACKS, Configuration, StackError, configuration_of, pins_of
from autopar.stacks.stack import beyond
from autopar.stacks.today import compared, compared_json, compared_text

pytestmark = pytest.mark.pure

TARGET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).square().mean()

def net():
    return Net(), (torch.ones(4, 8),)
"""


def study(gpus=4, memory=None, **asked):
    return study_of(captured_of("deep")[0].program, gpus, memory_limit_bytes=memory, **asked)


def needs(plan):
    """Bytes that a GPU must have for a plan."""
    return max(stage.memory.upper_bytes for stage in plan.stages)


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("megatron", {"zero": 3}), ("megatron", {"schedule": "gpipe", "zero": 2}), ("composer", {"tp": 2}), ("accelerate", {"pp": 2}),
        ("deepspeed", {"pp": 2, "zero": 3}), ("deepspeed", {"recompute": "selective"}),
        ("torchtitan", {"tp": 2, "sequence_parallel": False}),
    ],
)  # fmt: skip
def test_a_pin_that_a_software_does_not_have_is_refused_with_one_that_does(name, pins):
    """Each remedy that is said is planned here, by the same software."""
    found = study(pins=Pins(**pins), stack=name)
    with pytest.raises(Infeasible, match="cannot run a plan with the pins|no mesh|no plan fits") as refused:
        _ = found.plan
    (said,) = [line for line in str(refused.value).splitlines() if line.startswith("Tried, and each would do: ")]
    *changes, elsewhere = said.partition(": ")[2].removesuffix(".").split("; ")
    assert changes and elsewhere.startswith("autopar itself")
    for change in changes:
        own = dict(pins)
        for part in change.split(" with "):
            pin, equals, value = part.removesuffix(" not pinned").partition("=")
            assert pin in pins
            own.pop(pin)
            own |= {pin: {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)} if equals else {}
        plan = study(pins=Pins(**own), stack=name).plan
        assert not beyond(configuration_of(plan), STACKS[name])
    names = {stack.title: key for key, stack in STACKS.items()} | {"autopar itself": None}
    for title in elsewhere.removesuffix(" in its place").split(", "):
        assert study(pins=Pins(**pins), stack=names[title]).plan.gpus == 4


def test_a_leaner_pin_is_one_that_the_software_has():
    """Megatron-LM has ZeRO-1 and no ZeRO-3, which would be leaner."""
    asked = {"pins": Pins(dp=4, zero=0), "stack": "megatron"}
    leanest = needs(study(**{**asked, "pins": Pins(dp=4, zero=1, recompute="full", micro_batch=1)}).plan)
    assert leanest < needs(study(**{**asked, "pins": Pins(dp=4, zero=0, recompute="full", micro_batch=1)}).plan)
    with pytest.raises(Infeasible, match="zero=1") as refused:
        _ = study(memory=leanest, **asked).plan
    assert "zero=3" not in str(refused.value)


CONFIGURED = Configuration(dp=4, micro_batch=3, micro_batches=1, global_batch=12, zero=0, precision="bf16", optimizer="adamw")


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed", "accelerate"])
def test_a_configuration_that_does_not_fit_has_changes_that_do(name):
    """What is said of each change is what the planner says of it, and none needs more than there is."""
    stack, ample = STACKS[name], study()
    leanest = replace(CONFIGURED, micro_batch=1, micro_batches=3, zero=max(stack.limits.zeros), recompute="full")
    limit = needs(planner_of(ample)(pins_of(leanest, 4, 12), 4, 12, stack, True)) + 1024
    found = compared(stack, CONFIGURED, 4, 12, planner_of(study(memory=limit)))
    assert isinstance(found.today, str) and "GiB a GPU" in found.today or "MiB a GPU" in found.today
    assert found.remedies
    for remedy in found.remedies:
        assert needs(remedy.plan) <= limit and not beyond(configuration_of(remedy.plan), stack)
        assert remedy.plan.global_batch == 12
    text = compared_text(found)
    assert all(remedy.change.partition(" (")[0] in " ".join(text.split()) for remedy in found.remedies)
    assert [x["change"] for x in compared_json(found)["remedies"]] == [x.change for x in found.remedies]


def test_a_configuration_of_another_size_or_batch_is_refused_with_what_was_priced():
    priced = planner_of(study())
    with pytest.raises(PlanError, match="not for 4") as refused:
        compared(STACKS["megatron"], replace(CONFIGURED, dp=2, micro_batch=3, micro_batches=2), 4, 12, priced)
    assert "--gpus 2: " in str(refused.value) and "data parallel ranks 2 -> 4" in str(refused.value)
    with pytest.raises(PlanError, match="global batch of 24") as refused:
        compared(STACKS["megatron"], replace(CONFIGURED, global_batch=24, micro_batches=None), 4, 12, priced)
    assert "a global batch of 12 samples in the configuration: " in str(refused.value)
    with pytest.raises(StackError, match="cannot be priced yet") as refused:
        compared(STACKS["megatron"], replace(CONFIGURED, unpriced=("context parallelism", "--context-parallel-size 1")), 4, 12, priced)
    assert "--context-parallel-size 1: " in str(refused.value)


def test_a_configuration_of_another_size_that_does_not_fit_either_has_both_changes():
    stack, wrong = STACKS["megatron"], replace(CONFIGURED, dp=2, micro_batch=6)
    leanest = replace(wrong, micro_batch=1, micro_batches=6, zero=1, recompute="full")
    limit = needs(planner_of(study())(pins_of(leanest, 2, 12), 2, 12, stack, True)) + 1024
    with pytest.raises(PlanError, match="not for 4") as refused:
        compared(stack, wrong, 4, 12, planner_of(study(memory=limit)))
    assert "--gpus 2, and " in str(refused.value) or "4 GPUs" in str(refused.value) or "2 -> 4" in str(refused.value)


def test_a_plan_says_for_which_software_it_is_and_pins_of_the_user_alone():
    """Two softwares with the same limits have plans of their own, also where one was kept."""
    for name in ("accelerate", "transformers", "accelerate"):
        plan = study(pins=Pins(dp=4), stack=name).plan
        said = {choice.name: choice.value for choice in explanation_of(plan).choices}
        assert (plan.software, said["pinned"], said["for"].partition(",")[0]) == (name, "dp=4", STACKS[name].title)
    assert "for" not in {choice.name for choice in explanation_of(study().plan).choices}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--for", "megatron", "--pin", "zero=3"], 3),  # each may be asked for; no plan has both
        (["--for", "composer", "--pin", "tp=2"], 3),
        (["--for", "megatron", "--gpus", "3", "--cluster", "laptop"], 3),
        (["--for", "megatrn"], 2),  # nothing has that name
        (["--for", "megatron", "--pin", "zero=7"], 2),
    ],
)
def test_a_plan_that_a_software_cannot_run_is_infeasible_and_a_wrong_name_is_wrong_usage(options, code, tmp_path, capsys):
    target = tmp_path / "stacked.py"
    target.write_text(TARGET)
    with pytest.raises(SystemExit) as stopped:
        main(["plan", f"{target}:net", "--gpus", "2", "--cluster", "cpu", "--json", *options])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (stopped.value.code, said["exit_code"]) == (code, code)
    assert ("Tried, and each would do" in said["message"]) == (code == 3), said


def test_a_search_for_a_software_that_is_stopped_has_an_honest_gap():
    """It is of several searches, of which the first has a plan: the bound is below what the others would have found."""
    whole = study(stack="megatron").plan
    stopped = study(stack="megatron")
    stopped.stop = lambda: True
    found = stopped.plan
    assert ended_by_user(found) and found.searched["unexplored"] > 0 and "cut short" in cut_short(found)
    assert found.bound_s <= whole.step_time_s <= found.step_time_s and not cut_short(whole)
    (note,) = [note for note in found.notes if "interrupt from the keyboard" in note]
    assert f"{found.searched['unexplored']} of {found.searched['choices']} choices" in note


@pytest.mark.parametrize("asked", [{"memory": 1}, {"pins": Pins(tp=3)}, {"pins": Pins(zero=3), "stack": "megatron"}], ids=str)
def test_a_refusal_does_not_name_what_the_user_did_not_wait_for(asked):
    found = study(**asked)
    found.stop = lambda: True
    with pytest.raises(Infeasible, match="What would do was not found out: ended by Ctrl-C") as refused:
        _ = found.plan
    assert "Tried" not in str(refused.value) and "No change" not in str(refused.value)


@pytest.mark.parametrize("name", STACKS)
def test_an_axis_that_splits_nothing_is_said_to_be_so_in_what_is_exported(name):
    """Another software would split over it what it can, which is another plan."""
    plan = CASES["launches"]().plan
    assert plan.mesh["tp"] == 2 and "splits nothing" in explanation_of(plan).verdict
    text = STACKS[name].text(configuration_of(plan))
    assert "that tp 2 splits nothing in this plan: it does as much on 1 GPU" in text and "strategy of each operator" not in text


def test_an_axis_that_splits_nothing_is_no_advice():
    found = compared(STACKS["deepspeed"], Configuration(dp=2, zero=0), 2, 8, planner_of(CASES["launches"]()))
    assert found.free.mesh["tp"] == 2 and "splits nothing in it" in " ".join(compared_text(found).split())
