"""Each parameter has memory of its own, and what is another name for it is refused, with what to do."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture, lift_to_float64, to_float64
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure


class _Holding(nn.Module):
    """Reads the memory of a weight by another name: an optimizer's steps change both."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        view = self.head.weight.detach()
        if how == "buffer":
            self.register_buffer("table", view)
        else:
            self.table = {"attribute": view, "list": [view], "row": view[0]}[how]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table: Any = self.table
        return (self.head(x) * (x * table[0].sum(0))).sum()


@pytest.mark.parametrize("how", ["attribute", "list", "row", "buffer"])
def test_other_names_for_the_memory_of_a_parameter_are_refused(how: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)shares the memory of the parameter head.weight.*make it of head.weight in the forward"):
        capture(_Holding(how), (torch.randn(8, 4),))


def test_two_parameters_of_one_memory_are_refused() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Flatten(0), nn.Linear(32, 1))
    apart, flat = copy.deepcopy(tied), torch.randn(32)
    apart[0].weight.data, apart[1].weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)  # of one storage, as in recurrent layers
    assert len(capture(apart, (torch.randn(8, 4),), loss=torch.sum).program.params) == 4
    tied[1].weight.data = tied[0].weight.data
    with pytest.raises(CaptureError, match=r"0.weight and 1.weight of Sequential share memory"):
        capture(tied, (torch.randn(8, 4),), loss=torch.sum)


@pytest.mark.parametrize("how", ["attribute", "list", "buffer"])
def test_they_are_refused_where_a_model_is_verified_too(how: str) -> None:
    with lift_to_float64(), pytest.raises(CaptureError, match="shares the memory of the parameter head.weight"):
        capture(to_float64(_Holding(how)), (torch.randn(8, 4, dtype=torch.float64),))


class _Asking(nn.Module):
    """Is traced a second time, with a number of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if int(counts.sum()) % 2 else self.layer(2 * x)


@pytest.mark.parametrize("asks", [False, True])
def test_nothing_that_capture_computed_stays_in_memory(asks: bool) -> None:
    """Without Python's collector of cycles, which may not look for a long time: on a GPU it would be the activations of a step."""
    model = _Asking() if asks else nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
    given = (torch.randn(8, 16), torch.arange(8))[: 1 + asks]
    capture(model, given, loss=torch.mean)  # modules that are imported on the way keep frames
    gc.collect()
    gc.disable()
    try:
        before = {id(t) for t in _tensors()}
        captured = capture(model, given, loss=torch.mean)
        known = before | {id(t) for t in captured.tensors.values()}
        left = [t for t in _tensors() if id(t) not in known and t.device.type == "cpu" and type(t) is torch.Tensor]
    finally:
        gc.enable()
    assert [tuple(t.shape) for t in left] == []


def _tensors() -> list[torch.Tensor]:
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


class _Greedy(nn.Module):
    """Its device has memory for so many samples; no trace of it is kept."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.layer, self.room = nn.Linear(4, 4), room

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and x.shape[0] > self.room:
            raise torch.OutOfMemoryError(f"no memory for {x.shape[0]} samples")
        return self.layer(x).square().sum()


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (8, ()),
        (4, ("the captured program was compared with the model on 4 samples alone: one device has no memory for the whole batch",)),
        (1, ("the captured program was compared with the model on 1 sample alone: one device has no memory for the whole batch",)),
        (0, ("the captured program was not compared with the model, for a sample of which one device has no memory",)),
    ],
)
def test_where_the_whole_batch_does_not_fit_fewer_samples_are_compared(room: int, said: tuple[str, ...]) -> None:
    found = capture(_Greedy(room), (torch.randn(8, 4),))
    assert found.program.notes == said
    assert found.program.types[found.program.inputs[0].value].shape == (8, 4)


def test_what_differs_on_fewer_samples_is_refused() -> None:
    class Drawing(_Greedy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * random.random()

    with pytest.raises(CaptureError, match="random"):
        capture(Drawing(2), (torch.randn(8, 4),))


def test_lists_that_modules_share_are_shared_in_float64_too() -> None:
    held: Any = [torch.ones(2), {"kept": (torch.zeros(1),)}]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.held = model[0].held = held
    to_float64(model)
    assert model.held is model[0].held is held
    assert held[0].dtype == held[1]["kept"][0].dtype == torch.float64
