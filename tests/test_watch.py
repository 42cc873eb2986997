"""The line of a step, steps measured beside the plan, and bars on a terminal."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import autopar
from autopar import progress
from autopar.progress import working
from autopar.run import WorkerPool
from autopar.watch import model_flops
from tests.checkpoint_model import LAYERS, B, D, T, V, adamw, batch, difference, plain, trained, whole_state


def _compiled(pins: dict[str, Any], gpus: int) -> Any:
    return autopar.compile(plain(dropout=0.1), gpus, example_inputs=batch(0), cluster="cpu", pins=pins)


def _lines(pins: dict[str, Any]) -> list[str | None]:
    model = _compiled(pins, 2)
    line = autopar.StepLine(model, every=2, file=io.StringIO())
    optimizer, found = adamw(model), []
    for step in range(4):
        (loss,) = trained(model, optimizer, range(step, step + 1))
        found.append(line(loss))
    return found


def _measured(pins: dict[str, Any]) -> dict[str, Any]:
    """What profile says, and the training after it beside training without it."""
    runs = []
    for profiles in (False, True):
        torch.manual_seed(5)
        model = _compiled(pins, 2)
        optimizer = adamw(model)
        losses = trained(model, optimizer, range(2))
        model(*batch(3)).backward()  # gradients that are there when it is measured
        before = {n: g.clone() for n, g in model.full_gradients().items()}
        found = model.profile(*batch(4), steps=2) if profiles else None
        same = difference(before, model.full_gradients())
        losses += trained(model, optimizer, range(2, 4))
        runs.append((losses, whole_state(model), same))
    assert found is not None
    moved = difference(runs[0][1], runs[1][1])
    html = found and found._repr_html_()
    return {"losses": [r[0] for r in runs], "state": moved, "same": runs[1][2], "found": found, "text": str(found), "html": html}


@pytest.mark.gloo
def test_a_line_every_few_steps_and_a_profile_that_leaves_no_trace() -> None:
    with WorkerPool(2, backend="gloo") as pool:
        first, second = pool.run(_lines, {"dp": 2}, timeout_s=300)
        assert second == [None] * 4
        assert [line is None for line in first] == [True, False, True, False]
        form = r"step 4  loss \d\.\d{4}  \S+ \S+ a step \(plan \S+ \S+\)  \S+ tokens/s  MFU \S+%  memory \S+ [MG]iB \(plan \S+ [MG]iB\)"
        assert re.fullmatch(form, first[3]), first[3]
        for told in pool.run(_measured, {"tp": 2}, timeout_s=300):
            without, with_it = told["losses"]
            assert with_it == pytest.approx(without, rel=1e-12)
            assert told["state"] < 1e-12
            assert told["same"] == 0.0
            found = told["found"]
            assert len(found.steps_s) == 2
            assert found.predicted_s > 0
            assert 0 < found.mfu < 10
            assert found.memory_bytes > 0
            assert re.search(r"forward and backward +\S+ \S+ +\S+ \S+\n", told["text"])
            assert "e+" not in told["text"]
            assert told["html"] == f"<pre>{told['text']}</pre>"


@pytest.mark.pure
def test_flops_of_the_model_do_not_depend_on_the_plan() -> None:
    model = plain()
    matrices = LAYERS * (3 * D * D + D * D + 4 * D * D + 4 * D * D) + V * D
    attention = LAYERS * 2 * T * D  # scores and their use, of each position
    for pins in ({}, {"dp": 4}, {"tp": 4}, {"pp": 2, "dp": 2}):
        gpus = 4 if pins else 1
        plan = autopar.plan(model, gpus, example_inputs=batch(0), cluster="cpu", pins=pins)
        assert model_flops(plan) == pytest.approx(6 * B * T * (matrices + attention), rel=0.25), pins


@pytest.mark.pure
def test_wrong_use_is_refused() -> None:
    model: Any = autopar.compile(plain(), 1, example_inputs=batch(0), cluster="cpu")
    with pytest.raises(ValueError, match="every must be a positive number of steps; got 0"):
        autopar.StepLine(model, every=0)
    with pytest.raises(ValueError, match="steps must be positive; got 0"):
        model.profile(*batch(0), steps=0)
    later: Any = autopar.compile(plain(), 1, cluster="cpu")
    with pytest.raises(ValueError, match="its model has not been called yet"):
        autopar.StepLine(later, every=1)(1.0)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.pure
def test_a_bar_on_a_terminal_only_and_only_later(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    original = progress._Late._begin

    def begin(bar: Any) -> None:
        original(bar)
        begun.set()

    monkeypatch.setattr(progress._Late, "_begin", begin)
    monkeypatch.setattr(progress, "AFTER_S", 0.01)
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stderr", piped)
    with working("planning"):
        pass
    assert piped.getvalue() == ""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with working("planning"), working("something inside"):
        assert begun.wait(60)
    assert "planning" in terminal.getvalue()
    assert "inside" not in terminal.getvalue()
    begun.clear()
    monkeypatch.setattr(progress, "AFTER_S", 3600.0)
    before = terminal.getvalue()
    with working("what is soon over"):
        pass
    assert terminal.getvalue() == before
    monkeypatch.setenv("RANK", "1")
    with working("another process"):
        pass
    assert terminal.getvalue() == before


@pytest.mark.pure
def test_a_bar_leaves_the_random_numbers_as_they_are() -> None:
    """What it is drawn with draws one when it is imported, which a capture would take for the model's."""
    code = (
        "import random, sys\n"
        "from autopar.progress import working\n"
        "sys.stderr.isatty = lambda: True\n"
        "before = random.getstate()\n"
        "with working('planning'): pass\n"
        "print('rich.progress' in sys.modules, random.getstate() == before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True True\n", done
