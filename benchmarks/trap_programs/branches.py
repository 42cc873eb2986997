"""What a forward asks of its batch in Python: whether a mask leaves anything out, which task a batch is of, how long its longest sequence
is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import BATCH, CLASSES, HIDDEN, Compile, Net, Results, batch, program, seeded, state, train

KIND = "values"
LENGTH = 6


class _Sequences(nn.Module):
    """Words [batch, length], how many of each are no padding, and a class of each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(16, 8), nn.Linear(8, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def hidden(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.words(ids)))


def _sequences(lengths: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 16, (BATCH, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < lengths[:, None]
    return ids * mask, mask.long(), torch.randint(CLASSES, (BATCH,), generator=generator)


def _of_lengths() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches that are whole, padded, whole again, and padded otherwise."""
    whole, some = torch.full((BATCH,), LENGTH), torch.arange(BATCH) % LENGTH + 1
    return [_sequences(lengths, seed) for seed, lengths in enumerate((whole, some, whole, some.flip(0), (some + 2).clamp(max=5)))]


def _trained(compile: Compile, build: type[nn.Module], given: list[tuple[Any, ...]]) -> Results:
    model = compile(seeded(build), example_inputs=given[0])
    losses = train(model, inputs=given)
    with torch.no_grad():
        losses += [model(*one).item() for one in given[:2]]
    return {"losses": losses, "state": state(model)}


class _Masked(_Sequences):
    def forward(self, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        kept: Tensor | None = mask
        if torch.all(mask == 1):
            kept = None
        h = self.hidden(ids)
        pooled = h.mean(1) if kept is None else (h * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)
        return F.cross_entropy(self.head(pooled), y)


@program(KIND)
def mask_left_out_where_it_is_of_ones(compile: Compile) -> Results:
    """As transformers does before attention."""
    return _trained(compile, _Masked, _of_lengths())


class _ToTheLongest(_Sequences):
    def forward(self, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        longest = int(mask.sum(1).max())
        positions = torch.arange(longest, dtype=torch.get_default_dtype()) / longest
        h = self.hidden(ids[:, :longest]) + positions[None, :, None]
        return F.cross_entropy(self.head(h.mean(1)), y)


@program(KIND)
def cut_to_the_longest_of_the_batch(compile: Compile) -> Results:
    """A number of the batch that sizes follow from."""
    return _trained(compile, _ToTheLongest, _of_lengths())


class _Tasks(Net):
    """Two tasks, each with a head of its own, of which a batch has one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, y: Tensor, task: Tensor) -> Tensor:
        head = self.head if task[0] == 0 else self.other
        return F.cross_entropy(head(self.hidden(x)), y % head.out_features)


@program(KIND)
def batches_of_two_tasks(compile: Compile) -> Results:
    """The head is chosen by the batch; the other one has no gradient then."""
    return _trained(compile, _Tasks, [(*batch(i), torch.full((BATCH,), i % 3 // 2)) for i in range(6)])


class _Labelled(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.logits(x)
        if not (y >= 0).any():
            return logits.square().mean()
        return F.cross_entropy(logits, y, ignore_index=-1)


@program(KIND)
def batches_without_a_label(compile: Compile) -> Results:
    """A cross-entropy of no label would be nan."""
    given = [batch(i) for i in range(4)]
    return _trained(compile, _Labelled, [(x, y if i % 2 == 0 else torch.full_like(y, -1)) for i, (x, y) in enumerate(given)])


class _WarmedUp(Net):
    def forward(self, x: Tensor, y: Tensor, step: Tensor) -> Tensor:
        logits = self.logits(x)
        loss = F.cross_entropy(logits, y)
        return loss + 0.1 * logits.square().mean() if step >= 3 else loss


@program(KIND)
def term_from_a_step_that_is_given(compile: Compile) -> Results:
    """The number of the step is an input."""
    return _trained(compile, _WarmedUp, [(*batch(i), torch.tensor(i)) for i in range(5)])


class _Counted(_Sequences):
    def forward(self, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        h = self.hidden(ids) * mask[..., None]
        if mask.sum().item() < mask.numel():
            h = h / mask.sum(1)[:, None, None]
        return F.cross_entropy(self.head(h.sum(1)), y)


@program(KIND)
def words_counted_by_item(compile: Compile) -> Results:
    """A number that is asked for by .item(), and compared."""
    return _trained(compile, _Counted, _of_lengths())
