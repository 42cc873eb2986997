"""Scripts that call torch.set_default_device, as those for GPUs do: a mode of torch functions is on then, between the script and what it
calls, and what is made without a device is made there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import autopar
from autopar.capture import capture
from autopar.run import WorkerPool

pytestmark = pytest.mark.gloo
PINS = {"tp": {"tp": 2}, "zero": {"dp": 2, "zero": 3}, "pipeline": {"pp": 2, "micro_batches": 2}}


@contextmanager
def default(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x)))).square().mean()


def built() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(8, 8)


def refused(pins: dict[str, int]) -> list[str]:
    """What is refused of a part's memory, with the mode that is on."""
    model, x = built()
    said: list[str] = []
    with default("cpu"):
        module = autopar.compile(model, 2, example_inputs=(x,), pins=pins)
        module(x).backward()
        weight = module.up.weight
        for attempt in (lambda: weight.untyped_storage(), lambda: get_gradient_edge(weight)):
            try:
                attempt()
            except TypeError as error:
                said.append(str(error))
        dist.broadcast(torch.zeros(1), 0)
    return said


@pytest.mark.parametrize("plan", ["tp", "zero"])
def test_memory_of_a_part_is_refused(pair: WorkerPool, plan: str) -> None:
    for storage, edge in pair.run(refused, PINS[plan]):
        assert "no storage here holds the whole" in storage
        assert "instead of its gradient edge" in edge


def trained(pins: dict[str, int], device: str) -> tuple[list[float], dict[str, list[float]]]:
    """Three steps and a whole state, in which nothing of autopar's own may be made on the default device."""
    model, x = built()
    y = [torch.randn(8, 8) for _ in range(5)]
    with default(device):
        module = autopar.compile(model.eval(), 2, example_inputs=(x,), pins=pins)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for given in y:
            loss = module(given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        module.train()
        module(x).backward()
        state = {name: value.flatten().tolist() for name, value in module.full_state_dict().items()}
    return losses, state


@pytest.mark.parametrize("plan", list(PINS))
def test_what_autopar_makes_says_its_device(pair: WorkerPool, plan: str) -> None:
    """A default device on which nothing can be computed changes nothing."""
    expected = pair.run(trained, PINS[plan], "cpu")
    assert pair.run(trained, PINS[plan], "meta") == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_is_left_out_where_torch_leaves_it_out() -> None:
    """Torch takes no fast path for an encoder in evaluation while a mode is on."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    x, padded = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        for mode in (None, "cpu"):
            torch.set_default_device(mode)
            try:
                expected = encoder(x, src_key_padding_mask=padded)
                program = capture(encoder, {"src": x, "src_key_padding_mask": padded}, loss=torch.sum, outputs=True).program
            finally:
                torch.set_default_device(None)
            assert bool((expected[1, 2:] == 0).all()) == (mode is None)
            assert any(op.target == "aten.where.self" for op in program.ops) == (mode is None)
