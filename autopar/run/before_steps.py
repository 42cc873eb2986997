"""What a loop still holds of a call when an optimizer steps (a metric that it will add up, the logits of a classifier) is computed before
the step: after it the parameters are others. The loop is asked once: what it reads, later calls compute."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autopar.errors import LaunchError
from autopar.run.alike import done_by_every_rank
from autopar.run.mesh import Mesh
from autopar.run.reading import Kind, Reading

__all__ = ["SMALL", "BeforeSteps", "computed_before"]

SMALL = 2**24  # bytes of all that a call returns beside its loss: of more, as of a language model's logits, the loop has to say so itself
_waiting = weakref.WeakValueDictionary[int, "BeforeSteps"]()  # in the order in which they were called: all ranks call alike


class BeforeSteps:
    """The calls of a module since the last step of which more than the loss may be read. params: of the module."""

    def __init__(self, mesh: Mesh, model: str, params: Mapping[str, nn.Parameter]) -> None:
        self._mesh, self._model, self._params = mesh, model, params
        self._calls: dict[int, weakref.ref[Reading[Any]]] = {}  # alive where anything of the call is held
        self._number = 0
        self._kinds = set[Kind]()  # of these calls
        self._asked = set[Kind]()

    def may_read(self, reading: Reading[Any], kind: Kind, size: int) -> None:
        """Note a call. size: bytes of what it returns beside its loss."""
        if size > SMALL or kind in self._asked:
            return
        self._calls = {number: one for number, one in self._calls.items() if one() is not None}
        self._number += 1
        self._calls[self._number] = weakref.ref(reading)
        self._kinds.add(kind)
        _waiting[id(self)] = self

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer changes parameters of this module."""
        own = set(map(id, self._params.values()))
        return any(id(param) in own for group in optimizer.param_groups for param in group["params"])

    def step(self) -> None:
        """Collective: compute what every rank holds."""
        calls, self._calls = {number: one() for number, one in self._calls.items()}, {}
        self._asked |= self._kinds
        done_by_every_rank("step on", self._model)
        held = {number: reading for number, reading in calls.items() if reading is not None}
        for number in sorted(self._mesh.shared(set(held))):
            try:
                held[number]("is held while an optimizer steps")
            except LaunchError:
                raise
            except Exception:  # noqa: BLE001  (nobody may want it: who reads it is told why it cannot be read)
                return


def computed_before(optimizer: Optimizer) -> None:
    """Collective: an optimizer is about to step."""
    for key, one in list(_waiting.items()):
        if one.trains(optimizer):
            del _waiting[key]
            one.step()
