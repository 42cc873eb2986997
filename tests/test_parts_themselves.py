"""What torch gives of a parameter where there is nothing to do, the parameter itself, is the part itself."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.run import WorkerPool
from benchmarks._traps_kit import train

pytestmark = pytest.mark.gloo

PINS = ({"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2})
GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda p: p.contiguous(),
    "to its type": lambda p: p.to(p.dtype),
    "to its device": lambda p: p.to("cpu"),
    "to another of its kind": lambda p: p.to(torch.zeros(3)),
    "float": lambda p: p.float(),
    "type": lambda p: p.type(torch.float32),
    "type of itself": lambda p: p.type_as(p),
    "real": lambda p: p.real,
    "the real part": torch.real,
    "conj": lambda p: p.conj(),
    "resolve_conj": lambda p: p.resolve_conj(),
    "positive": lambda p: +p,
    "dense": lambda p: p.to_dense(),
    "flat": lambda p: p.flatten(),
    "of one dimension at least": lambda p: torch.atleast_1d(p),  # type: ignore[no-untyped-call]
    "of two dimensions at least": lambda p: torch.atleast_2d(p),  # type: ignore[no-untyped-call]
    "double": lambda p: p.double(),
    "a copy": lambda p: p.to(p.dtype, copy=True),
    "detached": lambda p: p.detach(),
    "its data": lambda p: p.data.contiguous(),
}


def built() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(12, 8)


def themselves(pins: dict[str, Any] | None) -> dict[str, list[bool]]:
    model, x = built()
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x,), pins=pins)
    return {name: [given(p) is p for p in model.parameters()] for name, given in GIVEN.items()}


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_what_torch_gives_itself_is_the_part(pins: dict[str, Any], pair: WorkerPool) -> None:
    expected = themselves(None)
    assert any(not same for found in expected.values() for same in found)
    for found in pair.run(themselves, pins):
        assert found == expected


def trained(pins: dict[str, Any] | None) -> list[float]:
    """As libraries that keep parameters in a store of their own: what they keep is made without gradients, and trained."""
    model, x = built()
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x,), pins=pins)
    with torch.no_grad():
        store = [p.contiguous() for p in model.parameters()]
    optimizer = torch.optim.SGD([p.requires_grad_(True) for p in store], lr=1.0)
    return train(lambda x: model(x).square().mean(), optimizer, inputs=[(x,)] * 3)


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_a_store_of_parameters_is_trained(pins: dict[str, Any], pair: WorkerPool) -> None:
    expected = trained(None)
    assert expected[-1] < 0.5 * expected[0]
    for found in pair.run(trained, pins):
        assert found == pytest.approx(expected, rel=1e-5)


def saved(pins: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    model, x = built()
    module = autopar.compile(model, 2, example_inputs=(x,), pins=pins)
    kept = {name: value.contiguous().cpu() for name, value in module.state_dict().items()}
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    return {name: tuple(value.shape) for name, value in torch.load(file).items()}


def test_what_is_taken_of_a_state_dict_to_be_saved_is_whole(pair: WorkerPool) -> None:
    model, _ = built()
    for found in pair.run(saved, {"tp": 2}):
        assert found == {name: tuple(value.shape) for name, value in model.state_dict().items()}


def saved_by_a_library(pins: dict[str, Any]) -> tuple[list[float], bool]:
    """It calls state_dict() on every rank, and writes that of rank 0."""
    model, x = built()
    module = autopar.compile(model, 2, example_inputs=(x,), pins=pins)
    module.state_dict = module.full_state_dict
    step = functools.partial(train, lambda x: module(x).square().mean(), torch.optim.SGD(module.parameters(), lr=1.0), inputs=[(x,)])
    losses = step()
    kept, file = module.state_dict(), io.BytesIO()
    if torch.distributed.get_rank() == 0:
        torch.save(kept, file)
    losses += step()
    module.load_state_dict(kept)
    losses += step()
    alone, _ = built()
    alone.load_state_dict(kept)
    return losses, alone(x).square().mean().item() == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("pins", PINS[1:], ids=str)
def test_state_dict_may_give_the_whole_one(pins: dict[str, Any], pair: WorkerPool) -> None:
    for losses, is_the_original in pair.run(saved_by_a_library, pins):
        assert losses[0] > losses[1] == losses[2] and is_the_original
