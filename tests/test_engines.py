"""The benchmark of engines: each of torch's, and autopar's runtime, leaves the weights that one process leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar.run import WorkerPool
from benchmarks import engines
from benchmarks.engines import CASES, SMALL, batch_of, model_of, train

pytestmark = pytest.mark.gloo


def test_engines_train_the_same_model(tmp_path: Path) -> None:
    pins = autopar.Pins(pp=2, micro_batches=4, schedule="1f1b", recompute="none")
    plan = autopar.plan(model_of(SMALL), 2, example_inputs=batch_of(SMALL), pins=pins)
    for name in ("plan", "small"):
        plan.save(tmp_path / f"{name}.json")
    with WorkerPool(2) as pool:
        for who in ("autopar", "ddp", "fsdp2", "1f1b", "gpipe"):
            found = pool.run(train, who, 4, SMALL, str(tmp_path), True)
            assert not any(m.refused for m in found), who
            assert 0.0 <= found[0].worst_error < engines.TOLERANCE, who
        assert "greater than or equal to the number of stages" in pool.run(train, "1f1b", 1, SMALL, str(tmp_path), True)[0].refused
        measured = pool.run(train, "ddp", 1, SMALL, str(tmp_path), False)
        assert all(0 < m.step_s < 60 for m in measured)


@pytest.mark.parametrize("options", [["--plans", "ddq"], ["--batch", "33"], ["--hidden", "0"], ["--layers", "3"]])
def test_wrong_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as found:
        engines.main(options)
    assert found.value.code == 2 and options[0] in capsys.readouterr().err


def test_figures_are_json() -> None:
    assert engines.Measured().figures() == {"step_s": None, "memory_bytes": None, "worst_error": 0.0, "refused": ""}
    assert all(case.engine in engines.ENGINES for case in CASES.values())
