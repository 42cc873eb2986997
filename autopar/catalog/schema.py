"""Operator names resolved to torch's operators and their signatures: the one place that reads torch's schemas.

`OpOverload._schema` is private; nothing public gives argument names and defaults. Tested on the torch versions we support.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch._library.custom_ops import OPDEFS

from autopar.ir import Arg, Op, Ref

__all__ = ["Parameter", "bind", "parameters", "registering_module", "resolve", "tensor_refs"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operator. is_tensor: of type Tensor or Tensor?; is_list: a list of tensors."""

    name: str
    is_tensor: bool
    is_list: bool
    default: Arg
    has_default: bool
    mutated: bool
    kwarg_only: bool


@cache
def resolve(target: str) -> torch._ops.OpOverload:
    """'aten.linear.default' -> torch.ops.aten.linear.default. KeyError if torch has no such operator."""
    namespace, name, overload = target.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        raise KeyError(f"torch has no operator {target!r}") from None


def registering_module(target: str) -> str | None:
    """The Python module whose import registers a custom operator; None for torch's own, for autopar's, and where it cannot be
    told (an operator of the user's script, which registers it in every process that runs it)."""
    namespace, name, _ = target.split(".")
    if namespace in ("aten", "prims", "autopar"):
        return None
    defined = OPDEFS.get(f"{namespace}::{name}")
    module = getattr(defined._init_fn, "__module__", None) if defined is not None else None
    return None if module in (None, "__main__") else str(module)


@cache
def parameters(target: str) -> tuple[Parameter, ...]:
    """The operator's parameters in schema order; none for autopar's own operators."""
    if target.startswith("autopar."):
        return ()
    found = []
    for a in resolve(target)._schema.arguments:
        kind = str(a.type)
        default = tuple(a.default_value) if isinstance(a.default_value, list) else a.default_value
        found.append(
            Parameter(
                name=a.name,
                is_tensor=kind in ("Tensor", "Optional[Tensor]"),
                is_list="List[Tensor]" in kind or "List[Optional[Tensor]]" in kind,
                default=default,
                has_default=a.has_default_value(),
                mutated=bool(a.alias_info is not None and a.alias_info.is_write),
                kwarg_only=a.kwarg_only,
            )
        )
    return tuple(found)


def bind(op: Op) -> dict[str, Arg]:
    """The operator's arguments by parameter name, defaults filled in."""
    bound: dict[str, Arg] = {p.name: p.default for p in parameters(op.target) if p.has_default}
    for p, a in zip(parameters(op.target), op.args, strict=False):
        bound[p.name] = a
    bound.update(op.kwargs)
    return bound


def tensor_refs(op: Op) -> dict[str, int | None]:
    """Tensor parameter -> index of its Ref in refs(op), or None where the optional tensor is absent."""
    bound = bind(op)
    positions: dict[str, int | None] = {}
    order = [*(p.name for p, _ in zip(parameters(op.target), op.args, strict=False)), *(k for k, _ in op.kwargs)]
    start: dict[str, int] = {}
    count = 0
    for name in order:
        start[name] = count
        count += _count(bound[name])
    for p in parameters(op.target):
        if p.is_tensor:
            positions[p.name] = start[p.name] if isinstance(bound.get(p.name), Ref) else None
    return positions


def _count(arg: Arg) -> int:
    if isinstance(arg, Ref):
        return 1
    return sum(map(_count, arg)) if isinstance(arg, tuple) else 0
