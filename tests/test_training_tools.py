"""Programs of `python -m benchmarks training` under data, tensor and pipeline parallelism and ZeRO, and what its table says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import training
from benchmarks._traps import PROGRAMS
from benchmarks._traps_run import Judge, Outcome

PLANS = ("dp2", "tp2", "pp2", "zero3")
OF_TOOLS = {  # the Trainer itself: test_trainer.py
    "accelerated": "accelerate", "lightning_trainer": "lightning", "adapters_of_peft": "peft", "trainer_of_preferences": "accelerate",
}  # fmt: skip
OF_LOOPS = ("scheduled", "groups_by_name", "saved_and_resumed", "local_parts_of_the_batch", "lengths_in_buckets")


@pytest.mark.gloo
@pytest.mark.parametrize("name", OF_TOOLS)
def test_tools_do_as_on_one_process(name: str, judge: Judge) -> None:
    if importlib.util.find_spec(OF_TOOLS[name]) is None:
        pytest.skip(f"{OF_TOOLS[name]} is not installed: pip install 'autopar[tools]'")
    assert judge.not_right(name, PLANS) == []


@pytest.mark.gloo
@pytest.mark.parametrize("name", OF_LOOPS)
def test_loops_do_as_on_one_process(name: str, judge: Judge) -> None:
    plans = ("tp2", "pp2", "zero3")
    assert judge.not_right(name, plans) == []


@pytest.mark.pure
def test_every_feature_has_programs_of_the_table() -> None:
    assert len(training.FEATURES) >= 20
    for name, feature in training.FEATURES.items():
        assert feature.programs, name
        assert set(feature.programs) <= set(PROGRAMS), name


@pytest.mark.pure
def test_the_table_says_the_worst_of_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"

    def main(*outcomes: str) -> int:
        rows = zip(training.FEATURES["other optimizers"].programs, outcomes, strict=True)
        found = [Outcome(name=name, kind="training", plan="tp2", outcome=o, reason="use another") for name, o in rows]
        results.write_text("".join(json.dumps(o.record()) + "\n" for o in found))
        return training.main(["--features", "other optimizers", "--plans", "tp2", "--results", str(results)])

    count = len(training.FEATURES["other optimizers"].programs)
    assert main(*["right"] * count) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == {"other optimizers": {"tp2": "verified"}}
    assert main(*["right"] * (count - 1), "refused") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["refused"] == 1
    assert main("wrong", *["refused"] * (count - 1)) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["wrong"] == 1
    assert training.main(["--features", "clippin"]) == 2
    assert "clipping" in capsys.readouterr().err
