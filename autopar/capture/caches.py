"""Tables that a forward makes for the sizes of its batch and keeps: a program holds the one of its own sizes as a constant.

Where a table is made for the longest batch so far, and its values depend on that length, a call computes otherwise after a longer one. No
program of one call shows that, so that the model itself is asked: is its output another with the table of other sizes in its place?
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.around import as_called
from autopar.capture.as_before import left_as_it_was
from autopar.capture.export import FAILURES
from autopar.capture.given import Inputs, copied
from autopar.capture.held import Held, Order, Place, Shape, child, places
from autopar.capture.said import heard
from autopar.capture.state import Change, State
from autopar.errors import AutoparError, CaptureError
from autopar.run.inputs import arguments_of
from autopar.run.outside_draws import from_seed

__all__ = ["Caches"]

_TOLERANCE = 1e-4  # of the largest entry: a table is not made in the same order of operations for every size


class Caches:
    """What first calls of a model have made, with the inputs for which they did."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None) -> None:
        self._model, self._loss = model, loss
        self._made: list[tuple[Inputs, Sequence[Change]]] = []

    def note(self, inputs: Any, made: Sequence[Change]) -> None:
        """made: what the first call for these inputs made, and later ones keep. CaptureError where calls for these inputs, or for those
        before, compute otherwise once the others were called."""
        tables = _tables(made)
        if not tables:
            return
        given = copied(arguments_of(inputs))
        for other, before in self._made:
            known = _tables(before)
            path = next((path for path, table in tables.items() if path in known and not _agree(known[path], table)), None)
            if path is None:
                continue
            if self._depends(given, before) or self._depends(other, made):
                sizes = f"{list(known[path].shape)} and {list(tables[path].shape)}"
                raise CaptureError(
                    f"{type(self._model).__name__} makes {path} for the sizes of a batch and keeps it, {sizes}, and what later calls "
                    f"compute depends on which was made before\n  what to do: call the model once on its longest batch before compiling "
                    f"it, so that it is there; or make it for every batch"
                )
        if not any(_same_sizes(tables, _tables(before)) for _, before in self._made):
            self._made.append((given, made))

    def _depends(self, inputs: Inputs, made: Sequence[Change]) -> bool:
        """Whether a call of the model returns something else where that was made before."""
        try:
            alone, after = self._returned(inputs, ()), self._returned(inputs, made)
        except (*FAILURES, AutoparError):  # of other sizes: who calls it so is told then
            return False
        return len(alone) == len(after) and not all(map(_close, alone, after))

    def _returned(self, inputs: Inputs, made: Sequence[Change]) -> list[Tensor]:
        args, kwargs = copied(inputs)
        with left_as_it_was(self._model, self._loss), heard(), torch.no_grad(), from_seed(0), as_called((args, kwargs)):
            held = State.take(self._model, self._loss).held if made else ()
            there = {place.path: place for _, place in places(held)}
            for change in (c for c in made if not isinstance(c.after, Order | Shape)):  # of what a container holds, its items tell
                if (place := there.get(change.path) or _in_a_dict(held, change.path)) is not None:
                    place.put(change.after)
            return [x.detach().clone() for x in pytree.tree_leaves(self._model(*args, **kwargs)) if isinstance(x, Tensor)]


def _in_a_dict(held: Iterable[Held], path: str) -> Place | None:
    """The place of an item that a dict does not have."""
    for one in held:
        if isinstance(one.holder, dict) and not one.table and path.startswith(f"{one.path}["):
            with contextlib.suppress(ValueError, SyntaxError):
                key = ast.literal_eval(path[len(one.path) + 1 : -1])
                if child(one, key) == path:
                    return Place(one, key)
    return None


def _tables(made: Sequence[Change]) -> dict[str, Tensor]:
    return {c.path: c.after for c in made if isinstance(c.after, Tensor) and not c.after.is_meta}


def _same_sizes(tables: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return {path: t.shape for path, t in tables.items()} == {path: t.shape for path, t in others.items()}


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether the longer one begins with the shorter one, or they are as long."""
    if one.shape == other.shape or one.ndim != other.ndim:
        return one.shape == other.shape
    begin = tuple(slice(min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    return _close(one[begin], other[begin])


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() and a.numel()):
        return torch.equal(a, b)
    return bool(torch.allclose(a, b, rtol=0.0, atol=_TOLERANCE * float(a.abs().max()), equal_nan=True))
