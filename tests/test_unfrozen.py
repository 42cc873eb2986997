"""Parameters that were frozen when the model was compiled and train later: the plan goes on, and says what it has no room for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.planner import Plan
from autopar.render import load
from autopar.run import ParallelModule, WorkerPool
from autopar.run.manifest import ParamSpec
from autopar.unfrozen import unplanned_bytes

PLANS = {
    "dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2, "micro_batches": 2}, "zero1": {"dp": 2, "zero": 1},
    "zero2 of micro-batches": {"dp": 2, "zero": 2, "micro_batches": 2}, "zero3": {"dp": 2, "zero": 3},
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.first(x))), y)


class Decayed(Net):
    """Its loss has a term of all that trains."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.01 * torch.stack([p.square().sum() for p in self.parameters() if p.requires_grad]).sum()


def batch(index: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(index)
    return torch.randn(16, 8, generator=g).double(), torch.randint(4, (16,), generator=g)


def built(pins: dict[str, Any] | None, *frozen: str, kind: type[nn.Module] = Net) -> Any:
    """The model, of which the submodules with these names are frozen, compiled if there are pins."""
    torch.manual_seed(0)
    model = kind().double()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model if pins is None else autopar.compile(model, 2, example_inputs=batch(), cluster="cpu", pins=pins)


def step(model: Any, optimizer: torch.optim.Optimizer, index: int) -> float:
    optimizer.zero_grad()
    loss = model(*batch(index))
    loss.backward()
    optimizer.step()
    return float(loss.item())


def _gradually(pins: dict[str, Any] | None) -> list[float]:
    """The last blocks, then the others, then some are frozen again; evaluated in between."""
    model = built(pins, "blocks")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = [step(model, optimizer, 0), step(model, optimizer, 1)]
    for later in (model.blocks[2:], model.blocks[:2]):
        later.requires_grad_(True)
        optimizer.add_param_group({"params": list(later.parameters()), "lr": 5e-3})
        losses += [step(model, optimizer, 2), step(model, optimizer, 3)]
        with torch.no_grad():
            losses.append(model(*batch(9)).item())
    model.blocks[1].requires_grad_(False)
    losses += [step(model, optimizer, 4)]
    assert model.blocks[1].up.weight.grad is None
    model.blocks.requires_grad_(False)
    losses += [step(model, optimizer, 5)]
    model.blocks.requires_grad_(True)
    return [*losses, step(model, optimizer, 6)]


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:.*frozen when it was compiled")
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_unfrozen_trains(pair: WorkerPool, plan: str) -> None:
    expected = _gradually(None)
    for found in pair.run(_gradually, PLANS[plan], timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-12)


def _penalised(pins: dict[str, Any] | None, at_first: bool) -> list[float]:
    model = built(pins, *(["blocks"] if at_first else []), kind=Decayed)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), list[float]()
    for index in range(6):
        if index % 2 == 0:
            model.blocks.requires_grad_((index % 4 == 0) != at_first)
        losses.append(step(model, optimizer, index))
    return losses


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:.*frozen when it was compiled")
@pytest.mark.parametrize(("plan", "at_first"), [("tp2", False), ("tp2", True), ("pp2", False), ("zero3", False), ("zero3", True)])
def test_a_forward_that_asks_what_trains_is_told_what_does_now(pair: WorkerPool, plan: str, at_first: bool) -> None:
    expected = _penalised(None, at_first)
    for found in pair.run(_penalised, PLANS[plan], at_first, timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-12)


class Looking(Net):
    """Looks whether its activations have a gradient, and does nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        self.seen = h.requires_grad or self.seen
        return F.cross_entropy(self.head(self.blocks(h)), y)


def _frozen_up_to_the_head(pins: dict[str, Any] | None) -> list[float]:
    model = built(pins, kind=Looking)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = [step(model, optimizer, 0), step(model, optimizer, 1)]
    model.first.requires_grad_(False)
    model.blocks.requires_grad_(False)
    return [*losses, step(model, optimizer, 2), step(model, optimizer, 3)]


@pytest.mark.gloo
def test_stages_that_could_not_be_cut_so_go_on_where_nothing_else_is_computed(pair: WorkerPool) -> None:
    """Between frozen stages nothing that crosses has a gradient; what was planned computes the same, if code that asks does."""
    expected = _frozen_up_to_the_head(None)
    for found in pair.run(_frozen_up_to_the_head, {"pp": 2}, timeout_s=60):
        assert found == pytest.approx(expected, rel=1e-12)


class Stopping(Net):
    """No gradient goes to its first layer where its blocks do not train."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        trains = any(p.requires_grad for p in self.blocks.parameters())
        return F.cross_entropy(self.head(self.blocks(h if trains else h.detach())), y)


def _stopped() -> str:
    model = built({"pp": 2}, kind=Stopping)
    model(*batch()).backward()
    model.blocks.requires_grad_(False)
    with pytest.raises(ValueError, match="cannot run as it was planned") as error:
        model(*batch())
    return str(error.value)


