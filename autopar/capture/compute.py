"""The program of a model that computes in a lower precision than its parameters rest in (`run.precision`).

It is captured as if its parameters were of the lower dtype; then they are what they are, and each use of one is a cast.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autopar.capture.casts import Casting
from autopar.capture.trace import Trace
from autopar.errors import CaptureError, NoLoss
from autopar.ir import refs

__all__ = ["explained", "with_casts_of"]


@contextlib.contextmanager
def explained(dtype: torch.dtype | None) -> Iterator[None]:
    """A CaptureError from inside says what else there is, where everything is cast."""
    try:
        yield
    except CaptureError as e:
        if dtype is None or isinstance(e, NoLoss):
            raise
        name = str(dtype).removeprefix("torch.")
        raise CaptureError(
            f"{e}\n  with its float32 parameters and inputs in {name}; if it is that which fails, call the model inside of "
            f"torch.autocast(dtype=torch.{name}) and leave precision='fp32': that casts operator by operator"
        ) from e


def with_casts_of(
    trace: Trace, mutations: tuple[tuple[str, str], ...], originals: Mapping[str, Tensor]
) -> tuple[Trace, tuple[tuple[str, str], ...]]:
    """The trace and its mutations in which parameters and inputs are of the dtypes of these tensors, by value name, and are cast where
    they are used."""
    computed = {name: trace.metas[name].dtype for name, tensor in originals.items() if trace.metas[name].dtype != tensor.dtype}
    if not computed:
        return trace, mutations
    casting = Casting(trace, {**trace.metas, **{n: dataclasses.replace(trace.metas[n], dtype=originals[n].dtype) for n in computed}})
    for traced in trace.ops:
        wanted = {name: computed[name] for name in dict.fromkeys(refs(traced.op)) if name in computed}
        casting.add(traced.with_op(casting.with_operands(traced, wanted)))
    ends = tuple((b, casting.cast(v, computed[v], trace.ops[-1]) if v in computed else v) for b, v in mutations)
    return casting.trace(), ends
