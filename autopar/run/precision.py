"""A model that computes in a lower precision than its parameters rest in: float32 parameters and inputs are cast where they are used, so
that a gradient is cast back before it is added to another. Buffers keep their dtype, and so do parameters that are not float32 and those
of batch norms, which stand beside running statistics (FullyShardedDataParallel's mixed precision leaves these out as well)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["compute_dtype", "computing_in", "inputs_in"]

_WITH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(model: nn.Module, precision: str) -> torch.dtype | None:
    """What a model's float32 parameters are cast to for a precision; None if nothing is cast: of a model without such parameters, and
    for 'fp32' and 'fp64', which name what a model computes in by itself."""
    return _LOWER.get(precision) if any(p.dtype == torch.float32 for p in model.parameters()) else None


def inputs_in(dtype: torch.dtype | None, inputs: Any) -> Any:
    """The inputs, float32 ones cast; None leaves them as they are."""
    if dtype is None:
        return inputs
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.dtype == torch.float32 else t, inputs
    )


@contextlib.contextmanager
def computing_in(dtype: torch.dtype | None, model: nn.Module) -> Iterator[Mapping[int, Tensor]]:
    """Inside, the model's float32 parameters hold values of this dtype. Holds what they are outside, by the id of the parameter."""
    before: dict[int, tuple[nn.Parameter, Tensor]] = {}
    try:
        if dtype is not None:
            kept = {id(p) for m in model.modules() if isinstance(m, _WITH_STATISTICS) for p in m.parameters(recurse=False)}
            for parameter in model.parameters():
                if parameter.dtype == torch.float32 and id(parameter) not in kept:
                    before[id(parameter)] = parameter, parameter.data
                    parameter.data = parameter.data.to(dtype)
        yield {key: data for key, (_, data) in before.items()}
    finally:
        for parameter, data in before.values():
            parameter.data = data
