"""Tensors of any class as plain ones: what torch's own documentation of tensor subclasses does it by has no public name. Who asks a tensor
of a subclass; and whose code has led to what is warned of."""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["asker", "is_size", "plainly", "users_level"]

plainly = torch._C.DisableTorchFunctionSubclass  # a context: inside, __torch_function__ of no subclass is asked


def is_size(x: object) -> bool:
    """Of what pytree is to leave alone: a torch.Size would come back as a tuple, and `x.new(size)` takes that for elements."""
    return isinstance(x, torch.Size)


def asker(depth: int = 1) -> FrameType:
    """The frame of the code that calls a torch function, for __torch_function__ of a subclass, or for what is `depth` - 1 frames above
    that. Modes of torch functions (torch.set_default_device is one) stand between them and are passed over."""
    frame = sys._getframe(depth + 1)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__name__") == torch.overrides.__name__
    ):
        frame = frame.f_back
    return frame


def users_level() -> int:
    """The `stacklevel` of a warning, for the function that calls this: of the last code that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("autopar", "torch"):
        frame, level = frame.f_back, level + 1
    return level
