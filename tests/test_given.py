"""Tensors that a call leaves in attributes and containers, where the program gives what the model returns: they are outputs, and stand
where the original leaves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.capture.interpret import run_whole_program
from autopar.run.left_out import LeftOut
from autopar.run.outputs import Inner

pytestmark = pytest.mark.pure

FOUND: dict[str, Any] = {}


class Model(nn.Module):
    """Leaves tensors in an attribute, a dict, a list and a global dict; a number; and a cache."""

    cache: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.table: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(6.0)
        h = torch.tanh(self.first(x)) + self.cache
        self.size = h.square().mean()
        self.table["state"] = h.detach()
        self.states = [h, 2 * h]
        self.number = h.mean().item()
        FOUND["state"] = h
        return self.second(h)


def inputs() -> tuple[Tensor]:
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)),)


def outputs_of(captured: Captured, x: Tensor) -> dict[str, Tensor]:
    program = captured.program
    values = {name: tensor.detach() for name, tensor in captured.tensors.items()} | {program.inputs[0].value: x}
    return dict(zip(program.outputs, run_whole_program(program, values)[1:], strict=True))


def test_they_are_outputs_and_stand_where_the_original_leaves_them() -> None:
    (x,) = inputs()
    model: Any = Model()
    captured = capture(model, (x,), outputs=None)
    assert captured.returned is not None and captured.guards is not None
    assert len(captured.returned.names) == 1 and len(captured.program.outputs) == 6  # two places hold one tensor
    other = x + 1
    for given in (x, other):
        captured.guards.leave(outputs_of(captured, given))
        ours = [model.size, model.table["state"], *model.states, FOUND["state"], model.number]
        assert type(model.number) is float and captured.guards.changed() is None
        model(given)
        theirs = [model.size, model.table["state"], *model.states, FOUND["state"], model.number]
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        model.cache = None  # as the program found it


def test_of_a_model_with_a_loss_they_are_left_out_unless_its_outputs_are_asked_for() -> None:
    class WithLoss(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.size = self.first(x).square().mean()
            return self.second(torch.tanh(self.first(x))).sum() + self.size

    plain: Any = WithLoss()
    given: Any = WithLoss()
    first, second = capture(plain, inputs()), capture(given, inputs(), outputs=True)
    assert first.guards is not None and second.guards is not None
    first.guards.leave({})
    second.guards.leave(outputs_of(second, *inputs()))
    assert type(plain.size) is LeftOut and type(given.size) is Tensor
    assert first.program.outputs == () and any("leaves tensors in size" in note for note in first.program.notes)


def test_a_program_holds_for_what_stands_where_the_next_call_reads() -> None:
    class Reads(Model):
        last: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) + self.last
            self.last = h.detach().mean()
            return self.second(h)

    model = Reads()
    captured = capture(model, inputs(), outputs=None)
    assert captured.guards is not None and captured.guards.place("last") is not None and captured.guards.changed() is None
    captured.guards.leave(outputs_of(captured, *inputs()))
    assert isinstance(model.last, Tensor) and "last" in (captured.guards.changed() or "")


def test_of_an_activation_that_others_are_computed_of_no_gradient_is_told() -> None:
    """What comes by the others is not known there."""
    model: Any = Model()
    captured = capture(model, inputs(), outputs=None)
    assert captured.returned is not None and captured.returned.inner == {"add"}
    tensors = {name: torch.zeros(2, requires_grad=True) for name in captured.program.outputs}
    given = captured.returned.marked(tensors)
    assert [name for name, t in given.items() if type(t) is Inner] == ["add"]
    (2 * given["add"]).sum().backward()
    assert tensors["add"].grad is not None and type(2 * given["add"]) is Tensor
    for ask in (lambda t: t.retain_grad(), lambda t: t.register_hook(print), lambda t: t.grad):
        with pytest.raises(RuntimeError, match="Register a hook on the activation"):
            ask(given["add"])
