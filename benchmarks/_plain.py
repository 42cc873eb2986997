"""What `gpu` and `one_gpu` have beside autopar's: a model by plain torch in a lower precision, and times of a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.run.precision import compute_dtype

__all__ = ["between_s", "in_precision", "now"]


def in_precision(model: nn.Module, precision: str) -> Callable[..., Tensor]:
    """The model as it is called in a precision: where that is lower than its parameters', they and its inputs are cast before they are
    used, but for those of batch norms, whose statistics are in float32."""
    dtype = compute_dtype(model, precision)
    if dtype is None:
        return model
    kept = {id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    parameters = dict(model.named_parameters())

    def called(*args: Any, **kwargs: Any) -> Tensor:
        own = {name: p if id(p) in kept else p.to(dtype) for name, p in parameters.items()}
        given = pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
        found: Tensor = torch.func.functional_call(model, own, *given)
        return found

    return called


def now(device: str) -> Any:
    """When what the device ('cuda', 'cpu') has been given is done: to be waited for, and compared by between_s."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_s(a: Any, b: Any) -> float:
    return float(b - a) if isinstance(a, float) else a.elapsed_time(b) / 1e3
