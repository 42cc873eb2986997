"""The example scripts as people start them, beside the same training on one process."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def started(*command: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """The last line that each has printed; they must all end well."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err[-4000:]
        found.append(out.strip().splitlines()[-1] if out.strip() else "")
    return found


def of_the_plain_loop(steps: int) -> list[float]:
    """The same training with the original model and torch alone."""
    loop = example("plain_loop")
    torch.manual_seed(0)
    model, data = loop.LanguageModel().double(), loop.dataset()
    optimizer = torch.optim.AdamW(loop.groups(model), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    losses: list[float] = []
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)
    while len(losses) < steps:
        sampler.set_epoch(len(losses) // 8)
        for ids, labels in DataLoader(data, batch_size=loop.BATCH, sampler=sampler):
            loss = model(ids, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    return losses[:steps]


def test_a_plain_loop_under_torchrun_on_one_and_on_two_nodes(tmp_path: Path) -> None:
    """Four steps on one node; then two agents, which find each other, go on from the checkpoint under another plan."""
    script = str(ROOT / "examples" / "plain_loop.py")
    one = started(*TORCHRUN, "--standalone", "--nproc-per-node", "2", script, "--pin", "tp=2", "--steps", "4", "--checkpoint", "last",
                  cwd=tmp_path)  # fmt: skip
    (text,) = printed([one])
    expected = of_the_plain_loop(10)  # into the second epoch
    assert json.loads(text) == pytest.approx(expected[:4], rel=1e-9)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    train = (script, "--pin", "dp=2", "--steps", "10", "--checkpoint", "last")
    both = [started(*TORCHRUN, *meeting, *train, cwd=tmp_path) for _ in range(2)]
    (said,) = [line for line in printed(both) if line]  # rank 0 is on one of them
    assert json.loads(said) == pytest.approx(expected[4:], rel=1e-9)
