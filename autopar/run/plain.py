"""Tensors of any class as plain ones: what torch's own documentation of tensor subclasses does it by has no public name."""

from __future__ import annotations

import torch

__all__ = ["plainly"]

plainly = torch._C.DisableTorchFunctionSubclass  # a context: inside, __torch_function__ of no subclass is asked
