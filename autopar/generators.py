"""The states of torch's own generators: the CPU's, and those of GPUs where they are in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["kept", "restore", "same", "seed", "states"]


def states() -> list[Tensor]:
    """Of all of them, the CPU's first."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _devices())]


def same(before: Sequence[Tensor]) -> bool:
    """Whether nothing has been drawn since these were the states."""
    now = states()
    return len(now) == len(before) and all(map(torch.equal, now, before))


def seed(number: int) -> None:
    """Let all of them begin at a number. torch.manual_seed would write down a stack for each kind of device that there may be, at each call
    (torch 2.13)."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def restore(before: Sequence[Tensor]) -> None:
    """They go on from these states."""
    torch.set_rng_state(before[0])
    for device, state in zip(_devices(), before[1:], strict=False):
        torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Afterwards they go on as if nothing had been drawn inside."""
    with torch.random.fork_rng(devices=_devices()):
        yield


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
