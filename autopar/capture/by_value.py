"""Objects of Python and numpy that are told apart by what they hold: generators, arrays, queues, events, streams, shared numbers; and what
tensors hold, to which may be written without their knowing it."""

from __future__ import annotations

import array
import ctypes
import gc
import io
import itertools
import queue
import random
import sys
import threading
from collections import deque
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import torch

from autopar.capture.held import Taken, Value, is_plain
from autopar.capture.positions import is_iterator, position_of

__all__ = ["Mark", "by_value", "changes_in_place", "mark_of", "objects_in"]

_LARGEST = 1 << 20  # bytes of an array or a tensor that are compared
_FILES = (io.TextIOWrapper, io.BufferedIOBase, io.RawIOBase)
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, deque})  # the usual ones, which are faster to tell
_FEW = 4096  # entries of a larger one
Mark = tuple[int, bool, bytes | None]  # of a tensor: how often it was written to, whether it requires a gradient, what it holds


def mark_of(tensor: torch.Tensor) -> Mark:
    """What is another one where a tensor that is no inference tensor has been written to, through `.data` or an array of numpy that has its
    memory too. Of what is larger than 1 MiB some thousand entries are looked at, of what is not in the CPU's memory none."""
    return tensor._version, tensor.requires_grad, _held_by(tensor)


def _held_by(tensor: torch.Tensor) -> bytes | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        every = max(1, tensor.numel() // _FEW) if tensor.numel() * tensor.element_size() > _LARGEST else 1
        part = tensor.detach().resolve_conj().resolve_neg()
        part = part.reshape(-1) if every == 1 else part.flatten()[::every]
        return part.contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b""


def changes_in_place(value: object) -> bool:
    """Whether what by_value gives of an object may be another while the object is the same. Generators and iterators apart: a forward that
    draws from one is refused."""
    return not (isinstance(value, random.Random | torch.Generator | itertools.count) or is_iterator(value) or _of_numpy(value) is not None)


def _of_numpy(value: Any) -> Any:
    """The state of a random generator of numpy; None of anything else."""
    if not type(value).__module__.startswith("numpy.random"):
        return None
    if isinstance(state := getattr(getattr(value, "bit_generator", value), "state", None), dict):
        return _as_bytes(state)  # of a Generator, and of what it draws its bits from
    return _as_bytes(value.get_state()) if hasattr(value, "get_state") else None


def _as_bytes(state: Any) -> Any:
    """The same with bytes in the place of arrays."""
    if isinstance(state, dict | tuple):
        return tuple(map(_as_bytes, state.items() if isinstance(state, dict) else state))
    return state.tobytes() if hasattr(state, "tobytes") else state


def by_value(value: Any) -> Value | None:
    """What is neither simple nor a container but can be told apart by a value of its own; None of anything else."""
    if type(value) in _CONTAINERS:
        return None
    if isinstance(value, random.Random):
        return Taken("random generator", value.getstate())
    if isinstance(value, torch.Generator):
        with torch._C._DisableTorchDispatch():  # its state is a tensor, which a trace would take for one of the program
            return Taken("random generator", value.get_state().cpu().numpy().tobytes())
    if isinstance(value, itertools.count):
        return Taken(repr(value), repr(value))
    if is_iterator(value):
        return position_of(value, by_value)
    if (state := _of_numpy(value)) is not None:
        return Taken("random generator", state)
    if isinstance(value, queue.Queue | queue.SimpleQueue):
        found = objects_in(value)
        return Value(f"queue of {len(found)}", tuple(x if is_plain(x) else id(x) for x in found))
    if isinstance(value, threading.Event):
        return Value(f"event that is {'' if value.is_set() else 'not '}set", value.is_set())
    if isinstance(value, io.StringIO | io.BytesIO) and not value.closed:
        return Value(f"stream at {value.tell()}", (value.tell(), value.getvalue()))
    if isinstance(value, _FILES) and not value.closed and value.writable() and value.seekable():
        return Value(f"file at {value.tell()}", value.tell())
    if isinstance(value, bytearray | array.array | ctypes.Array) and len(value) <= _LARGEST:
        return Value(f"{type(value).__name__} of {len(value)}", bytes(value))
    if isinstance(value, memoryview):
        return _of_memory(value)
    if isinstance(value, SynchronizedBase) and isinstance(shared := value.get_obj(), ctypes.Array):
        return by_value(shared)
    if type(value).__module__.startswith(("ctypes", "multiprocessing.")) and hasattr(type(value), "value"):
        return Value(f"shared {value.value!r}", value.value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and getattr(value, "nbytes", _LARGEST + 1) <= _LARGEST:
        return Value(f"array of {value.nbytes} bytes", (str(value.dtype), value.shape, value.tobytes()))
    return None


def objects_in(value: Any) -> tuple[Any, ...]:
    """What a queue or an array holds beside numbers."""
    if isinstance(value, queue.Queue):
        with value.mutex:
            return tuple(value.queue)
    if isinstance(value, queue.SimpleQueue):
        return _waiting(value)
    return tuple(value.flat) if getattr(getattr(value, "dtype", None), "hasobject", False) and value.nbytes <= _LARGEST else ()


def _waiting(value: queue.SimpleQueue[Any]) -> tuple[Any, ...]:
    """Before Python 3.13 what a queue holds refers to what was taken from it too."""
    size, found = value.qsize(), [x for x in gc.get_referents(value) if x is not type(value)]
    held = found if sys.version_info >= (3, 13) else found[0] if found else []
    return tuple(held[len(held) - size :])


def _of_memory(value: memoryview) -> Value | None:
    try:
        return Value(f"memory of {value.nbytes} bytes", value.tobytes()) if value.nbytes <= _LARGEST else None
    except ValueError:  # it was given back
        return None
