"""Tensors of any class as plain ones: what torch's own documentation of tensor subclasses does it by has no public name. And who asks a
tensor of a subclass."""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["asker", "plainly"]

plainly = torch._C.DisableTorchFunctionSubclass  # a context: inside, __torch_function__ of no subclass is asked


def asker(depth: int = 1) -> FrameType:
    """The frame of the code that calls a torch function, for __torch_function__ of a subclass, or for what is `depth` - 1 frames above
    that. Modes of torch functions (torch.set_default_device is one) stand between them and are passed over."""
    frame = sys._getframe(depth + 1)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__name__") == torch.overrides.__name__
    ):
        frame = frame.f_back
    return frame
