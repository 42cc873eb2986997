"""What ranks are given is compared in every call, by a few elements: other batches are told of, other roundings are not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import LaunchError
from autopar.run import record, watchdog
from autopar.run.batches import GivenBatches
from autopar.run.watchdog import Watchdog

pytestmark = pytest.mark.pure


def _watching(rank: int, others: dict[int, Any]) -> Watchdog:
    watch = object.__new__(Watchdog)
    vars(watch).update(rank=rank, _others=others)
    return watch


def _told(
    mine: list[Tensor], theirs: list[Tensor], monkeypatch: pytest.MonkeyPatch, *, parts: tuple[int, int] = (0, 0), gradients: bool = False
) -> str:
    """What a rank is told in the call in which the other one was given something else. parts: of the batch, which the two are to have."""
    local = parts != (0, 0)

    def of(part: int) -> GivenBatches:
        return GivenBatches(SimpleNamespace(talks=True, world=4, dp=SimpleNamespace(rank=part, size=2)), local=local)  # type: ignore[arg-type]

    def compare(given: GivenBatches) -> Any:
        return given.compare_gradients if gradients else given.compare

    record.step(1)
    seen: dict[int, record.Batch] = {}
    alone = _watching(1, {})
    with monkeypatch.context() as m:
        m.setattr(watchdog, "current", lambda: alone)
        m.setattr(record, "_gradients", [0, 0])  # of the other process
        m.setattr(record, "was_given", lambda *numbers: seen.setdefault(1, was_given(*numbers)))
        compare(of(parts[1]))(theirs)
    watch = _watching(0, {1: SimpleNamespace(batch=lambda call, what: seen[1])})
    with monkeypatch.context() as m:
        m.setattr(watchdog, "current", lambda: watch)
        m.setattr(record, "_gradients", [0, 0])
        try:
            compare(of(parts[0]))(mine)
        except LaunchError as error:
            return str(error)
    return ""


was_given = record.was_given


def _ids(seed: int, rows: int = 1024, length: int = 256) -> Tensor:
    """Of which every row begins alike."""
    found = torch.randint(1000, (rows, length), generator=torch.Generator().manual_seed(seed))
    found[:, 0] = 1
    return found


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64])
def test_batches_of_another_shuffle_are_told_of(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ((_ids(seed) % 255 if dtype != torch.bool else _ids(seed) % 2).to(dtype) for seed in (0, 1))
    fixed = torch.ones(3)
    assert "ranks 0 and 1 were given different batches. Give every rank the same" in _told([fixed, one], [fixed, other], monkeypatch)
    assert _told([fixed, one], [fixed, one.clone()], monkeypatch) == ""
    assert _told([one.t()], [one.t().contiguous()], monkeypatch) == "", "strides are not compared"
    assert _told([one, fixed * 2, other], [other, fixed * 2, one], monkeypatch), "which input it is counts"


@pytest.mark.parametrize("classes", [1, 7, 255, 256, 5000])
def test_gradients_of_other_targets_are_told_of(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they differ in the places of two classes alone, of each token."""
    torch.manual_seed(0)
    logits = torch.randn(300, classes, dtype=torch.float64)
    one, other = (torch.softmax(logits, 1) / 300 for _ in range(2))
    if classes == 1:
        one, other = logits, logits.flip(0)
    else:
        one[range(300), torch.randint(classes, (300,))] -= 1 / 300
        other[range(300), torch.randint(classes, (300,))] -= 1 / 300
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a, b, c = (x.to(dtype) for x in (one, other, one + torch.randn_like(one) * one.abs() * 2**-24))
        assert "have made different losses" in _told([a], [b], monkeypatch, gradients=True)
        assert _told([a], [c], monkeypatch, gradients=True) == ""


def test_gradients_of_nearly_the_same_loss_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks smooth the labels of 12 samples by numbers of their own: a part in two thousand in the mean."""
    target = torch.zeros(12, 4, dtype=torch.float64).index_fill_(1, torch.tensor([1]), 1.0)
    probabilities = torch.softmax(torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), 1)
    one, other = (probabilities - (1 - k) * target - k / 4 for k in (0.05, 0.0507))
    assert "different losses" in _told([one], [one * 1.001], monkeypatch, gradients=True), "of another factor"
    for dtype in (torch.float64, torch.float32):
        assert "different losses" in _told([one.to(dtype)], [other.to(dtype)], monkeypatch, gradients=True)
    assert _told([one.bfloat16()], [(one * (1 + 2**-10)).bfloat16()], monkeypatch, gradients=True) == "", "which 16 bits round"


def test_inputs_that_ranks_round_otherwise_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 128)
    near = x + torch.randn_like(x) * 2**-20
    assert _told([x, _ids(0)], [near, _ids(0)], monkeypatch) == ""
    x[3], near[3] = torch.inf, torch.inf
    x[4], near[4] = torch.nan, torch.nan
    assert _told([x], [near], monkeypatch) == ""


def test_each_data_parallel_rank_has_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _told([_ids(0)], [_ids(1)], monkeypatch, parts=(0, 1)) == ""
    assert "autopar.sampler(dataset, model) says which" in _told([_ids(0)], [_ids(1)], monkeypatch, parts=(1, 1))


def test_numbers_that_are_on_their_way_are_read_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a GPU: the call is not waited for, and the error is of the call in which it was given."""
    def on_its_way(one: Any) -> Any:
        return dataclasses.replace(one, numbers=[torch.stack(one.numbers).double()], ready=SimpleNamespace(query=lambda: there))

    there, found = False, []
    watch = _watching(0, {})
    given = GivenBatches(SimpleNamespace(talks=True, world=2, dp=SimpleNamespace(rank=0, size=2)), local=False)  # type: ignore[arg-type]
    sent = given._sent
    monkeypatch.setattr(watchdog, "current", lambda: watch)
    monkeypatch.setattr(given, "_sent", lambda *call: on_its_way(sent(*call)))
    monkeypatch.setattr(record, "was_given", lambda *numbers: found.append(numbers[0]) or was_given(*numbers))
    for _ in range(3):
        record.step(1)
        given.compare([_ids(0)])
    assert found == []
    there = True
    record.step(1)
    given.compare([_ids(0)])
    last = record.calls()
    assert found == [last - 3, last - 2, last - 1, last]



def test_gradients_of_several_calls_in_one_backward_pass_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules were called before one backward pass: another rank that has come further in it was given others since."""
    numbers: list[int] = []
    mesh: Any = SimpleNamespace(talks=True, world=2, dp=SimpleNamespace(rank=0, size=2))
    first, second = GivenBatches(mesh, local=False), GivenBatches(mesh, local=False)
    monkeypatch.setattr(watchdog, "current", lambda: _watching(0, {}))
    monkeypatch.setattr(record, "was_given", lambda *given: numbers.append(given[0]) or was_given(*given))
    for _ in range(2):
        record.step(1)
        record.step(1)
        for given in (second, first, second):
            given.compare_gradients([torch.randn(40)])
    assert len({*numbers}) == 6 and numbers == sorted(numbers)
    assert [record.given_in(n, record.GRADIENTS_OF) for n in numbers] == 3 * [record.calls() - 2] + 3 * [record.calls()]
