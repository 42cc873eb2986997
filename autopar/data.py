"""Which samples a rank loads, and batches of a few sizes of samples of many lengths."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, Sampler, default_collate

from autopar.run import ParallelModule
from autopar.run.deferred import DeferredModule

__all__ = ["Padding", "batches", "sampler"]

Key = str | int


def sampler(
    dataset: Dataset[object], model: ParallelModule | DeferredModule, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
) -> DistributedSampler[object]:
    """The sampler of a DataLoader on this rank: of its data-parallel part where the module was compiled with local_batch=True, whose
    batch_size is then that of the plan divided by `model.data_ranks`; else of all samples, in the same order on every rank.

    shuffle, seed: as of torch's DistributedSampler, with the same seed on all ranks; `set_epoch` shuffles anew. drop_last: leave out the
    samples that do not divide among the parts; else some are given twice. A DataLoader has its own drop_last, for a last batch that is
    short. TypeError if the dataset has no length.
    """
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"{type(dataset).__name__} has no length: an iterable dataset deals out its samples itself. Let it give every "
            f"model.data_ranks-th sample, beginning with number model.data_rank"
        )
    return DistributedSampler(
        dataset, num_replicas=model.data_ranks, rank=model.data_rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )  # fmt: skip


class Padding:
    """The collate_fn of a DataLoader: batches of one size, of sequences of a few lengths: a module is captured for each length once.

        pad = autopar.Padding({"input_ids": 0, "labels": -100}, lengths=(128, 256, 512), batch_size=8, labels="labels")
        DataLoader(dataset, batch_size=8, collate_fn=pad)

    fill: the tensors of a sample that grow, each by its name (its position, where samples are tuples), with the value that fills them, at
    the end of their first dim. lengths: what they grow to: the least that holds the longest of the batch; None: they are left as they are.
    batch_size: what a short batch grows to, by copies of its first sample in which every label has its value of `fill`; None: not at all.
    labels: the name of these labels, tensors or whole numbers. collate: makes the batch of the padded samples; by default torch's.

    The result is that of the batch without padding where the loss leaves out labels of that value (ignore_index), a position reads no later
    one or has a mask, and samples do not meet (in batch norm they do). Raises ValueError for a sample that is longer than the longest of
    `lengths`, and KeyError or IndexError for a sample without one of the names.
    """

    def __init__(
        self, fill: Mapping[Key, float], *, lengths: Sequence[int] | None = None, batch_size: int | None = None, labels: Key | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:  # fmt: skip
        if batch_size is not None and labels not in fill:
            raise ValueError(
                f"batch_size={batch_size} needs labels=NAME, one of {list(fill)}: what is added to a batch must not be trained on"
            )
        self.lengths = _sorted(lengths) if lengths is not None else None
        self._fill, self._batch_size, self._labels, self._collate = dict(fill), batch_size, labels, collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The batch of these samples."""
        own: list[Any] = [dict(s) if isinstance(s, Mapping) else list(s) for s in samples]
        if self._batch_size is not None:
            if len(own) > self._batch_size:
                raise ValueError(f"a batch of {len(own)} samples is larger than batch_size={self._batch_size} of autopar.Padding")
            own += [self._ignored(own[0]) for _ in range(self._batch_size - len(own))]
        if self.lengths is not None:
            longest = max(len(sample[key]) for sample in own for key in self._fill)
            to = length_for(longest, self.lengths)
            for sample in own:
                for key, value in self._fill.items():
                    sample[key] = _grown(torch.as_tensor(sample[key]), to, value)
        return self._collate([sample if isinstance(sample, dict) else tuple(sample) for sample in own])

    def _ignored(self, sample: Any) -> Any:
        made = sample.copy()
        assert self._labels is not None
        value, label = self._fill[self._labels], made[self._labels]
        made[self._labels] = torch.full_like(label, value) if isinstance(label, Tensor) else type(label)(value)
        return made


def length_for(length: int, lengths: Sequence[int]) -> int:
    """The least of the sorted lengths that holds a sequence. ValueError if none does."""
    place = bisect.bisect_left(lengths, length)
    if place == len(lengths):
        raise ValueError(
            f"a sequence of length {length} is longer than the longest of lengths={tuple(lengths)}: add a length, or cut the sequence"
        )
    return lengths[place]


def batches(
    sizes: Sequence[int], model: ParallelModule | DeferredModule, *, batch_size: int, lengths: Sequence[int], shuffle: bool = True,
    seed: int = 0, drop_last: bool = False,
) -> Batches:  # fmt: skip
    """The batch_sampler of a DataLoader: batches whose samples are padded to the same of a few lengths (see `Padding`).

    sizes: the length of each sample. batch_size: of the global batch, in samples; where `model` was compiled with local_batch=True each
    rank is given its part, and all ranks batches of the same length. lengths: in positions, as of `Padding`. The last batch of a length may
    be short: Padding(batch_size=...) fills it, with that of a rank's part; drop_last leaves it out. One with fewer samples than there are
    parts is always left out. shuffle: samples and batches, by `seed`, which is the same on all ranks, and anew by `set_epoch`. Raises
    ValueError, on all ranks, for a sample that is longer than the longest of `lengths`, or a batch_size that does not divide among the
    ranks.
    """
    if batch_size % model.data_ranks:
        raise ValueError(f"a global batch of {batch_size} samples does not divide among {model.data_ranks} data-parallel ranks")
    return Batches(
        sizes, batch_size=batch_size, lengths=lengths, part=model.data_rank, parts=model.data_ranks, shuffle=shuffle, seed=seed,
        drop_last=drop_last,
    )  # fmt: skip


class Batches(Sampler[list[int]]):
    """What `batches` gives: part `part` of `parts` of each batch."""

    def __init__(
        self, sizes: Sequence[int], *, batch_size: int, lengths: Sequence[int], part: int, parts: int, shuffle: bool, seed: int,
        drop_last: bool,
    ) -> None:  # fmt: skip
        ordered = _sorted(lengths)
        self._of_length: dict[int, list[int]] = {}
        for index, size in enumerate(sizes):
            self._of_length.setdefault(length_for(int(size), ordered), []).append(index)
        self._batch_size, self._part, self._parts, self._shuffle, self._seed = batch_size, part, parts, shuffle, seed
        self._least = batch_size if drop_last else parts
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Batches and their order are other ones in each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return sum(len(own) // self._batch_size + (len(own) % self._batch_size >= self._least) for own in self._of_length.values())

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        found: list[list[int]] = []
        for length in sorted(self._of_length):
            own = self._of_length[length]
            order = [own[i] for i in torch.randperm(len(own), generator=generator, device="cpu")] if self._shuffle else own
            cut = (order[i : i + self._batch_size] for i in range(0, len(order), self._batch_size))
            found += [batch for batch in cut if len(batch) >= self._least]
        if self._shuffle:
            found = [found[i] for i in torch.randperm(len(found), generator=generator, device="cpu")]
        return (batch[self._part :: self._parts] for batch in found)


def _sorted(lengths: Sequence[int]) -> tuple[int, ...]:
    found = tuple(sorted(set(lengths)))
    if not found or found[0] < 1:
        raise ValueError(f"lengths must be positive whole numbers; got {tuple(lengths)}")
    return found


def _grown(tensor: Tensor, length: int, value: float) -> Tensor:
    more = tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)
    return torch.cat([tensor, more])
