"""Tensors that are written to without their knowing it are told apart by what they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.by_value import mark_of
from autopar.capture.guards import Guards

pytestmark = pytest.mark.pure

WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda t: t.data.mul_(2),
    "array": lambda t: t.numpy().__setitem__(0, 5.0),
    "itself": lambda t: t.add_(1),
}


class Scales(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()


@pytest.mark.parametrize("way", WRITES)
def test_a_plain_tensor_that_is_written_to_has_changed(way: str) -> None:
    guards = Guards.take(model := Scales(torch.ones(4)))
    for _ in range(2):
        assert guards.changed() is None
    WRITES[way](model.scale)
    assert "scale" in str(guards.changed())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_marks_of_all_dtypes(dtype: torch.dtype) -> None:
    t = torch.zeros(3, 2, dtype=dtype)
    assert mark_of(t) == mark_of(t)
    before = mark_of(t)
    t.data[1, 1] = 1
    assert mark_of(t) != before


def test_of_large_tensors_some_entries_are_looked_at() -> None:
    t = torch.zeros(1 << 20)
    before = mark_of(t)
    assert before[2] is not None and len(before[2]) < 1 << 17
    t.data.add_(1)
    assert mark_of(t) != before
    assert mark_of(torch.zeros(2, device="meta"))[2] is None
