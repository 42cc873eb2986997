"""Operators in the form that says what they do: what torch passes over is left out of a program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.planner.moments import split_into_moments

pytestmark = pytest.mark.pure


class Model(nn.Module):
    def __init__(self, computes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.computes = nn.Linear(8, 8), computes

    def forward(self, x: Tensor) -> Tensor:
        return self.computes(self.line(x)).square().mean()


def added_to(h: Tensor) -> Tensor:
    found = torch.empty(0)
    for k in range(3):
        found = torch.cat((found, h * k))
    return found


def before_a_cache(h: Tensor) -> Tensor:
    return torch.cat([torch.tensor([]), h], dim=-1) * 2


def of_numbers(h: Tensor) -> Tensor:
    return torch.cat([torch.empty(0), h[:, 0], torch.empty(0), h[:, 1]])


def of_another_dtype(h: Tensor) -> Tensor:
    """Which decides that of the result."""
    return torch.cat([torch.empty(0, dtype=torch.float64), h])


@pytest.mark.parametrize(("computes", "operands"), [(added_to, [2, 2]), (before_a_cache, []), (of_numbers, [2]), (of_another_dtype, [2])])
def test_empty_operands_of_a_concatenation(computes: Callable[[Tensor], Tensor], operands: list[int]) -> None:
    program = capture(Model(computes), (torch.randn(4, 8),)).program  # which compares loss and gradients
    found = [len(op.args[0]) for op in program.ops if op.target == "aten.cat.default"]  # type: ignore[arg-type]
    assert found == operands
    if computes is before_a_cache:
        assert split_into_moments(program, 2).body.batch_size == 2
