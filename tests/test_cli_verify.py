"""`autopar verify` on the command line, with real workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar import cli

pytestmark = pytest.mark.gloo

MODELS = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x).square().mean()


def net():
    return Net(), (torch.ones(8, 8),)


def larger():
    return Net(), (torch.ones(16, 8),)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 8))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


def ranked(model):
    return {**train(model), "rank": torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}


def doubling(model):
    found = torch.tensor(train(model)["losses"], dtype=torch.float64).frac()
    for _ in range(40):
        found = 4 * found * (1 - found)
    return found.tolist()


def silent(model):
    train(model)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(MODELS)
    return tmp_path


def code_of(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(argv))
    return int(stop.value.code or 0)


def test_a_plan_file_is_verified(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of("plan", "nets.py:net", "--gpus", "2", "--cluster", "cpu", "--pin", "dp=2", "-o", "plan.json") == 0
    capsys.readouterr()
    assert code_of("verify", "nets.py:net", "--gpus", "2", "--plan", "plan.json", "--json") == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["ok"]
    assert max(answer[k] for k in ("loss", "gradient", "parameter", "buffer", "evaluation", "batches")) < 1e-9
    assert answer["notes"] == []

    assert code_of("verify", "nets.py:larger", "--gpus", "2", "--plan", "plan.json") == 2
    assert "the plan was made for another model" in capsys.readouterr().err
    assert code_of("verify", "nets.py:net", "--gpus", "4", "--plan", "plan.json") == 2
    assert "is a plan for 2 GPUs, and --gpus says 4" in capsys.readouterr().err


def test_what_is_not_within_the_tolerance_exits_with_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.verify.TOLERANCE", -1.0)
    assert code_of("verify", "nets.py:net", "--gpus", "2", "--pin", "tp=2", "--steps", "1") == 1
    said = capsys.readouterr().out
    assert "NOT VERIFIED" in said and "rounding alone: the original itself" in said


def test_the_users_own_loop_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("verify", "nets.py:net", "--gpus", "2", "--pin", "tp=2", "--loop", "nets.py:train", "--json") == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["ok"], answer["mesh"]["tp"], answer["numbers"]) == (True, 2, 4)  # three losses, and how many they are
    assert answer["error"] < 1e-9


def test_a_loop_whose_numbers_differ_on_any_rank_exits_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("verify", "nets.py:net", "--gpus", "2", "--loop", "nets.py:ranked") == 1
    said = capsys.readouterr().out
    assert "rank on rank 1" in said
    assert "NOT VERIFIED" in said and "the plan moves it further" in said
    assert code_of("verify", "nets.py:net", "--gpus", "2", "--loop", "nets.py:silent") == 1
    assert "returned NoneType without any number" in capsys.readouterr().err
    assert code_of("verify", "nets.py:net", "--gpus", "2", "--loop", "nets.py:trian") == 2
    assert "did you mean train" in capsys.readouterr().err


def test_a_loop_that_magnifies_rounding_is_said_to_do_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("verify", "nets.py:net", "--gpus", "2", "--pin", "dp=2", "--loop", "nets.py:doubling", "--json") == 1
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["error"] > 1e-9 and answer["within_rounding"]
    assert answer["error"] <= 10 * answer["rounding"]
