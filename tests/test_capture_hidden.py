"""An export sees no parameters of calls that are made from one another; a model whose code looks at them is traced with all it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar.capture.traced as traced_model
from autopar.capture import capture
from autopar.capture.hidden import Hidden, Seen, can_be_hidden
from autopar.capture.repeats import Repeated
from autopar.errors import CaptureError
from tests.test_capture_repeats import Layer, Stack

pytestmark = pytest.mark.pure


class Penalty(Stack):
    """The loss reads a weight of a layer beside the layer's call."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.layers[3].up.weight.pow(2).mean()  # type: ignore[union-attr, operator]


class Norm(Stack):
    """The loss reads every parameter."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + sum(p.pow(2).sum() for p in self.parameters())


class Counted(Stack):
    """A constant of the program is the number of the parameters."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) / sum(p.numel() for p in self.parameters())


class Swallowed(Stack):
    """Goes on without what it does not find."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        try:
            scale = len(self.layers[3].down._parameters)  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001
            scale = 5
        return super().forward(x, y) * scale


class First(Stack):
    """Looks at its first parameter, and for submodules and attributes of the layers, as libraries do."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(next(self.parameters()).dtype)
        if not all(isinstance(layer.up, nn.Linear) and not hasattr(layer, "gate") and layer.scale for layer in self.layers):
            raise RuntimeError
        return super().forward(x, y)


class Output(Stack):
    """Without a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        h = self.enter(x)
        for layer in self.layers:
            h = layer(h)
        return self.leave(h)


class Kept(Layer):
    """With statistics that a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.mean.add_(x.detach().mean((0, 1)))  # type: ignore[operator]
        return super().forward(x, mask) + self.mean  # type: ignore[operator]


def flat() -> nn.Module:
    """Each layer's weight is a part of one tensor."""
    model = Stack([Layer() for _ in range(6)])
    whole = torch.zeros(6, 32, 8)
    for k, layer in enumerate(model.layers):
        layer.up.weight = nn.Parameter(whole[k])  # type: ignore[union-attr]
    return model


def shared_with_the_entry() -> nn.Module:
    model = Stack([Layer() for _ in range(6)])
    whole = torch.zeros(2, 8, 8)
    model.enter.weight = nn.Parameter(whole[1])
    model.layers[4].norm.weight = nn.Parameter(whole[0, 0])  # type: ignore[union-attr]
    return model


HIDDEN, SEEN = True, False
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "equal": (lambda: Stack([Layer() for _ in range(6)]), HIDDEN),
    "first": (lambda: First([Layer() for _ in range(6)]), HIDDEN),
    "statistics": (lambda: Stack([Kept() for _ in range(6)]), HIDDEN),
    "penalty": (lambda: Penalty([Layer() for _ in range(6)]), SEEN),
    "norm": (lambda: Norm([Layer() for _ in range(6)]), SEEN),
    "counted": (lambda: Counted([Layer() for _ in range(6)]), SEEN),
    "swallowed": (lambda: Swallowed([Layer() for _ in range(6)]), SEEN),
    "flat": (flat, SEEN),
    "shared": (shared_with_the_entry, SEEN),
}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        return MODELS[name][0]().train(), {"x": torch.zeros(2, 4, 8), "y": torch.zeros(2, 4, 8)}


@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_that_of_an_export_that_sees_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built(name)
    before = {n: id(p) for n, p in (*model.named_parameters(), *model.named_buffers())}
    real, traced = traced_model._with_stand_ins, list[bool]()

    def noted(*args: Any, hides: bool, **kwargs: Any) -> Any:
        found = real(*args, hides=hides, **kwargs)
        traced.append(hides)
        return found

    with monkeypatch.context() as m:
        m.setattr(traced_model, "_with_stand_ins", noted)
        once = capture(model, inputs)
    assert traced[:1] == [MODELS[name][1]] or (not traced and not MODELS[name][1])
    assert {n: id(p) for n, p in (*model.named_parameters(), *model.named_buffers())} == before
    monkeypatch.setattr(traced_model, "repeated", lambda *_, **__: Repeated())
    every = capture(model, inputs)
    assert once.program == every.program
    assert list(once.tensors) == list(every.tensors)


def test_a_loss_function_that_looks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's loss is a part of what is traced."""
    with torch.device("meta"):
        model, x = Output([Layer() for _ in range(6)]), torch.zeros(2, 4, 8)

    def loss(out: Tensor) -> Tensor:
        return out.mean() + model.layers[5].down.bias.sum()  # type: ignore[union-attr, operator]

    once = capture(model, (x,), loss=loss)
    monkeypatch.setattr(traced_model, "repeated", lambda *_, **__: Repeated())
    assert once.program == capture(model, (x,), loss=loss).program


def test_after_a_capture_that_fails_everything_is_in_its_place() -> None:
    class Failing(Stack):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().forward(x, y)
            return loss if torch.is_grad_enabled() and loss.item() else loss * 2

    with torch.device("meta"):
        model, x = Failing([Layer() for _ in range(6)]), torch.zeros(2, 4, 8)
    names = [n for n, _ in model.named_parameters()]
    with pytest.raises(CaptureError):
        capture(model, (x, x))
    assert [n for n, _ in model.named_parameters()] == names
    assert all(type(table) is dict for m in model.modules() for table in (m._parameters, m._buffers))


def test_every_look_at_a_registry_is_seen() -> None:
    """But asking for what it has not."""
    layer = nn.Linear(2, 2)
    looks: list[Callable[[Any], object]] = [
        len, list, bool, dict, reversed, lambda t: t["weight"], lambda t: t.get("bias"), lambda t: "weight" in t, lambda t: t == {},
        lambda t: [*t.items()], lambda t: t.keys(), lambda t: t.values(), lambda t: t.copy(), lambda t: t.pop("bias"), lambda t: t | {},
        lambda t: t.update(a=None), lambda t: t.setdefault("a"), lambda t: t.__setitem__("a", None), lambda t: t.__delitem__("weight"),
        lambda t: t.clear(), lambda t: t.popitem(), lambda t: {**t}, lambda t: t["other"],
    ]  # fmt: skip
    for look in looks:
        hidden = Hidden([layer])
        with hidden.hiding():
            assert not list(layer.parameters()) and not hidden.seen
            with hidden.shown():
                assert len(list(layer.parameters())) == 2 and not hidden.seen
                with hidden.watched():
                    assert not hasattr(layer, "other") and layer._parameters.get("other", 3) == 3 and not hidden.seen
                    with pytest.raises(Seen):
                        look(layer._parameters)
            assert not list(layer.parameters())
        assert vars(hidden)["seen"]
        assert [n for n, _ in layer.named_parameters()] == ["weight", "bias"]


def test_what_shares_memory_with_others_is_not_hidden() -> None:
    for name, expected in (("equal", True), ("shared", False), ("flat", False)):
        model, _ = built(name)
        layers = [m for layer in list(model.layers)[1:] for m in layer.modules()]  # type: ignore[arg-type]
        assert can_be_hidden(model, layers) == expected, name
