"""What the user notes on parameters and buffers (`weight.infshape`) is there for the forward, is watched, and stays where it was put."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.copies import copied
from autopar.errors import CaptureError
from autopar.run import WorkerPool


class Width:
    def __init__(self, base: int) -> None:
        self.base = base

    def ratio(self) -> float:
        return 8 / self.base


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight.width = Width(4)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.weight.width.ratio()) * getattr(self.bias, "gain", 1.0)  # type: ignore[operator, union-attr]


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        more = (nn.GELU, nn.Tanh, nn.GELU, nn.Tanh)
        blocks = (nn.Sequential(Layer(), nn.LayerNorm(8), nn.Linear(8, 8), *(f() for f in more)) for _ in range(layers))
        self.layers = nn.Sequential(*blocks)
        self.register_buffer("table", torch.arange(8.0))
        self.table.shift = 2  # type: ignore[union-attr, assignment]

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) + self.table.roll(self.table.shift)).square().mean()  # type: ignore[operator, union-attr, arg-type]


def scales(model: nn.Module, x: Tensor) -> list[float]:
    return [op.args[1] for op in capture(model, (x,)).program.ops if op.target == "aten.div.Tensor"]  # type: ignore[misc]


@pytest.mark.fake
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_forward_is_told_what_each_layer_has(device: str) -> None:
    with torch.device(device):
        model, x = Net(), torch.randn(4, 8)
    assert scales(model, x) == [2.0, 2.0, 2.0]
    model.layers[1][0].weight.width = Width(2)  # type: ignore[index]
    assert scales(model, x) == [2.0, 4.0, 2.0]


@pytest.mark.fake
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_read_is_watched_and_what_is_not_is_not(device: str) -> None:
    with torch.device(device):
        model, x = Net(), torch.randn(4, 8)
    guards = capture(model, (x,)).guards
    assert guards is not None
    weight, bias = model.layers[2][0].weight, model.layers[2][0].bias  # type: ignore[index]
    weight.colour = "red"
    assert guards.changed() is None
    weight.width.base = 2
    assert guards.changed() == "width of layers.2.0.weight.base from 4 to 2"
    weight.width = Width(4)
    assert guards.changed() is None  # another object that says the same
    bias.gain = 2.0
    assert guards.changed() == "gain of layers.2.0.bias from nothing to 2.0"
    del bias.gain
    model.table.shift = 3  # type: ignore[union-attr, assignment]
    assert guards.changed() == "shift of table from 2 to 3"


@pytest.mark.pure
def test_an_attribute_that_the_forward_sets_is_refused() -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.seen = x.shape[0]  # type: ignore[assignment]
            return super().forward(x).square().mean()

    with pytest.raises(CaptureError, match="(?s)sets the attribute seen of weight.*what to do: keep it in an attribute of the module"):
        capture(Counting(8, 8), (torch.randn(4, 8),))
    assert "__getattr__" not in vars(torch.Tensor)


@pytest.mark.pure
def test_a_copy_of_a_model_has_them_of_its_own() -> None:
    model = Net()
    other = copied(model)
    width = other.layers[0][0].weight.width  # type: ignore[index, union-attr]
    assert (width.base, other.table.shift) == (4, 2)  # type: ignore[union-attr]
    width.base = 1
    assert model.layers[0][0].weight.width.base == 4  # type: ignore[index]
    assert copied(nn.Sequential(model.layers[0][0], model.layers[0][0]))(torch.randn(2, 8)).shape == (2, 8)  # type: ignore[index]


def _there(pins: dict[str, int]) -> list[Any]:
    torch.manual_seed(0)
    model = autopar.compile(Net(), 2, example_inputs=(torch.randn(4, 8),), cluster="cpu", pins=pins)
    found: list[Any] = [p.width.base for p in model.parameters() if hasattr(p, "width")]
    found.append(model.table.shift)
    model.table.shift = 5
    with model.full_parameters():
        found.append(model.table.shift)
        model.table.shift = 6
    found.append(model.table.shift)
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("plan", [{"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_they_stay_on_what_is_in_parts(pair: WorkerPool, plan: dict[str, int]) -> None:
    assert pair.run(_there, plan, timeout_s=300) == [[4, 4, 4, 2, 5, 6]] * 2