@pytest.mark.gloo
def test_stages_that_cannot_be_cut_so_are_refused_where_something_else_is_computed(pair: WorkerPool) -> None:
    for said in pair.run(_stopped, timeout_s=60):
        assert "what crosses a cut must be differentiable" in said


def _gradients_of_what_was_frozen(pins: dict[str, Any] | None) -> dict[str, Tensor]:
    model = built(pins, "first", "blocks.0")
    model(*batch()).backward()
    model.first.requires_grad_(True)
    model.zero_grad()
    model(*batch(1)).backward()
    if pins is None:
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return dict(model.full_gradients())


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:.*frozen when it was compiled")
@pytest.mark.parametrize("plan", ["tp2", "pp2", "zero3"])
def test_whole_gradients_have_what_was_unfrozen(pair: WorkerPool, plan: str) -> None:
    expected = _gradients_of_what_was_frozen(None)
    for found in pair.run(_gradients_of_what_was_frozen, PLANS[plan], timeout_s=60):
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], expected[name], rtol=1e-10, atol=1e-14) for name in expected)


def _told() -> list[list[str]]:
    model = built({"dp": 2}, "first", "blocks.0")
    said = []
    for name in ("first", "first", "blocks.0"):
        model.get_submodule(name).requires_grad_(True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(*batch()).backward()
        said.append([str(w.message) for w in caught])
    return said


@pytest.mark.gloo
def test_rank_0_says_once_what_the_plan_has_no_room_for(pair: WorkerPool) -> None:
    (first, again, more), others = pair.run(_told, timeout_s=60)
    assert len(first) == len(more) == 1 and not again and others == [[], [], []]
    states = 3 * 8  # a gradient and two states of AdamW, in float64
    assert f"first.weight, first.bias of Net train, and were frozen when it was compiled. Gradients and states of adamw take "\
        f"{(8 * 16 + 16) * states / 1024:.2f} KiB more than planned for" in first[0]
    both = 8 * 16 + 16 + 2 * 16 + 2 * 16 * 32 + 32 + 16
    assert "first.weight, first.bias and 6 more of Net train" in more[0] and f"take {both * states / 1024:.2f} KiB more" in more[0]


def _refusals() -> list[str]:
    found = []
    rank = torch.distributed.get_rank()
    model = built({"dp": 2}, "first")
    model(*batch()).backward()
    model.first.requires_grad_(rank == 0)
    loaded = ParallelModule(load(model.source), {n: t.double() for n, t in built(None).state_dict().items()})
    loaded.first.requires_grad_(True)
    for one in (model, loaded):
        try:
            one(*batch())
            found.append("nothing was raised")
        except (autopar.LaunchError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.gloo
def test_what_cannot_be_trained_is_refused(pair: WorkerPool) -> None:
    for apart, alone in pair.run(_refusals, timeout_s=60):
        assert apart.startswith("LaunchError: ") and "what is frozen, differ between rank 0 and rank 1" in apart
        assert alone.startswith("ValueError: parameter first.weight did not require a gradient when the model was compiled")


class Averaged(Net):
    """Its first layer follows the head, and is not trained."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.bias.lerp_(self.blocks[0].down.bias, 0.1)
        return super().forward(x, y)


def _written() -> str:
    model = built({"tp": 2}, "first", kind=Averaged)
    model(*batch()).backward()
    model.first.weight.requires_grad_(True)
    with warnings.catch_warnings(record=True):
        model(*batch()).backward()
    model.first.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="parameter first.bias requires a gradient, and the forward writes to it") as error:
        model(*batch())
    return str(error.value)


@pytest.mark.gloo
def test_what_the_forward_writes_to_stays_frozen(pair: WorkerPool) -> None:
    for said in pair.run(_written, timeout_s=60):
        assert "freeze it again" in said


@pytest.mark.pure
def test_bytes_of_what_was_not_planned_for(tmp_path: Any) -> None:
    """On a rank of each stage: as the parameters rest, in slices of tensor parallelism and of ZeRO."""
    torch.manual_seed(0)
    plan: Plan = autopar.plan(Net(), 8, example_inputs=batch_of_floats(), cluster="dgx-a100", pins={"pp": 2, "tp": 2, "zero": 3})
    specs = [
        ParamSpec(name="whole", shape=(4, 6), dtype="float32", stages=(0,)),
        ParamSpec(name="of both", shape=(10,), dtype="float32", stages=(0, 1)),
        ParamSpec(name="cut", shape=(8, 6), dtype="bfloat16", layouts={"tp": "S(0)", "dp": "R"}, stages=(1,), zero_dim=1, rest="3"),
    ]
    assert unplanned_bytes(specs, plan) == [3 * 4 * (24 + 10), 3 * 4 * 10 + 3 * 2 * 48 // 4]


def batch_of_floats() -> tuple[Tensor, Tensor]:
    x, y = batch()
    return x.float(), y
