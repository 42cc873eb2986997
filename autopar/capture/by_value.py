"""Objects of Python and numpy that are told apart by what they hold: generators, arrays, queues, events, streams, shared numbers."""

from __future__ import annotations

import array
import ctypes
import io
import itertools
import queue
import random
import threading
from typing import Any

import torch

from autopar.capture.held import Value, is_plain

__all__ = ["by_value", "changes_in_place"]

_LARGEST = 1 << 20  # bytes of an array that is compared


def changes_in_place(value: object) -> bool:
    """Whether what by_value gives of an object may be another while the object is the same. Generators apart: a forward that draws from
    one is refused."""
    return not isinstance(value, random.Random | torch.Generator | itertools.count)


def by_value(value: Any) -> Value | None:
    """What is neither simple nor a container but can be told apart by a value of its own; None of anything else."""
    if isinstance(value, random.Random):
        return Value("random generator", value.getstate())
    if isinstance(value, torch.Generator):
        with torch._C._DisableTorchDispatch():  # its state is a tensor, which a trace would take for one of the program
            return Value("random generator", value.get_state().cpu().numpy().tobytes())
    if isinstance(value, itertools.count):
        return Value(repr(value), repr(value))
    if isinstance(value, queue.Queue):
        with value.mutex:
            return Value(f"queue of {len(value.queue)}", tuple(x if is_plain(x) else id(x) for x in value.queue))
    if isinstance(value, threading.Event):
        return Value(f"event that is {'' if value.is_set() else 'not '}set", value.is_set())
    if isinstance(value, io.StringIO | io.BytesIO) and not value.closed:
        return Value(f"stream at {value.tell()}", (value.tell(), value.getvalue()))
    if isinstance(value, bytearray | array.array | ctypes.Array) and len(value) <= _LARGEST:
        return Value(f"{type(value).__name__} of {len(value)}", bytes(value))
    if type(value).__module__.startswith(("ctypes", "multiprocessing.")) and hasattr(type(value), "value"):
        return Value(f"shared {value.value!r}", value.value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and getattr(value, "nbytes", _LARGEST + 1) <= _LARGEST:
        return Value(f"array of {value.nbytes} bytes", (str(value.dtype), value.shape, value.tobytes()))
    return None
