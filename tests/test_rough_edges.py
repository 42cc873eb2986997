"""What people do that nobody planned for: files that cannot be written, models that end the program, workers that are killed, scripts
without a guard."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.cli import main
from autopar.compiler import emit
from autopar.errors import CaptureError, Infeasible, LaunchError, PlanError, VerificationError
from autopar.files import OutputError, write_file
from autopar.run import ParallelModule, WorkerPool, launch
from autopar.verify import reference
from tests.run_model import Model, batch, emitted, tensors

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 4, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.second(self.first(x).relu()), y)


INPUTS = (torch.randn(8, 8), torch.zeros(8, dtype=torch.int64))


# ------------------------------------------------------------------------------------------------------------------- files
@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be larger than 100 bytes: as on a full disk, writing fails half way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.pure
def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, small_files: None) -> None:
    path = tmp_path / "plan.json"
    write_file(path, b"before")
    with pytest.raises(OutputError, match=r"cannot write .*plan.json: File too large \(.* MiB are free there, 0\.0 MiB are needed\)"):
        write_file(path, b"x" * 200)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.pure
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(OutputError, match="it is a device, a pipe or a socket"):
            write_file(path, b"x")
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()
    with pytest.raises(OutputError, match="it is a folder"):
        write_file(tmp_path, b"x")
    with pytest.raises(OutputError, match="there is no folder"):
        write_file(tmp_path / "none" / "x", b"x")
    with pytest.raises(OutputError, match="File name too long"):
        write_file(tmp_path / ("x" * 300), b"x")


@pytest.mark.pure
def test_what_a_link_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"before")
    (tmp_path / "link").symlink_to("there")
    write_file(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_bytes() == b"after"


@pytest.mark.pure
def test_the_command_line_says_so_before_it_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "nothing.py:none", "--gpus", "2", "-o", "/dev/null"])
    assert stop.value.code == 2 and "cannot write /dev/null: it is a device" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- models, plans
TARGETS = """
import sys, torch
from torch import nn
class Leaves(nn.Linear):
    def forward(self, x):
        sys.exit(0)
def build():
    sys.exit(0)
def leaves():
    return Leaves(4, 4), (torch.zeros(2, 4),)
"""


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "text"), [("build", "calling .*:build ended the program, by sys.exit"), ("leaves", "own code ended the program")]
)
def test_a_target_that_ends_the_program_is_an_error(name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(TARGETS)
    with pytest.raises(SystemExit) as stop:
        main(["plan", f"{tmp_path / 'model.py'}:{name}", "--gpus", "2"])
    assert stop.value.code == 2
    assert re.search(text, capsys.readouterr().err)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        (Net(), (INPUTS[0], torch.full((8,), 4)), "Target 4 is out of bounds"),
        (Net(), (INPUTS[0].double(), INPUTS[1]), "must have the same dtype"),
        (Net(), (INPUTS[0][:, :5], INPUTS[1]), "cannot capture Net"),
    ],
)
def test_inputs_that_the_model_does_not_take(model: nn.Module, inputs: tuple[Tensor, ...], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(model, inputs)


@pytest.mark.pure
def test_weights_that_are_no_numbers_are_not_called_a_defect() -> None:
    model = Net()
    with torch.no_grad():
        model.second.weight[0, 0] = float("nan")
    text = r"the loss of Net itself is nan on the example inputs \(step 1, .*; second.weight has values that are not finite"
    with pytest.raises(VerificationError, match=text):
        reference(model, INPUTS)


@pytest.mark.pure
def test_memory_that_is_too_small_by_far_is_told_in_a_unit_of_its_own() -> None:
    with pytest.raises(Infeasible) as error:
        autopar.plan(Net(), 2, example_inputs=INPUTS, cluster="dgx-h100", memory="1KiB")
    assert "short of 1.00 KiB a GPU" in str(error.value) and " 0.00" not in str(error.value)


@pytest.mark.pure
@pytest.mark.parametrize("dims", [{"first.weight": 7}, {"first.weight": -1}, {"none": 0}, {"second.bias": 0, "first.weight": 2}])
def test_parts_along_a_dim_that_is_not_there(dims: dict[str, int]) -> None:
    captured = capture(Net(), INPUTS)
    plan = autopar.plan(Net(), 2, example_inputs=INPUTS, cluster="cpu", pins={"dp": 2, "zero": 3})
    emit(captured, plan)
    with pytest.raises(PlanError, match="the plan cuts the parameter"):
        emit(captured, msgspec.structs.replace(plan, zero_dims=dims))


# ----------------------------------------------------------------------------------------------------------------- workers
@pytest.mark.pure
@pytest.mark.parametrize("gpus", ["2", 0, True, 1.5, None])
def test_a_number_of_workers_that_is_none(gpus: object) -> None:
    with pytest.raises(ValueError, match="gpus must be a whole number of at least one worker"):
        launch(os.getpid, gpus=gpus)  # type: ignore[arg-type]


@pytest.mark.pure
def test_functions_that_new_processes_do_not_find() -> None:
    def inner() -> None: ...

    with pytest.raises(ValueError, match="inner is defined inside of a function"):
        launch(inner, gpus=1)
    code = "import autopar\ndef fn(): pass\nautopar.launch(fn, gpus=1)\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False)
    assert "fn is defined in a notebook, an interactive session or a script from standard input" in done.stderr.splitlines()[-1]


@pytest.mark.gloo
def test_a_function_of_a_module_is_launched_from_standard_input() -> None:
    """As from a notebook's cell: new processes import the function, and not the main module, which is no file."""
    code = "import os, autopar\nprint(len(set(autopar.launch(os.getpid, gpus=2))), __file__)\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, env=ENVIRONMENT, timeout=200, check=False)
    assert done.stdout == "2 <stdin>\n", done.stderr


@pytest.mark.gloo
def test_a_script_without_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import autopar\ndef fn(): pass\nautopar.launch(fn, gpus=2)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=ENVIRONMENT, timeout=200, check=False)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert "the script starts workers when it is imported" in done.stderr and 'if __name__ == "__main__":' in done.stderr


def _killed_in_step_2() -> None:
    model = ParallelModule(emitted(dp=2), tensors(Model().double()), device="cpu")
    for step in range(4):
        if step == 2 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model.train_step(batch(step))


@pytest.mark.gloo
def test_the_rank_that_was_killed_is_named_and_not_one_that_waited_for_it() -> None:
    text = r"failed on rank 1 of 2: died\nthe process was ended by signal 9 \(SIGKILL\), after step 2, outside of the model"
    with WorkerPool(2, backend="gloo") as pool, pytest.raises(LaunchError, match=text):
        pool.run(_killed_in_step_2)


@pytest.mark.gloo
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time, autopar\n"
        "def busy():\n"
        "    os.write(1, f'worker {os.getpid()}\\n'.encode())\n"
        "    while True: time.sleep(1)\n"
        "if __name__ == '__main__':\n    autopar.launch(busy, gpus=2)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert parent.stdout is not None
    workers = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(_lives(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_lives(pid) for pid in workers)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.pure
def test_generated_bad_inputs_are_errors_that_say_so() -> None:
    """Some of them; `python -m benchmarks hostile` makes 10,000."""
    command = [sys.executable, "-m", "benchmarks", "hostile", "--inputs", "350", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert found["inputs"] == 350 and found["error"] > 150
    assert not any(found[name] for name in ("traceback", "hang", "crash", "started", "written_outside"))
