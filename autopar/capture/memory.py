"""Whose memory is whose: a program has each parameter in memory of its own, and no other name for it."""

from __future__ import annotations

import torch

from autopar.capture.follow import storage_of
from autopar.errors import CaptureError
from autopar.run.inputs import not_dense

__all__ = ["OfParameters"]


class OfParameters:
    """The memory of a model's parameters. model: its name, for errors."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._elements: dict[int, dict[str, range]] = {}  # of each storage: parameter -> from its first element to its last

    def add(self, name: str, parameter: torch.Tensor) -> None:
        """CaptureError if it is memory of another one too; parts of one storage that do not meet are none."""
        there, own = self._elements.setdefault(storage_of(parameter), {}), _elements(parameter)
        other = next((n for n, x in there.items() if range(max(x.start, own.start), min(x.stop, own.stop))), None)
        if other is not None:
            raise CaptureError(
                f"the parameters {other} and {name} of {self._model} share memory (as after a.data = b.data): they would part when they "
                f"are moved\n  what to do: let both names be one parameter, as in a.weight = b.weight, or copy the values"
            )
        there[name] = own

    def check(self, tensor: torch.Tensor, what: str) -> None:
        """CaptureError if a tensor that is no parameter is not dense, or is memory of one: training would not reach it, which moves
        parameters."""
        if lies := not_dense(tensor):
            raise CaptureError(f"{what} of {self._model} is {lies[0]}, and a program is of dense ones\n  what to do: {lies[1]}")
        if not tensor.numel():
            return
        if there := self._elements.get(storage_of(tensor)):
            name = next(reversed(there))
            raise CaptureError(
                f"{self._model} holds {what} that shares the memory of the parameter {name}, and would not see what training makes of it\n"
                f"  what to do: make it of {name} in the forward"
            )


def _elements(tensor: torch.Tensor) -> range:
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return range(first, first)
    return range(first, first + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1)
