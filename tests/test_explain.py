"""Questions about plans: the explanation and its schema, why, why not, what if, sweep, fit, diff, notebooks."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from explain_cases import CASES, masked, program_of, study_of
from planner_programs import captured_of
from torch import nn

from autopar import Plan, cli
from autopar.axes import AXES
from autopar.capture import capture
from autopar.errors import Infeasible, PlanError
from autopar.explain import Refused
from autopar.explain import sweep as sweeps
from autopar.explain.asking import answer_text, what_if, why_not
from autopar.explain.changes import pairs_of, parsed_pins, with_changes
from autopar.explain.families import families_of
from autopar.explain.fit import fit, fit_text
from autopar.explain.reliefs import reliefs_of
from autopar.explain.sweep import sweep
from autopar.explain.terms import own_terms, reads_of, terms_of, timed
from autopar.explain.why import TIE, why, why_text
from autopar.ir import Kind, Strategy
from autopar.measure import Pricer
from autopar.planner import Pins, make_plan
from autopar.planner.axis import AxisProblem, AxisSolver, objective_of, solve_axis, stated
from autopar.planner.problems import axis_leaves, axis_problem
from autopar.planner.wishes import WishError
from autopar.report.columns import WIDTH
from autopar.report.compare import compare, comparison_text
from autopar.report.explanation import SCHEMA, Explanation, Family, OperatorView, explanation_of, in_words, mesh_words, schema
from autopar.report.sweep import sweep_text
from autopar.report.text import _other, document, explanation_text, plan_text
from cost_models.cluster import load_cluster
from cost_models.compute import rate_of

pytestmark = pytest.mark.pure

BINDS = {"memory": "memory", "network": "network", "heads": "heads", "batch": "batch", "launches": "launches", "nothing": "compute"}


def _upper(pins: Pins) -> int:
    """What a GPU must have for such a plan on 4 GPUs."""
    return math.ceil(max(stage.memory.interval_bytes[1] for stage in deep(4, pins=pins).plan.stages))


def deep(gpus: int = 4, **asked: Any):
    return study_of(captured_of("deep")[0].program, gpus, **asked)


# ------------------------------------------------------------------------------------------------------- the explanation
@pytest.mark.parametrize("case", list(CASES))
def test_what_binds_is_said_first(case: str, golden) -> None:
    """The words of an explanation in which one known constraint binds; figures are masked."""
    study = CASES[case]()
    found = explanation_of(study.plan, reliefs=tuple(reliefs_of(study)))
    text = explanation_text(found)
    _on_a_screen(found)
    print(text)  # with its figures, for who looks
    kinds = [limit.kind for limit in found.limits]
    assert BINDS[case] in kinds, kinds
    if case == "nothing":
        assert kinds == ["compute"] and "nothing else" in found.limits[0].text
    golden(f"explain_{case}.txt", masked(text))
    if "idle" in kinds:  # who reads that has fewer GPUs to use, which were tried
        (fewer,) = [x for x in found.reliefs if x.change.startswith("1 GPU in place of")]
        assert fewer.step_time_s is not None and fewer.step_time_s <= found.summary.step_time_s * 1.01
    assert ("idle" in kinds) == ("splits nothing" in found.verdict)


SCREEN = 45  # lines


def _on_a_screen(found: Explanation) -> None:
    """With families as they are where nothing is pinned."""
    plan = "tp 8, dp 8, ZeRO-1, 4 micro-batches, recompute 5"
    names = ("data parallel", "data parallel, ZeRO-1", "ZeRO-3 (FSDP)", "tensor parallel alone", "Megatron-style, tp 8", "FSDP + tp 8")
    families = [Family(name=name, pins={}, step_time_s=2.5, memory_bytes=2**36, plan=plan) for name in names]
    refused = "does not fit: at least 2.21 GiB a GPU short"
    families.append(Family(name="pipeline alone", pins={}, step_time_s=None, memory_bytes=None, plan="", why=refused))
    lines = explanation_text(msgspec.structs.replace(found, families=families)).splitlines()
    assert max(map(len, lines)) <= WIDTH, "\n".join(lines)
    assert len(lines) <= SCREEN, "\n".join(lines)


def test_what_is_long_is_folded() -> None:
    """A hundred kinds of blocks, stages, limits and operators: the screen has those that matter, and says what it leaves out."""
    study = deep(8, pins=Pins(pp=2, tp=2, dp=2))
    found = explanation_of(study.plan)
    block, stage, limit = found.blocks[0], found.stages[0], found.limits[0]
    operators = [
        OperatorView(how=how, axis=axis, kind=f"mine.op{k}.default", count=k, modules=["a.module"], seconds=1e-6 * k, share=1e-4 * k)
        for how, axis in (("not split", "tp"), ("no rule", ""), ("probed", "")) for k in range(1, 40)
    ]  # fmt: skip
    many = msgspec.structs.replace(
        found,
        blocks=[msgspec.structs.replace(block, name=f"a.module.with.a.long.name.{k}", forward_s=float(k)) for k in range(100)],
        stages=[msgspec.structs.replace(stage, rank=k, stages=[k], memory_bytes=stage.memory_bytes + k) for k in range(100)],
        limits=[msgspec.structs.replace(limit, kind=f"kind{k}") for k in range(100)],
        operators=operators,
    )  # fmt: skip
    text = explanation_text(many)
    _on_a_screen(msgspec.structs.replace(many, limits=many.limits[:9], stages=many.stages[:9], operators=found.operators))
    assert "97 others, in all" in text and "the 3 fullest of 100 stages" in text and "less: kind3" in text
    assert "long.name.99 " in text and "stage 99 " in text and "stage 96 " not in text, "the fullest"
    assert "replicated over tp: 780 (mine::op39, mine::op38, mine::op37, ... (+36))" in " ".join(text.split())
    assert "none refused or padded" in text


def test_a_plan_that_is_almost_that_of_now_is_said_by_what_is_other() -> None:
    now = "dp 64, ZeRO-3, 2 micro-batches, recompute 5 of 32"
    said = {
        now: "as now",
        "dp 64, ZeRO-1, 2 micro-batches": "as now, but ZeRO-1, without recompute 5 of 32",
        "dp 64, no ZeRO, 2 micro-batches, recompute 5 of 32": "as now, but no ZeRO",
        "dp 128, ZeRO-3, recompute 4 of 32": "dp 128, ZeRO-3, recompute 4 of 32",
    }
    assert {plan: _other(plan, now) for plan in said} == said


def test_the_account_adds_up_and_survives_the_file(tmp_path: Path) -> None:
    study = deep(8, pins=Pins(pp=2, tp=2, dp=2))
    plan = study.plan
    assert plan.account is not None
    assert math.isclose(sum(plan.account.seconds.values()), plan.step_time_s, rel_tol=1e-9)
    found = explanation_of(plan)
    assert math.isclose(sum(part.share for part in found.time), 1.0, rel_tol=1e-9)
    assert [x.name for x in found.axes] == list(AXES) and math.prod(x.size for x in found.axes) == found.gpus
    assert sum(block.count for block in found.blocks if block.repeated) == 6
    for stage in found.stages:
        assert sum(stage.memory.values()) == stage.memory_bytes
    plan.save(tmp_path / "plan.json")
    assert explanation_text(explanation_of(Plan.load(tmp_path / "plan.json"))) == explanation_text(found)
    text = plan_text(plan, verbose=True)
    assert "embed.weight" in text and "p_embed_weight" not in text, "the user's names alone"


def test_a_plan_without_an_account_is_explained_too() -> None:
    plan = msgspec.structs.replace(deep().plan, account=None)
    text = plan_text(plan)
    assert text.startswith(f"{plan.model} on 4 x dgx-h100") and "time of a step" in text


def test_the_document_is_as_its_schema_says() -> None:
    plan = deep().plan
    value = json.loads(msgspec.json.encode(document(plan, explanation_of(plan, families=tuple(families_of(deep()))))))
    assert value["schema"] == SCHEMA == value["explanation"]["schema"]
    again = msgspec.convert(value["explanation"], Explanation)
    assert again.verdict == explanation_of(plan).verdict
    assert {"memory_bytes", "tokens_or_samples_per_s", "strategies", "mesh", "step_time_s"} <= set(value)
    declared = schema()
    root = declared["$defs"][declared["$ref"].rpartition("/")[2]]
    assert set(root["properties"]) == set(value["explanation"]) and set(root["required"]) == set(Explanation.__struct_fields__)


# ------------------------------------------------------------------------------------------------------------- questions
def test_why_not_is_a_plan_with_these_pins_term_by_term() -> None:
    study = deep()
    answer = why_not(study, "tp=2,pp=2")
    pinned = study.solve(dataclasses.replace(study.asked, pins=Pins(tp=2, pp=2)))
    assert isinstance(pinned, Plan) and answer.comparison is not None and answer.feasible
    assert (pinned.mesh["tp"], pinned.mesh["pp"]) == (2, 2)
    for side, plan in (("first", study.plan), ("second", pinned)):
        assert math.isclose(sum(getattr(t, side) for t in answer.comparison.time), plan.step_time_s, rel_tol=1e-9)
        assert sum(getattr(t, side) for t in answer.comparison.memory) == max(plan.memory_bytes)
    assert "slower" in answer.verdict or "the same" in answer.verdict
    same = deep(pins=Pins(dp=4))
    assert "is what was chosen" in why_not(same, f"dp=4,zero={same.plan.zero}").verdict


def test_why_not_of_what_cannot_be_had_says_why_and_what_would_do() -> None:
    whole, parts = (_upper(Pins(dp=4, zero=zero, micro_batch=1, recompute="full")) for zero in (0, 3))
    study = deep(4, memory_limit_bytes=(whole + parts) // 2)
    answer = why_not(study, "dp=4,zero=0")
    assert not answer.feasible and "does not fit" in answer.verdict
    assert "zero=3" in answer.remedy and "Tried" in answer.remedy
    assert "there is no such plan" in answer_text(answer, "dp=4,zero=0")
    with pytest.raises(WishError, match="there is no pin 'pt'; did you mean"):
        why_not(study, "pt=8")


@pytest.mark.parametrize(
    "texts,says",
    [
        (["memory"], "not NAME=VALUE"), (["memory=lots"], "like '80GiB'"), (["gpus=0"], "positive whole number"),
        (["memroy=1GiB"], "did you mean memory"), (["link.inter=fast"], "25GB/s"), (["link.inter=0GB/s"], "must carry something"),
        (["gpus=2", "gpus=4"], "given twice"), (["optimizer=adamx"], "did you mean"), ([""], "NAME=VALUE"), (["tp=two"], "Expected `int"),
    ],
)  # fmt: skip
def test_a_wrong_change_says_what_is_wrong(texts: list[str], says: str) -> None:
    with pytest.raises((WishError, PlanError)) as error:
        with_changes(deep().asked, pairs_of(texts, "--what-if"))
    assert says in str(error.value)


def test_a_size_that_does_not_divide_has_those_that_do() -> None:
    answer = why_not(deep(), "tp=3")
    assert not answer.feasible and "tp=2; tp=4" in answer.remedy
    text = answer_text(answer, "tp=3")
    assert text.count("no mesh of 4 GPUs has tp=3") == 1 and "Tried, and each would do: tp=2; tp=4." in text
    for pins in ({"tp": 2}, {"tp": 4}):
        assert isinstance(deep().solve(deep().with_pins(**pins)), Plan)


def test_what_a_difference_is_made_of_is_said_first() -> None:
    a, b = deep(4, pins=Pins(dp=4)).plan, deep(4, pins=Pins(pp=4)).plan
    found = compare(a, b, ("a", "b"))
    kind = max(found.time, key=lambda term: (term.second - term.first) * (b.step_time_s - a.step_time_s)).kind
    assert f"of {kind}" in found.verdict.partition("mostly ")[2]
    assert max(map(len, comparison_text(found, ("a", "b")).splitlines())) <= WIDTH


def test_changes_are_those_that_were_asked_for() -> None:
    asked, said = with_changes(deep().asked, pairs_of(["memory=40GiB gpus=128", "link.inter=200Gb/s,tp=2", "batch=24"], "--what-if"))
    assert (asked.memory_limit_bytes, asked.gpus, asked.batch, asked.pins.tp) == (40 * 2**30, 128, 24, 2)
    assert asked.cluster.inter.bandwidth_bytes_per_s == 25e9 and len(said) == 5
    twice, _ = with_changes(asked, pairs_of(["link.inter=x2"], "--what-if"))
    assert twice.cluster.inter.bandwidth_bytes_per_s == 50e9
    assert parsed_pins(pairs_of(["blocks=2,4,pp=2"], "--why-not"), "--why-not") == {"blocks": (2, 4), "pp": 2}


def test_what_if_is_the_plan_that_is_made_for_it() -> None:
    study = deep()
    answer = what_if(study, ["gpus=2"])
    assert answer.comparison is not None
    direct = make_plan(study.program, 2, study.asked.cluster, precision="bf16")
    assert math.isclose(sum(t.second for t in answer.comparison.time), direct.step_time_s, rel_tol=1e-9)
    assert [c.what for c in answer.comparison.changes][0] == "GPUs"


def test_why_has_the_chosen_strategy_and_what_each_other_costs() -> None:
    study = study_of(captured_of("wide")[0].program, 2, pins=Pins(tp=2))
    found = why(study, "up")
    assert found.operators and {x.axis for x in found.operators} == {"tp"}
    heavy = found.operators[0]
    assert (heavy.kind, heavy.module) == ("linear", "up")
    assert heavy.options[0].verdict == "chosen" and len(heavy.options) >= 3
    assert {"output features", "input features (a sum over ranks)", "not split"} <= {o.split for o in heavy.options}
    assert "up" in why_text(found) and why(study, "up.weight").operators[0].kind == "linear"
    with pytest.raises(WishError, match="there is no such module"):
        why(study, "upp")


def test_a_name_that_is_none_is_answered_with_those_that_there_are() -> None:
    study = study_of(program_of(512, 2, 8, 4, 256), 2, pins=Pins(tp=2))
    with pytest.raises(WishError, match=r"it has embed, layers\.\*\.norm, .* and 1 more$"):
        why(study, "zzzzzz")
    for name in Pins.__struct_fields__:
        if name != "axes":
            with pytest.raises(WishError, match=f"there are .*{name}"):
                parsed_pins({"zzzzzz": "1"}, "--why-not")
    with pytest.raises(WishError, match=r"there are memory, gpus, .*dp"):
        with_changes(study.asked, {"zzzzzz": "1"})


def test_a_kind_of_operator_is_all_of_them_and_not_the_one_of_that_name() -> None:
    study = study_of(program_of(512, 2, 8, 4, 256), 2, pins=Pins(tp=2))
    count = sum(op.target == "aten.scaled_dot_product_attention.default" for op in study.program.ops)
    assert count == 2 and why(study, "scaled_dot_product_attention").matched.startswith(f"{count} operators")


def test_an_axis_that_splits_nothing_is_said_wherever_a_plan_is_named() -> None:
    study = CASES["launches"]()
    small = study.solve(dataclasses.replace(study.asked, gpus=2))
    assert isinstance(small, Plan)
    idle = small.mesh["tp"] > 1 and not small.tensor_split_share
    assert ("splits nothing" in in_words(small)) == ("it splits nothing" in mesh_words(small)) == idle


def test_no_strategy_is_better_than_the_one_that_its_axis_has_chosen() -> None:
    """What is said of a strategy is the axis' program with it given: the best of these is the best there is, within the solver's gap; and
    one program that is solved again and again says what a new one of the same operator with that strategy alone says."""
    program, pricer = captured_of("wide")[0].program, Pricer(load_cluster("dgx-h100"), {"pp": 1, "dp": 1, "tp": 2})
    problem = timed(axis_problem(program, "tp", 2, pricer, "adamw", axis_leaves(program, "tp", 2)))
    best = solve_axis(problem)
    again = AxisSolver(problem)
    for group in [g for g in problem.choices.groups.values() if g.op is not None and len(g.strategies) > 1]:
        found = {s: again.solve(gap=TIE, given=(group.key, s)) for s in group.strategies}
        for s, solution in found.items():
            assert all(solution.assignment.ops[name] == s for name in group.members)
            alone = {**problem.choices.groups, group.key: dataclasses.replace(group, strategies=(s,))}
            anew = solve_axis(dataclasses.replace(problem, choices=dataclasses.replace(problem.choices, groups=alone)), gap=TIE)
            assert solution.outcome.objective == pytest.approx(anew.outcome.objective, rel=2 * TIE)
            assert solution.outcome.objective >= best.outcome.objective * (1 - 2 * TIE)
        assert min(x.outcome.objective for x in found.values()) == pytest.approx(best.outcome.objective, rel=2 * TIE)


@pytest.mark.parametrize("pins", [Pins(tp=2, sequence_parallel=True), Pins(tp=2, sequence_parallel=False), Pins(tp=2)])
def test_a_choice_is_explained_under_what_was_asked_of_its_axis(pins: Pins) -> None:
    """Under the pin no other strategy is better than the chosen one, by what its axis goes by; without it many would be."""
    study = study_of(program_of(512, 2, 8, 4, 256), 2, pins=pins)
    found = why(study, "layers.*")
    assert found.operators and {x.axis for x in found.operators} == {"tp"}
    if pins.sequence_parallel is not None:
        assert all(f"sequence_parallel={str(pins.sequence_parallel).lower()}, which is pinned" in x.reason for x in found.operators)
    verdicts = [o.verdict for x in found.operators for o in x.options[1:]]
    assert verdicts and not any(v.startswith("faster by itself") for v in verdicts)


def test_the_terms_of_an_axis_are_its_objective() -> None:
    """Computation and communication by themselves add up to what the integer program minimises, but for its preference for what rests."""
    program, pricer = captured_of("wide")[0].program, Pricer(load_cluster("dgx-h100"), {"pp": 1, "dp": 1, "tp": 2})
    problem = timed(axis_problem(program, "tp", 2, pricer, "adamw", axis_leaves(program, "tp", 2)))
    host = load_cluster("dgx-h100").gpu.host
    for s in (solve_axis(problem).assignment, _all_alike(problem)):
        chosen = stated(problem, s) if not callable(s) else s
        terms = terms_of(problem, chosen, reads_of(problem))
        assert terms is not None
        objective = objective_of(problem, chosen) * 1e-6
        assert terms.seconds <= objective * (1 + 1e-9) or host
        assert objective <= terms.compute_s + 1.1 * terms.communication_s + (0.0 if host else 1.0)
    whole = terms_of(problem, _all_alike(problem), reads_of(problem))
    assert whole is not None and whole.communication_s == 0.0
    ops = [g for g in problem.choices.groups.values() if g.op is not None]
    chosen = _all_alike(problem)
    for group in ops:  # where nothing is split, an operator's own communication is none, and memory only what it keeps or reads
        own = own_terms(problem, group, chosen(group.key), chosen, reads_of(problem))
        assert own is not None and own.communication_s == 0.0 and own.compute_s <= whole.compute_s


def _all_alike(problem: AxisProblem) -> Callable[[str], Strategy]:
    """Every operator whole on every rank."""

    def whole(key: str) -> Strategy:
        options = problem.choices.groups[key].strategies
        return next(s for s in options if all(x.kind is Kind.INVARIANT for x in (*s.inputs, *s.outputs)))

    return whole


def test_why_on_the_data_axis_has_computation_communication_memory_and_what_is_forced() -> None:
    study = study_of(captured_of("wide")[0].program, 2, pins=Pins(dp=2))
    found = why(study, "up")
    heavy = found.operators[0]
    assert (heavy.axis, heavy.n, heavy.kind) == ("dp", 2, "linear")
    chosen, whole = heavy.options[0], next(o for o in heavy.options if o.split == "not split")
    assert chosen.split == "samples" and chosen.compute_s and chosen.communication_s and chosen.memory_bytes
    assert whole.compute_s is not None and whole.compute_s > chosen.compute_s, "every rank does it all"
    assert whole.memory_bytes is not None and whole.memory_bytes > chosen.memory_bytes
    assert whole.change_s is not None and math.isclose(whole.change_s, whole.change_compute_s + whole.change_communication_s)
    assert whole.change_compute_s > 0 and whole.change_memory_bytes > 0
    text = why_text(found)
    assert "compute +" in text and "communication" in text and max(map(len, text.splitlines())) <= WIDTH


def test_heads_that_do_not_divide_are_said_to_be_unavailable() -> None:
    study = study_of(captured_of("attention")[0].program, 8, pins=Pins(tp=8))
    found = why(study, "scaled_dot_product_attention")
    said = {o.split: o.verdict for o in found.operators[0].options}
    assert said["heads"] == "unavailable: 4 does not divide into 8 parts"


# --------------------------------------------------------------------------------------------------------- sweep and fit
def test_a_sweep_has_every_combination_and_its_cheapest() -> None:
    study = deep(1)
    small = load_cluster("dgx-h100").gpu.context_bytes + 2**20
    found = sweep(study, [4, 1, 2], [None, small], [study.asked.cluster], [None])
    assert [(p.gpus, p.memory_limit_bytes == small) for p in found.points] == [(n, few) for few in (False, True) for n in (1, 2, 4)]
    fits = [p for p in found.points if p.step_time_s is not None]
    assert found.cheapest is not None and found.points[found.cheapest].gpu_seconds == min(p.gpu_seconds for p in fits)
    assert all("fit" in p.why for p in found.points if p.step_time_s is None) and len(fits) < 6
    direct = study.solve(dataclasses.replace(study.asked, gpus=2))
    assert isinstance(direct, Plan) and found.points[1].step_time_s == direct.step_time_s
    text = sweep_text(found)
    assert "the cheapest that fits" in text and "scaling pays up to" in text and max(map(len, text.splitlines())) <= WIDTH
    for heading in ("step", "GPU-s", "memory", "MFU"):
        assert text.count(heading) >= 2, "in the table and in the picture"


def test_fit_finds_the_fewest_gpus() -> None:
    study = deep(1, memory_limit_bytes=_upper(Pins(dp=4, zero=3, micro_batch=1, recompute="full")) + 2**16)
    found, plan = fit(study)
    assert plan.gpus == found.gpus > 1
    for n in range(1, found.gpus):
        assert isinstance(study.solve(dataclasses.replace(study.asked, gpus=n)), Refused)
    assert f"fits on {found.gpus} GPUs" in fit_text(found)
    with pytest.raises(Infeasible, match="fits on none of"):
        fit(deep(1, memory_limit_bytes=2**20), most=2)


# ------------------------------------------------------------------------------------------------------------------ diff
def test_where_no_number_of_gpus_fits_memory_that_does_is_said() -> None:
    """On the number that is nearest to fitting; with the memory that is said a plan is made there."""
    study = deep(1, memory_limit_bytes=load_cluster("dgx-h100").gpu.context_bytes + 2**10)
    with pytest.raises(Infeasible, match="fits on none of 1, 2, 4") as refused:
        fit(study, 4)
    nearest = re.search(r"On (\d+), which is nearest to it", str(refused.value))
    said = re.search(r"Tried, and each would do: .*?(\d+) (MiB|GiB) a GPU", str(refused.value))
    assert nearest and said
    limit = int(said[1]) * {"MiB": 2**20, "GiB": 2**30}[said[2]]
    plan = study.solve(dataclasses.replace(study.asked, gpus=int(nearest[1]), memory_limit_bytes=limit))
    assert isinstance(plan, Plan)


def test_a_diff_says_what_changed_in_words() -> None:
    a, b = deep(4, pins=Pins(dp=4)).plan, deep(4, pins=Pins(tp=2, dp=2)).plan
    found = compare(a, b, ("a", "b"))
    changes = {c.what: (c.first, c.second) for c in found.changes}
    assert changes["mesh"] == ("dp 4", "tp 2, dp 2") and not found.equal
    assert "faster" in found.verdict or "slower" in found.verdict
    timed = msgspec.structs.replace(a, planning_s={"stages": 1.0})
    assert compare(a, timed, ("a", "b")).equal and comparison_text(compare(a, timed, ("a", "b")), ("a", "b")) == "a and b are the same plan"
    dearer = msgspec.structs.replace(a, step_time_s=2 * a.step_time_s)
    assert "every decision is the same" in comparison_text(compare(a, dearer, ("a", "b")), ("a", "b"))


# -------------------------------------------------------------------------------------------------------------- notebooks
def test_a_plan_in_a_notebook_and_in_print() -> None:
    plan = deep().plan
    assert str(plan).startswith("Tied on 4 x h100-sxm") and len(str(plan).splitlines()) <= 6
    assert repr(plan).startswith("<Plan of Tied on 4 GPUs")
    shown = plan._repr_html_()
    assert "<details>" in shown and "<script" not in shown and "time of a step" in shown


def test_a_plan_is_made_from_standard_input() -> None:
    code = (
        "import torch, autopar\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.a = nn.Linear(8, 8)\n"
        "    def forward(self, x): return self.a(x).square().mean()\n"
        "model = autopar.compile(Net(), gpus=2, example_inputs=(torch.ones(8, 8),), cluster='cpu')\n"
        "print(model._repr_html_())\n"
    )
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "Net on 2 x cpu" in done.stdout


# ---------------------------------------------------------------------------------------------------------- command line
def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", "--schema"])
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out) == schema()


def test_scaling_goes_on_behind_a_number_of_gpus_that_does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "time_of", lambda plan: [SimpleNamespace(kind="comm", share=0.5, seconds=1.0)])

    def stops(**works: float) -> tuple[int | None, str]:
        plans: Any = [(int(gpus[1:]), SimpleNamespace(tokens_or_samples_per_s=work)) for gpus, work in works.items()]
        return sweeps._stops(plans)

    assert stops(_8=100.0, _13=90.0, _16=200.0) == (16, "")
    assert stops(_8=100.0, _16=200.0, _24=205.0)[0] == 16
    assert stops(_8=100.0, _13=90.0)[0] == 8


def test_what_binds_a_family_is_said_of_the_mesh_that_was_asked_for() -> None:
    """And where no plan is there for other reasons than memory, the first of them."""
    found = [*families_of(study_of(captured_of("deep")[0].program, 8)), *families_of(study_of(captured_of("normed")[0].program, 8))]
    refused = [family.why for family in found if family.step_time_s is None]
    assert refused and not any(why.endswith(":") or "there is no data axis" in why for why in refused)


def test_memory_that_no_gpu_of_the_cluster_has_is_told() -> None:
    cluster = load_cluster("rtx4090-8x")
    program = program_of(256, 1, 4, 8, 32, 256)
    notes = make_plan(program, 2, cluster, memory_limit_bytes=80 * 2**30).notes
    assert any("has 23.60 GiB, and the plan may use 80.00 GiB" in note for note in notes), notes
    assert not any("may use" in note for note in make_plan(program, 2, cluster).notes)


def test_float32_convolutions_are_measured_against_the_rate_they_run_at() -> None:
    gpu = load_cluster("dgx-a100").gpu
    assert rate_of("conv", "float32", gpu) == "tf32" and rate_of("matmul", "float32", gpu) == "float32"
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1))
        program = capture(net, (torch.empty(64, 3, 64, 64),), loss=lambda out: out.mean()).program
    plan = make_plan(program, 1, load_cluster("dgx-a100"))
    assert plan.account is not None and plan.account.peak_flops_per_s > 0.9 * gpu.peak_flops_per_s("tf32")
    mfu = explanation_of(plan).summary.mfu
    assert mfu is not None and mfu < 1
