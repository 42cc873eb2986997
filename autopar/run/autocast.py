"""The state of torch.autocast around a call. A captured program holds the casts that autocast makes as operators, so that what is emitted
runs outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Autocast", "ambient", "under", "without"]

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, order=True, slots=True)
class Autocast:
    """torch.autocast is on for a type of devices, with this dtype."""

    device: str
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    def __str__(self) -> str:
        return f'torch.autocast("{self.device}", dtype=torch.{self.dtype_name})'

    @staticmethod
    def of(device: str, dtype: torch.dtype) -> Autocast:
        return Autocast(device, str(dtype).removeprefix("torch."))


def ambient() -> tuple[Autocast, ...]:
    """What is on at this line; () outside of autocast."""
    return tuple(Autocast.of(d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))


@contextlib.contextmanager
def under(state: tuple[Autocast, ...]) -> Iterator[None]:
    """Inside, exactly this is on. Nothing that autocast has cast inside is kept for later."""
    if state == ambient():
        yield
        return
    wanted = {a.device: a.dtype for a in state}
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            if device in wanted or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=wanted.get(device), enabled=device in wanted, cache_enabled=False))
        yield


def without() -> contextlib.AbstractContextManager[None]:
    """Inside, autocast is off."""
    return under(())
