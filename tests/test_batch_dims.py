"""The batch is followed by its dims: what has its size by chance is neither cut with it nor gathered for it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.compiler import emit, plan_of
from autopar.errors import Infeasible
from autopar.planner.moments import batched_inputs, split_into_moments
from autopar.run import WorkerPool
from autopar.verify import TOLERANCE, verify


class Tokens(nn.Module):
    """A layer of attention over tokens of `width`, with a mask, positions and weights of the classes as inputs."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(classes, width), nn.Embedding(64, width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, classes)
        self.square = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(places)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out((q @ k.transpose(1, 2)).masked_fill(mask, -1e9).softmax(-1) @ v) + torch.tanh(x @ self.square.t())
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), weight=weights)


def tokens(batch: int, length: int, width: int, classes: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(classes, (batch, length))
    mask, places = torch.ones(length, length, dtype=torch.bool).triu(1), torch.arange(length)
    given = {"ids": ids, "labels": ids.roll(1, 1), "mask": mask, "places": places, "weights": torch.linspace(0.5, 1.5, classes)}
    return Tokens(width, classes), given


class Mixing(nn.Module):
    """Constants of lengths, products of a weight with itself, and a row that is put before each sample."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.mix, self.positions = nn.Parameter(torch.randn(length, length)), nn.Parameter(torch.randn(length, width))
        self.square, self.first = nn.Parameter(torch.randn(width, width) / width), nn.Parameter(torch.randn(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = torch.einsum("st,bth->bsh", self.mix.tril(), x + self.positions)
        scores = (mixed @ x.transpose(1, 2)).masked_fill(torch.ones(length, length).triu(1) > 0, -1e9)
        y = scores.softmax(-1) @ mixed @ torch.matrix_exp(self.square - self.square.T)
        far = (torch.arange(length)[:, None] - torch.arange(length)[None]).abs().to(x.dtype)
        y = y + (torch.exp(-far) @ torch.exp(-far)).softmax(-1) @ y
        return torch.cat([self.first.expand(batch, -1, -1), y], 1).square().mean()


def mixing(batch: int, length: int, width: int) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Mixing(length, width), (torch.randn(batch, length, width),)


def batched(model: nn.Module, inputs: Any) -> set[str]:
    return set(batched_inputs(capture(model, inputs, check=False).program))


def collectives(model: nn.Module, inputs: Any, **pins: int) -> Counter[str]:
    """What one rank's program communicates, by kind."""
    captured = capture(model, inputs, check=False)
    source = emit(captured, plan_of(captured, 2, pins=pins, cluster="cpu"))
    return Counter(re.findall(r"\bC\.(all_gather|all_reduce|reduce_scatter|all_to_all)\(", source))


@pytest.mark.pure
@pytest.mark.parametrize("sizes", [(8, 12, 20, 28), (16, 16, 20, 28), (16, 12, 20, 16), (16, 16, 16, 16)], ids=str)
def test_inputs_are_told_by_their_dims(sizes: tuple[int, int, int, int]) -> None:
    assert batched(*tokens(*sizes)) == {"ids", "labels"}


@pytest.mark.pure
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_input_is_gathered_because_it_is_as_large_as_the_batch(micro_batches: int) -> None:
    apart, same = (collectives(*tokens(*sizes), dp=2, micro_batches=micro_batches) for sizes in ((16, 12, 20, 28), (16, 16, 16, 16)))
    assert same == apart


@pytest.mark.pure
def test_no_value_is_cut_and_gathered_because_it_is_as_large_as_the_batch() -> None:
    assert collectives(*mixing(32, 12, 20), dp=2) == collectives(*mixing(32, 32, 32), dp=2) == Counter(all_reduce=1)


class Sequences(nn.Module):
    """Torch's own attention, which puts the sequence before the batch, merges both for its last product, and heads behind the batch."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.patches, self.layers = nn.Conv2d(3, 128, 8, stride=8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.patches(x).flatten(2).transpose(1, 2)).square().mean()


def sequences() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Sequences(), (torch.randn(16, 3, 64, 64),)


@pytest.mark.pure
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_batch_is_followed_behind_a_sequence(micro_batches: int) -> None:
    """Many divisors of its other dims may be segments too, and none of them is the sequence's length."""
    assert collectives(*sequences(), dp=2, micro_batches=micro_batches) == Counter(all_reduce=1)


@pytest.mark.gloo
def test_a_batch_behind_a_sequence_is_exact(workers: WorkerPool) -> None:
    for pins in ({"dp": 4}, {"dp": 2, "tp": 2, "micro_batches": 2}):
        report = verify(*sequences(), 4, pins=pins, steps=2, pool=workers)
        assert report.ok and max(report.loss, report.gradient, report.parameter) < TOLERANCE, report


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, near: Tensor, far: Tensor, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        scores = h @ x.transpose(1, 2)
        return self.out(torch.where(near, scores, scores * 0.5).masked_fill(far, 0.0) @ h).square().sum()


@pytest.mark.pure
def test_more_masks_than_batches_do_not_outvote_it() -> None:
    masks = [torch.eye(16) > 0, torch.ones(16, 16).triu(3) > 0]
    assert batched(Masked(), (*masks, torch.randn(16, 16, 16))) == {"x"}


@pytest.mark.pure
def test_every_sample_against_every_other_is_the_batch_twice() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, a: Tensor, b: Tensor, pairs: Tensor) -> Tensor:
            return F.cross_entropy(self.left(a) @ self.right(b).T, pairs)

    assert batched(Contrast(), (torch.randn(12, 8), torch.randn(12, 8), torch.arange(12))) == {"a", "b", "pairs"}


