"""A bar on standard error for what takes long: only on a terminal, only of process 0, and only when it has taken two seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

__all__ = ["working"]

AFTER_S = 2.0
_shown = threading.Lock()  # by one at a time: what goes on inside of something that has a bar has none


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Inside, after two seconds, a bar that says what is being done and for how long."""
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield
        return
    bar = _Late(what)
    try:
        yield
    finally:
        bar.close()
        _shown.release()


class _Late:
    """A bar that begins later, unless it is closed by then."""

    def __init__(self, what: str) -> None:
        self._what, self._closed = what, False
        self._lock = threading.Lock()
        self._shown = contextlib.ExitStack()
        self._timer = threading.Timer(AFTER_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("autopar: {task.description}"), BarColumn(), TimeElapsedColumn())
        with self._lock:
            if not self._closed:
                bar = self._shown.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
                bar.add_task(self._what, total=None)

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            self._shown.close()
