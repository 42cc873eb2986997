"""What a forward writes in place, captured: loss, gradients and buffers are the model's, and nothing is written in place any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.capture import capture, run_program
from tests.capture_model import BATCH, DIM, Function, check_well_formed

pytestmark = pytest.mark.pure


def write_slice(m: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    y[:, 1:3] = m.weight[:, :2] * 2
    return y


def write_view_then_read_another(m: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    rows, other = y.view(2, -1), y[:, 0]
    rows[0].mul_(3)
    return other * y.sum() + rows.sum()


def write_through_two_views(m: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    y.t()[2:4].transpose(0, 1).add_(m.weight[:, :2])
    return y


def write_chunks(m: Function, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    a, b, c = y.chunk(3, dim=1)
    b.copy_(a * c)
    c.zero_()
    return y * m.weight


def write_indices_and_masks(m: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    y[torch.tensor([0, 2])] = m.weight[:2]
    y.masked_fill_(x > 1, 0.5)
    y[:, 0].fill_(m.weight.sum())
    return y.sigmoid_() * y


def write_rows_in_a_loop(m: Function, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for i in range(BATCH):
        out[i] = x[i] * m.weight[i] + (out[i - 1] if i else 0)
    return out


def write_integers_and_other_dtypes(m: Function, x: torch.Tensor) -> torch.Tensor:
    ids = torch.zeros(DIM, dtype=torch.long)
    ids[1:] += 2
    y = x * m.weight
    y.mul_((ids > 1).to(torch.float64))
    return y * ids


def write_diagonal(m: Function, x: torch.Tensor) -> torch.Tensor:
    y = m.weight * x[:, :BATCH]
    y.diagonal().mul_(4)
    return y.unsqueeze_(0)


def write_copy_that_is_no_view(m: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    z = y.clone()
    z.zero_()
    return y + z + y.t().reshape(-1)[:DIM].mul_(2)


WRITES = [
    write_slice, write_view_then_read_another, write_through_two_views, write_chunks, write_indices_and_masks, write_rows_in_a_loop,
    write_integers_and_other_dtypes, write_copy_that_is_no_view,
]  # fmt: skip


@pytest.mark.parametrize("fn", WRITES, ids=lambda f: f.__name__)
def test_writes_in_place_become_functional(fn: Callable[..., torch.Tensor]) -> None:
    check_well_formed(capture(Function(fn), (torch.randn(BATCH, DIM),)))  # which compares loss and gradients with the model's


def test_write_through_a_diagonal() -> None:
    check_well_formed(capture(Function(write_diagonal, BATCH, BATCH), (torch.randn(BATCH, DIM),)))


def test_buffer_mutations_are_listed_and_made() -> None:
    def count(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.state[1:].add_(x.detach().sum())
        return x * m.weight + m.state

    model, x = Function(count), torch.randn(BATCH, DIM)
    captured = capture(model, (x,))
    check_well_formed(captured)
    assert torch.equal(model.state, torch.zeros(DIM))
    ((buffer, _),) = captured.program.mutations
    assert [(b.value, b.mutated) for b in captured.program.buffers] == [(buffer, True)]
    values = {**captured.tensors, captured.program.inputs[0].value: x, buffer: torch.zeros(DIM)}
    for _ in range(2):
        assert torch.allclose(run_program(captured.program, values), model(x))
    assert torch.allclose(values[buffer], model.state)
