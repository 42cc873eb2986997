"""Whole state dicts as torch.distributed.checkpoint gives them, of a model and of its optimizers:

    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

Of a DTensor torch makes the whole on all ranks together, before rank 0 alone keeps it; here it is done so of what is in parts. (What it
calls for that is private; there is no other way.)
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.run.part import AnyPart, Parted, lies_of, local

__all__ = ["whole_where_full"]

_API = "torch.distributed.checkpoint.state_dict"


def whole_where_full() -> None:
    """Have torch's functions give whole tensors from now on, if they have been imported."""
    if (api := sys.modules.get(_API)) is not None:
        _watch(api)


@functools.cache
def _watch(api: Any) -> None:
    gather = api._gather_state_dict

    @functools.wraps(gather)
    def gathered(state_dict: Any, *args: Any, ranks_only: tuple[int, ...] = (), **kwargs: Any) -> Any:
        kept = not ranks_only or torch.distributed.get_rank() in ranks_only
        on_cpu = bool(kwargs.get("cpu_offload"))
        whole = pytree.tree_map_only(Parted, functools.partial(_whole, kept=kept, on_cpu=on_cpu), state_dict)
        return gather(whole, *args, ranks_only=ranks_only, **kwargs)

    api._gather_state_dict = gathered


def _whole(part: AnyPart, *, kept: bool, on_cpu: bool) -> Tensor:
    """Collective."""
    whole = lies_of(part).gather(local(part))
    if not kept:
        return whole.new_empty(0)
    return whole.cpu() if on_cpu else whole
