"""What `autopar.interrupted` rests on: whether the run is asked to leave, with the same answer on every rank at the same step.

A signal reaches ranks at different steps, or one of them alone. Each counts its own calls of `interrupted`. Once a rank has been asked,
the watchdogs of all ranks say over a store how far theirs are, and hold back the next call; all leave at the call behind the furthest.
Until then a call reads a flag.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType

import torch.distributed as dist

from autopar.errors import LaunchError

__all__ = ["Leaving", "heed", "signalled"]

_asked: set[int] = set()  # the signals that have come to this process
_handled: set[int] = set()


def heed(signals: Iterable[int]) -> None:
    """From now on these signals are noted, and do not end the process."""
    for number in signals:
        if number not in _handled:
            signal.signal(number, _noted)
            _handled.add(number)


def signalled() -> bool:
    """Whether one of them has come to this process."""
    return bool(_asked)


def _noted(number: int, frame: FrameType | None) -> None:
    _asked.add(number)


class Leaving:
    """Of one rank. store: None where there is none."""

    def __init__(self, rank: int, world: int, token: str) -> None:
        self.store: dist.Store | None = None
        self._rank, self._world, self._prefix = rank, world, f"{token}/leave"
        self._lock = threading.Lock()
        self._calls = 0
        self._held = False
        self._last: int | None = None  # the call with which all leave
        self._decided = threading.Event()

    @property
    def wanted(self) -> bool:
        """Whether the user's loop asks."""
        return bool(_handled)

    @property
    def period_s(self) -> float | None:
        return 0.05 if self._held and self._last is None else None

    def passed(self) -> bool:
        with self._lock:
            self._calls += 1
            held = self._held
        if not held:
            if _asked and self.store is None:
                raise LaunchError("a signal asks this process to leave, and it cannot reach the store over which ranks agree on a step")
            return False
        self._decided.wait()
        assert self._last is not None
        return self._calls >= self._last

    def go_on(self) -> None:
        """By the watchdog, from time to time."""
        if self.store is None or self._last is not None or not _handled:
            return
        asked = f"{self._prefix}/asked"
        try:
            if _asked:
                self.store.set(asked, "1")
            if not self._held and not self.store.check([asked]):
                return
            if not self._held:
                with self._lock:
                    self._held = True
                self.store.set(f"{self._prefix}/{self._rank}", str(self._calls))
            keys = [f"{self._prefix}/{rank}" for rank in range(self._world)]
            if self.store.check(keys):
                self._last = 1 + max(int(self.store.get(key)) for key in keys)
                self._decided.set()
        except RuntimeError:  # the store's process has gone, and with it a rank: the watchdog says so
            self.store = None
