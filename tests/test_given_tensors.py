"""A tensor that a parameter is given as its data or its gradient, and that the loop goes on holding: what it has, and what is told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import autopar
from autopar.run import WorkerPool
from benchmarks._traps_kit import Net, batch, seeded

pytestmark = pytest.mark.gloo


def _compiled() -> autopar.ParallelModule:
    return autopar.compile(seeded(Net), 2, example_inputs=batch(), cluster="cpu", pins={"tp": 2})


def _told(found: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in found if "the loop holds" in str(w.message)]


def _data() -> tuple[list[str], list[str], Tensor, Tensor]:
    """What is told of a temporary and of a tensor that is held, over two steps of each; that tensor, and the weight when it left it."""
    model = _compiled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.head.weight

    def steps() -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                model(*batch()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return _told(found)

    weight.data = weight.detach().clone() * 0.5 + torch.zeros(weight.shape)
    of_none = steps()
    held = torch.full(weight.shape, 0.25)
    weight.data = held
    of_held = steps()
    came_to = torch.zeros(weight.shape) + weight.detach()
    weight.data = torch.zeros(weight.shape)
    return of_none, of_held, held, came_to


def test_what_is_held_has_what_the_parameter_came_to_when_it_is_left(pair: WorkerPool) -> None:
    for rank, (of_none, of_held, held, came_to) in enumerate(pair.run(_data, timeout_s=60)):
        assert of_none == []
        assert len(of_held) == (1 if rank == 0 else 0)
        assert torch.equal(held, came_to) and not torch.equal(held, torch.full_like(held, 0.25))


def _gradients() -> list[str]:
    model = _compiled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = buffer[at : at + p.numel()].view(p.shape)
        at += p.numel()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(*batch()).backward()
        optimizer.step()
    return _told(found)


def test_a_buffer_of_gradients_that_stays_as_it_was_is_told_of(pair: WorkerPool) -> None:
    first, other = pair.run(_gradients, timeout_s=60)
    assert len(first) == 1 and ".grad (and what" in first[0]
    assert other == []
