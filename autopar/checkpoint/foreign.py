"""Checkpoints that torch.distributed.checkpoint wrote itself, of DDP, FSDP2 or a plain module (get_state_dict, dcp.save): read only.

Their index is a pickle. It is read by an unpickler that knows the dataclasses of that index and nothing else, and what it gives is copied
into values of our own and checked. Tensors and values are read with weights_only=True.
"""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    FileSystemReader,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from autopar.checkpoint.boxes import not_a_tiling
from autopar.checkpoint.index import Contents, Group
from autopar.checkpoint.planners import read_values
from autopar.checkpoint.values import encode
from autopar.errors import CheckpointError

__all__ = ["METADATA", "ForeignReader", "contents_for", "model_prefix"]

METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),  # of torch before 2.3
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath",),
    "collections": ("OrderedDict",),
}  # fmt: skip
_BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError, OverflowError, MemoryError,
           RecursionError, RuntimeError)  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Builds dtypes, sizes and the dataclasses of DCP's index; UnpicklingError for everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            if name == "Size":
                return torch.Size
            if isinstance(found := vars(torch).get(name), torch.dtype):
                return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if name in _CLASSES.get(module, ()):
            if module.startswith("torch.distributed.checkpoint"):
                return getattr(dcp_filesystem if module.endswith("filesystem") else dcp_metadata, name)
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not of such an index: what it would do is not done")


def _layout(name: str) -> torch.layout:
    return torch.strided


