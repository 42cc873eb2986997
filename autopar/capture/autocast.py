"""torch.autocast, around the call that is captured and inside of the model: the casts that it makes become operators of the program."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.casts import CAST, Casting
from autopar.capture.export import quiet
from autopar.capture.infer import Inference, Meta
from autopar.capture.interpret import resolve, run_op
from autopar.capture.region_ops import HOOK
from autopar.capture.trace import Trace, Traced
from autopar.errors import CaptureError
from autopar.ir import Op, Ref, map_refs, refs
from autopar.run.autocast import Autocast, under
from autopar.run.region import REGION

__all__ = ["with_casts"]


def with_casts(trace: Trace, infer: Inference) -> Trace:
    """The trace with an operator for each cast that autocast makes of an operand. Which casts these are is asked of torch: each distinct
    call runs once on fake tensors inside autocast. (Autocast keeps what it has cast of a parameter; here it is cast at each use, and the
    gradients of several uses are added in the parameter's own precision.) CaptureError if an operator's precision has no such form."""
    if not any(t.autocast for t in trace.ops):
        return trace
    return _Casts(trace, infer).run()


class _Casts:
    def __init__(self, trace: Trace, infer: Inference) -> None:
        self.trace, self.infer, self.mode = trace, infer, FakeTensorMode()
        self.casting = Casting(trace, trace.metas)
        self.known: dict[object, Mapping[int, torch.dtype]] = {}

    def run(self) -> Trace:
        for traced in self.trace.ops:
            op = traced.op
            if traced.autocast and op.target not in (REGION, HOOK, CAST):
                op = self._explicit(traced)
            self.casting.add(traced.with_op(op))
        return self.casting.trace()

    def _explicit(self, traced: Traced) -> Op:
        op, order = traced.op, list(dict.fromkeys(refs(traced.op)))
        nameless = map_refs(op, lambda name: Ref(str(order.index(name))))
        metas = [self.casting.metas[n] for n in order]
        key = op.target, repr((nameless.args, nameless.kwargs)), tuple(metas), traced.autocast
        if key not in self.known:
            self.known[key] = _casts_of(nameless, metas, traced.autocast, self.mode)
        casts = {order[k]: dtype for k, dtype in self.known[key].items()}
        if _writes(op):  # what is written to keeps its dtype
            return self.casting.with_operands(traced, casts) if casts else op
        wanted = [self.trace.metas[o].dtype for o in op.outputs if o is not None]
        if self._dtypes(op, casts) == wanted:
            return self.casting.with_operands(traced, casts)
        accepts = {a.name for a in resolve(op.target)._schema.arguments}
        if "dtype" in accepts and op.kwarg("dtype") is None and len(op.args) <= _position(op, "dtype"):
            asked = dataclasses.replace(op, kwargs=(*((k, v) for k, v in op.kwargs if k != "dtype"), ("dtype", wanted[0])))
            if self._dtypes(asked, {}) == wanted:
                return asked
        floating = [n for n in order if self.casting.metas[n].dtype in (torch.float32, torch.float16, torch.bfloat16)]
        for dtype in dict.fromkeys((*wanted, *(a.dtype for a in traced.autocast))):
            whole = {n: dtype for n in floating if self.casting.metas[n].dtype != dtype}
            if self._dtypes(op, whole) == wanted:
                return self.casting.with_operands(traced, whole)
        raise CaptureError(
            f"{traced.autocast[0]} makes {op.target} compute in a precision that no cast of its operands gives\n  at {op.source}\n  what "
            f"to do: compute it inside of torch.autocast(..., enabled=False) with explicit casts"
        )

    def _dtypes(self, op: Op, casts: Mapping[str, torch.dtype]) -> list[torch.dtype] | None:
        metas = self.casting.metas | {n: dataclasses.replace(self.casting.metas[n], dtype=dtype) for n, dtype in casts.items()}
        with quiet(), contextlib.suppress(RuntimeError, TypeError, ValueError):
            return [m.dtype for m in self.infer(op, metas) if m is not None]
        return None


def _writes(op: Op) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in resolve(op.target)._schema.arguments)


def _position(op: Op, argument: str) -> int:
    return [a.name for a in resolve(op.target)._schema.arguments].index(argument)


def _casts_of(op: Op, metas: list[Meta], state: tuple[Autocast, ...], mode: FakeTensorMode) -> dict[int, torch.dtype]:
    """The operands, by number, that autocast casts before anything is computed."""
    device = torch.device(state[0].device)
    with mode, torch.no_grad():
        env = {str(i): torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device=device) for i, m in enumerate(metas)}
        seen = _FirstCasts({id(t): int(name) for name, t in env.items()})
        with contextlib.suppress(_NoMore), under(state), seen:
            run_op(op, env, device)
    return seen.casts


class _NoMore(Exception):  # noqa: N818  (no error: what is asked is known)
    """Something other than a cast of an operand runs."""


class _FirstCasts(TorchDispatchMode):
    def __init__(self, operands: Mapping[int, int]) -> None:
        super().__init__()
        self.operands, self.casts = operands, dict[int, torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        operand = self.operands.get(id(args[0])) if args else None
        if func is not torch.ops.aten._to_copy.default or operand is None or kwargs.get("dtype") is None:
            raise _NoMore
        self.casts[operand] = kwargs["dtype"]
        return func(*args, **kwargs)
