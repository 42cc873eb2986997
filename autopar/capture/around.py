"""What is around the call that is captured, torch.autocast above all: the model runs in it, and nothing else of capture does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from autopar.run.autocast import Autocast, ambient, under, without
from autopar.run.checkpointed import without_checkpointing

__all__ = ["as_called", "capturing"]

_AROUND: ContextVar[tuple[Autocast, ...]] = ContextVar("autocast around the call", default=())


@contextlib.contextmanager
def capturing() -> Iterator[tuple[Autocast, ...]]:
    """Inside, autocast is off, except for what runs as_called(): that is in the state that was on here."""
    around = ambient()
    token = _AROUND.set(around)
    try:
        with without():
            yield around
    finally:
        _AROUND.reset(token)


@contextlib.contextmanager
def as_called() -> Iterator[None]:
    """Inside, the user's model runs, in the autocast state of the call that is captured, and keeps what its operators keep."""
    with under(_AROUND.get()), without_checkpointing():
        yield
