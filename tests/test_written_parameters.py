"""Frozen parameters that a forward writes to are buffers of its program, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.stateful_models import BATCH, DIM

pytestmark = pytest.mark.pure


class Followed(nn.Module):
    """A frozen network of one weight under two names, which `move` changes in each call before it is asked."""

    def __init__(self, move: Callable[[Any], None]) -> None:
        super().__init__()
        self.move = move
        self.online, self.target = (nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(2))
        self.target[2].weight = self.target[0].weight
        self.target.requires_grad_(False)
        self.started = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.move(self)
            aim = self.target(x)
        return (self.online(x) - aim).square().mean()


def pairs(m: Any) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return [(m.target[0].weight, m.online[0].weight), (m.target[0].bias, m.online[0].bias), (m.target[2].bias, m.online[2].bias)]


def moved_in_place(m: Any) -> None:
    for old, new in pairs(m):
        old.mul_(0.9).add_(new, alpha=0.1)


def moved_by_data(m: Any) -> None:
    for old, new in pairs(m):
        old.data = old.data * 0.9 + new.data * 0.1


def moved_by_its_data(m: Any) -> None:
    for old, new in pairs(m):
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


def moved_by_lerp(m: Any) -> None:
    for old, new in pairs(m):
        old.lerp_(new, 0.1)


def copied_over(m: Any) -> None:
    for old, new in pairs(m):
        old[:3].copy_(new[:3])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("move", [moved_in_place, moved_by_data, moved_by_its_data, moved_by_lerp, copied_over], ids=lambda f: f.__name__)
def test_frozen_parameters_that_the_forward_writes_to_are_buffers(move: Callable[[Any], None], device: str) -> None:
    with torch.device(device):
        torch.manual_seed(0)
        model, x = Followed(move), torch.randn(BATCH, DIM)
    before = snapshot_of(model)
    found = capture(model, (x,))
    written = {b.fqn: b.aliases for b in found.program.buffers if b.parameter}
    assert written == {"target.0.weight": ("target.2.weight",), "target.0.bias": (), "target.2.bias": ()}
    assert all(b.mutated for b in found.program.buffers if b.parameter) and len(found.program.mutations) == 3
    assert {p.fqn for p in found.program.params} == {f"online.{k}.{kind}" for k in (0, 2) for kind in ("weight", "bias")}
    assert device == "meta" or all(torch.equal(a, b) for a, b in zip(before, snapshot_of(model), strict=True))
    assert all(isinstance(p, nn.Parameter) and not p.requires_grad for p in model.target.parameters())


def snapshot_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_a_call_that_writes_to_none_has_them_as_buffers_if_others_do() -> None:
    model, inputs = Followed(lambda m: None), (torch.randn(BATCH, DIM),)
    assert not any(b.parameter for b in capture(model, inputs).program.buffers)
    found = capture(model, inputs, written=["target.0.weight", "target.0.bias"]).program
    assert [(b.fqn, b.mutated) for b in found.buffers if b.parameter] == [("target.0.weight", False), ("target.0.bias", False)]


def test_what_the_first_call_alone_writes_to_a_frozen_parameter_has_a_program_of_its_own() -> None:
    def started(m: Any) -> None:
        if not m.started:
            for old, new in pairs(m):
                old.data.copy_(new.data)
            m.started = True

    model, x = Followed(started), torch.randn(BATCH, DIM)
    first = capture(model, (x,))
    assert all(b.mutated for b in first.program.buffers if b.parameter) and first.guards is not None
    assert first.guards.changed() is None and not model.started
    model(x)
    assert "started" in (first.guards.changed() or "")
    later = capture(model, (x,), written=[b.fqn for b in first.program.buffers if b.parameter and b.fqn is not None])
    assert not any(b.mutated for b in later.program.buffers if b.parameter)


def test_a_frozen_parameter_that_is_written_in_a_lower_precision_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)frozen parameter target.0.weight, which rests in torch.float32.*rounded away.*autocast"):
        capture(Followed(moved_in_place), (torch.randn(BATCH, DIM),), dtype=torch.bfloat16)


def test_a_parameter_that_is_written_to_unless_it_is_traced_is_refused() -> None:
    def moved(m: Any) -> None:
        if get_proxy_mode() is None:  # of torch's own insides, in the place of torch.compiler
            moved_in_place(m)

    with pytest.raises(CaptureError, match=r"writes to target.0.weight, .*and a trace of it does not"):
        capture(Followed(moved), (torch.randn(BATCH, DIM),))


def test_one_that_is_written_to_unless_somebody_compiles_is_followed() -> None:
    def moved(m: Any) -> None:
        if not is_compiling():
            moved_in_place(m)

    found = capture(Followed(moved), (torch.randn(BATCH, DIM),)).program
    assert [b.fqn for b in found.buffers if b.mutated] == ["target.0.weight", "target.0.bias", "target.2.bias"]
