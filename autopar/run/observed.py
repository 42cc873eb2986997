"""Hooks that are told of gradients and change none, in a pipeline. The gradient is on the ranks of one stage, and may be computed before
the user asks for it: they are told of it after backward, on all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from autopar.run import comm
from autopar.run.mesh import Mesh
from autopar.run.region import Region

__all__ = ["Observed", "Observes", "is_observer"]

Tensors = tuple[Tensor | None, ...]


class Observes(Protocol):
    """The module of a region around such hooks. told: called in backward with what they would be given, in their place; None: they are
    called then."""

    observes: bool
    told: Callable[[Tensors], None] | None

    def tell(self, given: Tensors) -> None:
        """Call them. RuntimeError if they give gradients, as they did not when the model was captured."""


def is_observer(region: Region) -> bool:
    return bool(getattr(region.module, "observes", False))


class Observed:
    """What such hooks are to be told of one step."""

    def __init__(self, regions: Sequence[Region], mesh: Mesh, device: torch.device) -> None:
        observers = [r for r in regions if is_observer(r)] if mesh.pp.size > 1 else []
        self._of = {r.handle: cast(Observes, r.module) for r in observers}
        self._mesh, self._device = mesh, device
        self._noted: list[tuple[str, Tensors]] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, what backward comes to is noted for them."""
        for handle, module in self._of.items():
            module.told = functools.partial(self._note, handle)
        try:
            yield
        finally:
            for module in self._of.values():
                module.told = None

    def _note(self, handle: str, given: Tensors) -> None:
        self._noted.append((handle, tuple(None if t is None else t.detach().clone() for t in given)))

    def tell(self, factor: Tensor | None) -> None:
        """Collective, after all of backward. factor: what gradients are yet to be multiplied by."""
        if not self._of:
            return
        noted, self._noted = self._noted, []
        everywhere = self._mesh.of_all([(handle, [_described(t) for t in given]) for handle, given in noted])
        for stage in reversed(range(self._mesh.pp.size)):
            source = self._mesh.rank_at(pp=stage)
            for k, (handle, described) in enumerate(everywhere[source]):
                own = noted[k][1] if source == self._mesh.rank else (None,) * len(described)
                self._of[handle].tell(tuple(self._sent(t, of, source, factor) for t, of in zip(own, described, strict=True)))

    def _sent(self, own: Tensor | None, described: tuple[tuple[int, ...], torch.dtype] | None, source: int, factor: Tensor | None) -> Any:
        if described is None:
            return None
        shape, dtype = described
        here = torch.empty(shape, dtype=dtype, device=self._device) if own is None else own.contiguous()
        comm.broadcast_(here, source, self._mesh.pp)
        return here if factor is None else here * factor.to(here.dtype)


def _described(t: Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    return None if t is None else (tuple(t.shape), t.dtype)
