"""Full backward hooks of a module, and its backward pre-hooks, as what two regions run: of what it is given, and of what it returns.

What comes back to the module's results is what its hooks are told first, and they are told of it again beside what comes back to its
arguments. So a tensor leads from the first region to the second: its gradient is that of a result. It is zeros, of the result's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BackwardHooks", "Entered", "Returned", "refuse_changed"]

Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False, frozen=True, kw_only=True)
class BackwardHooks:
    """The hooks of one call of a module, in order. given: how many arguments it was called with, by position; entered: which of them are
    tensors with gradients. made: how many results; returned: which of these are. observes: they gave no gradients when they were tried.
    beside: the other tensors among the arguments, of which torch tells zeros. Not copied: hooks and module are the user's own."""

    module: nn.Module
    hooks: tuple[Callable[..., Any], ...]
    before: tuple[Callable[..., Any], ...]
    given: int
    entered: tuple[int, ...]
    made: int
    returned: tuple[int, ...]
    observes: bool = False
    beside: tuple[tuple[int, tuple[int, ...], torch.dtype], ...] = ()

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
        device = next((g.device for g in grads if g is not None), None)
        zeros = tuple(torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype in self.beside)
        packed = _packed((*self.entered, *(k for k, *_ in self.beside)), (*grads, *zeros), self.given)
        results = _packed(self.returned, of_results, self.made)
        for hook in self.hooks:
            packed = _replaced(packed, hook(self.module, packed, results), "Backward hook", "grad_input")
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


class _Around(nn.Module):
    """told: as of `observed.Observes`. Gradients are those of what it gives, then of what leads from the one region to the other; of the
    first, a hook on arguments is given zeros in the place of None, as torch does."""

    fills = False

    def __init__(self, hooks: BackwardHooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.told: Callable[[Gradients], None] | None = None

    @property
    def observes(self) -> bool:
        return self.hooks.observes

    def arriving(self, grads: Gradients) -> Gradients:
        """What the gradients of what it gives become, for what it is given."""
        raise NotImplementedError

    def passed(self, grads: Gradients) -> Gradients:
        """What they become past hooks that change none."""
        raise NotImplementedError

    def forwarded(self, grads: Gradients) -> Gradients:
        """What they become; hooks that only look are told later, where somebody sees to that."""
        if self.told is None:
            return self.arriving(grads)
        self.told(grads)
        return self.passed(grads)

    def tell(self, given: Gradients) -> None:
        """As of `observed.Observes`."""
        refuse_changed(self.arriving(given), self.passed(given))


def refuse_changed(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """RuntimeError if these are others."""
    if any(a is not b for a, b in zip(found, expected, strict=True)):
        raise RuntimeError(
            "a hook gives a gradient, and gave none when the model was captured: in a pipeline it is called after backward then, and "
            "changes nothing. Compile with Pins(pp=1), or let it give one in every step"
        )


class Entered(_Around):
    """Of the arguments that need gradients: themselves, then zeros like each result."""

    fills = True

    def __init__(self, hooks: BackwardHooks, results: Sequence[Tensor]) -> None:
        super().__init__(hooks)
        self.like = tuple((tuple(r.shape), r.dtype) for r in results)

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        device = arguments[0].device
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self.like)
        found: tuple[Tensor, ...] = _Hooked.apply(self, len(arguments), len(arguments) + len(self.like), *arguments, *zeros)
        return found

    def arriving(self, grads: Gradients) -> Gradients:
        of_arguments, of_results = self._apart(grads)
        if any(g is not None for g in of_results):  # else none has come through the results, and torch tells no hook
            of_arguments = self.hooks.of_arguments(of_arguments, of_results)
        return (*of_arguments, *(None for _ in of_results))

    def passed(self, grads: Gradients) -> Gradients:
        of_arguments, of_results = self._apart(grads)
        return (*of_arguments, *(None for _ in of_results))

    def _apart(self, grads: Gradients) -> tuple[Gradients, Gradients]:
        count = len(self.hooks.entered)
        return grads[:count], grads[count:]


class Returned(_Around):
    """Of the results that need gradients, and what leads here from the arguments (nothing where none of these needs one): the results.
    Behind their gradients stands, where something leads back to the arguments, what is not None."""

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        n = len(self.hooks.returned)
        found: tuple[Tensor, ...] = _Hooked.apply(self, n, n, *values)
        return found

    def arriving(self, grads: Gradients) -> Gradients:
        *of_results, leads = grads
        hooks = self.hooks if leads is not None else replace(self.hooks, entered=())  # all before it may have been frozen since
        return self._leading(hooks.of_results(tuple(of_results)))

    def passed(self, grads: Gradients) -> Gradients:
        return self._leading(grads[:-1])

    def _leading(self, grads: Gradients) -> Gradients:
        return (*grads, *grads) if self.hooks.entered else grads


class _Hooked(torch.autograd.Function):
    """The first n values, of which a gradient of the first `count` is zeros where it is None; they go on as they are forwarded."""

    @staticmethod
    def forward(ctx: Any, around: _Around, count: int, n: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.around, ctx.leads = around, any(t.requires_grad for t in values[count:])
        ctx.like = [(t.shape, t.dtype, t.device) for t in values[:count]]
        return tuple(t.view_as(t) for t in values[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        around = ctx.around
        if around.fills:
            if all(g is None for g in grads[: len(ctx.like)]):  # its results do not depend on its arguments
                return (None, None, None, *(None for _ in grads))
            return (None, None, None, *around.forwarded(_filled(grads, ctx.like)))
        found = around.forwarded((*grads, torch.empty(0, device="cpu") if ctx.leads else None))
        return (None, None, None, *_filled(found, ctx.like))


def _filled(grads: Gradients, like: Sequence[tuple[torch.Size, torch.dtype, torch.device]]) -> Gradients:
    """With zeros in the place of None among the first."""
    first = (torch.zeros(of[0], dtype=of[1], device=of[2]) if g is None else g for g, of in zip(grads, like, strict=False))
    return (*first, *grads[len(like) :])
