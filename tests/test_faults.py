"""What the other ranks do and say when one is killed, raises, ends early or is waited for; leaving on a signal; starting again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

import autopar
from autopar.run import record
from autopar.run.record import Seen
from autopar.run.watchdog import Watchdog
from tests.run_model import Model

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Run(Protocol):
    def __call__(self, form: str, folder: Path, **environment: str) -> dict[str, Any]: ...


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a form of `fault_forms.py`; one process has imported what all of them need."""
    command = [sys.executable, str(ROOT / "tests" / "fault_forms.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as forms:
        stdin, stdout = forms.stdin, forms.stdout
        assert stdin is not None and stdout is not None

        def ask(form: str, folder: Path, **environment: str) -> dict[str, Any]:
            print(json.dumps({"form": form, "folder": str(folder), "environment": environment}), file=stdin, flush=True)
            found: dict[str, Any] = json.loads(stdout.readline())
            assert "ended" not in found, f"{form}: the script itself ended with {found['ended']}"
            return found

        yield ask
        stdin.close()
        assert forms.wait(timeout=60) == 0


@pytest.mark.parametrize(("form", "ranks"), [("raises", 2), ("raises, of four", 4)])
def test_a_rank_that_raises_brings_the_others_down_after_its_traceback(form: str, ranks: int, tmp_path: Path, run: Run) -> None:
    found = run(form, tmp_path)
    assert found["codes"] == [1] * ranks
    own, *others = [line for line in found["text"].splitlines() if "ValueError: on purpose" in line]
    assert "autopar" not in own and found["text"].count("Traceback") == 1, found["text"]
    (said,) = others
    assert re.match(rf"autopar: rank 1 of {ranks} has failed after step 3, outside of the model: ValueError: on purpose \(", said)
    assert found["text"].splitlines()[-1] == said


def test_a_rank_that_makes_fewer_steps_is_named(tmp_path: Path, run: Run) -> None:
    found = run("exits", tmp_path)
    assert found["codes"] == [1, 0]
    (said,) = found["text"].splitlines()
    assert said.startswith("autopar: rank 1 of 2 has ended by itself (after step 3, outside of the model), and rank 0 waits for it, in ")
    assert "all ranks must make the same calls" in said


def test_a_rank_that_is_killed_while_no_other_waits(tmp_path: Path, run: Run) -> None:
    found = run("killed while the other computes", tmp_path)
    assert found["codes"] == [1, -9]
    (said,) = found["text"].splitlines()
    assert re.match(r"autopar: rank 1 of 2 \(process \d+\) was killed, or crashed, after step 3, outside of the model\.", said)


def test_a_rank_that_is_killed_on_another_machine(tmp_path: Path, run: Run) -> None:
    found = run("killed on another machine", tmp_path)
    assert found["codes"] == [1, -9]
    (said,) = [line for line in found["text"].splitlines() if line.startswith("autopar: ")]
    pattern = r"autopar: rank 1 of 2 \(process \d+\) on another machine is not heard of any more; it was last after step 3, outside of the"
    assert re.match(pattern, said) and "Traceback" not in found["text"], found["text"]


@pytest.mark.parametrize(("form", "axis"), [("waits", "all ranks|dp"), ("waits in forward", "tp")])
def test_a_collective_that_is_waited_for_too_long_is_named(form: str, axis: str, tmp_path: Path, run: Run) -> None:
    found = run(form, tmp_path, AUTOPAR_TIMEOUT="15")
    assert found["codes"] == [1, 1]
    lines = found["text"].splitlines()
    pattern = r"autopar: rank 0 of 2 has waited (\d+) s in step 4, (forward|backward), in an? [a-z-]+ over (.*)"
    said = [re.match(pattern, line) for line in lines]
    matched = [m for m in said if m is not None]
    assert len(matched) >= 2, found["text"]  # when a tenth of the time has passed, and at the end
    assert re.search(axis, matched[-1][3])
    assert "; rank 1 is after step 3, outside of the model (fault_forms.py:" in matched[-1][0] and "in in_no_hurry)" in matched[-1][0]
    assert "longer than AUTOPAR_TIMEOUT=15 allows" in matched[-1][0]
    if form == "waits in forward":
        number = int(re.search(r"line (\d+) of the emitted module", matched[-1][0])[1])  # type: ignore[index]
        assert "C.all_reduce" in (ROOT / "tests" / "run_model.py").read_text().splitlines()[number - 1]


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("changed on one rank", "kind from 'b' to 'c'"),
        ("another size on one rank", "it is called with other inputs or in another mode than before, or others train"),
        ("changed on one rank of another machine", "kind from 'b' to 'c'"),
        ("another size on one rank of another machine", "it is called with other inputs or in another mode than before, or others train"),
    ],
)
def test_a_rank_that_captures_again_alone_ends_with_what_it_is(form: str, why: str, tmp_path: Path, run: Run) -> None:
    """Without waiting for a timeout: it is an error of that rank, and the others end because it has failed."""
    found = run(form, tmp_path, AUTOPAR_TIMEOUT="inf")
    assert found["codes"] == [1, 1]
    assert found["steps"].count("step 5 of rank") == 2, "what changes on all ranks alike is captured again by all"
    errors = [line for line in found["text"].splitlines() if "autopar.errors.LaunchError: rank 1 has to" in line]
    assert len(errors) == 1, found["text"]
    assert re.search(rf"rank 1 has to capture Plain again \(.*{re.escape(why)}.*\), and rank 0 does not, or for another reason", errors[0])


