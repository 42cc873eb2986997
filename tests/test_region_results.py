"""What a submodule that runs as it is written returns beside tensors: numbers that values decide are in no graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.run.region import REGION

pytestmark = pytest.mark.pure


class Router(nn.Linear):
    """Sorts rows by their expert, and counts how many each has; gives the counts as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        chosen = super().forward(x).argmax(-1)
        counts = [(chosen == k).sum() for k in range(2)]
        order = chosen.argsort(stable=True)
        if self.kind == "numbers":
            return order, [int(c) for c in counts]
        if self.kind == "text":
            return order, ["more" if c.item() > 3 else "fewer" for c in counts]
        if self.kind == "object":
            return order, SimpleNamespace(sizes=[int(c) for c in counts])
        return order, [None, 2]  # which no value decides


class Routed(nn.Module):
    """used: calls the experts; a graph of it needs what the router gives beside tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = Router(kind), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        order, sizes = self.router(x)
        if self.router.kind == "numbers":
            rows = torch.cat([expert(part) for expert, part in zip(self.experts, x[order].split(sizes), strict=True)])
        else:
            rows = self.experts[0](x[order]) * (2.0 if "more" in str(sizes) else 1.0)
        return rows.square().mean()


class Around(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.routed = Routed(kind)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.routed(x)) * 1.0


@pytest.mark.parametrize("kind", ["numbers", "text", "object"])
def test_a_submodule_that_returns_what_values_decide_is_no_operator(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)router cannot be run as it is written.*it returns .*let it return tensors"):
        capture(Routed(kind), (torch.randn(8, 4),))


@pytest.mark.parametrize("kind", ["numbers", "text"])
def test_the_submodule_around_it_is_one(kind: str) -> None:
    (op,) = [op for op in capture(Around(kind), (torch.randn(8, 4),)).program.ops if op.target == REGION]
    assert op.module == "routed"
