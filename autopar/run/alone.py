"""A model computes with the global batch, as on one process: to code of its forward torch.distributed says that there is no other.

Else a sum over ranks in it (of a codebook, a centre, a queue) would count every sample once for each rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from autopar.run import record

__all__ = ["as_one_process"]

_PAUSE_S = 0.001


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, there is no process group of all ranks: is_initialized() is False, and a collective over it raises ValueError. Waits for a
    save that a thread does beside training, which asks for that group too."""
    everyone = dist.group.WORLD if dist.is_available() else None
    if everyone is None:
        yield
        return
    while record.saves_beside():
        time.sleep(_PAUSE_S)
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = everyone
