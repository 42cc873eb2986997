"""Buffers that a model changes, cut into stages at every legal place: each change is made once; what changes in place stays together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.effects import changed_in_place
from autopar.compiler import plan_of
from autopar.ir import Program, refs
from autopar.planner.lower import lower
from autopar.planner.moments import split_into_moments
from autopar.planner.stages import cut_stages, legal_cuts

pytestmark = pytest.mark.pure


class Views(nn.Module):
    """Two views through one encoder with norms, and a predictor that is called for both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16, affine=False))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.encoder(x), self.encoder(y)
        return -F.cosine_similarity(self.head(a), b.detach()).mean() - F.cosine_similarity(self.head(b), a.detach()).mean()


class Written(nn.Module):
    """Buffers that follow from inputs, from states and from one another, written at the end."""

    of_inputs: Tensor
    a_sum: Tensor
    of_states: Tensor
    another: Tensor
    constant: Tensor
    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for name in ("of_inputs", "a_sum", "of_states", "another", "constant", "noise"):
            self.register_buffer(name, torch.zeros(8))
        self.numbers = torch.arange(8.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x + 0.1 * self.of_inputs
        for layer in self.layers:
            h = torch.tanh(layer(h))
        self.another = self.of_states
        self.of_states = 0.9 * self.of_states + h.detach().mean(0)
        self.of_inputs = x.mean(0)
        self.a_sum = self.a_sum + (y > 0).sum(0)
        self.constant = self.numbers
        self.noise = torch.randn(8)
        return F.mse_loss(h + self.noise, y)


EXAMPLE = torch.zeros(4096, 8), torch.ones(4096, 8)


def captured(model: nn.Module) -> Program:
    return capture(model, EXAMPLE).program


@pytest.mark.parametrize("model", [Views, Written])
def test_every_change_of_a_buffer_is_made_by_one_stage(model: type[nn.Module]) -> None:
    program = captured(model())
    moments = split_into_moments(program, 1)
    positions = legal_cuts(moments.body).crossing
    assert positions and program.mutations
    for position in positions:
        stages = cut_stages(moments, moments.body, (position,), {}).stages
        assert sorted(pair for stage in stages for pair in stage.mutations) == sorted(program.mutations)
        for stage in stages:
            made = {o for op in stage.ops for o in op.outputs} | set(moments.prologue_outputs)
            assert all(value in made for _, value in stage.mutations)


@pytest.mark.parametrize("data_parallel", [False, True])
def test_what_changes_in_place_is_used_by_one_stage(data_parallel: bool) -> None:
    """Also where the norms of the ranks are of all samples, by an operator of autopar's own."""
    found = capture(Views(), EXAMPLE)
    program = found.program
    if data_parallel:
        program = lower(program, plan_of(found, 2, cluster="cpu", pins={"dp": 2})).program
        assert sum(op.target == "autopar.L.sync_batch_norm" for op in program.ops) == 6
    changed = {buffer for op in program.ops for buffer in changed_in_place(op)}
    assert len(changed) == 6
    positions = legal_cuts(program).crossing
    for position in positions:
        before = {r for op in program.ops[:position] for r in refs(op)}
        after = {r for op in program.ops[position:] for r in refs(op)}
        assert before.isdisjoint(after & changed)
