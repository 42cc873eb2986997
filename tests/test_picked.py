"""What is picked of each sample is a gather, which is split by samples; other indexes stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.planner.moments import split_into_moments
from autopar.run import WorkerPool
from autopar.verify import verify

BATCH, LENGTH, WIDTH = 8, 6, 8
Picks = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, picks: Picks) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.hidden, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.picks = picks

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.picks(self.hidden(self.words(words)), words)).square().mean()


def the_last_one(h: Tensor, words: Tensor) -> Tensor:
    last = (words != 0).sum(1).clamp(min=1) - 1
    return h[torch.arange(h.shape[0], device=h.device), last]


def from_the_end(h: Tensor, words: Tensor) -> Tensor:
    return h[torch.arange(0, len(h)), -1 - (words != 0).sum(1) % 3]


def several(h: Tensor, words: Tensor) -> Tensor:
    """As points are picked for groups."""
    places = words % LENGTH
    rows = torch.arange(len(h), dtype=torch.long).view(len(h), 1).repeat(1, LENGTH)
    return h[rows, places]


def beside_others(h: Tensor, words: Tensor) -> Tensor:
    """Some of each sample's places stay, as where patches of pictures are dropped."""
    rows = torch.arange(len(h))[:, None]
    return torch.cat((h.mean(1, keepdim=True), h[rows, words[:, :3] % LENGTH]), 1)


def the_same_for_all(h: Tensor, words: Tensor) -> Tensor:
    return h[torch.arange(len(h))[:, None], torch.tensor([0, 2, -1], dtype=torch.int32)]


def numbers(h: Tensor, words: Tensor) -> Tensor:
    """Of two dims, one number of each row."""
    return h.sum(1)[torch.arange(len(h)), words[:, 0] % WIDTH][:, None] * h.mean(1)


def written_to_each(h: Tensor, words: Tensor) -> Tensor:
    """Classes in one number of each row, and one place of each sample that others take the value of."""
    chosen = torch.zeros(len(h), LENGTH, dtype=h.dtype)
    chosen[torch.arange(len(h)), words[:, 0] % LENGTH] = 1.0
    h = h * chosen[:, :, None]
    h[torch.arange(len(h)), -1 - words[:, 1] % 3] = h.mean(1) * 2
    return h


def written_to_several(h: Tensor, words: Tensor) -> Tensor:
    """Which of two values a place has follows from nothing: it stays as it is."""
    h = h.clone()
    h[torch.arange(len(h))[:, None], words % LENGTH] = 0.5
    return h


def a_large_index(h: Tensor, words: Tensor) -> Tensor:
    """More of each row than it has, of an index that is small by itself."""
    return h[torch.arange(len(h))[:, None, None], torch.arange(LENGTH)[None, None, :].expand(1, 3, LENGTH)].sum(1)


def of_weights(h: Tensor, words: Tensor) -> Tensor:
    """A kernel on the diagonal, as in resampling: nothing of it is of samples."""
    weight = torch.zeros(BATCH, BATCH, 3, dtype=h.dtype)
    weight[torch.arange(BATCH), torch.arange(BATCH)] = torch.tensor([0.25, 0.5, 0.25], dtype=h.dtype).expand(BATCH, 3)
    return torch.nn.functional.conv1d(h, weight[: LENGTH, : LENGTH], padding=1)


def in_another_order(h: Tensor, words: Tensor) -> Tensor:
    return h[torch.arange(len(h)).flip(0), words[:, 0] % LENGTH]


def of_fewer(h: Tensor, words: Tensor) -> Tensor:
    return h[torch.arange(len(h) // 2), words[: len(h) // 2, 0] % LENGTH]


def of_what_is_given(h: Tensor, words: Tensor) -> Tensor:
    return h[words[:, 1] % BATCH, words[:, 0] % LENGTH]


def inputs() -> tuple[Tensor, ...]:
    return (torch.randint(0, 9, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)),)


def captured(picks: Picks) -> Captured:
    return capture(Model(picks).double(), inputs())  # which compares loss and gradients


def has(found: Captured, *names: str) -> bool:
    return any(op.target in names for op in found.program.ops)


OWN = (the_last_one, from_the_end, several, beside_others, the_same_for_all, numbers)
INDEXES = ("aten.index.Tensor", "aten.index_put.default")


@pytest.mark.pure
@pytest.mark.parametrize("picks", [*OWN, written_to_each])
def test_what_is_picked_of_each_sample_is_split_by_samples(picks: Picks) -> None:
    found = captured(picks)
    assert has(found, "aten.gather.default", "aten.scatter.src") and not has(found, *INDEXES)
    body = split_into_moments(found.program, 4).body
    assert [body.types[op.name].shape[0] for op in body.ops if op.target == "aten.embedding.default"] == [BATCH // 4]


@pytest.mark.pure
@pytest.mark.parametrize("picks", [in_another_order, of_fewer, of_what_is_given, written_to_several, a_large_index, of_weights])
def test_other_indexes_stay(picks: Picks) -> None:
    found = captured(picks)
    assert has(found, *INDEXES) and not has(found, "aten.gather.default", "aten.scatter.src")


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2, "tp": 2}, {"dp": 4, "micro_batches": 2}], ids=str)
def test_equals_the_original(pins: dict[str, Any], workers: WorkerPool) -> None:
    for picks in (*OWN, written_to_each):
        report = verify(Model(picks), inputs(), 4, pins=pins, steps=2, pool=workers)
        assert report.ok, report
