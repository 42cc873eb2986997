"""Collectives of torch.distributed that users call with parameters and gradients, as who averages gradients by hand does.

They are given whole tensors, which are the same on every rank, and what they have written goes back into the parts. Where a torch asks no
subclass of tensors (2.11 in most of them), they would send the memory of a part, and are refused.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch.distributed as dist

from autopar.run.lies import Lies

__all__ = ["COLLECTIVES", "finished", "not_in_parts"]

COLLECTIVES = frozenset({
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter",
})  # fmt: skip


def finished(found: Any) -> Any:
    """What a collective has given; it has written what it writes."""
    if isinstance(found, dist.Work):
        found.wait()
    return found


def not_in_parts(lies: Lies, frame: FrameType) -> None:
    """TypeError where torch.distributed is about to send the memory of a part, or of a copy. frame: who asks whether it is complex, as
    torch does of each tensor that it sends."""
    if lies.split and frame.f_globals.get("__name__") == dist.broadcast.__module__:
        while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension
            frame = frame.f_back
        raise TypeError(
            f"{lies.name} is held in parts by several processes, and torch.distributed.{frame.f_code.co_name} of this version of torch "
            f"would send this rank's part. Parameters and gradients are the same on all ranks already. Where a collective is needed, call "
            f"it inside of `with model.full_parameters():`"
        )
