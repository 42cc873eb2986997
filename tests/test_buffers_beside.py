"""Buffers that a model is given after it was compiled, and that its forward does not read: the loop's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CheckpointError
from autopar.run import WorkerPool
from benchmarks._traps_run import Judge

pytestmark = pytest.mark.gloo
PLANS = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale).square().mean()


def _compiled(pins: dict[str, int] | None) -> Any:
    torch.manual_seed(0)
    model = Net()
    return model if pins is None else autopar.compile(model, 2, pins=pins, example_inputs=(torch.ones(4, 8),))


def _states(pins: dict[str, int] | None) -> list[Any]:
    model = _compiled(pins)
    whole = (lambda: dict(model.state_dict())) if pins is None else model.full_state_dict
    model(torch.ones(4, 8)).backward()
    model.register_buffer("kept", torch.arange(3.0))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    model.first.register_buffer("before", model.first.weight.detach().clone())
    first = {name: t.clone() for name, t in whole().items()}
    model(torch.ones(4, 8)).backward()
    with torch.no_grad():
        model.first.before.mul_(3.0)
    changed = whole()["first.before"].clone()
    (model.load_state_dict if pins is None else model.load_full_state_dict)(first)
    return [sorted(first), first["first.before"].tolist(), changed.tolist(), whole()["first.before"].tolist(), model.kept.tolist()]


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_states_have_them_whole(pins: dict[str, int], pair: WorkerPool) -> None:
    names, *values = _states(None)
    assert {"kept", "first.before"} <= set(names) and "passing" not in names
    for found in pair.run(_states, pins):
        assert found == [names, *values]


def _read(pins: dict[str, int]) -> str:
    model = _compiled(pins)
    model(torch.ones(4, 8)).backward()
    model.register_buffer("shift", torch.ones(4))
    model.last.register_forward_hook(lambda layer, given, made: made + model.shift)
    try:
        model(torch.ones(4, 8))
    except ValueError as error:
        return str(error)
    return ""


def test_one_that_a_forward_reads_is_refused(pair: WorkerPool) -> None:
    for said in pair.run(_read, {"tp": 2}):
        assert "shift was not in the model when the plan was made" in said


def _saved(folder: str) -> str:
    model = _compiled({"dp": 2})
    model.register_buffer("kept", torch.arange(3.0))
    try:
        autopar.save(folder, model)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_them_is_refused_with_what_to_do(pair: WorkerPool, tmp_path: Path) -> None:
    for said in pair.run(_saved, str(tmp_path / "saved")):
        assert said.startswith("kept: registered on the model after it was compiled") and "give that to save" in said
    assert not (tmp_path / "saved").exists()


def test_weights_are_consolidated_in_them(judge: Judge) -> None:
    assert judge.not_right("consolidated_in_buffers", ("tp2", "pp2", "zero3")) == []
