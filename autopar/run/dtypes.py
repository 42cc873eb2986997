"""Dtypes by the names that manifests and stages give them.

`getattr(torch, name)` would follow whoever has changed torch's own names for a while (see capture.lift), and a buffer made so for a
message would not have the sender's dtype: it would be read as garbage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PRECISIONS", "dtype_named", "empty", "itemsize_named"]

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""What a user calls a precision -> the dtype."""

_BY_NAME = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def dtype_named(name: str) -> torch.dtype:
    """'float32' -> torch.float32. Raises ValueError on a name that no dtype has."""
    if name not in _BY_NAME:
        raise ValueError(f"{name!r} is not a dtype of torch")
    return _BY_NAME[name]


def itemsize_named(precision: str | None) -> int | None:
    """Bytes of a number of that precision ('bf16', ...); None of None."""
    return None if precision is None else dtype_named(PRECISIONS[precision]).itemsize


def empty(shape: Sequence[int], dtype: str, device: torch.device | str) -> Tensor:
    """Room for a tensor, uninitialised."""
    return torch.empty(tuple(shape), dtype=dtype_named(dtype), device=device)
