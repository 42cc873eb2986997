"""The memory of this process as its device counts it: what CUDA has allocated, or the resident set of a process on a CPU."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

__all__ = ["forget_peak", "give_back", "give_back_at_once", "now_bytes", "peak_bytes"]

_MMAP_THRESHOLD, _AT_ONCE_BYTES = -3, 2**16  # glibc: what is larger is asked of the system, and given back to it, by itself (mallopt(3))
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def now_bytes() -> int | None:
    """Bytes in use; None where the system has no /proc."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else _resident("VmRSS")


def peak_bytes() -> int | None:
    """The most bytes in use since `forget_peak`, or since the process began; None where the system has no /proc."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _resident("VmHWM")


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # resets the peak of the resident set (proc(5))


def give_back() -> None:
    """Return what is not in use to the system, where the process's allocator keeps it: what is counted next is in use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)


def give_back_at_once() -> None:
    """From now on this process's allocator keeps nothing large that is not in use. What is allocated anew is the slower for it: not for
    what is timed."""
    if not torch.cuda.is_available() and (option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc's
        option(_MMAP_THRESHOLD, _AT_ONCE_BYTES)


def _resident(key: str) -> int | None:
    if not (_STATUS.exists() and _CLEAR.exists()):
        return None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
