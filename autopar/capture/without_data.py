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

__all__ = ["on_meta", "values"]

_VALUES: ContextVar[Mapping[Leaf, Tensor] | None] = ContextVar("the values of what is captured without them", default=None)


def values() -> Mapping[Leaf, Tensor]:
    """By name or path, the buffers and inputs that have values, and stand on the meta device for the time of a capture."""
    return _VALUES.get() or {}


@contextlib.contextmanager
def on_meta(model: nn.Module, inputs: Any) -> Iterator[dict[int, Tensor]]:
    """Inside, the buffers of a model of which some parameter is on the meta device are there, too. inputs: those of a call, (args, kwargs).
    Gives, by the id of a tensor that stands there for a buffer, that buffer: it is filled for the time inside."""
    of: dict[int, Tensor] = {}
    if not any(p.is_meta for p in model.parameters()):
        yield of
        return
    known: dict[Leaf, Tensor] = {name: b for name, b in model.named_buffers(remove_duplicate=False) if not b.is_meta}
    known.update(given_by(inputs).items())
    standing: dict[int, Tensor] = {}
    places = [(m._buffers, key, b) for m in model.modules() for key, b in m._buffers.items() if b is not None and not b.is_meta]
    for registry, key, buffer in places:
        if id(buffer) not in standing:
            made = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="meta")
            standing[id(buffer)], of[id(made)] = made, buffer
        registry[key] = standing[id(buffer)]
    token = _VALUES.set(known)
    try:
        yield of
    finally:
        _VALUES.reset(token)
        for registry, key, buffer in places:
            registry[key] = buffer
