"""Parameters that the user's code works with outside of the calls of a parallel module, with gradients: each rank uses the whole, and
is to do the same with it. A term of the loss of weights alone is one such use. Another is the model's own forward, where code comes to that
without the call of the parallel module (`self.forward(...)`, a submodule by itself): of its own part of the data each rank would have
another gradient there, and nothing would bring these together.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar.errors import LaunchError
from autopar.run import comm, record
from autopar.run.alike import done_by_every_rank
from autopar.run.batches import ROUNDING, SMALL, numbers_of_all
from autopar.run.mesh import Mesh
from autopar.run.plain import users_level

__all__ = ["Outside"]

MUCH = 0.5  # of the elements of the parameters that are trained


class Outside:
    """Of a model. params: by name."""

    def __init__(self, model: str, mesh: Mesh, params: Mapping[str, nn.Parameter]) -> None:
        self._model, self._mesh, self._params = model, mesh, params
        self._used: dict[str, int] = {}  # elements, by name
        self._told = False

    def check(self, name: str, grad: Tensor) -> None:
        """Collective: LaunchError where a parameter that every rank has used for the same work has another gradient on another rank. A
        warning, once, where many parameters are used so. grad: of the whole."""
        if not self._mesh.talks or record.computes() or not grad.numel():
            return
        done_by_every_rank("compare the gradients of", name)
        numbers = torch.stack([x.double() for x in numbers_of_all(grad.detach())])
        every: list[list[float]] = [one.tolist() for one in comm.all_gather(numbers, self._mesh.everyone)]
        within = ROUNDING.get(grad.dtype, 0.0)
        first = every[0]
        for rank, own in enumerate(every):
            if not _alike(first, own, within):
                raise LaunchError(
                    f"ranks 0 and {rank} have different gradients of {name}, for what was computed with it outside of the calls of "
                    f"{self._model}: they would train different models. If that is the model's forward (a method that calls "
                    f"self.forward(...), a submodule by itself) on each rank's part of the batch, call the model instead: gradients of its "
                    f"calls alone are brought together. Else make every rank compute the same: of the same data, with the same seed"
                )
        self._tell(name, grad.numel())

    def _tell(self, name: str, elements: int) -> None:
        if self._told:
            return
        self._used[name] = elements
        trained = [p for p in self._params.values() if p.requires_grad]
        if sum(self._used.values()) < MUCH * sum(p.shape.numel() for p in trained):
            return
        self._told = True
        if self._mesh.rank == 0:
            warnings.warn(
                f"{len(self._used)} of {len(trained)} parameters of {self._model} have gradients of what is outside of its calls: every "
                f"rank gathers each of them for it, and does all of that work. If it is the model's forward (a method that calls "
                f"self.forward(...), a submodule by itself), call the model instead, or let the method call self(...): that runs as it "
                f"was planned",
                stacklevel=users_level(),
            )


def _alike(a: list[float], b: list[float], within: float) -> bool:
    """Two gradients, by a sum of their elements of both signs, and the sum of their absolute values."""
    finite = [[math.isfinite(x) for x in one] for one in (a, b)]
    if not all(map(all, finite)):  # what overflows on all is for those who look for that
        return finite[0] == finite[1]
    size = max(a[1], b[1])
    return abs(a[0] - b[0]) <= within * size and abs(math.asinh(a[1] / SMALL) - math.asinh(b[1] / SMALL)) <= within
