"""Buffers of no state_dict that a call gives another shape than they had: tables of positions, the membranes of its samples."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.around import as_called
from autopar.capture.as_before import left_as_it_was
from autopar.capture.export import FAILURES, objective_of
from autopar.capture.given import Inputs, copied
from autopar.capture.made import holding, in_the_state
from autopar.errors import BufferMade
from autopar.ir import Program, refs
from autopar.run.outside_draws import from_seed
from autopar.run.precision import computing_in

__all__ = ["as_a_call_leaves_it"]

Loss = Callable[[Any], Tensor] | None


class _Captured(Protocol):
    @property
    def program(self) -> Program: ...


Found = TypeVar("Found", bound=_Captured)


def as_a_call_leaves_it(
    model: nn.Module, loss: Loss, inputs: Inputs, captured: Callable[[], Found], *, dtype: torch.dtype | None, error: BufferMade
) -> Found:
    """What is captured of a model as its first call leaves it, with buffers in the shapes of its batch: tables, and states that a call
    begins anew. Raises the error where there is no data, where the first call computes anything else than the next, or where what it
    leaves there is read and is of the values of its batch, or of weights. dtype: as of `capture`; inputs: in it."""
    tensors = (*model.parameters(), *model.buffers(), *(x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)))
    if any(t.is_meta for t in tensors):
        raise error
    with computing_in(dtype, model):
        made, first = _made_by_a_call(model, loss, inputs)
        if not made:
            raise error
        with holding(model, made):
            try:
                again, second = _made_by_a_call(model, loss, inputs)
            except FAILURES as other:  # which has another part of a table elsewhere, as it was
                raise error from other
        if again or not torch.equal(first, second):
            raise error
        others, _ = _made_by_a_call(model, loss, inputs, otherwise=True)
    with holding(model, made):
        found = captured()
    of_values = {name for name, b in made.items() if name not in others or not torch.equal(b, others[name])}
    if _reads(found.program, made, of_values):
        raise error
    return found


def _other_values(x: Tensor) -> Tensor:
    return (0.5 * x + 0.25 if x.is_floating_point() else x.flip(0) if x.dim() else x).detach()


def _made_by_a_call(model: nn.Module, loss: Loss, inputs: Inputs, *, otherwise: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """The buffers of no state_dict to which a call gives another shape or dtype, by name, and its loss. otherwise: with other values of
    the inputs and the parameters. The model is left as it was."""
    saved, before = in_the_state(model), dict(model.named_buffers(remove_duplicate=False))
    with left_as_it_was(model, loss), from_seed(0), torch.enable_grad(), as_called(inputs):
        args, kwargs = pytree.tree_map_only(Tensor, _other_values, inputs) if otherwise else copied(inputs)
        if otherwise:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(_other_values(p))
        result, _ = objective_of(model(*args, **kwargs), loss, None)
        after = model.named_buffers(remove_duplicate=False)
        made = {n: b for n, b in after if n in before and n not in saved and (b.shape, b.dtype) != (before[n].shape, before[n].dtype)}
        return {name: b.detach().clone() for name, b in made.items()}, result.detach().clone()


def _reads(program: Program, made: Collection[str], of_values: Collection[str]) -> bool:
    """Whether a program reads buffers of these names that it writes to, or that are of values of one batch or of weights."""
    values = {b.value for b in program.buffers if b.fqn in made and (b.mutated or b.fqn in of_values)}
    return any(not values.isdisjoint(refs(op)) for op in program.ops if op.target not in _OF_SHAPES)


_OF_SHAPES = {f"aten.{name}_like.default" for name in ("zeros", "ones", "full", "empty", "rand", "randn")}
