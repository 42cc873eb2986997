"""Buffers that a program cannot hold, as plain attributes while a model is captured: a forward that does not read them needs none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from autopar.run.inputs import not_dense

__all__ = ["sparse_buffers_aside"]


@contextlib.contextmanager
def sparse_buffers_aside(model: nn.Module) -> Iterator[None]:
    """Inside, buffers that are not dense, and in no state_dict, are plain attributes of their modules. The compiled model keeps them as
    they are; a forward that reads one is refused where it does."""
    before: list[tuple[nn.Module, dict[str, torch.Tensor | None], list[str]]] = []
    for module in model.modules():
        held = module._buffers
        aside = [name for name in sorted(module._non_persistent_buffers_set) if (b := held.get(name)) is not None and not_dense(b)]
        if aside:
            before.append((module, dict(held), aside))
            vars(module).update({name: held.pop(name) for name in aside})
    try:
        yield
    finally:
        for module, held, aside in before:
            for name in aside:
                vars(module).pop(name, None)
            module._buffers.clear()
            module._buffers.update(held)
