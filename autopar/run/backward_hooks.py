"""Full backward hooks of a module, and its backward pre-hooks, as what two regions run: of what it is given, and of what it returns.

What comes back to the module's results is what its hooks are told first, and they are told of it again beside what comes back to its
arguments. So a tensor leads from the first region to the second: its gradient is that of a result. It is zeros, of the result's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BackwardHooks", "Entered", "Returned"]

Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False, frozen=True, kw_only=True)
class BackwardHooks:
    """The hooks of one call of a module, in order. given: how many arguments it was called with, by position; entered: which of them are
    tensors with gradients. made: how many results; returned: which of these are. Not copied: hooks and module are the user's own."""

    module: nn.Module
    hooks: tuple[Callable[..., Any], ...]
    before: tuple[Callable[..., Any], ...]
    given: int
    entered: tuple[int, ...]
    made: int
    returned: tuple[int, ...]

    def __deepcopy__(self, memo: object) -> BackwardHooks:
        return self

    def of_results(self, grads: Gradients) -> Gradients:
        """What the gradients of its results become. RuntimeError, as of torch, if a hook returns what it may not."""
        packed = _packed(self.returned, grads, self.made)
        for hook in self.before:
            packed = _replaced(packed, hook(self.module, packed), "Backward pre hook", "grad_output")
        if not self.entered:
            nothing: Gradients = (None,) * self.given
            for hook in self.hooks:
                found = hook(self.module, nothing, packed)
                if found is not None and not (isinstance(found, tuple) and all(x is None for x in found)):
                    raise RuntimeError("a backward hook of a module of which no argument needs a gradient must return None")
        return tuple(packed[k] for k in self.returned)

    def of_arguments(self, grads: Gradients, of_results: Gradients) -> Gradients:
        """What the gradients of its arguments become. of_results: what those of its results have become."""
        packed, beside = _packed(self.entered, grads, self.given), _packed(self.returned, of_results, self.made)
        for hook in self.hooks:
            packed = _replaced(packed, hook(self.module, packed, beside), "Backward hook", "grad_input")
        return tuple(packed[k] for k in self.entered)


def _packed(places: Sequence[int], values: Gradients, size: int) -> Gradients:
    at = dict(zip(places, values, strict=True))
    return tuple(at.get(k) for k in range(size))


def _replaced(before: Gradients, found: Any, what: str, of: str) -> Gradients:
    if found is None:
        return before
    if len(found) != len(before):
        raise RuntimeError(f"{what} returned an invalid number of {of}, got {len(found)}, but expected {len(before)}")
    return tuple(found)


class Entered(nn.Module):
    """Of the arguments that need gradients: themselves, then zeros like each result."""

    def __init__(self, hooks: BackwardHooks, results: Sequence[Tensor]) -> None:
        super().__init__()
        self.hooks, self.like = hooks, tuple((tuple(r.shape), r.dtype) for r in results)

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        device = arguments[0].device
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self.like)
        found: tuple[Tensor, ...] = _Entered.apply(self.hooks, *arguments, *zeros)
        return found


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hooks: BackwardHooks, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hooks = hooks
        return tuple(t.view_as(t) for t in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.hooks.entered)
        of_arguments, of_results = grads[:count], grads[count:]
        # where none comes back through the results, or none to the arguments, torch tells no hook
        if any(g is not None for g in of_arguments) and any(g is not None for g in of_results):
            of_arguments = ctx.hooks.of_arguments(of_arguments, of_results)
        return (None, *of_arguments, *(None for _ in of_results))


class Returned(nn.Module):
    """Of the results that need gradients, and what leads here from the arguments (nothing where none of these needs one): the results."""

    def __init__(self, hooks: BackwardHooks) -> None:
        super().__init__()
        self.hooks = hooks

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = _Returned.apply(self.hooks, *values)
        return found


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hooks: BackwardHooks, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hooks, ctx.leads = hooks, len(values) > len(hooks.returned)
        return tuple(t.view_as(t) for t in values[: len(hooks.returned)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grads = ctx.hooks.of_results(grads)
        return (None, *grads, *(grads if ctx.leads else ()))
