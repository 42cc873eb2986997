"""A model computes with the global batch, as on one process: to code of its forward torch.distributed says that there is no other.

Else a sum over ranks in it (of a codebook, a centre, a queue) would count every sample once for each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

__all__ = ["as_one_process"]


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, there is no process group of all ranks: is_initialized() is False, and a collective over it raises ValueError."""
    everyone = dist.group.WORLD if dist.is_available() else None
    if everyone is None:
        yield
        return
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = everyone
