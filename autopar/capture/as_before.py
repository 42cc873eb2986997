"""The model's own forward may run inside, and all that it changes is as before afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.capture.state import State
from autopar.run.part import is_part
from autopar.run.standing_buffers import is_expanded

__all__ = ["as_before", "left_as_it_was", "plain_as_before", "values_as_before"]


@contextlib.contextmanager
def left_as_it_was(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None = None, params: Iterable[torch.Tensor] | None = None
) -> Iterator[None]:
    """Inside, the model's own forward may run; afterwards its buffers, attributes, and what its code keeps elsewhere are as before, and
    its parameters. params: those to which it may write, if that is known."""
    with as_before(model, State.take(model, loss), model.parameters() if params is None else params):
        yield


@contextlib.contextmanager
def as_before(model: nn.Module, start: State, params: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Everything is as before afterwards: registries, the values of buffers and plain tensors, all that the State shows. params: those to
    which the forward may write. Parameters of a parallel module, to which a hook of the loop may lead, are none that it writes to: to
    compare one all ranks would have to gather it."""
    buffers = [(b, b.detach().clone()) for b in (*model.buffers(), *params) if not is_expanded(b)]
    try:
        with plain_as_before(start):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:  # all of them: batch norm writes without raising their versions
                buffer.detach().copy_(value)


@contextlib.contextmanager
def plain_as_before(start: State) -> Iterator[None]:
    """All that the State shows is as before afterwards; parameters and buffers are as they are."""
    with values_as_before(start.tensors.values()):
        try:
            yield
        finally:
            start.restore()


@contextlib.contextmanager
def values_as_before(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """What is written to these tensors inside is undone afterwards; parts, and tensors of inference mode, are as they are."""
    before = [(t, t._version, t.detach().clone()) for t in tensors if not (t.is_inference() or is_part(t))]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in before:
                if tensor._version != version or (tensor.layout == torch.strided and not tensor.is_meta and not tensor.equal(value)):
                    tensor.detach().copy_(value)
