"""The base class of an emitted pipeline stage, and recompute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.run.mesh import Mesh
from autopar.run.saved import keeps_graphs
from autopar.run.weights import Weights, buffers_kept

__all__ = ["Stage", "recompute"]


class Stage(nn.Module):
    """What one pipeline stage runs for one micro-batch.

    An emitted subclass states `receives` and `sends` ((shape, dtype name) of each activation; all floating, all with a
    gradient) and defines `forward(self, *received, **inputs) -> tuple`: the activations to send, or (loss,) on the last
    stage, and then its `outputs`, which the user is given. The parallel module sets `weights` before each step, and `mesh` once.
    """

    receives: ClassVar[tuple[tuple[tuple[int, ...], str], ...]] = ()
    sends: ClassVar[tuple[tuple[tuple[int, ...], str], ...]] = ()
    outputs: ClassVar[tuple[tuple[tuple[int, ...], str], ...]] = ()
    weights: Weights
    mesh: Mesh

    def __call__(self, *received: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Hooks of all modules are told of the model's alone: a stage is none of them."""
        found: tuple[Tensor, ...] = (self._compiled_call_impl or self.forward)(*received, **inputs)
        return found

    def forward(self, *received: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"{type(self).__name__} does not define forward")


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return contextlib.nullcontext(), buffers_kept()


def recompute(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), which keeps only its tensor arguments for the backward pass and runs again there.

    The second run has the random numbers of the first, and its updates of buffers (batch norm's running statistics) are
    dropped: they have been made. fn must not read a buffer that the step changes elsewhere.
    """
    if keeps_graphs():  # of which a second gradient would run it a third time
        return fn(*args)
    return checkpoint(fn, *args, use_reentrant=False, context_fn=_contexts)
