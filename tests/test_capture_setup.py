"""What the first call of a model on the meta device sets up, where the model cannot run without data but as it is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure


class Asking(nn.Module):
    """Asks for a value, unless it is exported."""

    kind: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.sum().item() != x.sum().item():
            raise ValueError("not a number")
        return self.computed(self.linear(x)).square().mean()

    def computed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class SetsUp(Asking):
    """As classifiers of transformers say what kind of labels they have seen first."""

    def computed(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "regression"
        return x if self.kind == "regression" else 2 * x


class Hooks(Asking):
    """As they install hooks in their first call."""

    def computed(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind, self.seen = "hooked", [0]
            self.linear.register_forward_hook(lambda module, args, output: None)
        return x


class Checks(Hooks):
    """As transformers do, it checks a value behind that, exported or not."""

    def computed(self, x: Tensor) -> Tensor:
        x = super().computed(x)
        torch._check_tensor_all(x.isfinite(), lambda: "not finite")
        return x


class Counts(Asking):
    def computed(self, x: Tensor) -> Tensor:
        self.kind = (self.kind or 0) + 1
        return x * self.kind


class Begins(Asking):
    """Its first call computes something else."""

    def computed(self, x: Tensor) -> Tensor:
        begins, self.kind = self.kind is None, "begun"
        return 2 * x if begins else x


class Named(Asking):
    """Has a buffer under the name of a plain attribute too, as rotary tables of transformers 4 have. moves: to another in each call."""

    moves = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("other", torch.zeros(4))
        self.known = [self.table, self.other]
        self.first = self.table

    def computed(self, x: Tensor) -> Tensor:
        if self.moves:
            self.first = self.known[1]
        return x * self.table


class Moves(Named):
    moves = True


COMPUTED = ["aten.linear.default", "aten.square.default", "aten.mean.default"]


def on_meta(kind: type[Asking]) -> tuple[Asking, Captured]:
    model = kind().to("meta")
    return model, capture(model, (torch.zeros(2, 4, device="meta"),))


@pytest.mark.parametrize("kind", [SetsUp, Hooks, Checks])
def test_what_the_first_call_alone_sets_up_is_no_obstacle(kind: type[Asking]) -> None:
    model, captured = on_meta(kind)
    targets = [op.target for op in captured.program.ops]
    assert [t for t in targets if t in COMPUTED] == COMPUTED and (kind is Checks or targets == COMPUTED)
    assert model.kind is None and not model.linear._forward_hooks, "the model is left as it was"
    model.kind = "another"
    assert captured.guards.changed(), "and what was set up is watched"


@pytest.mark.parametrize("kind", [Counts, Begins])
def test_what_goes_on_or_counts_for_the_first_call_alone_is_refused(kind: type[Asking]) -> None:
    with pytest.raises(CaptureError, match=r"each call of \w+ changes kind"):
        on_meta(kind)


def test_a_buffer_under_two_names_is_no_change() -> None:
    with torch.device("meta"):
        model = Named()
    captured = capture(model, (torch.zeros(2, 4, device="meta"),))
    assert "table" in [b.fqn for b in captured.program.buffers] and model.first is model.table
    with torch.device("meta"):
        moves = Moves()
    with pytest.raises(CaptureError, match="changes first"):
        capture(moves, (torch.zeros(2, 4, device="meta"),))
