"""What operators do that their schemas do not say: buffers that they change in place, operands that they return as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir import Op, Ref

__all__ = ["EFFECTS", "changed_in_place", "operand_returned", "packet"]

# target -> (position of the flag that says so, positions of the buffers)
EFFECTS = {"aten.batch_norm.default": (5, (3, 4)), "aten.instance_norm.default": (5, (3, 4))}
_ALWAYS = {"autopar.L.sync_batch_norm": (3, 4)}  # target of an operator on one rank -> positions of the buffers


def changed_in_place(op: Op) -> tuple[str, ...]:
    """The buffers that an operator changes, which keep their names: of all that read them, the order counts."""
    flag, positions = EFFECTS.get(op.target, (None, _ALWAYS.get(op.target, ())))
    if flag is not None and not op.args[flag]:
        return ()
    return tuple(a.name for p in positions if isinstance(a := op.args[p], Ref))


def packet(target: torch._ops.OpOverload) -> str:
    """An operator's name without that of its overload: 'aten.to'."""
    return str(target).rpartition(".")[0]


def operand_returned(node: fx.Node, target: torch._ops.OpOverload, named: Mapping[str, Any]) -> fx.Node | None:
    """The operand of a traced operator, if that gives the very tensor that it was given, through which gradients go on also where they are
    off. named: its arguments, by name."""
    first, result = node.args[0] if node.args else None, node.meta["val"]
    if not isinstance(first, fx.Node) or not isinstance(result, Tensor):
        return None
    return first if _is_returned(packet(target), named, first.meta["val"], result) else None


def _is_returned(name: str, named: Mapping[str, Any], operand: Tensor, result: Tensor) -> bool:
    if (operand.shape, operand.dtype, operand.device, operand.layout) != (result.shape, result.dtype, result.device, result.layout):
        return False
    if name in ("aten.to", "aten.type_as"):
        asked = named.get("memory_format")
        return not named.get("copy") and (asked in (None, torch.preserve_format) or operand.is_contiguous(memory_format=asked))
    if name == "aten.flatten":
        dims = operand.dim()
        first, last = named.get("start_dim", 0), named.get("end_dim", -1)
        return dims > 0 and first % dims == last % dims
    return (name == "aten.resolve_conj" and not operand.is_conj()) or (name == "aten.resolve_neg" and not operand.is_neg())
