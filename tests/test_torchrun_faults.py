"""Under torchrun: a rank that is killed, a machine that goes, a run that is asked to leave. The loss curve is that of one process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._faults_job import reference

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOPAR_CACHE": "off", "GLOO_SOCKET_IFNAME": "lo"}


def _torchrun(folder: Path, steps: int, what: str, *options: str) -> subprocess.Popen[str]:
    script = [str(ROOT / "tests" / "torchrun_job.py"), str(folder), str(steps), what]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True)


def _until(job: subprocess.Popen[str], said: str) -> str:
    """What a job has printed when it has said this."""
    assert job.stdout is not None
    out = ""
    while said not in out:
        line = job.stdout.readline()
        assert line, out + job.communicate()[1]
        out += line
    return out


def _losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"^losses (.*)$", out, re.M)[-1].split()]


def test_torchrun_starts_the_ranks_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    job = _torchrun(tmp_path, 6, "killed", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    out, err = job.communicate(timeout=400)
    assert job.returncode == 0, err
    said = re.findall(r"^autopar: (.*)$", err, re.M)
    pattern = r"rank 1 of 2 \(process \d+\) was killed, or crashed, after step 4, outside of the model"
    assert len(said) == 1 and re.match(pattern, said[0]), err
    assert "Traceback" not in err
    assert sorted(re.findall(r"rank \d of 2 from \d", out)) == [f"rank {r} of 2 from {n}" for r in range(2) for n in (0, 3)]
    assert _losses(out) == pytest.approx(reference(6), rel=1e-10)


def test_with_fewer_machines_it_is_planned_anew_and_goes_on(tmp_path: Path) -> None:
    """Of two machines, which are two agents of torchrun, one goes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    timing = "last_call_timeout=15,keep_alive_interval=2,keep_alive_max_attempt=3"
    common = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    first, second = (_torchrun(tmp_path, 12, "slow", *common, "--rdzv-id=job", f"--rdzv-conf=is_host={i},{timing}") for i in (1, 0))
    out = _until(first, "saved 2 by")
    second.kill()  # its rank finds that out by itself
    rest, err = first.communicate(timeout=500)
    second.communicate()
    out += rest
    assert first.returncode == 0, err
    assert "rank 0 of 2 from 0" in out and (resumed := re.search(r"rank 0 of 1 from (\d+)", out)), out
    assert int(resumed[1]) >= 2
    assert _losses(out) == pytest.approx(reference(12), rel=1e-10)


def test_sigterm_saves_and_leaves_and_one_process_goes_on(tmp_path: Path) -> None:
    job = _torchrun(tmp_path, 100_000, "asked", "--standalone", "--nproc-per-node=2")
    out = _until(job, "saved 3 by")
    job.send_signal(signal.SIGTERM)
    rest, err = job.communicate(timeout=300)
    out += rest
    left = re.findall(r"left after (\d+)", out)
    assert len(left) == 2 and left[0] == left[1], out + err
    steps = int(left[0]) + 2
    alone = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "torchrun_job.py"), str(tmp_path), str(steps), "to its end"],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=200, check=False,
    )  # fmt: skip
    assert f"rank 0 of 1 from {left[0]}" in alone.stdout, alone.stderr
    assert _losses(alone.stdout) == pytest.approx(reference(steps), rel=1e-10)
