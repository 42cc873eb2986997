"""The adapter to torch's stack of dispatch modes, which is private."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = ["none", "those_of_the_user_aside"]


@contextlib.contextmanager
def none() -> Iterator[None]:
    """Inside, tensors are computed with as if nothing were traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def those_of_the_user_aside() -> Iterator[None]:
    """Inside, modes that look at operators (FlopCounterMode, and those of users) see none: what is computed is not what the user's program
    computes. A FakeTensorMode stays, with all that is beside it: what is computed is of its tensors."""
    stack = _get_current_dispatch_mode_stack()
    with _disable_current_modes() if stack and not any(isinstance(mode, FakeTensorMode) for mode in stack) else contextlib.nullcontext():
        yield
