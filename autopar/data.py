"""Which samples a rank loads."""

from __future__ import annotations

from collections.abc import Sized

from torch.utils.data import Dataset, DistributedSampler

from autopar.run import ParallelModule
from autopar.run.deferred import DeferredModule

__all__ = ["sampler"]


def sampler(
    dataset: Dataset[object], model: ParallelModule | DeferredModule, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
) -> DistributedSampler[object]:
    """The sampler of a DataLoader on this rank: of its data-parallel part where the module was compiled with local_batch=True, whose
    batch_size is then that of the plan divided by `model.data_ranks`; else of all samples, in the same order on every rank.

    As with torch's DistributedSampler, `set_epoch` shuffles anew. drop_last: leave out the samples that do not divide among the parts;
    else some are given twice. A DataLoader has its own drop_last, for a last batch that is short. TypeError if the dataset has no length.
    """
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"{type(dataset).__name__} has no length: an iterable dataset deals out its samples itself. Let it give every "
            f"model.data_ranks-th sample, beginning with number model.data_rank"
        )
    return DistributedSampler(
        dataset, num_replicas=model.data_ranks, rank=model.data_rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )  # fmt: skip
