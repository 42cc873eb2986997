"""What is kept for a backward pass that never comes is let go of, and what is differentiated again has its graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture import capture
from autopar.run import WorkerPool
from autopar.run.saved import Kept, itself, with_graphs


def results() -> tuple[StorageWeakRef, Tensor]:
    """Of an operator that keeps its own result, which nobody else does, and what is computed of it."""
    x = torch.randn(8, 8, requires_grad=True)
    y = torch.tanh(x)
    return StorageWeakRef(y.untyped_storage()), y.sum()


@pytest.mark.pure
def test_results_live_as_long_as_what_is_computed_of_them() -> None:
    with saved_tensors_hooks(itself, lambda kept: kept):
        known, total = results()
    assert not known.expired()
    total.backward()
    del total
    with saved_tensors_hooks(itself, lambda kept: kept):
        known, total = results()
    del total
    assert known.expired()


@pytest.mark.pure
def test_what_is_differentiated_again_has_its_graph() -> None:
    x = torch.full((), 0.5, requires_grad=True)
    with saved_tensors_hooks(itself, lambda kept: kept), with_graphs():
        (first,) = torch.autograd.grad(torch.tanh(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    y = torch.tanh(torch.tensor(0.5))
    torch.testing.assert_close(second, -2 * y * (1 - y * y))


@pytest.mark.pure
def test_a_pass_that_is_looked_at_keeps_until_its_end() -> None:
    with Kept() as keeps, saved_tensors_hooks(keeps.pack, keeps.unpack):
        known, total = results()
        total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="is over"):
        total.backward()
    del total
    assert known.expired()


class Chosen(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) * (1 + int(x[0, 0] > 0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[: 2 + int(x[0, 0] > 9)])[0].sum(0) + x


class Net(nn.Module):
    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), last or nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x)).square().mean()


def with_a_graph() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) and o.grad_fn is not None for o in gc.get_objects())


@pytest.mark.pure
@pytest.mark.parametrize("part", [lambda: Chosen(8, 8), Recurrent])
def test_capture_keeps_nothing_of_the_passes_that_it_looks_at(part: Callable[[], nn.Module]) -> None:
    before, model = with_a_graph(), Net(part())
    assert any(op.target == "autopar.L.region" for op in capture(model, (torch.randn(4, 8),)).program.ops)
    assert with_a_graph() == before


def _held(pins: dict[str, Any], wrapped: bool) -> list[int]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model = autopar.compile(Net(), 2, example_inputs=(x,), cluster="cpu", pins=pins)
    found = []
    for _ in range(6):
        (checkpoint(model, x, use_reentrant=False) if wrapped else model(x)).item()
        found.append(with_a_graph())
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("pins", "wrapped"), [({"dp": 2, "zero": 3}, False), ({"dp": 2}, True), ({"pp": 2}, True)], ids=str)
def test_calls_without_backward_keep_nothing(pair: WorkerPool, pins: dict[str, Any], wrapped: bool) -> None:
    for found in pair.run(_held, pins, wrapped, timeout_s=100):
        assert found[-1] <= found[0] + 2, found  # of each call three results are kept by the operators that made them
