"""Whose code is looked at for what a model's forward may reach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.reach import Search
from autopar.run.part import PartTensor

pytestmark = pytest.mark.pure


class Kept:
    def used(self, x: Tensor) -> Tensor:
        return x + 1


class Holder(nn.Module):
    """Holds an object of the user's, and a part of a tensor, as a recurrent model that runs in parts holds its state."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.state = Kept(), torch.zeros(2).as_subclass(PartTensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept.used(x) + self.state.detach()


def test_parts_that_a_model_holds_lead_nowhere() -> None:
    search = Search(Holder(), ())
    search.follow(())
    found = search.found
    assert {function.__qualname__ for function in found.functions} >= {"Holder.forward", "Kept.used"}
    assert not [function for function in found.functions if function.__module__.startswith("autopar.")]
    assert Kept in found.classes and PartTensor not in found.classes
