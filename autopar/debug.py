"""AUTOPAR_DEBUG=1..4: the time of each pass, the plan, LP files, the emitted source; on standard error, of rank 0."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from autopar.errors import SettingError
from autopar.progress import working

__all__ = ["debug_level", "said", "timed"]


def debug_level() -> int:
    """0 (nothing) to 4. SettingError if the variable is something else."""
    text = os.environ.get("AUTOPAR_DEBUG") or "0"
    if text not in ("0", "1", "2", "3", "4"):
        raise SettingError(f"AUTOPAR_DEBUG must be 0, 1, 2, 3 or 4, not {text!r}")
    return int(text)


def said(level: int, text: Callable[[], str]) -> None:
    """Print, if that much is wanted."""
    if debug_level() >= level and os.environ.get("RANK", "0") == "0":
        print(text(), file=sys.stderr, flush=True)


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Level 1: how long the pass took. A bar where it takes long, on a terminal."""
    start = time.perf_counter()
    with working(name):
        yield
    said(1, lambda: f"autopar: {name} took {time.perf_counter() - start:.2f} s")
