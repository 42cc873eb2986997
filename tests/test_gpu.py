"""What only a GPU can show; and that the benchmark of a machine with GPUs says so where there is none."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.report import doctor
from autopar.run import WorkerPool
from autopar.run.launch import default_device
from autopar.verify import verify
from benchmarks import gpu
from tests.test_host_synchronisation import WORDS, Language

ROOT = Path(__file__).parent.parent


@pytest.mark.pure
def test_without_a_gpu_nothing_is_run_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == gpu.NONE != 0
    said, line = capsys.readouterr().out.splitlines()
    assert said.startswith("there is no GPU on this machine (torch ") and said.endswith("nothing was run, and nothing is written")
    assert json.loads(line)["gpu"] is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.pure
def test_make_gpu_runs_the_benchmark() -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    shown = subprocess.run(["make", "-n", "gpu"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.search(r"python -m benchmarks gpu", shown)


@pytest.mark.pure
def test_the_training_that_is_compared() -> None:
    """On the CPU, where it can be: plain torch and autopar have the same losses from the same weights."""
    args = argparse.Namespace(steps=3, hidden=64, layers=1, length=16, batch=2)
    for precision, tolerance in gpu.TOLERANCES.items():
        plain, ours = (gpu.trained(args, precision, parallel=parallel, device="cpu") for parallel in (False, True))
        assert ours["losses"] == pytest.approx(plain["losses"], rel=tolerance)
        assert ours["losses"][0] != ours["losses"][-1] and ours["predicted_peak_bytes"] > 0


@pytest.mark.pure
def test_provenance_names_what_was_used() -> None:
    found = gpu.provenance(["--steps", "3"])
    assert found["command"] == "python -m benchmarks gpu --steps 3" and found["torch"] == str(torch.__version__)
    assert {"when", "commit", "devices", "driver", "cuda", "nccl", "python", "machine"} <= found.keys()


@pytest.mark.pure
def test_the_gpu_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert default_device() == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "5")  # more processes than GPUs share them
    assert default_device() == torch.device("cuda", 1)
    monkeypatch.delenv("LOCAL_RANK")
    assert default_device() == torch.device("cuda", 2), "what the script has chosen"


# ------------------------------------------------------------------------------------------------------------ with a GPU
def losses(pins: dict[str, Any], gpus: int, *, strict: bool) -> list[float]:
    """Of four steps. strict: what makes the host wait for the device is an error, from the fourth step on."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (8, 8))
    model = autopar.compile(Language().eval(), gpus, pins=pins, example_inputs=(ids, ids))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = ids.pin_memory() if torch.cuda.is_available() else ids
    found: list[Tensor] = []
    for step in range(4):
        with nothing_waited_for() if strict and step == 3 else contextlib.nullcontext():
            loss = model(given, given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.detach())
    return [float(x) for x in found]


@contextlib.contextmanager
def nothing_waited_for() -> Iterator[None]:
    """What makes the host wait for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_nothing() -> None:
    assert len(losses({}, 1, strict=True)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"pp": 2, "micro_batches": 4}, {"dp": 2, "zero": 3}], ids=str)
def test_two_gpus_over_nccl_are_one(pins: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    expected = losses({}, 1, strict=False)
    with WorkerPool(2, backend="nccl") as pool:
        for found in pool.run(losses_of_two, pins):
            assert found == pytest.approx(expected, rel=1e-3)


def losses_of_two(pins: dict[str, Any]) -> list[float]:
    return losses(pins, 2, strict=True)


@pytest.mark.gpu
@pytest.mark.parametrize("pins", [{"dp": 2, "tp": 2}, {"pp": 4, "micro_batches": 4}, {"dp": 4, "zero": 3}, {"tp": 4}], ids=str)
def test_workers_that_share_a_gpu_compute_what_one_process_does(pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (8, 8))
    report = verify(Language().eval(), (ids, ids), 4, pins=pins, device="cuda")
    assert report.ok


@pytest.mark.gpu
def test_workers_that_share_a_gpu_lie_on_it() -> None:
    with WorkerPool(2, backend="gloo", device="cuda") as pool:
        assert {name for name, _ in pool.run(device_and_backend)} == {"cuda"}
        assert {backend for _, backend in pool.run(device_and_backend)} == {"gloo"}


def device_and_backend() -> tuple[str, str]:
    return default_device().type, str(dist.get_backend())


@pytest.mark.pure
def test_a_gpu_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU, and torch sees none"):
        WorkerPool(2, device="cuda")
    with pytest.raises(ValueError, match="device must be 'cuda' or 'cpu'; got 'tpu'"):
        WorkerPool(2, device="tpu")


@pytest.mark.gpu
def test_doctor_says_what_nccl_sees() -> None:
    found = {check.name: check for check in doctor.checks()}
    assert found["NCCL"].state == "ok" and "starts and reduces on cuda:" in found["NCCL"].found


@pytest.mark.gpu
@pytest.mark.parametrize(("model_on", "batch_on"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_model_and_a_batch_on_either_device(model_on: str, batch_on: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (8, 8))
    plain = Language().eval()
    expected = float(plain(ids, ids).detach())
    given = ids.to(batch_on)
    model = autopar.compile(plain.to(model_on), 1, example_inputs=(given, given))
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert float(model(given, given).detach()) == pytest.approx(expected, rel=1e-5)
