"""What a forward asks of its inputs in Python: the branch is the one that it takes itself, for every batch, under every plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.answers import QUESTIONS, given_by
from autopar.errors import CaptureError
from autopar.run import WorkerPool
from autopar.run.region import REGION

Asks = Callable[["Tagger", Tensor, Tensor], bool]
SIZE, LENGTH, WORDS = 8, 5, 12


class Tagger(nn.Module):
    """A class of each word; words that a mask leaves out have label -100. Its loss is another for another answer of `asks`."""

    padding: Tensor

    def __init__(self, asks: Asks) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up, self.down = nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("padding", torch.tensor(0))
        self.asks = asks

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.words(ids)))
        if self.asks(self, ids, mask):
            h = h * mask[..., None]
        return F.cross_entropy(self.down(h).flatten(0, 1), labels.flatten())


def not_all_ones(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    return not torch.all(mask == 1)


def any_padding(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    return bool((ids == m.padding).any())


def equal_lengths(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    lengths = mask.sum(1)
    return torch.equal(lengths, lengths[:1].expand_as(lengths))


def written_first(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    seen = mask.clone()
    seen[:, 0] = 0
    seen.mul_(2)
    return bool(seen.sum() > mask.numel())


def in_a_loop(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    steps = 0
    while (mask.sum(1) > steps).all():
        steps += 1
    return steps < 3


def a_number(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    return int(mask.sum(1).min()) < 4


def an_item(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    return mask.sum().item() < mask.numel() - 4


def a_list(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    return min(mask.sum(1).tolist()) < 4


ASKED: list[Asks] = [not_all_ones, any_padding, equal_lengths, written_first, in_a_loop, a_number, an_item, a_list]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of samples that are whole, mostly, or all of one length."""
    g = torch.Generator().manual_seed(seed)
    shortest = (LENGTH, LENGTH, LENGTH - 1, 1)[seed % 4]
    lengths = torch.randint(shortest, LENGTH + 1, (SIZE, 1), generator=g) if seed % 3 else torch.full((SIZE, 1), shortest)
    ids = torch.randint(seed % 2, WORDS, (SIZE, LENGTH), generator=g)
    labels = torch.randint(3, (SIZE, LENGTH), generator=g)
    return ids, (torch.arange(LENGTH) < lengths).long(), labels


@pytest.mark.pure
@pytest.mark.parametrize("asks", ASKED)
def test_answers_are_those_of_the_model_itself(asks: Asks) -> None:
    model = Tagger(asks)
    captured = capture(model, batch(1))
    held = dict(model.named_buffers()).__getitem__
    first, seen = asks(model, *batch(1)[:2]), set()
    for seed in range(40):
        given = batch(seed)
        changed = captured.answers.changed(held, given_by((given, {})).__getitem__) is not None
        same = asks(model, *given[:2]) == first
        assert changed or same
        seen.add(same)
    assert seen == {True, False}
    assert any(asks.__name__ in note or "test_asked_of_inputs.py" in note for note in captured.program.notes)


def of_what_is_computed(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    return bool(m.words(ids).sum() > 0)


def drawn(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    return bool((torch.rand(len(mask)) * mask.sum(1)).sum() > 10)


def too_often(m: Tagger, ids: Tensor, mask: Tensor) -> bool:
    return sum(bool(x > 0) for x in mask.flatten()[: QUESTIONS + 1]) > 3


@pytest.mark.pure
@pytest.mark.parametrize("asks", [of_what_is_computed, drawn, too_often])
def test_what_more_than_the_batch_decides_is_refused(asks: Asks) -> None:
    with pytest.raises(CaptureError, match="test_asked_of_inputs.py"):
        capture(Tagger(asks), batch(1))


class Chosen(Tagger):
    """The words of the first sample are chosen by a mask that it is written to."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        chosen = torch.zeros(WORDS, dtype=torch.bool)
        chosen[ids[0]] = True
        h = torch.tanh(self.up(self.words.weight))[:, None]
        return self.down(h[chosen]).square().mean() + 0 * mask.sum() * labels.sum()


@pytest.mark.pure
def test_sizes_that_a_written_mask_decides_run_as_they_are_written() -> None:
    captured = capture(Chosen(not_all_ones), batch(1))
    assert captured.answers.of_inputs is None and not captured.answers.questions
    assert any(op.target == REGION for op in captured.program.ops)


@pytest.mark.pure
def test_without_values_it_is_refused_as_before() -> None:
    with pytest.raises(CaptureError, match="test_asked_of_inputs.py"):
        capture(Tagger(not_all_ones).to("meta"), tuple(t.to("meta") for t in batch(1)))


def trained(asks: Asks, pins: dict[str, Any], local: bool) -> tuple[list[float], list[float], int]:
    """Losses of steps on batches of both answers, those of one process, and how often the model was captured again."""
    model, plain = Tagger(asks).double(), Tagger(asks).double()
    compiled: Any = autopar.compile(model, gpus=2, cluster="cpu", pins=pins, example_inputs=batch(1), local_batch=local)
    size = SIZE // compiled.data_ranks
    part = slice(size * compiled.data_rank, size * (compiled.data_rank + 1))
    found: list[list[float]] = []
    for one, cut in ((compiled, part), (plain, slice(None))):
        optimizer, losses = torch.optim.SGD(one.parameters(), lr=0.5), []
        for seed in (1, 3, 2, 5, 7, 9, 11, 4):
            optimizer.zero_grad()
            ids, mask, labels = (t[cut] for t in batch(seed))
            loss = one(ids, mask=mask, labels=labels)  # by name, where the example was by position
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    return found[0], found[1], compiled._forms._captures


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("asks", "pins", "local"),
    [
        (not_all_ones, {"dp": 2}, False), (not_all_ones, {"tp": 2}, False), (not_all_ones, {"pp": 2, "micro_batches": 2}, False),
        (not_all_ones, {"dp": 2, "zero": 3}, True), (an_item, {"dp": 2}, True), (an_item, {"tp": 2}, False),
    ],
)  # fmt: skip
def test_batches_of_both_answers_train_as_on_one_process(pool: WorkerPool, asks: Asks, pins: dict[str, Any], local: bool) -> None:
    run = functools.partial(trained, asks)
    for losses, expected, captures in pool.run(run, pins, local):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert captures >= 1
        assert asks is an_item or captures == 1, "each answer is captured once"


def apart() -> None:
    """A mask of ones on one rank, of both on the other, where later calls compare few elements."""
    compiled: Any = autopar.compile(Tagger(not_all_ones).double(), gpus=2, cluster="cpu", pins={"dp": 2}, example_inputs=batch(1))
    ids, _, labels = batch(1)
    for number in range(40):
        mask = torch.ones_like(ids)
        if number > 20 and dist.get_rank() == 1:
            mask[3, 2:] = 0
        compiled(ids, mask, labels).backward()


@pytest.mark.gloo
def test_ranks_whose_batches_answer_otherwise_are_told(pool: WorkerPool) -> None:
    with pytest.raises(autopar.LaunchError, match="rank 1 has to capture Tagger again .*mask.*rank 0 does not"):
        pool.run(apart, timeout_s=120)
