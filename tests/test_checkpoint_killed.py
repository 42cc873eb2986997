"""Saves that are killed at any step of theirs, or have no room: the checkpoint before stays."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.checkpoint import safetensors_file
from autopar.errors import CheckpointError
from tests.checkpoint_model import in_a_child

pytestmark = pytest.mark.pure


def _filled(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(number)
            optimizer.state[p]["momentum_buffer"].fill_(number)


def _killed_at(step: int, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save, and end with SIGKILL at a step of it: whatever it opens, writes, syncs, renames or removes is one."""
    done = 0

    def count(event: str, args: Any) -> None:
        nonlocal done
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "written", "fsync"):
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (function(*args), count(name, ()))[0]

    safetensors_file._write_data = counted("written", safetensors_file._write_data)  # type: ignore[assignment]
    os.fsync = counted("fsync", os.fsync)
    sys.addaudithook(count)
    autopar.save(folder, model, optimizer, number=step)
    os._exit(0)


def test_a_kill_at_any_step_of_a_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    _filled(model, optimizer, 0)
    autopar.save(tmp_path / "a", model, optimizer, number=0)
    seen, step, status = [0], 0, 1
    while status != 0:
        step += 1
        _filled(model, optimizer, step)
        _, waited = os.waitpid(in_a_child(lambda: _killed_at(step, tmp_path / "a", model, optimizer)), 0)  # noqa: B023
        status = os.waitstatus_to_exitcode(waited)
        assert status in (0, -signal.SIGKILL)
        seen.append(autopar.load(tmp_path / "a", model, optimizer)["number"])
        assert seen[-1] in (step, seen[-2])  # this save, or the one before
        assert all((p == seen[-1]).all() and (optimizer.state[p]["momentum_buffer"] == seen[-1]).all() for p in model.parameters())
    assert step > 15 and len(set(seen)) > 2  # killed before the index was in its place, and after
    assert len(list((tmp_path / "a").iterdir())) == 2  # what dead saves have left is gone


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """A process saves over and over; it is killed from outside while it does."""
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(2, 24)).sum().backward()
    optimizer.step()
    draw = random.Random(0)

    def over_and_over(first: int) -> None:
        for number in range(first, first + 1_000_000):
            _filled(model, optimizer, number)
            autopar.save(tmp_path / "a", model, optimizer, number=number)
            os.write(says, b".")

    for kill in range(12):
        hears, says = os.pipe()
        pid = in_a_child(lambda kill=kill: over_and_over(1_000_000 * kill))
        for _ in range(draw.randint(1, 3)):
            os.read(hears, 1)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(hears)
        os.close(says)
        number = autopar.load(tmp_path / "a", model, optimizer)["number"]
        assert number // 1_000_000 == kill
        assert all((p == number).all() and (optimizer.state[p]["momentum_buffer"] == number).all() for p in model.parameters())


def test_without_room_the_checkpoint_before_stays(tmp_path: Path) -> None:
    """A limit of the kernel on the size of files, in a process of its own."""

    def work() -> None:
        model = nn.Linear(100, 100)
        with torch.no_grad():
            model.weight.fill_(1)
        autopar.save(tmp_path / "a", model)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with torch.no_grad():
            model.weight.fill_(2)
        try:
            autopar.save(tmp_path / "a", model)
        except CheckpointError as error:
            (tmp_path / "said").write_text(str(error))
            os._exit(0)

    _, status = os.waitpid(in_a_child(work), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "MiB are free there). The checkpoint that was there before, if there was one, is as it was" in (tmp_path / "said").read_text()
    model = nn.Linear(100, 100)
    autopar.load(tmp_path / "a", model)
    assert (model.weight == 1).all()
    assert len(list((tmp_path / "a").iterdir())) == 2