@pytest.mark.parametrize("form", ["other shapes", "other shapes, of which no collective tells"])
def test_ranks_that_are_called_with_other_shapes_are_told_so(form: str, tmp_path: Path, run: Run) -> None:
    """Before the call's first collective: no timeout comes to it, and no loss of mixed batches is returned."""
    found = run(form, tmp_path, AUTOPAR_TIMEOUT="inf")
    assert found["codes"] == [1, 1], found["text"]
    assert "LaunchError: ranks 0 and 1 are called with inputs of different shapes, or in different modes" in found["text"], found
    assert found["steps"].count("step 5 of rank") == 2 and "step 6" not in found["steps"]


def test_an_evaluation_on_one_rank_is_told_of_at_once(tmp_path: Path, run: Run) -> None:
    found = run("called once more, without gradients", tmp_path, AUTOPAR_TIMEOUT="inf")
    assert found["codes"] == [1, 1], found["text"]
    assert "ranks 0 and 1 are called with inputs of different shapes, or in different modes (training, torch.no_grad())" in found["text"]
    assert "step 5 of rank" not in found["steps"]


def test_ranks_that_wait_for_one_another_in_different_calls_end(tmp_path: Path, run: Run) -> None:
    """When it is said that they wait, after a tenth of the time that they may."""
    found = run("called once more, with gradients", tmp_path, AUTOPAR_TIMEOUT="60")
    assert found["codes"] == [1, 1], found["text"]
    (said,) = found["text"].splitlines()
    assert "; rank 0 is in a later call of the model than rank 1, and each waits for the other: all ranks must call it equally" in said
    assert int(re.search(r"have waited (\d+) s", said)[1]) < 40  # type: ignore[index]


def test_a_batch_that_all_ranks_leave_out_is_left_out(tmp_path: Path, run: Run) -> None:
    found = run("left out by all ranks", tmp_path, AUTOPAR_TIMEOUT="inf")
    assert found["codes"] == [0, 0] and found["text"] == "", found["text"]
    assert found["steps"].count("left out 5 by rank") == 4, "by both ranks, of the original and of the parallel module"
    assert all(found["steps"].count(f"step {step} of rank") == 2 for step in (0, 1, 2, 3, 4, 6, 7))


@pytest.mark.parametrize(("form", "rank"), [("left out by one rank", 1), ("left out by one stage", 0)])
def test_a_rank_that_leaves_a_batch_out_alone_ends_the_run(form: str, rank: int, tmp_path: Path, run: Run) -> None:
    """Its next call is not taken for what the others wait for in the call that it has left."""
    found = run(form, tmp_path, AUTOPAR_TIMEOUT="inf")
    assert found["codes"] == [1, 1], found["text"]
    said = f"LaunchError: rank {rank} has raised IndexError (index out of range in self) in a call of the model, which other ranks have not"
    assert said in found["text"], found["text"]
    assert "step 4 of rank" in found["steps"] and "step 6" not in found["steps"]


