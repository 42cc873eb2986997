"""What capture and planning compute is not what the user's program computes, and what watches that is not to see it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autopar.run.dispatch_modes import those_of_the_user_aside
from autopar.run.hooks import without_followers
from autopar.run.saved import without_hooks

__all__ = ["unwatched"]


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside, modes that look at operators, tools of torch that follow which module runs, hooks on what is saved for backward and
    detect_anomaly are not in force."""
    with those_of_the_user_aside(), without_followers(), without_hooks():
        with torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else contextlib.nullcontext():
            yield
