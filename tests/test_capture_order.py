"""What code runs in the order of a set is captured in one order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, program_hash
from autopar.ir import refs

pytestmark = pytest.mark.pure


class Rotary(nn.Module):
    """Two kinds of angles, of which each has a buffer and a scale."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.register_buffer("near", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("far", torch.tensor([5.0, 6.0, 7.0, 8.0]))
        self.scale, self.dropout = {"near": 1.0, "far": 0.5}, nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        angle = self.dropout(x.detach() * getattr(self, kind))
        return angle.cos() * self.scale[kind], angle.sin() * self.scale[kind]


class Kinds(nn.Module):
    """order: in which it makes what its layers read, as a loop over a set of names would."""

    def __init__(self, order: Sequence[str], dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.rotary = order, Rotary(dropout)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        angles = {kind: self.rotary(x, kind) for kind in self.order}
        for k, layer in enumerate(self.layers):
            cos, sin = angles["far" if k % 2 else "near"]
            x = layer(x * cos + x.roll(1, -1) * sin)
        return x.square().mean()


class Counting(nn.Module):
    """Batch norms of one line, which the loss reads in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = [self.norm(y) for y in (x, 2 * x + 1)]
        return (second * first.exp()).square().mean()


X = torch.arange(8.0).reshape(2, 4) / 8


def test_one_program_whatever_the_order_of_a_set() -> None:
    near, far = (capture(Kinds(order), {"x": X}).program for order in (("near", "far"), ("far", "near")))
    assert program_hash(near) == program_hash(far) and near.ops == far.ops and near.types == far.types
    made = {o: op for op in near.ops for o in op.outputs}
    angles = [made[refs(op)[0]] for op in near.ops if op.target == "aten.cos.default"]
    assert [refs(op)[1] for op in angles] == ["b_rotary_near", "b_rotary_far"], "that of the first layer comes first"


def test_numbers_are_drawn_in_the_order_of_the_code() -> None:
    """Their order is theirs: the first that is drawn is another one in each of these, as it is in the model (`capture` compares them)."""
    near, far = (capture(Kinds(order, 0.5), {"x": X}).program for order in (("near", "far"), ("far", "near")))
    first = [next(op for op in p.ops if op.target == "aten.dropout.default") for p in (near, far)]
    made = [{o: op for op in p.ops for o in op.outputs} for p in (near, far)]
    assert [refs(m[refs(op)[0]])[1] for m, op in zip(made, first, strict=True)] == ["b_rotary_near", "b_rotary_far"]


def test_writes_to_running_statistics_keep_their_order() -> None:
    program = capture(Counting(), {"x": X}).program
    norms = [op for op in program.ops if op.target == "aten.batch_norm.default"]
    assert len(norms) == 2 and refs(norms[0])[0] == "x", "it is compared with the model's buffers, too"