def test_a_rank_that_goes_on_without_the_others_is_named(tmp_path: Path, run: Run) -> None:
    found = run("left out by one rank, which does something else", tmp_path, AUTOPAR_TIMEOUT="inf")
    assert found["codes"] == [1, 1], found["text"]
    (said,) = found["text"].splitlines()
    assert said.startswith("autopar: rank 1 of 2 has raised IndexError: index out of range in self, in step 6, forward, which other ranks")


class Elsewhere:
    """The record of a rank that has decided so, and has seen the others agree on so many calls."""

    def __init__(self, decided: int, agreed: int) -> None:
        self._seen = dataclasses.replace(Seen.of(record.NOTHING), decided=decided, agreed=agreed)

    def alive(self) -> bool:
        return True

    def seen(self) -> Seen:
        return self._seen


@pytest.mark.parametrize(
    ("call", "number", "agreed", "differs"),
    [(5, 7, 4, False), (5, 8, 4, True), (6, 9, 5, False), (6, 9, 4, True)],
    ids=["waits for the same", "waits for another", "has gone on from the same", "has gone on without"],
)
def test_a_rank_that_has_agreed_and_gone_on_does_not_differ(call: int, number: int, agreed: int, differs: bool) -> None:
    watch = object.__new__(Watchdog)
    vars(watch).update(rank=0, world=2, _store=None, _others={1: Elsewhere(call << 33 | 1 << 32 | number, agreed)})
    assert watch.differing(5 << 33 | 1 << 32 | 7) == (1 if differs else None)


@pytest.mark.parametrize(
    ("form", "where"),
    [("saved by one rank", "saving a checkpoint, in "), ("saved beside by one rank", "saving a checkpoint beside, for which it waits for")],
)
def test_a_checkpoint_for_which_one_rank_does_nothing_is_named(form: str, where: str, tmp_path: Path, run: Run) -> None:
    found = run(form, tmp_path, AUTOPAR_TIMEOUT="20")
    assert found["codes"] == [1, 1], found["text"]
    said = [line for line in found["text"].splitlines() if line.startswith("autopar: ")]
    assert re.match(r"autopar: rank 0 of 2 has waited (\d+) s ", said[-1]) and where in said[-1], said
    assert "rank 1 is" in said[-1] and "in_no_hurry" in said[-1] and "longer than AUTOPAR_TIMEOUT=20 allows" in said[-1]


def test_ranks_leave_together_at_a_step_of_which_there_is_a_checkpoint(tmp_path: Path, run: Run) -> None:
    """One of them alone is given the signal."""
    found = run("asked to leave", tmp_path)
    assert found["codes"] == [0, 0] and found["text"] == "", found["text"]
    left = set(re.findall(r"left after (\d+)", found["steps"]))
    assert len(left) == 1 and found["steps"].count("left after") == 2
    step = int(left.pop())
    assert 4 <= step < 2000
    for rank in range(2):
        assert len(re.findall(rf"step \d+ of rank {rank}\n", found["steps"])) == step
    model = Model().double()
    assert autopar.load(tmp_path / "left", model) == {"step": step}


def test_a_loop_that_does_not_ask_ends_by_the_signal(tmp_path: Path, run: Run) -> None:
    found = run("asked, of no loop that asks", tmp_path)
    assert found["codes"][1] == -15 and found["codes"][0] in (1, -15)


def test_on_one_process_the_signal_is_seen_at_the_next_call() -> None:
    code = (
        "import os, signal, autopar\nfound = [autopar.interrupted()]\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "found += [autopar.interrupted(), autopar.interrupted()]\nassert found == [False, True, True], found\n"
    )
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, timeout=120, check=False).returncode == 0


def test_kills_at_random_moments_lose_nothing_that_was_saved() -> None:
    """A few of them, in every phase, under every plan; `python -m benchmarks faults` makes more."""
    command = [sys.executable, "-m", "benchmarks", "faults", "--kills", "6", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == 6 and found["hangs"] == found["lost"] == found["other_messages"] == 0
    assert found["loss_error"] <= 1e-10 and torch.tensor(found["end_s"]).max() < 60
