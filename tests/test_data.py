"""Batches of a few lengths: padding, and which samples come together on which rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.data import Batches

pytestmark = pytest.mark.pure


def sample(length: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(1, length + 1), "labels": torch.arange(length)}


def test_a_batch_grows_to_the_least_length_that_holds_it() -> None:
    pad = autopar.Padding({"ids": 0, "labels": -100}, lengths=(8, 4), batch_size=3, labels="labels")
    batch = pad([sample(2), sample(4)])
    assert batch["ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 0, 0]]
    assert batch["labels"].tolist() == [[0, 1, -100, -100], [0, 1, 2, 3], [-100] * 4]
    assert pad([sample(5)])["ids"].shape == (3, 8)


def test_samples_that_are_tuples_with_a_number_as_label() -> None:
    pad = autopar.Padding({1: -1}, batch_size=3, labels=1)
    x, y = pad([(torch.ones(2), 4), (torch.zeros(2), 5)])
    assert x.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert y.tolist() == [4, 5, -1]


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"length 9 is longer than the longest of lengths=\(4, 8\): add a length, or cut"):
        autopar.Padding({"ids": 0}, lengths=(4, 8))([sample(9)])
    with pytest.raises(ValueError, match="batch_size=4 needs labels=NAME"):
        autopar.Padding({"ids": 0}, batch_size=4)
    with pytest.raises(ValueError, match="a batch of 2 samples is larger than batch_size=1"):
        autopar.Padding({"labels": -100}, batch_size=1, labels="labels")([sample(1)] * 2)
    model: Any = SimpleNamespace(data_rank=0, data_ranks=4)
    with pytest.raises(ValueError, match=r"length 9 is longer"):
        autopar.batches([3, 9], model, batch_size=4, lengths=(4, 8))
    with pytest.raises(ValueError, match="a global batch of 6 samples does not divide among 4 data-parallel ranks"):
        autopar.batches([3], model, batch_size=6, lengths=(4, 8))
    with pytest.raises(ValueError, match="lengths must be positive"):
        autopar.Padding({"ids": 0}, lengths=())


@given(
    st.lists(st.integers(1, 16), max_size=60), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.booleans(), st.booleans(),
)  # fmt: skip
def test_ranks_have_parts_of_the_same_batches(sizes: list[int], parts: int, epoch: int, shuffle: bool, drop_last: bool) -> None:
    lengths = (4, 8, 16)

    def of(part: int) -> tuple[list[list[int]], int]:
        made = Batches(sizes, batch_size=8, lengths=lengths, part=part, parts=parts, shuffle=shuffle, seed=5, drop_last=drop_last)
        made.set_epoch(epoch)
        return list(made), len(made)

    ranks = [of(part) for part in range(parts)]
    assert all(len(found) == count == ranks[0][1] for found, count in ranks)
    seen: list[int] = []
    for step in zip(*(found for found, _ in ranks), strict=True):
        together = [index for part in step for index in part]
        assert all(step)
        assert max(len(part) for part in step) <= 8 // parts
        assert len({next(n for n in lengths if n >= sizes[i]) for i in together}) == 1
        assert len(together) == 8 or not drop_last
        seen += together
    assert len(seen) == len(set(seen))
    left_out = len(sizes) - len(seen)
    assert left_out <= len(lengths) * ((8 if drop_last else parts) - 1)


def test_epochs_have_other_batches() -> None:
    made = Batches([3] * 40, batch_size=8, lengths=(4,), part=0, parts=1, shuffle=True, seed=0, drop_last=False)
    first = list(made)
    made.set_epoch(1)
    assert list(made) != first
    made.set_epoch(0)
    assert list(made) == first
