"""Modules around what is no module: autograd functions and functions of the user's, and hooks on activations, as what regions run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.run.backward_hooks import Entered, Returned, refuse_changed
from autopar.run.closed import names_in, over_tensors

__all__ = ["Applied", "AsAutograd", "Drawn", "Hooked", "Terms", "Weight", "names_read"]


class Applied(nn.Module):
    """An autograd function of the user's, as what a region runs."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class Drawn(nn.Module):
    """A function of the user's that draws random numbers, as what a region runs: it returns tensors in the place of arrays of numpy and of
    floats. returned: alone, what the function has returned last. places: of its leaves, in order, what each is that is a tensor here."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__()
        self.function = function
        self.returned: tuple[Any, ...] = ()
        self.places: tuple[type, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.returned = (self.function(*args, **kwargs),)
        leaves, spec = pytree.tree_flatten(self.returned[0])
        found = [_as_tensor(x) for x in leaves]
        self.places = tuple(type(x) for x, made in zip(leaves, found, strict=True) if isinstance(made, Tensor))
        return pytree.tree_unflatten(found, spec)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "returned": ()}


def _as_tensor(x: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        return torch.from_numpy(numpy.array(x))
    return torch.tensor(x, dtype=torch.float64, device="cpu") if isinstance(x, float) else x


@dataclass(frozen=True, slots=True)
class Weight:
    """By what the mean of a part counts among others: the samples of one of the tensors that a function is given, by its number among
    these; of labels, those that are not `ignored`."""

    operand: int
    ignored: int | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor | int:
        """Of these tensors that it is given."""
        labels = tensors[self.operand]
        return labels.shape[0] if self.ignored is None else (labels != self.ignored).sum()


class Terms(Applied):
    """A function that returns the mean of its samples, or their sum (weight: None), as one whose results for parts of them are to be added:
    multiplied by the weight of its part. Of a part that has none both the result and the gradients are zeros."""

    def __init__(self, function: type[torch.autograd.Function], weight: Weight | None) -> None:
        super().__init__(function)
        self.weight = weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.weight is None:
            return super().forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        weight = self.weight.of([x for x in leaves if isinstance(x, Tensor)])
        if isinstance(weight, Tensor):
            leaves = [_Counted.apply(x, weight) if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        returned = super().forward(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda r: torch.where(torch.as_tensor(weight, device=r.device) > 0, r * weight, 0), returned)


class _Counted(torch.autograd.Function):
    """What it is given. Its gradient is zeros where nothing counts, and not what 0/0 has left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return torch.where(weight > 0, grads[0], 0), None


class AsAutograd(nn.Module):
    """The forward of an autograd function, differentiated by autograd."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.function.setup_context is not torch.autograd.Function.setup_context:
            return self.function.forward(*args, **kwargs)
        context = torch.autograd.function.FunctionCtx()
        context.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)  # type: ignore[attr-defined]
        return self.function.forward(context, *args, **kwargs)


class Hooked(nn.Module):
    """What it is given, with a hook on its gradient. Behind it are given the tensors that the hook holds (`closed_tensors`). observes: the
    hook gave no gradient when it was tried. told: as of `observed.Observes`."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None], *, observes: bool = False) -> None:
        super().__init__()
        self.hook = _Hook(hook)
        self.observes = observes
        self.told: Callable[[tuple[Tensor | None, ...]], None] | None = None

    def forward(self, x: Tensor, *closed: Tensor) -> Tensor:
        given = x.view_as(x)
        if given.requires_grad:
            held = [t.detach() for t in closed]
            given.register_hook(_Hook(lambda grad: self._called(grad, held)))
        return given

    def _called(self, grad: Tensor, closed: Sequence[Tensor]) -> Tensor | None:
        if self.told is not None:
            self.told((grad, *closed))
            return None
        return self._over(closed)(grad)

    def _over(self, closed: Sequence[Tensor]) -> Callable[[Tensor], Tensor | None]:
        return over_tensors(self.hook.hook, closed) if closed else self.hook

    def tell(self, given: tuple[Tensor | None, ...]) -> None:
        """As of `observed.Observes`."""
        grad, *closed = (t for t in given if t is not None)
        refuse_changed([self._over(closed)(grad)], [None])


class _Hook:
    """The user's own, in copies too: it may be a method of the whole model."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor) -> Tensor | None:
        return self.hook(grad)

    def __deepcopy__(self, memo: object) -> _Hook:
        return self


def names_read(module: nn.Module) -> set[str]:
    """By which hooks, or the backward of an autograd function, may read what the loop sets. Inside of modules that is not looked for."""
    if isinstance(module, Hooked):
        return names_in(module.hook.hook)
    if isinstance(module, Entered | Returned):
        return {name for hook in (*module.hooks.before, *module.hooks.hooks) for name in names_in(hook)}
    return names_in(module.function.backward) if isinstance(module, Applied) else set()
