"""The format of a checkpoint: a folder of data files and one index, which is the mark of a complete one.

    PATH/checkpoint.json                      the index: what is where, and everything that is no tensor
    PATH/data-ID-RANK.safetensors             the boxes that a rank has written, under names such as model.layer.weight[0:64,0:16]

Why not the files of torch.distributed.checkpoint's FileSystemWriter: its index and its values are pickles, which run code when they are
read. Safetensors and JSON are data. torch.distributed.checkpoint does the planning over them all the same (`storage`, `planners`).

A save writes data files with an ID of its own, and then replaces the index in one step of the file system. So the index that is there is
always of a complete checkpoint, whenever a process is killed; what a dead save has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from autopar.checkpoint.boxes import not_a_tiling
from autopar.checkpoint.safetensors_file import itemsize
from autopar.errors import CheckpointError
from autopar.files import in_line

__all__ = ["INDEX", "Chunk", "Contents", "File", "Group", "Index", "Stream", "TensorEntry", "commit", "data_file", "read_index"]

INDEX = "checkpoint.json"
FORMAT = "autopar checkpoint"
VERSION = 1
_DATA = re.compile(r"data-[0-9a-f]{16}-\d{5,}\.safetensors")
_DEAD = re.compile(r"checkpoint\.json\.[0-9a-f]{16}\.part")

Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Sizes = Annotated[tuple[Size, ...], msgspec.Meta(max_length=64)]


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A box of a tensor. file: its number in the index; start: of its data there, in bytes; crc: CRC-32 of its data, which is checked
    where the box is read whole; offsets, sizes: of the box, by dim."""

    file: Size
    start: Size
    crc: Size
    offsets: Sizes
    sizes: Sizes


class TensorEntry(msgspec.Struct, frozen=True):
    """shape: of the whole."""

    dtype: str
    shape: Sizes
    chunks: tuple[Chunk, ...]


class File(msgspec.Struct, array_like=True, frozen=True):
    name: str
    nbytes: Size


class Group(msgspec.Struct, frozen=True):
    """A group of an optimizer: the names of its parameters, and its options, encoded."""

    params: tuple[str, ...]
    options: dict[str, Any]


class Stream(msgspec.Struct, frozen=True):
    """Where a parallel module's own random numbers are: their seed, and how many calls have drawn."""

    seed: int
    calls: Size


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a checkpoint beside numbers of tensors. Encoded values as in `values`.

    names: of the model's parameters and persistent buffers; tied: another name -> the one under which a tensor is kept. module_state: name
    of a module -> what its get_extra_state() gave. groups: of the optimizer, None if none was saved; state: name of a parameter -> its
    state. extra: what the user gave. config: the model's own configuration as JSON, where it has one.
    """

    names: tuple[str, ...]
    tied: dict[str, str] = {}
    module_state: dict[str, Any] = {}
    groups: tuple[Group, ...] | None = None
    state: dict[str, dict[str, Any]] = {}
    extra: dict[str, Any] = {}
    stream: Stream | None = None
    config: str | None = None


class Index(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int
    id: str
    files: tuple[File, ...]
    tensors: dict[str, TensorEntry]
    contents: Contents


def data_file(save_id: str, rank: int) -> str:
    """The name of the data file of a rank; save_id: 16 hexadecimal digits."""
    return f"data-{save_id}-{rank:05d}.safetensors"


def commit(
    folder: Path, save_id: str, files: tuple[File, ...], tensors: dict[str, TensorEntry], contents: Contents
) -> None:
    """Make this the checkpoint of the folder, in one step; then remove the files of others. Raises OSError, CheckpointError."""
    index = Index(format=FORMAT, version=VERSION, id=save_id, files=files, tensors=tensors, contents=contents)
    for file in files:
        found = _size(folder / file.name)
        if found != file.nbytes:
            raise CheckpointError(
                f"{folder / file.name} was written by a rank, and {'is not there' if found is None else f'has {found} bytes'} as rank 0 "
                f"sees it: a checkpoint needs a folder that all ranks share"
            )
    part = folder / f"{INDEX}.{save_id}.part"
    with _removed_on_error(part):
        with part.open("wb") as stream:
            stream.write(msgspec.json.encode(index))
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(folder)  # the names of the data files are on the disk before the index says so
        os.replace(part, folder / INDEX)
    # from here on it is the checkpoint, and what fails now is no failure of the save
    kept = {file.name for file in files}
    with contextlib.suppress(OSError):
        _sync_folder(folder)
        for path in folder.iterdir():
            if (_DATA.fullmatch(path.name) and path.name not in kept) or _DEAD.fullmatch(path.name):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def read_index(folder: Path) -> Index:
    """The index of a checkpoint, checked: every element of every tensor is in one place of a file that is there. CheckpointError else."""
    path = folder / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not the index of a checkpoint, or is damaged: {in_line(error)}") from error
    if index.format != FORMAT or index.version != VERSION:
        says = f"{in_line(repr(index.format))} version {index.version}"
        raise CheckpointError(f"{path} says {says}; this autopar reads {FORMAT!r} version {VERSION}")
    for file in index.files:
        if not _DATA.fullmatch(file.name):
            raise CheckpointError(f"{path} names a data file {file.name[:80]!r}, which no checkpoint has")
        found = _size(folder / file.name)
        if found != file.nbytes:
            state = "is not there" if found is None else f"has {found} bytes instead of {file.nbytes}"
            raise CheckpointError(
                f"{folder} is not complete: {file.name} {state}. Copy the folder again, or load an earlier checkpoint (or it was replaced "
                f"while it was read: read it again)"
            )
    for key, entry in index.tensors.items():
        if problem := _problem(entry, index.files):
            raise CheckpointError(f"{path} is damaged: {key}: {problem}")
    known = {f"model.{name}" for name in index.contents.names}
    if missing := sorted(known - index.tensors.keys()):
        raise CheckpointError(f"{path} is damaged: it names {missing[0]} and does not say where it is")
    if wrong := sorted(set(index.contents.tied.values()) - set(index.contents.names)):
        raise CheckpointError(f"{path} is damaged: something is tied to {wrong[0]!r}, which it does not have")
    return index


def _problem(entry: TensorEntry, files: tuple[File, ...]) -> str | None:
    dtype = vars(torch).get(entry.dtype)
    if not isinstance(dtype, torch.dtype):
        return f"there is no dtype {entry.dtype[:40]!r}"
    for chunk in entry.chunks:
        nbytes = math.prod(chunk.sizes) * itemsize(dtype)
        if chunk.file >= len(files) or chunk.start + nbytes > files[chunk.file].nbytes:
            return "a part of it lies outside of the data"
    return not_a_tiling(entry.shape, ((chunk.offsets, chunk.sizes) for chunk in entry.chunks))