class ForeignReader(FileSystemReader):
    """Reads DCP's own format; its index without running anything."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.folder = Path(path)
        self._metadata = _read(self.folder)

    def read_metadata(self, *args: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)


def _read(folder: Path) -> Metadata:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            raw = _Unpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except _BROKEN as error:
        raise CheckpointError(f"{path} is not an index of torch.distributed.checkpoint, or is damaged: {error}") from error
    try:
        return _checked(folder, raw)
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _checked(folder: Path, raw: Any) -> Metadata:
    """The same index, of fresh objects that hold nothing but what they should."""
    if type(raw) is not Metadata or not isinstance(raw.state_dict_metadata, dict) or not isinstance(raw.storage_data, dict):
        raise CheckpointError(f"{folder / METADATA} holds a {type(raw).__name__}, not an index of a checkpoint")
    entries: dict[str, Any] = {}
    for key, entry in raw.state_dict_metadata.items():
        if type(entry) is BytesStorageMetadata:
            entries[str(key)] = BytesStorageMetadata()
            continue
        if type(entry) is not TensorStorageMetadata or not isinstance(dtype := entry.properties.dtype, torch.dtype):
            raise CheckpointError(f"{folder / METADATA}: {key} is neither a tensor nor a value")
        size = _ints(entry.size)
        chunks = [ChunkStorageMetadata(offsets=_ints(c.offsets), sizes=_ints(c.sizes)) for c in entry.chunks]
        if problem := not_a_tiling(size, ((tuple(c.offsets), tuple(c.sizes)) for c in chunks)):
            raise CheckpointError(f"{folder / METADATA}: {key} cannot be read: {problem}")
        entries[str(key)] = TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)
    storage: dict[MetadataIndex, Any] = {}
    sizes: dict[str, int] = {}
    for index, info in raw.storage_data.items():
        name, offset, length = info.relative_path, info.offset, info.length
        if type(name) is not str or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{folder / METADATA} names a data file {str(name)[:80]!r} outside of the checkpoint")
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0 or offset + length > sizes[name]:
            state = "is not there" if sizes[name] < 0 else f"has {sizes[name]} bytes, and should have more"
            raise CheckpointError(f"{folder} is not complete: {name} {state}")
        fresh = dcp_filesystem._StorageInfo(name, offset, length)
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{folder} was written with extensions (compression), which are not read: write it without")
        storage[MetadataIndex(str(index.fqn), None if index.offset is None else _ints(index.offset))] = fresh
    return Metadata(state_dict_metadata=entries, storage_data=storage, planner_data=_paths(raw.planner_data))


def _ints(values: Iterable[Any]) -> torch.Size:
    found = [*values]
    if any(type(v) is not int or not 0 <= v < 2**62 for v in found) or math.prod(max(v, 1) for v in found) >= 2**62:
        raise CheckpointError(f"a size or offset {found[:8]} that no tensor has")
    return torch.Size(found)


def _paths(raw: Any) -> dict[str, tuple[str | int, ...]]:
    """Key -> where it was in the nested state that was saved."""
    if not isinstance(raw, dict):
        return {}
    return {str(key): tuple(p if type(p) is int else str(p) for p in path) for key, path in raw.items() if isinstance(path, tuple)}


# ------------------------------------------------------------------------------------------------- in terms of our own checkpoints
def model_prefix(keys: Iterable[str], names: Iterable[Iterable[str]]) -> str:
    """What stands before the names of the model's tensors. names: for each tensor, every name it has. CheckpointError if more than one
    prefix fits; the one that most names have if none has all."""
    keys = set(keys)
    names = [tuple(of_one) for of_one in names]
    found: dict[str, int] = {}
    for of_one in names:
        here = {key[: -len(name)] for name in of_one for key in keys if key.endswith(name) and (key == name or key[-len(name) - 1] == ".")}
        for prefix in here:
            found[prefix] = found.get(prefix, 0) + 1
    if not found:
        return ""
    most = max(found.values())
    best = sorted(prefix for prefix, count in found.items() if count == most)
    named = [prefix for prefix in best if prefix.rstrip(".").rpartition(".")[2] == "model"]
    if len(best) > 1 and len(named) != 1:
        several = ", ".join(repr(p.rstrip(".")) for p in best)
        raise CheckpointError(f"the checkpoint has several models ({several}), and none is called 'model'")
    return named[0] if len(best) > 1 else best[0]


def contents_for(reader: ForeignReader, names: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, str], Contents]:
    """Name of a tensor of the model -> its key, and what else is in a foreign checkpoint. names: each tensor's first name -> all names."""
    metadata = reader.read_metadata()
    tensors = {key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    values = metadata.state_dict_metadata.keys() - tensors
    prefix = model_prefix(tensors, names.values())
    first = {alias: name for name, of_one in names.items() for alias in of_one}
    rest = sorted(metadata.state_dict_metadata)
    of_optimizer = {key: place for key in rest if (place := _place(key, first)) is not None}
    keys = {key.removeprefix(prefix): key for key in sorted(tensors) if key.startswith(prefix) and key not in of_optimizer}
    if not prefix:  # the model's tensors are among whatever else was saved
        keys = {name: key for name, key in keys.items() if name in first}
    state: dict[str, dict[str, Any]] = {}
    options: dict[tuple[str, str], dict[str, Any]] = {}
    read: dict[str, Any] = {}
    wanted = [key for key in rest if key in values and (key in of_optimizer or key not in keys.values())]
    read_values(reader, metadata, wanted, lambda key, file: read.update({key: _value(reader.folder, key, file)}))
    taken = set(keys.values())
    for key, (kind, of, last) in of_optimizer.items():
        taken.add(key)
        value = {"!": "tensor", "v": key} if key in tensors else _encoded(key, read[key])
        if kind == "state":
            if last in state.setdefault(of, {}):
                raise CheckpointError(f"{reader.folder} has the state {last} of {of} twice")
            state[of][last] = value
        else:
            options.setdefault((kind, of), {})[last] = value if last != "params" else read.get(key)
    extra: dict[str, Any] = {}
    for key in rest:
        if key not in taken and read.get(key) is not _UNREADABLE:
            path = metadata.planner_data.get(key, (key,))
            _set(extra, path, {"!": "tensor", "v": key} if key in tensors else _encoded(key, read[key]))
    groups = tuple(_groups(options, first))
    contents = Contents(names=tuple(keys), groups=groups or None, state=state, extra=extra)
    return keys, contents


def _place(key: str, first: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Where a key belongs in an optimizer: ('state', parameter, state), (prefix of a group, its number or a parameter, option)."""
    for word in ("state", "param_groups"):
        before, found, after = ("", word, key.removeprefix(f"{word}.")) if key.startswith(f"{word}.") else key.partition(f".{word}.")
        if not found or not after:
            continue
        if word == "state":
            name, _, last = after.rpartition(".")
            if name in first and last:
                return "state", first[name], last
        else:
            of, _, last = after.rpartition(".")
            if of.isdecimal():
                return f"{before}.numbered", of, last
            if of in first:
                return f"{before}.named", first[of], last
    return None


def _groups(options: Mapping[tuple[str, str], dict[str, Any]], first: Mapping[str, str]) -> Iterator[Group]:
    for (kind, of), found in options.items():
        params = [of] if kind.endswith(".named") else found.get("params")
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            raise CheckpointError(f"the checkpoint's optimizer names no parameters in group {of}: save it as get_state_dict gives it")
        yield Group(params=tuple(first.get(name, name) for name in params), options={k: v for k, v in found.items() if k != "params"})


_UNREADABLE = object()


def _value(folder: Path, key: str, file: Any) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except _BROKEN as error:
        warnings.warn(f"{folder}: {key} is not read: it holds what only running it would give ({type(error).__name__})", stacklevel=2)
        return _UNREADABLE


def _encoded(key: str, value: Any) -> Any:
    def keep(path: str, tensor: torch.Tensor) -> str:
        raise CheckpointError(f"{path} is a tensor within a value: it is not read")

    if value is _UNREADABLE:
        raise CheckpointError(f"{key} belongs to the optimizer, and cannot be read as data: load without an optimizer")
    return encode(value, key, keep)


def _set(nested: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """In nested dicts; numbers in a path (of a list) are keys too."""
    for part in path[:-1]:
        found = nested.setdefault(str(part), {})
        nested = found if isinstance(found, dict) and "!" not in found else {}
    nested[str(path[-1])] = value
