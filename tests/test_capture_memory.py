"""Each parameter has memory of its own, and what is another name for it is refused, with what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture, lift_to_float64, to_float64
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure


class _Holding(nn.Module):
    """Reads the memory of a weight by another name: an optimizer's steps change both."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        view = self.head.weight.detach()
        if how == "buffer":
            self.register_buffer("table", view)
        else:
            self.table = {"attribute": view, "list": [view], "row": view[0]}[how]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table: Any = self.table
        return (self.head(x) * (x * table[0].sum(0))).sum()


@pytest.mark.parametrize("how", ["attribute", "list", "row", "buffer"])
def test_other_names_for_the_memory_of_a_parameter_are_refused(how: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)shares the memory of the parameter head.weight.*make it of head.weight in the forward"):
        capture(_Holding(how), (torch.randn(8, 4),))


def test_two_parameters_of_one_memory_are_refused() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Flatten(0), nn.Linear(32, 1))
    apart, flat = copy.deepcopy(tied), torch.randn(32)
    apart[0].weight.data, apart[1].weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)  # of one storage, as in recurrent layers
    assert len(capture(apart, (torch.randn(8, 4),), loss=torch.sum).program.params) == 4
    tied[1].weight.data = tied[0].weight.data
    with pytest.raises(CaptureError, match=r"0.weight and 1.weight of Sequential share memory"):
        capture(tied, (torch.randn(8, 4),), loss=torch.sum)


@pytest.mark.parametrize("how", ["attribute", "list", "buffer"])
def test_they_are_refused_where_a_model_is_verified_too(how: str) -> None:
    with lift_to_float64(), pytest.raises(CaptureError, match="shares the memory of the parameter head.weight"):
        capture(to_float64(_Holding(how)), (torch.randn(8, 4, dtype=torch.float64),))
