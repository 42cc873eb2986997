"""Autograd functions of a model on the meta device: tried on small tensors, and the program is that of the model with data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, program_hash
from autopar.compiler import plan_of
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure


class Squared(torch.autograd.Function):
    """With the gradient that autograd gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0]


class Clipped(torch.autograd.Function):
    """With another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class OfAWidth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1, 32).view(x.shape) if x.shape[-1] == 32 else x.view(-1, 32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Model(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.function.apply(layer(x))
        return x.mean()


def captured(function: type[torch.autograd.Function], device: str) -> Any:
    with torch.device(device):
        return capture(Model(function), (torch.ones(16, 32),)).program


@pytest.mark.parametrize("function, regions", [(Squared, 0), (Clipped, 3), (Drawn, 3)])
def test_the_program_is_that_of_the_model_with_data(function: type[torch.autograd.Function], regions: int) -> None:
    program = captured(function, "meta")
    assert sum(op.target == "autopar.L.region" for op in program.ops) == regions
    assert program_hash(program) == program_hash(captured(function, "cpu"))


def test_what_works_by_samples_is_split() -> None:
    plan = plan_of(capture(*_on_meta(Clipped)), 4, pins={"dp": 4}, cluster="dgx-a100")
    assert all("S(0)" in text for name, text in plan.axes["dp"].ops.items() if "clipped" in name.lower())


def test_what_cannot_be_tried_is_refused_with_a_remedy() -> None:
    with pytest.raises(CaptureError, match="build the model with data"):
        captured(OfAWidth, "meta")


def test_who_looks_at_values_is_refused_with_a_remedy() -> None:
    class Looks(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if torch.compiler.is_exporting() or float(y) > 0 else y * 2

    with torch.device("meta"), pytest.raises(CaptureError, match="build the model with data"):
        capture(Looks(OfAWidth), (torch.ones(16, 32),))


def test_a_submodule_that_no_graph_holds_may_be_one_with_data() -> None:
    class Finite(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.isfinite(x).all() else x.clamp(-1, 1)

    with torch.device("meta"), pytest.raises(CaptureError, match="or: build the model with data, not on the meta device: 1, or"):
        capture(nn.Sequential(nn.Linear(8, 8), Finite()), (torch.ones(4, 8),), loss=torch.mean)
    assert capture(nn.Sequential(nn.Linear(8, 8), Finite()), (torch.ones(4, 8),), loss=torch.mean).program.notes


def test_sizes_that_depend_on_values_may_be_there_with_data() -> None:
    class Selects(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x).masked_select(mask).square().mean()

    with torch.device("meta"), pytest.raises(CaptureError, match="or: build the model with data, not on the meta device: what computes it"):
        capture(Selects(8, 8), (torch.ones(4, 8), torch.ones(4, 8).bool()))
    assert capture(Selects(8, 8), (torch.ones(4, 8), torch.ones(4, 8).bool())).program.notes


def _on_meta(function: type[torch.autograd.Function]) -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        return Model(function), (torch.ones(16, 32),)
