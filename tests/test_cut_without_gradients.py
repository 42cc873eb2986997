"""Calls without gradients of a model that was cut into stages: what comes back is no reason where not to cut, and what cannot be
captured is computed by the original."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.capture.assembled import differentiable_throughout
from autopar.planner.stages import legal_cuts
from autopar.run import WorkerPool
from benchmarks._traps_run import Judge
from benchmarks.trap_programs.evaluation import Adapted


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(8, 16), nn.Tanh(), Adapted(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def merge(model: nn.Module, sign: float) -> None:
    for module in model.modules():
        if isinstance(module, Adapted):
            module.merge(sign)


@pytest.mark.fake
def test_nothing_is_cut_where_no_gradient_comes_back() -> None:
    model = adapted()
    merge(model, 1.0)
    program = capture(model, (torch.randn(4, 8, dtype=torch.float64),), loss=torch.sum).program
    linears = [k for k, op in enumerate(program.ops) if op.target.endswith("linear.default")]
    assert len(linears) == 3
    assert all(p > linears[-1] for p in legal_cuts(program).crossing)
    assert linears[1] in legal_cuts(differentiable_throughout(program)).crossing


def _merged_on_two_stages() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, one = autopar.compile(adapted(), example_inputs=(x,), gpus=2, cluster="cpu", pins={"pp": 2}), adapted()
    for each in (model, one):
        each(x).square().mean().backward()
        with torch.no_grad():
            for p in each.parameters():
                if p.grad is not None:
                    p.sub_(p.grad)
        merge(each, 1.0)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(model(x), one(x), rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match="must be differentiable"):
            model(x)
    merge(model, -1.0)
    merge(one, -1.0)
    assert torch.allclose(model(x), one(x), rtol=0, atol=1e-12)


@pytest.mark.gloo
def test_what_was_cut_for_calls_without_gradients_runs_in_no_other(pair: WorkerPool) -> None:
    pair.run(_merged_on_two_stages, timeout_s=60)


@pytest.mark.gloo
def test_a_cache_that_grows_is_the_original_s(judge: Judge) -> None:
    assert judge.not_right("cache_that_grows_in_evaluation", ("pp2",)) == []
