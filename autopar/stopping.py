"""Ctrl-C while a plan is searched: the first one ends the search with the best plan so far, the second one the program."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["stopped_by_user"]

SAID = "autopar: ending the search; the best plan so far is the answer (Ctrl-C again ends the program)"


@contextlib.contextmanager
def stopped_by_user() -> Iterator[Callable[[], bool]]:
    """Inside, whether the user has pressed Ctrl-C. Only in the main thread, where nothing else handles the signal, and not under torchrun,
    whose agent ends all ranks: elsewhere Ctrl-C does what it does."""
    asked = threading.Event()
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler and "RANK" not in os.environ
    if threading.current_thread() is not threading.main_thread() or not handled:
        yield asked.is_set
        return

    # The signal may come while this thread holds a lock of what draws the bar, which would have to say it: so another thread says it.
    said = threading.Thread(target=lambda: print(f"\n{SAID}", file=sys.stderr, flush=True), daemon=True)

    def note(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asked.set()
        said.start()

    signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked.is_set():
            said.join()
