"""Values that people keep beside tensors (options of optimizers, states of schedulers, samplers, generators), as JSON and back.

What JSON has stands for itself; everything else is an object with the key '!' that names its kind, out of a fixed list. Tensors are kept
in the checkpoint's data, and the value names the key. Decoding builds numbers, text, containers and arrays, and calls nothing else.
"""

from __future__ import annotations

import base64
import binascii
import collections
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.errors import CheckpointError

__all__ = ["decode", "encode", "tensor_keys"]

Keep = Callable[[str, Tensor], str]  # the path of a tensor, the tensor -> the key under which it is kept
_DEEPEST = 100
_LISTS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict, "ordered": collections.OrderedDict, "counter": lambda pairs: collections.Counter(dict(pairs)),
}  # fmt: skip
_SCALAR = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")


def encode(value: Any, path: str, keep: Keep, depth: int = 0) -> Any:
    """A value as JSON. path: its name, for errors and for the keys of tensors. CheckpointError if it is of a kind that is not kept."""
    kind = type(value)
    if depth > _DEEPEST:
        raise CheckpointError(f"{path[:80]} is nested more than {_DEEPEST} deep, or contains itself")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"!": "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"!": "float", "v": repr(value)}
    if isinstance(value, Tensor):
        return {"!": "tensor", "v": keep(path, value)}

    def inside(items: Any) -> list[Any]:
        return [encode(item, f"{path}.{i}", keep, depth + 1) for i, item in enumerate(items)]

    if kind is list:
        return inside(value)
    if kind is torch.Size:
        return {"!": "size", "v": list(value)}
    if isinstance(value, tuple):
        if kind is not tuple:
            raise _refused(path, value, "make it a plain tuple or a dict")
        return {"!": "tuple", "v": inside(value)}
    if kind in (set, frozenset):
        return {"!": kind.__name__, "v": inside(sorted(value, key=repr))}
    if kind is collections.deque:
        return {"!": "deque", "v": inside(value), "n": value.maxlen}
    if kind is dict and all(type(k) is str and k != "!" for k in value):
        return {k: encode(v, f"{path}.{k}", keep, depth + 1) for k, v in value.items()}
    for name, made in (("dict", dict), ("ordered", collections.OrderedDict), ("counter", collections.Counter)):
        if kind is made:
            pairs = [[encode(k, path, keep, depth + 1), encode(v, f"{path}.{k}", keep, depth + 1)] for k, v in value.items()]
            return {"!": name, "v": pairs}
    if kind is bytes:
        return {"!": "bytes", "v": base64.b64encode(value).decode()}
    if kind is complex:
        return {"!": "complex", "v": [encode(value.real, path, keep), encode(value.imag, path, keep)]}
    if kind is torch.dtype:
        return {"!": "dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, np.generic) and _SCALAR.fullmatch(value.dtype.name):
        return {"!": "scalar", "dtype": value.dtype.name, "v": encode(value.item(), path, keep)}
    if kind is np.ndarray and _SCALAR.fullmatch(value.dtype.name):
        return {"!": "array", "v": keep(path, torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)))}
    if callable(getattr(value, "state_dict", None)):
        raise _refused(path, value, "give its state_dict()")
    raise _refused(path, value, "give numbers, text, tensors, arrays, and lists, tuples, sets and dicts of them")


def _refused(path: str, value: object, remedy: str) -> CheckpointError:
    return CheckpointError(f"{path} is of type {type(value).__name__}, which a checkpoint does not keep: {remedy}")


def tensor_keys(value: Any) -> Iterator[str]:
    """The keys of the tensors in an encoded value."""
    if isinstance(value, list):
        for item in value:
            yield from tensor_keys(item)
    elif isinstance(value, dict):
        if value.get("!") in ("tensor", "array") and isinstance(value.get("v"), str):
            yield value["v"]
        else:
            for item in value.values():
                yield from tensor_keys(item)


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value again. tensor: key -> tensor. CheckpointError if it was not made by `encode`."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "!" not in value:
        return {k: decode(v, tensor) for k, v in value.items()}
    try:
        return _tagged(value["!"], value, tensor)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, binascii.Error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint has a value of kind {str(value['!'])[:40]!r} that cannot be read: {error}") from error


def _tagged(kind: str, value: Mapping[str, Any], tensor: Callable[[str], Tensor]) -> Any:
    held = value["v"]
    if kind in _LISTS:
        return _LISTS[kind](decode(list(held), tensor))
    if kind in _DICTS:
        return _DICTS[kind]([(decode(k, tensor), decode(v, tensor)) for k, v in held])
    if kind == "tensor":
        return tensor(held)
    if kind == "array":
        return tensor(held).numpy()
    if kind == "int":
        return int(held, 16)
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[held]
    if kind == "size":
        return torch.Size(held)
    if kind == "deque":
        return collections.deque(decode(list(held), tensor), value["n"])
    if kind == "bytes":
        return base64.b64decode(held, validate=True)
    if kind == "complex":
        return complex(*decode(list(held), tensor))
    if kind == "dtype" and isinstance(found := vars(torch).get(held), torch.dtype):
        return found
    if kind == "scalar" and _SCALAR.fullmatch(value["dtype"]):
        return np.dtype(value["dtype"]).type(decode(held, tensor))
    raise CheckpointError(f"the checkpoint has a value of an unknown kind {str(kind)[:40]!r}: a later autopar wrote it, or it is damaged")
