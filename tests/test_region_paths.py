"""On which ways gradients come to parameters past what runs as it is written, and which of them a step has reached."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.ir import Program
from autopar.region_paths import paths_of
from autopar.run.region import Region
from autopar.run.unreached import _reached


class Chosen(nn.Module):
    """What values of a tensor decide is no graph's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.layers[int(y[0])](z)


class Net(nn.Module):
    """first -> head -> loss by operators; tower -> second.chosen -> scale -> third.chosen -> loss past two submodules; base reaches the
    loss both ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.first, self.head, self.tower = (nn.Linear(8, 8) for _ in range(4))
        self.second, self.third, self.scale = Chosen(), Chosen(), nn.Parameter(torch.ones(8))
        self.still = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.base(x))
        a = self.head(torch.tanh(self.first(x)))
        b = self.third(torch.tanh(self.second(self.tower(x) * self.still, y)) * self.scale, y)
        return F.mse_loss(a, x.detach()) + b.square().mean()


def captured() -> Captured:
    return capture(Net(), (torch.randn(4, 8), torch.tensor([0, 1, 0, 1])))


def past(program: Program) -> set[str]:
    values = paths_of(program).past_regions
    return {p.fqn for p in program.params if p.value in values}


@pytest.mark.fake
def test_what_gradients_come_to_past_regions_alone() -> None:
    layers = {f"{m}.layers.{k}.{n}" for m in ("second", "third") for k in (0, 1) for n in ("weight", "bias")}
    assert past(captured().program) == {"tower.weight", "tower.bias", "scale"} | layers


@pytest.mark.fake
def test_a_program_without_regions_has_no_such_ways() -> None:
    program = capture(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),), loss=lambda h: h.square().mean()).program
    assert paths_of(program).flows == {} and past(program) == set()


def regions() -> tuple[Region, Region]:
    found = [x for x in captured().tensors.values() if isinstance(x, Region)]
    second, third = sorted(found, key=lambda region: region.path)
    return second, third


@pytest.mark.fake
def test_regions_know_what_leads_to_them() -> None:
    second, third = regions()
    assert (second.direct, third.direct) == (False, True)
    assert [sorted(names) for names, _ in second.upstream] == [["base.bias", "base.weight", "tower.bias", "tower.weight"], []]
    assert [(sorted(names), before) for names, before in third.upstream] == [(["scale"], (second.handle,)), ([], ())]


@pytest.mark.fake
def test_a_parameter_is_reached_where_every_region_on_a_way_gave_a_gradient() -> None:
    second, third = regions()
    into_second, into_third, of_third = f"{second.handle}[0]", f"{third.handle}[0]", f"{third.handle}.layers.1.weight"
    both = [second, third]
    assert _reached(both, set()) == set()
    assert _reached(both, {of_third}) == {"third.layers.1.weight"}
    assert _reached(both, {into_second}) == set()  # of zeros that the third gave
    assert _reached(both, {into_third}) == {"scale"}
    assert _reached(both, {into_second, into_third}) == {"scale", "tower.weight", "tower.bias", "base.weight", "base.bias"}
    assert _reached(both, {f"{second.handle}.layers.0.bias", into_third}) == {"scale", "second.layers.0.bias"}
