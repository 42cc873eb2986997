"""The process that workers of tests and of `traps` are forked from."""

from __future__ import annotations

import functools
import multiprocessing
import os

__all__ = ["begin"]


@functools.cache
def begin() -> None:
    """Start it, with what `benchmarks._preloaded` imports, where the system can fork; unless workers were started before."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks._preloaded"])
        first = context.Process(target=os.getpid)
        first.start()
        first.join()
