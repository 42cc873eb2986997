"""Constants of a GPU, fitted to training runs: what they were made with is found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fit_gpus
from benchmarks._predict import Prediction, predictions, repriced
from benchmarks._runs import rebuilt
from cost_models.cluster import load_gpu
from tests.test_forms import changed
from tests.test_published import row, table

pytestmark = pytest.mark.pure

WORK = {"hidden": 4096, "n_heads": 32, "ffn": 16384, "vocab": 4096, "seq_len": 2048, "global_batch": 8}  # the device is what takes time
ROWS = [row(), row(micro_batch=1), row(**WORK), row(**WORK, gpu="H200"), row(**WORK, gpu="A100-80GB"), row(**WORK, status="oom")]


def test_constants_are_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = load_gpu("h100-sxm")
    made_with = {"matmul": 0.8 * start.fraction("matmul"), "launch_s": 2.0 * start.launch_s}
    found = [p for _, p in predictions([rebuilt(r, i) for i, r in enumerate(ROWS)]) if isinstance(p, Prediction)]
    times = repriced(found, lambda cluster: changed(cluster, made_with))
    measured = [{**ROWS[p.run.number], "step_time_s": str(t.step_s)} for p, t in zip(found, times, strict=True)]
    path = table(tmp_path / "runs.csv", measured)
    assert fit_gpus.main(["h100-sxm", "h200", "--data", str(path), "--constants", "matmul,launch_s", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpus"] == ["h100-sxm", "h200"]
    assert answer["runs"] == 4, "neither what ran on another GPU nor what failed"
    assert answer["loss_before"] > 0.1
    assert answer["loss"] < 0.01
    assert answer["constants"] == pytest.approx(made_with, rel=0.03)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["h100-smx"], "there is no gpu 'h100-smx' in the catalogue; did you mean h100-sxm"),
        (["h100-sxm", "--constants", "speed"], "no constant is called speed"),
        (["rtx4090"], "no row that can be rebuilt is of rtx4090"),
    ],
)
def test_what_cannot_be_fitted_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], reason: str) -> None:
    path = table(tmp_path / "runs.csv", [row()])
    assert fit_gpus.main([*argv, "--data", str(path)]) == 2
    assert reason in capsys.readouterr().err
