"""The adapter to torch.utils.checkpoint: what a model wraps in it runs as if it were called by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint
from torch import Tensor

from autopar.run.saved import without_hooks

__all__ = ["functions_called", "not_kept_for_later", "without_checkpointing"]


def not_kept_for_later() -> contextlib.AbstractContextManager[object]:
    """Inside, torch.utils.checkpoint around a call does not replace what is kept for backward by a promise to run the call again: a stage
    of a pipeline runs backward within the call, and would begin the call anew, each rank at another time."""
    return without_hooks(torch.utils.checkpoint.__name__)


@contextlib.contextmanager
def without_checkpointing() -> Iterator[None]:
    """Inside, torch.utils.checkpoint calls its function and keeps what that keeps. What runs again in backward is the plan's to decide,
    and in a program it cannot be seen; and a module that runs on other tensors than its own (torch.func.functional_call) would run again on
    its own, when these are back in their places."""
    module = torch.utils.checkpoint
    apply, generator = module.CheckpointFunction.__dict__.get("apply"), module._checkpoint_without_reentrant_generator
    module.CheckpointFunction.apply = staticmethod(_called)  # type: ignore[method-assign]
    module._checkpoint_without_reentrant_generator = _nothing_around
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        if apply is None:
            del module.CheckpointFunction.apply
        else:
            module.CheckpointFunction.apply = apply  # type: ignore[method-assign]


def functions_called() -> int:
    """How often torch.utils.checkpoint has called a function `without_checkpointing`, so far."""
    return _count


_count = 0


def _called(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """As use_reentrant=True has it: gradients flow through what is returned only if one of the arguments has one."""
    global _count
    _count += 1
    if any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return function(*args)
    with torch.no_grad():
        return function(*args)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    """In place of what use_reentrant=False does before and after the function."""
    global _count
    _count += 1
    yield
