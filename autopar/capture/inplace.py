"""Which operator computes what an in-place one writes, found by their schemas.

`torch.ops.OpOverload._schema` is private; nothing public gives the types of arguments.
"""

from __future__ import annotations

from functools import cache

import torch

from autopar.capture.interpret import resolve
from autopar.ir import Arg, Op

__all__ = ["functional_form", "functional_target"]

_OTHER_NAMES = {"normal_": "normal_functional"}


@cache
def functional_form(target: str) -> tuple[str, tuple[int, ...]] | None:
    """The overload that returns what `target` ('aten.pow_.Tensor') writes to its first argument, and for each of its positional arguments
    the position in those of `target`; None if there is none. Of several, the overload of the same name first."""
    namespace, name, overload = target.split(".")
    # __iand__ writes what __and__ gives
    plain = f"__{name[3:]}" if name.startswith("__i") else _OTHER_NAMES.get(name, name.removesuffix("_"))
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in resolve(target)._schema.arguments]
    overloads = sorted(packet.overloads(), key=lambda o: o != overload)
    for match in (_in_order, _by_name):
        for other in overloads:
            schema = resolve(f"{namespace}.{plain}.{other}")._schema
            returned = [str(r.type) for r in schema.returns]
            if schema.is_mutable or returned != ["Tensor"]:
                continue
            order = match(wanted, [(a.name, str(a.type)) for a in schema.arguments])
            if order is not None:
                return f"{namespace}.{plain}.{other}", order
    return None


def _in_order(wanted: list[tuple[str, str]], found: list[tuple[str, str]]) -> tuple[int, ...] | None:
    """The same types, and behind the first argument the same names."""
    same = [t for _, t in wanted] == [t for _, t in found] and [n for n, _ in wanted[1:]] == [n for n, _ in found[1:]]
    return tuple(range(len(found))) if same else None


def _by_name(wanted: list[tuple[str, str]], found: list[tuple[str, str]]) -> tuple[int, ...] | None:
    """The same arguments in another order; else, of the same number and types, whatever they are called."""
    if sorted(wanted) == sorted(found):
        return tuple(wanted.index(f) for f in found)
    return tuple(range(len(found))) if [t for _, t in wanted] == [t for _, t in found] else None


def functional_target(op: Op) -> tuple[str, tuple[Arg, ...]] | None:
    """The functional overload for a call of an in-place operator, and its positional arguments; None if there is none."""
    found = functional_form(op.target)
    if found is None:
        return None
    target, order = found
    own, others = (resolve(t)._schema.arguments for t in (op.target, target))
    args = list(op.args)
    for k in range(len(args), len(own)):  # what it may leave out, and the other may not
        if own[k].kwarg_only or op.kwarg(own[k].name) is not None or others[order.index(k)].has_default_value():
            break
        args.append(own[k].default_value)
    return target, tuple(args) if order == tuple(range(len(order))) else tuple(args[k] for k in order if k < len(args))
