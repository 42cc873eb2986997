"""A model whose parameters have no data: all of it is captured on the meta device, and what has data, as buffers may, is known by its
values all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.answers import Leaf, given_by
from autopar.run.without_data import lacks_data

__all__ = ["on_meta", "values"]

_VALUES: ContextVar[Mapping[Leaf, Tensor] | None] = ContextVar("the values of what is captured without them", default=None)


def values() -> Mapping[Leaf, Tensor]:
    """By name or path, the buffers and inputs that have values, and stand on the meta device for the time of a capture."""
    return _VALUES.get() or {}


@contextlib.contextmanager
def on_meta(model: nn.Module, inputs: Any, *, any_model: bool = False) -> Iterator[dict[int, Tensor]]:
    """Inside, all of a model of which some parameter is on the meta device is there; any_model: of others too. inputs: those of a call,
    (args, kwargs). Gives, by the id of a tensor that stands there for a parameter or buffer with data, that one."""
    of: dict[int, Tensor] = {}
    if not (any_model or lacks_data(model)):
        yield of
        return
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known: dict[Leaf, Tensor] = {name: t for name, t in held if not t.is_meta}
    known.update(given_by(inputs).items())
    standing: dict[int, Tensor] = {}
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    places = [(table, key, t) for table in tables for key, t in table.items() if t is not None and not t.is_meta]
    for table, key, t in places:
        if id(t) not in standing:
            standing[id(t)] = made = _stand_in(t)
            of[id(made)] = t
        table[key] = standing[id(t)]
    token = _VALUES.set(known)
    try:
        yield of
    finally:
        _VALUES.reset(token)
        for table, key, t in places:
            table[key] = t


def _stand_in(t: Tensor) -> Tensor:
    """Another one on the meta device, with the same hooks."""
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    if isinstance(t, nn.Parameter):
        made = nn.Parameter(made, requires_grad=t.requires_grad)
        made._backward_hooks, made._post_accumulate_grad_hooks = t._backward_hooks, t._post_accumulate_grad_hooks
    return made
