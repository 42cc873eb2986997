"""The order of samples on processes that are all given all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

__all__ = ["shuffled_alike"]


def shuffled_alike(sampler: Any, of_process_0: Callable[[int], int]) -> torch.Generator | None:
    """Collective: a sampler that would draw from the generator of each process draws from one of its own, with the seed of process 0, which
    is returned. of_process_0: gives every process the number of that one."""
    if getattr(sampler, "generator", sampler) is not None:
        return None
    sampler.generator = torch.Generator().manual_seed(of_process_0(int(torch.randint(2**62, (), device="cpu"))))
    return cast("torch.Generator", sampler.generator)
