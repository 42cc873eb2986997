"""Operators that do not give the same bits each time: where every rank runs one on all of it, gradients are brought to their mean, so that
copies of a parameter stay copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.catalog.determinism import varies
from autopar.compiler import plan_of
from autopar.ir import Program
from autopar.planner.lower import lower
from autopar.planner.price import param_bytes
from autopar.run import WorkerPool, buckets
from autopar.run.part import local

BATCH, WIDE = 3, 8  # neither the batch nor the channels are divided by two ranks, and the rest is too small to be


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.up, self.down = nn.Conv2d(3, 5, 3), nn.LayerNorm(5), nn.Linear(5, WIDE), nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x).mean((2, 3)))
        return (h + self.down(torch.relu(self.up(h)))).square().mean()


class Plain(Odd):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.mean((2, 3)) @ self.conv.weight.sum((2, 3)).t())
        return (h + self.down(torch.relu(self.up(h)))).square().mean()


def given() -> Tensor:
    return torch.randn(BATCH, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def program_of(model: nn.Module) -> Any:
    torch.manual_seed(0)
    return capture(model, (given(),))


def operators(program: Program) -> dict[str, bool]:
    return {op.target.split(".")[1]: varies(op, program.types) for op in program.ops}


@pytest.mark.pure
def test_which_vary() -> None:
    class Every(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.embedding = nn.Conv2d(3, 5, 3), nn.Embedding(5, 4)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            h = self.conv(x)
            places = index.cumsum(0)  # of integers
            loss = F.cross_entropy(h, index[:, None, None].expand(-1, 3, 3)) + F.cross_entropy(h.mean((2, 3)), index)
            flat = h.flatten(1)
            return loss + flat.cumsum(1).sum() + flat.gather(1, places[:, None] % 3).sum() + self.embedding(index).sum()

    program = capture(Every(), (given(), torch.tensor([0, 1, 2]))).program
    found = {(op.target.split(".")[1], varies(op, program.types), len(program.types[op.outputs[0] or ""].shape)) for op in program.ops}
    names = {name for name, varying, _ in found if varying}
    assert {"conv2d", "cumsum", "gather", "cross_entropy_loss"} <= names
    assert {("cumsum", False, 1), ("cumsum", True, 2), ("embedding", False, 2)} <= found
    assert not {"linear", "mean", "add", "sum", "embedding"} & names
    losses = [varies(op, program.types) for op in program.ops if op.target.startswith("aten.cross_entropy_loss")]
    assert losses == [True, False]


@pytest.mark.pure
def test_a_convolution_that_trains_nothing_varies_not() -> None:
    model = Odd()
    model.conv.requires_grad_(False)
    assert operators(program_of(model).program)["conv2d"] is False
    assert operators(program_of(Odd()).program)["conv2d"] is True


@pytest.mark.fake
@pytest.mark.parametrize(("make", "agreed"), [(Odd, ("tp",)), (Plain, ())])
def test_gradients_that_all_ranks_compute_are_agreed_upon(make: type[nn.Module], agreed: tuple[str, ...]) -> None:
    captured = program_of(make())
    plan = plan_of(captured, 2, cluster="cpu", pins={"tp": 2})
    rank = lower(captured.program, plan).program
    found = {p.fqn: p.agreed for p in rank.params}
    assert set(found.values()) == {agreed}, "all of it is whole on both ranks"
    summed = {p.fqn: param_bytes(rank, {}, 1)[p.value].summed for p in rank.params}
    assert summed == found, "and that is priced"


def trained(pins: dict[str, Any], make: type[nn.Module]) -> dict[str, list[float]]:
    """Gradients, where a rank's kernels add up in another order than another's."""
    torch.manual_seed(0)
    model = autopar.compile(make().double(), 2, example_inputs=(given().double(),), pins=pins)
    rank, init = torch.distributed.get_rank(), buckets.Reduction.__init__

    def rounded(self: Any, bucket: Any, grads: dict[str, Tensor]) -> None:
        init(self, bucket, {name: g * (1 + 1e-9 * rank) for name, g in grads.items()})

    buckets.Reduction.__init__ = rounded  # type: ignore[method-assign]
    try:
        for _ in range(2):  # also where gradients are added
            model(given().double()).backward()
    finally:
        buckets.Reduction.__init__ = init  # type: ignore[method-assign]
    return {name: local(p.grad).flatten().tolist() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.gloo
def test_copies_stay_copies() -> None:
    torch.manual_seed(0)
    plain = Odd().double()
    for _ in range(2):
        plain(given().double()).backward()
    with WorkerPool(2) as pool:
        first, second = pool.run(trained, {"tp": 2}, Odd)
        assert first["conv.weight"] == second["conv.weight"] and first["norm.bias"] == second["norm.bias"], "to the bit"
        expected = plain.conv.weight.grad
        assert expected is not None and first["conv.weight"] == pytest.approx(expected.flatten().tolist(), rel=1e-8)
        first, second = pool.run(trained, {"tp": 2}, Plain)
        assert first["norm.bias"] != second["norm.bias"], "nothing is sent where kernels give the same bits"
