"""A bar on standard error for what takes long: only on a terminal, only of process 0, and only when it has taken a second."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator

__all__ = ["found_so_far", "working"]

AFTER_S = 1.0
_bars: list[_Late] = []
_shown = threading.Lock()  # by one at a time: what goes on inside of something that has a bar has none


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Inside, after a second, a bar that says what is being done, for how long, and what was found so far."""
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield
        return
    _imported()
    bar = _Late(what)
    _bars.append(bar)
    try:
        yield
    finally:
        _bars.remove(bar)
        bar.close()
        _shown.release()


def found_so_far(text: Callable[[], str]) -> None:
    """What the bar says beside, where there is one."""
    for bar in _bars:
        bar.say(text)


def _imported() -> None:
    """rich draws a random number when it is imported, which would be the user's, and would seem to be of a model that is being captured."""
    if "rich.progress" not in sys.modules:
        state = random.getstate()
        import rich.progress  # noqa: F401

        random.setstate(state)


class _Late:
    """A bar that begins later, unless it is closed by then."""

    def __init__(self, what: str) -> None:
        self._what, self._closed = what, False
        self._lock = threading.Lock()
        self._shown = contextlib.ExitStack()
        self._say: Callable[[str], None] | None = None
        self._timer = threading.Timer(AFTER_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        found = TextColumn("{task.fields[found]}")
        columns = (TextColumn("autopar: {task.description}"), BarColumn(bar_width=20), TimeElapsedColumn(), found)
        with self._lock:
            if not self._closed:
                bar = self._shown.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
                task = bar.add_task(self._what, total=None, found="")
                self._say = lambda text: bar.update(task, found=text)

    def say(self, text: Callable[[], str]) -> None:
        if self._say is not None:
            self._say(text())

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            self._shown.close()
