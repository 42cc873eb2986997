"""Scripts of `python -m benchmarks mixed`: how they are drawn, named, made shorter; each action on one process, some under plans."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from benchmarks._mixed import Script, mixed_program, script_named, script_of, shorter
from benchmarks._mixed_actions import ACTIONS, OPTIMIZERS
from benchmarks._mixed_models import BODIES, EXTRAS, FORMS, Design, design_of
from benchmarks._traps_run import Judge, Outcome, _same
from benchmarks.mixed import main, shortest

SCRIPTS = {"mixed-7": "dp2", "mixed-11": "tp2", "mixed-23": "pp2", "mixed-31": "zero3"}


@pytest.mark.pure
def test_a_script_is_the_same_whenever_it_is_named() -> None:
    whole = script_named("mixed-17")
    assert whole == script_of(17) != script_of(18)
    part = script_named("mixed-17-0.2")
    assert (part.design, part.optimizer) == (whole.design, whole.optimizer)
    assert part.actions == (whole.actions[0], whole.actions[2])
    assert script_named("mixed-17-").actions == ()


@pytest.mark.pure
@pytest.mark.parametrize("name", ["mixed", "mixed-", "mixed-x", "mixed-1-a", "mixed-1-0..2", "clipped_norm", "mixed-1; print()"])
def test_other_names_are_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mixed_program(name) is None
    with pytest.raises(ValueError, match="is no name of a script"):
        script_named(name)
    assert main(["--names", name]) == 2
    assert "there is no script or plan" in capsys.readouterr().err


@pytest.mark.pure
def test_all_that_there_is_is_drawn() -> None:
    scripts = [script_of(seed) for seed in range(400)]
    assert {a for s in scripts for a in s.actions} == set(ACTIONS)
    assert {s.optimizer for s in scripts} == set(OPTIMIZERS)
    assert {e for s in scripts for e in s.design.extras} == set(EXTRAS)
    assert {(s.design.body, s.design.form) for s in scripts} == {(b, f) for b in BODIES for f in FORMS}


@pytest.mark.pure
def test_what_is_wrong_is_made_as_short_as_it_goes() -> None:
    """By a judge to whom two actions together are wrong."""

    class Pretending:
        def outcomes(self, name: str, plans: Sequence[str]) -> Iterator[Outcome]:
            actions = script_named(name).actions
            bad = "step" in actions and actions.count(other) >= 1
            yield Outcome(name=name, kind="mixed", plan=plans[0], outcome="wrong" if bad else "right")

    other = next(a for a in script_of(17).actions if a != "step")
    (first,) = Pretending().outcomes("mixed-17", ("dp2",))
    found = shortest(Pretending(), first)
    assert sorted(script_named(found.name).actions) == sorted(("step", other))
    assert [script_named(name).actions for name in shorter(found.name)] in ([("step",), (other,)], [(other,), ("step",)])


@pytest.mark.pure
@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_runs_and_repeats_on_one_process(name: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        rng = random.Random(name)
        for form in FORMS:
            drawn = design_of(rng)
            script = Script(Design(drawn.body, drawn.norm, form, drawn.extras, drawn.outputs), "adamw", ("step", name, "step"))
            first, second = (script.run(_same) for _ in range(2))
            assert all(torch.equal(t, second["state"][n]) for n, t in first["state"].items())
            assert _flat(first["found"]) == _flat(second["found"])
    finally:
        torch.set_default_dtype(before)


def _flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: _flat(v) for k, v in value.items()}
    return [_flat(v) for v in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "plan"), SCRIPTS.items())
def test_scripts_are_right_under_plans(name: str, plan: str, judge: Judge) -> None:
    """One plan each; the benchmark runs any number of them under all."""
    assert judge.not_right(name, (plan,)) == []
