"""FLOPs of what runs, backward passes inside of it too (which torch's own counter cannot run beside), and about how much work a program
is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autopar.ir import Op, Program, refs
from autopar.run.region import REGION

__all__ = ["CountedFlops", "work_of"]

ELEMENT = 30.0  # FLOPs of products, in the time of which a core makes one element of anything else
_BY_LAST_DIM = {"linear": 0, "mm": 0, "bmm": 0, "matmul": 0, "mv": 0, "_grouped_mm": 0, "grouped_mm_fallback": 0, "addmm": 1, "baddbmm": 1}
"""Operator -> the operand over whose last dim it sums products."""


class CountedFlops(TorchDispatchMode):
    """flops: of the operators that ran inside, by torch's formulas; others count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and (formula := _FORMULAS.get(func.overloadpacket)) is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


_FORMULAS: Mapping[Any, Callable[..., Any]] = flop_registry


def work_of(program: Program) -> float:
    """About the FLOPs of a forward and a backward pass, where each element that an operator makes counts as ELEMENT of them."""
    return 3 * sum(_products(op, program) + ELEMENT * _made(op, program) for op in program.ops)


def _made(op: Op, program: Program) -> int:
    return sum(program.types[o].numel for o in op.outputs if o is not None)


def _products(op: Op, program: Program) -> float:
    """FLOPs of the products that an operator sums, in forward."""
    if op.target == REGION:
        return float(str(op.kwarg("flops")))
    name, shapes = op.target.split(".")[1], [program.types[r].shape for r in refs(op)]
    made = _made(op, program)
    if name in _BY_LAST_DIM:
        return 2.0 * made * (shapes[_BY_LAST_DIM[name]] or (1,))[-1]
    if name.startswith("conv"):
        return 2.0 * made * math.prod(shapes[1]) / max(1, shapes[1][0])
    if name.startswith("scaled_dot_product"):
        return 4.0 * made * shapes[1][-2]
    if name in ("einsum", "bilinear", "lstm", "gru"):  # as of a product of matrices of these sizes
        return 2.0 * math.sqrt(made * math.prod(max(1, math.prod(shape)) for shape in shapes[:2]))
    return 0.0
