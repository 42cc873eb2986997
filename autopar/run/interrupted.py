"""`autopar.interrupted`: whether the run is asked to save and leave (see leaving.py, and watchdog.py, which asks the other ranks)."""

from __future__ import annotations

import signal

from autopar.run import leaving, watchdog

__all__ = ["interrupted"]


def interrupted(signals: tuple[int, ...] = (signal.SIGTERM,)) -> bool:
    """Whether to save and leave: True, on all ranks at the same step, once one of them has been given one of these signals.

        for step in range(first, steps):
            ...
            if autopar.interrupted():
                autopar.save("run/last", model, optimizer, step=step + 1)
                break

    Collective in the sense that all ranks call it equally often, once a step; it costs nothing until a signal has come. From its first
    call on, the signals do not end the process. Call it first from the main thread.
    """
    leaving.heed(signals)
    now = watchdog.current()
    return leaving.signalled() if now is None else now.leaving.passed()
