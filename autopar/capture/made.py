"""Buffers that the first call of a model makes, where nothing was before, and that its state_dict holds from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from autopar.capture.held import ABSENT
from autopar.capture.state import Change
from autopar.errors import CaptureError

__all__ = ["holding", "in_the_state", "made_of"]


def in_the_state(model: nn.Module) -> frozenset[str]:
    """The names of the buffers that the state_dict holds."""
    modules = model.named_modules(remove_duplicate=False)
    return frozenset(f"{m}.{k}" if m else k for m, x in modules for k in x._buffers.keys() - x._non_persistent_buffers_set)


def made_of(settled: Iterable[Change], saved: frozenset[str]) -> dict[str, torch.Tensor]:
    """Of what the first call makes and later ones keep, the buffers of these names, by name."""
    new = (c for c in settled if c.path in saved and (c.before is None or c.before is ABSENT))
    return {c.path: c.after.detach().clone() for c in new if isinstance(c.after, torch.Tensor)}


@contextlib.contextmanager
def holding(model: nn.Module, made: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the model holds these buffers, as after its first call. CaptureError for those without data."""
    if without := [name for name, t in made.items() if t.is_meta]:
        raise CaptureError(
            f"the first call of {type(model).__name__} makes the buffer {without[0]}, which its state_dict holds from then on, and which "
            f"has no values on the meta device\n  what to do: build the model with data, register the buffer when the model is built, or "
            f"with persistent=False"
        )
    before = []
    for name, tensor in made.items():
        path, _, last = name.rpartition(".")
        registry = model.get_submodule(path)._buffers
        before.append((registry, dict(registry)))
        registry[last] = tensor
    try:
        yield
    finally:
        for registry, items in reversed(before):
            registry.clear()
            registry.update(items)