@pytest.mark.pure
def test_inputs_that_never_meet_are_believed_by_their_size() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.one(a).square().sum() + self.other(b).abs().sum()

    assert batched(Apart(), (torch.randn(6, 6), torch.randn(6, 6))) == {"a", "b"}


@pytest.mark.pure
def test_micro_batches_have_the_whole_mask() -> None:
    program = capture(*tokens(16, 16, 16, 16), check=False).program
    body = split_into_moments(program, 4).body
    assert body.types["mask"].shape == (16, 16) and body.types["ids"].shape == (4, 16)
    assert set(batched_inputs(body)) & {"ids", "labels", "mask", "places", "weights"} == {"ids", "labels"}


@pytest.mark.gloo
def test_all_sizes_equal_is_exact(workers: WorkerPool) -> None:
    for made, pins in ((tokens(8, 8, 8, 8), {"dp": 2, "tp": 2, "micro_batches": 2}), (mixing(8, 8, 8), {"dp": 4})):
        report = verify(*made, 4, pins=pins, steps=2, pool=workers)
        assert report.ok and max(report.loss, report.gradient, report.parameter) < TOLERANCE, report


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(8, 8, 2, batch_first=batch_first), nn.Linear(8, 4)

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor], y: Tensor | None = None) -> Tensor:
        h, (last, _) = self.layers(x, states)
        return self.out(h).square().mean() if y is None else F.cross_entropy(self.out(last[-1]), y)


STATES = torch.zeros(2, 12, 8), torch.zeros(2, 12, 8)


@pytest.mark.pure
def test_states_of_layers_do_not_outvote_the_batch() -> None:
    program = capture(Recurrent(True), (torch.randn(12, 6, 8), STATES), check=False).program
    assert (program.batch_size, program.batched, program.notes) == (12, ("x",), ())


@pytest.mark.pure
def test_a_batch_behind_the_time_is_that_of_the_labels() -> None:
    program = capture(Recurrent(False), (torch.randn(6, 12, 8), STATES, torch.zeros(12).long()), check=False).program
    assert (program.batch_size, program.batched, program.notes) == (12, ("y",), ())


@pytest.mark.pure
def test_where_no_first_dim_is_a_batch_none_is_split() -> None:
    captured = capture(Recurrent(False), (torch.randn(6, 12, 8), STATES), check=False)
    said = "inputs: their first dims have the sizes 6, 2; none of them is seen to be the batch, so no plan divides it"
    assert (captured.program.batch_size, captured.program.notes) == (None, (said,))
    with pytest.raises(Infeasible, match="no input has a dim that could be the batch"):
        plan_of(captured, 2, pins={"dp": 2}, cluster="cpu")


@pytest.mark.pure
@pytest.mark.parametrize("trained_before", [False, True])
def test_sequences_of_different_lengths_are_no_batches(trained_before: bool) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.out = nn.Linear(8, 8) if trained_before else nn.Identity(), nn.Linear(8, 4)

        def forward(self, parts: list[Tensor], y: Tensor) -> Tensor:
            whole = nn.utils.rnn.pad_sequence([self.before(x) for x in parts], batch_first=True)
            return F.cross_entropy(self.out(whole.sum(1)), y)

    program = capture(Padded(), ([torch.randn(2 + k % 3, 8) for k in range(12)], torch.arange(12) % 4), check=False).program
    assert (program.batch_size, program.batched) == (12, ("y",))


@pytest.mark.pure
@pytest.mark.parametrize("batch", [1, 4])
def test_two_masks_as_long_as_the_sequences_are_no_batch(batch: int) -> None:
    near, far = torch.eye(6, dtype=torch.bool), torch.ones(6, 6, dtype=torch.bool).triu(3)

    program = capture(Masked(), (near, far, torch.randn(batch, 6, 16)), check=False).program
    assert (program.batch_size, program.batched) == (batch, ("x",))
