"""Local workers: results, failures, hangs; and torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import LaunchError
from autopar.run import Mesh, WorkerPool, launch, record, watchdog
from autopar.run.groups import release
from autopar.run.together import told_by_all

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parent.parent


def _sum(x: torch.Tensor, factor: int) -> tuple[int, torch.Tensor, str, int]:
    x = x * factor * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return dist.get_rank(), x, dist.get_backend(), torch.get_num_threads()


def _fail_on(rank: int) -> int:
    if dist.get_rank() == rank or rank < 0:
        raise RuntimeError(f"broken on purpose, {rank}")
    dist.barrier()
    return os.getpid()


def _die() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def _hang() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def _pid() -> int:
    return os.getpid()


def test_launch_returns_the_results_by_rank() -> None:
    found = launch(_sum, torch.ones(2), 10, gpus=2)
    assert [(rank, x.tolist(), backend, threads) for rank, x, backend, threads in found] == [
        (0, [30.0, 30.0], "gloo", 1),
        (1, [30.0, 30.0], "gloo", 1),
    ]


def test_a_pool_keeps_its_workers_and_survives_what_goes_wrong() -> None:
    with WorkerPool(2, backend="gloo") as pool:
        first = pool.run(_pid)
        assert pool.run(_pid) == first
        text = r"_fail_on failed on rank . of 2: RuntimeError: broken on purpose, -1(.|\n)*Traceback(.|\n)*in _fail_on"
        with pytest.raises(LaunchError, match=text):
            pool.run(_fail_on, -1)
        assert pool.run(_pid) == first  # all failed alike: the group is as it was
        with pytest.raises(LaunchError, match="failed on rank 1 of 2: RuntimeError: broken on purpose, 1"):
            pool.run(_fail_on, 1)
        second = pool.run(_pid)
        assert not set(second) & set(first)  # rank 0 waited in a collective
        with pytest.raises(LaunchError, match="failed on rank 1 of 2: died\nthe process ended with exit code 3"):
            pool.run(_die)
        pool.run(_pid)  # new workers are up
        start = time.monotonic()
        with pytest.raises(LaunchError, match=r"_hang did not end within 2 s on ranks \[0\] of 2"):
            pool.run(_hang, timeout_s=2)
        assert time.monotonic() - start < 30
        assert len(set(pool.run(_pid))) == 2


def test_a_pool_has_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        WorkerPool(0)


def test_a_script_ends_as_it_should_however_it_ends() -> None:
    """Five times each. No thread of a process group may be alive when the interpreter finalizes: it would abort the process, on a
    quiet machine in a quarter to a half of the runs."""
    forms = ["at module level", "inside main", "saved last", "destroyed", "deleted", "exits", "raises"]
    command = [sys.executable, str(ROOT / "tests" / "exit_forms.py"), "5", *forms]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=environment)
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == ([f"{form}: pairs 5" for form in forms], "", 0)


def test_workers_of_launch_leave_no_thread_of_a_process_group() -> None:
    found = launch(_groups_then_release, gpus=2)
    assert found == [(True, [])] * 2


def _groups_then_release() -> tuple[bool, list[str]]:
    """As a worker ends: a mesh's group and the default one have threads, and none is left after release()."""
    mesh = Mesh({"dp": 2})
    dist.all_reduce(torch.ones(1), group=mesh.dp.group)
    before = _threads_of_gloo()
    release()
    return bool(before), _threads_of_gloo()


def _threads_of_gloo() -> list[str]:
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return [name for name in names if "gloo" in name]


