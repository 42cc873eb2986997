"""Where torch.distributed.checkpoint writes and reads: the format of `index`, by DCP's public StorageWriter and StorageReader."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autopar.checkpoint import index as format
from autopar.checkpoint.index import Chunk, Contents, File, TensorEntry, data_file, read_index
from autopar.checkpoint.safetensors_file import itemsize, read_elements, write
from autopar.errors import CheckpointError

__all__ = ["CheckpointReader", "Writer", "told"]


@contextlib.contextmanager
def told(what: str, folder: Path, nbytes: int | None = None) -> Iterator[None]:
    """An error of the file system inside is a CheckpointError that says what was done, and what room there is."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(folder).free
                needs = "" if nbytes is None else f" of {nbytes / 2**20:.1f} MiB"
                raise CheckpointError(
                    f"{what}{needs}: {error.strerror} ({free / 2**20:.1f} MiB are free there). The checkpoint that was there before, if "
                    f"there was one, is as it was. Free some room, and save again"
                ) from error
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


class Writer(StorageWriter):
    """Writes one checkpoint. rank: of this process; save_id: the same on all ranks, and of no other save. writes: entered while this
    process's part is written, outside of which ranks wait for each other."""

    def __init__(
        self, folder: Path, save_id: str, rank: int, writes: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        self._folder, self._id, self._rank, self._writes = folder, save_id, rank, writes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP's: nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any) -> None:
        with told(f"cannot make the folder {self._folder}", self._folder.parent):
            self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """The boxes of the plan in one file; none if there are none."""
        tensors = []
        for item in plan.items:
            assert item.tensor_data is not None, "values that are no tensors are in the index"
            chunk, properties = item.tensor_data.chunk, item.tensor_data.properties
            name = _name_of_box(item.index.fqn, item.tensor_data.size, chunk)
            tensors.append((name, properties.dtype, tuple(chunk.sizes)))

        def data(i: int) -> torch.Tensor:
            found = planner.resolve_data(plan.items[i])
            assert isinstance(found, torch.Tensor)
            return found

        sizes = [math.prod(shape) * itemsize(dtype) for _, dtype, shape in tensors]
        results = []
        if tensors:
            path = self._folder / data_file(self._id, self._rank)
            try:
                with self._writes(), told(f"cannot write {path}", self._folder, sum(sizes)):
                    placed = write(path, tensors, data)
                    total = path.stat().st_size
            except CheckpointError:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                raise
            for item, size, place in zip(plan.items, sizes, placed, strict=True):
                where = (File(name=path.name, nbytes=total), place)
                results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=where))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written."""
        contents: Contents = metadata.planner_data
        files: dict[str, int] = {}
        names: list[File] = []
        where: dict[MetadataIndex, tuple[int, Any]] = {}
        for result in (one for of_rank in results for one in of_rank):
            file, place = result.storage_data
            if file.name not in files:
                files[file.name] = len(names)
                names.append(file)
            where[result.index] = (files[file.name], place)
        tensors = {}
        for key, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata)
            chunks = []
            for chunk in found.chunks:
                number, place = where[MetadataIndex(key, chunk.offsets)]
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                chunks.append(Chunk(file=number, start=place.start, crc=place.crc, offsets=offsets, sizes=sizes))
            dtype = str(found.properties.dtype).removeprefix("torch.")
            tensors[key] = TensorEntry(dtype=dtype, shape=tuple(found.size), chunks=tuple(chunks))
        with told(f"cannot write the index of {self._folder}", self._folder):
            format.commit(self._folder, self._id, tuple(names), tensors, contents)

    def remove(self) -> None:
        """What this rank has written, of a save that has failed."""
        with contextlib.suppress(OSError):
            (self._folder / data_file(self._id, self._rank)).unlink(missing_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _name_of_box(key: str, size: torch.Size, chunk: ChunkStorageMetadata) -> str:
    if chunk.sizes == size:
        return key
    return f"{key}[{','.join(f'{start}:{start + length}' for start, length in zip(chunk.offsets, chunk.sizes, strict=True))}]"


class CheckpointReader(StorageReader):
    """Reads a checkpoint of autopar.save as torch.distributed.checkpoint does, so that other engines load it too:

        state = {"model": get_model_state_dict(fsdp_model)}
        torch.distributed.checkpoint.load(state, storage_reader=CheckpointReader(path))

    Tensors are under 'model.NAME' (tied ones under each of their names) and 'optimizer.state.NAME.STATE', in their global shapes. Nothing
    is unpickled. Raises CheckpointError if there is no checkpoint, or if it is not complete or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.reset(path)

    @property
    def contents(self) -> Contents:
        """What the checkpoint has beside tensors."""
        return self._index.contents

    @property
    def id(self) -> str:
        """Another one for each save."""
        return self._index.id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
        self._index = read_index(self.folder)
        tied = self._index.contents.tied.items()
        self._tensors = self._index.tensors | {f"model.{alias}": self._index.tensors[f"model.{name}"] for alias, name in tied}

    def read_metadata(self, *args: Any) -> Metadata:
        found = {}
        for key, entry in self._tensors.items():
            chunks = [ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes)) for c in entry.chunks]
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            found[key] = TensorStorageMetadata(properties=properties, size=torch.Size(entry.shape), chunks=chunks)
        return Metadata(state_dict_metadata=found)  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """DCP's: all is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[int, list[tuple[Chunk, ReadItem]]] = {}
        chunks_of: dict[str, dict[tuple[int, ...], Chunk]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise CheckpointError(f"{self.folder} has {item.storage_index.fqn} in its index: autopar.load reads what is no tensor")
            key = item.storage_index.fqn
            if key not in chunks_of:
                chunks_of[key] = {c.offsets: c for c in self._tensors[key].chunks if all(c.sizes)}
            assert item.storage_index.offset is not None
            chunk = chunks_of[key][tuple(item.storage_index.offset)]
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for number, items in by_file.items():
            path = self.folder / self._index.files[number].name
            with told(f"cannot read {path}", self.folder), path.open("rb", buffering=0) as file:
                for chunk, item in sorted(items, key=lambda one: one[0].start):
                    dtype = getattr(torch, self._tensors[item.storage_index.fqn].dtype)
                    found_here = _read(file, chunk, dtype, tuple(item.storage_offsets), tuple(item.lengths))
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(found_here)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / format.INDEX).is_file()


def _read(file: IO[bytes], chunk: Chunk, dtype: torch.dtype, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    """A rectangle of a box: the rows that it spans are read, and of those what is wanted is kept."""
    if lengths == chunk.sizes:
        return read_elements(file, chunk.start, dtype, chunk.sizes, chunk.crc)
    row = math.prod(chunk.sizes[1:]) * itemsize(dtype)
    rows = read_elements(file, chunk.start + offsets[0] * row, dtype, (lengths[0], *chunk.sizes[1:]))
    for dim in range(1, len(lengths)):
        rows = rows.narrow(dim, offsets[dim], lengths[dim])
    return rows
