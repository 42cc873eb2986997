"""The program of a model that computes in a lower precision than its parameters rest in (`run.precision`).

It is captured as if its parameters were of the lower dtype; then they are what they are, and each use of one is a cast.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autopar.capture.trace import Trace, Traced
from autopar.errors import CaptureError, NoLoss
from autopar.ir import Op, Ref, map_refs, refs

__all__ = ["explained", "with_casts_of"]

CAST = "aten.to.dtype"


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
    metas, storages = dict(trace.metas), dict(trace.storages)
    computed = {name: metas[name].dtype for name, tensor in originals.items() if metas[name].dtype != tensor.dtype}
    if not computed:
        return trace, mutations
    metas |= {name: dataclasses.replace(metas[name], dtype=originals[name].dtype) for name in computed}
    storage, ops = min(storages.values(), default=0), list[Traced]()

    def cast(name: str, place: Traced) -> str:
        nonlocal storage
        storage -= 1
        made = trace.names.fresh(f"{name}_{str(computed[name]).removeprefix('torch.')}")
        metas[made], storages[made] = dataclasses.replace(metas[name], dtype=computed[name]), storage
        by = place.op
        op = Op(target=CAST, args=(Ref(name), computed[name]), outputs=(made,), no_grad=by.no_grad, module=by.module, source=by.source)
        ops.append(dataclasses.replace(place, op=op))
        return made

    for traced in trace.ops:
        made = {name: cast(name, traced) if name in computed else name for name in dict.fromkeys(refs(traced.op))}
        ops.append(dataclasses.replace(traced, op=_renamed(traced.op, made)))
    mutations = tuple((buffer, cast(value, trace.ops[-1]) if value in computed else value) for buffer, value in mutations)
    return dataclasses.replace(trace, ops=tuple(ops), metas=metas, storages=storages), mutations


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    return map_refs(op, lambda name: Ref(names[name]))
