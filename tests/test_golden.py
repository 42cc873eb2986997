"""Plans of real models as files, and the source that they are written as; the same in every process."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autopar.capture import Captured, capture
from autopar.compiler import emit, plan_of
from autopar.planner import Plan
from benchmarks import _models

pytestmark = pytest.mark.pure

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parent.parent
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt2", {"dp": 2, "tp": 2}),  # tied embeddings
    "gpt_pipeline": ("gpt2", {"dp": 2, "pp": 2, "micro_batches": 2}),
    "bert": ("bert", {"tp": 2, "pp": 2}),  # a classifier
    "resnet": ("resnet", {"dp": 2, "tp": 2}),  # batch norm
}


@functools.cache
def captured_model(name: str) -> Captured:
    return capture(*getattr(_models, name)(), check=False)


def planned(name: str) -> tuple[Captured, Plan]:
    """A case of PLANS, planned now. How long that took is left out."""
    model, pins = PLANS[name]
    captured = captured_model(model)
    return captured, msgspec.structs.replace(plan_of(captured, 4, cluster="dgx-h100", pins=pins), planning_s={})


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_written_as_before(name: str, golden: Callable[[str, str], None], request: pytest.FixtureRequest) -> None:
    """The plan file is an input: another plan may be found today, but this one must be written as it was."""
    path = GOLDEN / f"{name}.plan.json"
    if request.config.getoption("--update-golden"):
        planned(name)[1].save(path)
    model, pins = PLANS[name]
    plan = Plan.load(path)
    assert pins.items() <= {**plan.mesh, "micro_batches": plan.micro_batches}.items()
    source = emit(captured_model(model), plan)
    assert max(map(len, source.splitlines())) <= 120
    golden(f"{name}.py.txt", re.sub(r"(\.py):\d+:", r"\1:", source))  # line numbers of installed packages move


def test_the_order_of_hashes_decides_nothing() -> None:
    """Two processes with other hashes of strings find the same plans and write the same sources, byte for byte."""
    program = "import sys\nfrom tests.test_golden import print_all\nprint_all(sys.argv[1:])"
    names = ["gpt_pipeline", "resnet"]
    found = []
    with contextlib.ExitStack() as stack:
        started = []
        for seed in ("0", "1"):
            environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", program, *names]
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)  # nothing, if it has ended
        for process in started:
            found.append(process.communicate(timeout=300)[0])
            assert process.returncode == 0
    assert found[0].count('"program_hash"') == len(names)
    assert found[0] == found[1]


def print_all(names: list[str]) -> None:
    """Plans and sources, in a process of the test above."""
    for name in names:
        captured, plan = planned(name)
        print(plan.to_json().decode(), emit(captured, plan))
