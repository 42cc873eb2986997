"""From what a backward pass begins that runs inside of its call: of a loss that a GradScaler is going to scale, from that scale, so that
gradients which float16 has no numbers for are kept, as where the scaled loss is differentiated."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from autopar.run.instances import instances

__all__ = ["Scaling"]

_LOOKS = 2  # calls before which the process is looked through for scalers


class Scaling:
    """Expects of each loss what the last one was multiplied by, as a share of the scale of the process's GradScaler, and of the first one
    that scale. Where there are several scalers, what the last loss was multiplied by; where there is none, 1."""

    def __init__(self) -> None:
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._looks, self._share, self._last = _LOOKS, 1.0, 0.0

    def begin(self) -> float:
        """From what the backward pass of this call begins, the same on every rank."""
        scalers = self._alive()
        if len(scalers) < len(self._scalers):  # there may be another in the place of one
            self._looks = _LOOKS
        if self._looks:
            self._looks -= 1
            scalers = [x for x in instances(torch.amp.GradScaler) if x.is_enabled()]
            self._scalers = [weakref.ref(x) for x in scalers]
        if len(scalers) == 1:
            return scalers[0].get_scale() * self._share
        return self._last or scalers[0].get_scale() if scalers else 1.0

    def left_of(self, factor: Tensor, begun: float) -> Tensor:
        """What gradients are yet to be multiplied by. factor: what the loss was multiplied by; begun: what backward began from."""
        if scalers := self._alive():
            self._last = factor.item()
            share = self._last / scalers[0].get_scale()
            self._share = share if 0 < share < float("inf") else 1.0
        return factor if begun == 1 else factor / begun

    def _alive(self) -> list[torch.amp.GradScaler]:
        return [found for ref in self._scalers if (found := ref()) is not None]
