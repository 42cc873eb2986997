"""Batches that do not divide among the data-parallel ranks, or into micro-batches, give what they give on one process."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import LaunchError
from autopar.run import WorkerPool
from benchmarks._traps_kit import batch
from benchmarks._traps_run import Judge
from tests.in_turn import in_turn

pytestmark = pytest.mark.gloo

ODD = in_turn("odd", ("dp2",), ("zero3",))


@pytest.mark.parametrize("name", ODD)
def test_programs_with_odd_batches_are_right(name: str, judge: Judge) -> None:
    assert judge.not_right(name, ODD[name]) == []


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.drop(torch.relu(self.first(x)))), y)


def _compiled(zero: int) -> autopar.ParallelModule:
    return autopar.compile(Dropping(), 2, example_inputs=batch(), cluster="cpu", pins={"dp": 2, "zero": zero})


def _told() -> list[str]:
    parallel = _compiled(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for size in (7, 12, 5, 7):
            parallel(*batch(size=size)).backward()
    return [str(w.message) for w in found if "does not divide" in str(w.message)]


def test_it_is_told_once_that_every_rank_computes_all_of_it(pair: WorkerPool) -> None:
    first, other = pair.run(_told, timeout_s=60)
    assert len(first) == 1 and "a batch of 7 does not divide among 2 data-parallel ranks" in first[0]
    assert other == []


def _dropped(zero: int) -> tuple[list[float], dict[str, Tensor]]:
    parallel = _compiled(zero)
    optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.0), []
    for size in (12, 7, 7, 1):
        loss = parallel(*batch(size=size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, parallel.full_gradients()


@pytest.mark.parametrize("zero", [0, 3])
def test_all_ranks_draw_the_same_for_it(zero: int, pair: WorkerPool) -> None:
    (losses, gradients), (others, other_gradients) = pair.run(_dropped, zero, timeout_s=60)
    assert losses == others
    assert losses[1] != losses[2]  # weights do not move: each call draws anew
    assert gradients.keys() == other_gradients.keys()
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def _first_of(size: int, example: bool) -> float:
    model = autopar.compile(Dropping().eval(), 2, cluster="cpu", pins={"dp": 2}, example_inputs=batch() if example else None)
    return float(model(*batch(size=size)))


def test_a_first_batch_that_does_not_divide_is_no_example(pair: WorkerPool) -> None:
    """What is said of it does: with an example of the usual size such a batch is computed."""
    with pytest.raises(LaunchError, match=r"does not divide into 2 ranks[\s\S]*batch of this first call[\s\S]*example_inputs="):
        pair.run(_first_of, 5, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = float(Dropping().eval()(*batch(size=5)))
        assert pair.run(_first_of, 5, True) == pytest.approx([expected, expected], rel=1e-5)