def test_under_torchrun_the_module_joins_the_group(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\nfrom autopar.run import ParallelModule\nfrom tests.run_model import Model, batch, emitted, tensors\n"
        "model = ParallelModule(emitted(dp=2), tensors(Model().double()), device='cpu')\n"
        "line = f'loss {model.train_step(batch(0)).item():.6f}\\n'\n"
        "os.write(1, line.encode())  # at once: two ranks write to one pipe\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [line for line in done.stdout.splitlines() if line.startswith("loss")]
    assert len(losses) == 2 and len(set(losses)) == 1


ALONE = """
import torch, torch.distributed as dist, autopar

def train():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    x = torch.ones(4, 8)
    model = autopar.compile(layers, 2, example_inputs=(x,), loss=torch.mean, cluster="cpu", pins={"pp": 2})
    for _ in range(3):  # in the first ones ranks compare their inputs first
        model(x).backward()
    if dist.get_rank() == 0:
        DOES
    model(x).backward()

if __name__ == "__main__":
    autopar.launch(train, gpus=2)
"""


def _alone(folder: Path, does: str) -> subprocess.CompletedProcess[str]:
    """A script of two workers, of which the first one does something alone in line 11."""
    script = folder / "logs_alone.py"
    script.write_text(ALONE.replace("DOES", does))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOPAR_TIMEOUT": "20"}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_what_one_worker_does_alone_is_named_when_all_wait(tmp_path: Path) -> None:
    done = _alone(tmp_path, "model.clip_grad_norm_(1.0)")
    said = done.stderr.splitlines()[-1]
    assert re.search(r"ranks 0, 1 of 2 have waited \d s: ", said) and "logs_alone.py:11" in said, said
    assert "rank 0 asks for something in which all ranks have a part" in said and "rank 1 has gone on to call the model" in said
    assert "not under `if rank == 0`" in said and said.endswith("The ranks end") and done.returncode == 1


def test_what_one_worker_reads_alone_is_an_error_at_once(tmp_path: Path) -> None:
    done = _alone(tmp_path, "print(max(float(p.norm()) for p in model.parameters()))")
    assert "have waited" not in done.stderr and 'logs_alone.py", line 11, in train' in done.stderr and done.returncode == 1
    assert "LaunchError: rank 0 is about to sum up 0.weight, which all ranks do together, and rank 1 does something else" in done.stderr


@pytest.mark.parametrize("does", ["autopar.save('here', model)", "autopar.load('here', model)"])
def test_a_checkpoint_of_one_worker_alone_is_an_error_at_once(does: str, tmp_path: Path) -> None:
    """Of a script that goes on to call the model on the others."""
    done = _alone(tmp_path, does)
    what = "save" if "save" in does else "load"
    assert f"rank 0 is about to {what} a checkpoint, which all ranks do together, and rank 1 does something else" in done.stderr
    assert "have waited" not in done.stderr and done.returncode == 1 and not (tmp_path / "here").exists()


def test_a_worker_that_waits_for_one_that_is_done_ends() -> None:
    """Of autopar.launch, whose other worker lives and waits for what to do next."""
    with WorkerPool(2, backend="gloo") as pool, pytest.raises(LaunchError, match="rank 0 of 2 has waited") as said:
        pool.run(_waits_at_its_end, timeout_s=120)
    assert "rank 1 is at the end of what it was given" in str(said.value) and "The ranks end" in str(said.value)


def _waits_at_its_end() -> None:
    os.environ["AUTOPAR_TIMEOUT"] = "20"
    Mesh({"dp": 2})
    if dist.get_rank() == 0:
        told_by_all("alone")


def _called_before(times: int) -> None:
    """A task in which the ranks are called `times` times, but for rank 0."""
    for _ in range(times if dist.get_rank() else 0):
        record.decided(1, again=False)


def _other_sizes() -> list[float]:
    model = autopar.compile(torch.nn.Linear(4, 4), gpus=2, example_inputs=(torch.ones(8, 4),), cluster="cpu", pins={"dp": 2})
    with torch.no_grad():
        return [float(model(torch.full((size, 4), 2.0)).shape[0]) for size in (8, 4, 2, 4)]


def test_what_ranks_did_in_an_earlier_task_is_not_compared() -> None:
    """Each new size is captured again, for which ranks wait until all of them say that they do, by the number of the call."""
    with WorkerPool(2, backend="gloo") as pool:
        pool.run(_other_sizes, timeout_s=60)
        pool.run(_called_before, 3, timeout_s=60)
        assert pool.run(_other_sizes, timeout_s=60) == [[8, 4, 2, 4]] * 2


def _late_with_its_record(rank: int) -> None:
    """As on a busy machine, the last rank is slow to make its record."""
    if rank == 3:
        made = watchdog.Own

        def late(path: Path) -> record.Own:
            time.sleep(1.0)
            return made(path)

        watchdog.Own = late  # type: ignore[assignment, misc]


def _records_that_are_read() -> list[int]:
    Mesh({"dp": 4})
    watch = watchdog.current()
    assert watch is not None
    return sorted(watch._others)


def test_a_rank_that_is_slow_to_begin_is_watched_too() -> None:
    """Else others would wait for ever for what it decides, and would not see that it has gone. Of four, rank 2 may be given what gloo
    broadcasts from rank 0 before the last one is asked for."""
    with WorkerPool(4, enter=_late_with_its_record) as pool:
        assert pool.run(_records_that_are_read, timeout_s=60) == [[other for other in range(4) if other != rank] for rank in range(4)]
