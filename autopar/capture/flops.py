"""FLOPs of what runs, backward passes inside of it too (which torch's own counter cannot run beside)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["CountedFlops"]


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
