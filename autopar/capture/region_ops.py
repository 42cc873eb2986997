"""The operators that stand for regions, and for hooks on activations, in a trace."""

from __future__ import annotations

import torch
from torch import Tensor, library

from autopar.capture.hooked import Call
from autopar.run.condition import Condition
from autopar.run.region import Place, Region

__all__ = ["CONDITION", "HOOK", "TRACED", "asked", "is_static"]

_LIBRARY = library.Library("autopar_region", "DEF")
_LIBRARY.define("call(str key, Tensor[] tensors, int results) -> Tensor[]")
_LIBRARY.define("hook(str key, Tensor(a!) tensor, Tensor[] closed) -> ()")  # a trace sees it write to the activation, which is another then
HOOK = "autopar_region.hook.default"
TRACED: dict[str, Call] = {}  # while a model is exported, and until its graph has been read
CONDITION = "condition_"


def _made(key: str, tensors: list[Tensor], results: int) -> list[Tensor]:
    call = TRACED[key]
    like = next((t for t in tensors), torch.empty(0, device=call.region.place or "cpu"))
    return [like.new_empty(tuple(r.shape), dtype=r.dtype) for r in call.results]


def _registered(key: str, tensor: Tensor, closed: list[Tensor]) -> None:
    pass


library.register_fake("autopar_region::hook", _registered, lib=_LIBRARY)
_LIBRARY.impl("hook", _registered, "CompositeExplicitAutograd")
library.register_fake("autopar_region::call", _made, lib=_LIBRARY)
_LIBRARY.impl("call", _made, "CompositeExplicitAutograd")


def asked(value: Tensor, expected: bool, line: str, of: Tensor | None = None) -> Tensor:
    """While a model is exported: a region that asks in every step whether a value is as expected; its result, True. of: bool[*], the
    elements of which each must be so: those that are not are counted, which ranks do by their parts."""
    key = f"{CONDITION}{sum(k.startswith(CONDITION) for k in TRACED)}"
    if of is not None:
        value = (of.logical_not() if expected else of).sum()
    module = Condition(expected, line, counts=of is not None)
    region = Region(path=key, module=module, state=(), arguments=((Place(),), {}), modes=(True,))
    TRACED[f"{key}@0"] = Call(
        region=region, arguments=(), results=(torch.empty((), dtype=torch.bool, device="cpu"),), structure=None, flops=0, saved=0,
        draws=False, rows=(), line=line,
    )  # fmt: skip
    result: Tensor = torch.ops.autopar_region.call(f"{key}@0", [value.detach()], 1)[0]
    return result


def is_static(tensor: Tensor) -> bool:
    """Whether the sizes of a traced tensor are numbers."""
    return all(isinstance(s, int) for s in (*tensor.shape, *tensor.stride()))
