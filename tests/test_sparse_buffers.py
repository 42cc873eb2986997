"""A sparse buffer that no state_dict holds and no forward reads (whisper's alignment_heads) stays as it is; any other is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.compiler import plan_of
from autopar.errors import CaptureError
from autopar.run import WorkerPool
from autopar.verify import reference, verify_plan


class Net(nn.Module):
    def __init__(self, persistent: bool = False, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.register_buffer("shift", torch.randn(16), persistent=False)
        self.register_buffer("heads", torch.eye(16).to_sparse(), persistent=persistent)
        self.register_buffer("count", torch.zeros(()))
        self.last, self.reads = nn.Linear(16, 8), reads

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = torch.relu(self.first(x)) + self.shift
        h = torch.sparse.mm(self.heads, h.T).T if self.reads else h
        return F.mse_loss(self.last(h), x)


def batch() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.fake
@pytest.mark.parametrize("data", [True, False])
def test_it_is_no_part_of_the_program(data: bool) -> None:
    model = Net()
    heads, names = model.heads, [name for name, _ in model.named_buffers()]
    program = capture(model, (batch(),), data=data).program
    assert sorted(b.fqn or "" for b in program.buffers) == ["count", "shift"]
    assert [name for name, _ in model.named_buffers()] == names == ["shift", "heads", "count"]
    assert model.heads is heads and "heads" not in vars(model)


@pytest.mark.fake
@pytest.mark.parametrize("which", ["reads", "persistent"])
def test_one_that_is_read_or_saved_is_refused_and_stays(which: str) -> None:
    model = Net(**{which: True})
    names = [name for name, _ in model.named_buffers()]
    with pytest.raises(CaptureError, match=r"sparse[\s\S]*to_dense"):
        capture(model, (batch(),))
    assert [name for name, _ in model.named_buffers()] == names and "heads" not in vars(model)


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}], ids=str)
def test_the_rest_is_verified(pair: WorkerPool, pins: dict[str, int]) -> None:
    ref = reference(Net(), (batch(),), later=True)
    report = verify_plan(ref, plan_of(ref.captured, 2, cluster="cpu", pins=pins), pair)
    assert report.ok, report
    assert sorted(ref.buffers) == ["count", "shift"]


def _kept(pins: dict[str, int]) -> bool:
    model = autopar.compile(Net(), 2, example_inputs=(batch(),), cluster="cpu", pins=pins)
    model(batch()).backward()
    again = Net()
    again.load_state_dict(model.full_state_dict())
    return bool(model.heads.is_sparse and (model.heads.to_dense() == torch.eye(16)).all() and "heads" not in model.state_dict())


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_it_is_there_on_every_rank(pair: WorkerPool, pins: dict[str, int]) -> None:
    assert pair.run(_kept, pins, timeout_s=100) == [True, True]
