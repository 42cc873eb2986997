"""Who writes and reads which boxes: torch.distributed.checkpoint's planners, given how the tensors of a plan lie.

Every rank proposes the boxes that it holds, and the plan keeps each on one of the ranks that propose it: the copies of a parameter are
written once, and all ranks write about the same amount.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    ChunkStorageMetadata,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    StorageReader,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.checkpoint.boxes import Box
from autopar.checkpoint.index import Contents
from autopar.checkpoint.storage import Writer
from autopar.errors import CheckpointError

__all__ = ["Held", "Target", "read", "read_values", "write"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A tensor as this rank holds it. shape: of the whole; here: what is on this rank, plain; boxes: of it, which this rank would write."""

    shape: tuple[int, ...]
    here: Tensor
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a tensor of the checkpoint is to go. key: in the checkpoint; here, boxes: as of Held."""

    key: str
    here: Tensor
    boxes: tuple[Box, ...]


# What reading a damaged file or a hostile pickle ends with, which is then said in our words. Anything else is a defect and keeps its type.
_DAMAGED = (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, AssertionError, OverflowError, MemoryError)


# ------------------------------------------------------------------------------------------------------------------ writing
class SavePlanner(DefaultSavePlanner):
    """held: key -> what this rank holds of it. contents: what else goes into the checkpoint, as this rank knows it."""

    def __init__(self, held: Mapping[str, Held], contents: Contents) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held, self._contents = held, contents

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, one in self._held.items():
            properties = TensorProperties(dtype=one.here.dtype)
            for box in one.boxes:
                chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
                data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(one.shape))
                items.append(WriteItem(index=MetadataIndex(key, box.offsets), type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=self._contents)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        known: dict[str, tuple[Any, int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                kind = (item.tensor_data.properties.dtype, tuple(item.tensor_data.size))
                before, other = known.setdefault(item.index.fqn, (kind, rank))
                if before != kind:
                    raise CheckpointError(f"{item.index.fqn} is {_kind(before)} on rank {other} and {_kind(kind)} on rank {rank}")
        contents = _merged([plan.planner_data for plan in all_plans])
        own = [SavePlan(items) for items in shared_out([plan.items for plan in all_plans])]
        plans, metadata = super().create_global_plan(own)
        return plans, dataclasses.replace(metadata, planner_data=contents)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        one = self._held[write_item.index.fqn]
        offset = write_item.index.offset
        assert offset is not None
        (box,) = (box for box in one.boxes if box.offsets == tuple(offset))
        return box.of(one.here)


def shared_out(proposed: Sequence[Sequence[WriteItem]]) -> list[list[WriteItem]]:
    """For each rank, which of the boxes that it proposes it is to write: each box is written once, by the rank that has least to write so
    far. Boxes that few ranks have come first, and large ones before small ones."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, of_rank in enumerate(proposed):
        for item in of_rank:
            holders.setdefault(item.index, []).append(rank)
            items[item.index] = item
    load, own = [0] * len(proposed), [[] for _ in proposed]  # type: tuple[list[int], list[list[WriteItem]]]
    for index in sorted(items, key=lambda i: (len(holders[i]), -_nbytes(items[i]))):
        rank = min(holders[index], key=lambda r: load[r])
        load[rank] += _nbytes(items[index])
        own[rank].append(items[index])
    return own


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _kind(kind: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{str(kind[0]).removeprefix('torch.')}{list(kind[1])}"


def _merged(found: Sequence[Contents]) -> Contents:
    """Rank 0's, with the states of parameters that only others know."""
    state: dict[str, dict[str, Any]] = {}
    for contents in found:
        for name, of_param in contents.state.items():
            state.setdefault(name, of_param)
    return msgspec.structs.replace(found[0], state=state)


def write(writer: Writer, held: Mapping[str, Held], contents: Contents, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint; collective over the group (None: this process alone). CheckpointError on every rank if it fails on one."""
    planner = SavePlanner(held, contents)
    try:
        if group is not None:
            with _said("save"):
                dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
            return
        # the sequence that torch.distributed.checkpoint documents for a writer and a planner, without other ranks
        planner.set_up_planner({}, StorageMeta(), True)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer.finish(metadata, [writer.write_data(planner.finish_plan(plans[0]), planner).wait()])
    except CheckpointError:
        writer.remove()
        raise


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """What DCP collects from all ranks as one CheckpointError."""
    try:
        yield
    except CheckpointException as failed:
        for rank, (error, _) in sorted(failed.failures.items()):
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"the {what} failed on rank {rank}: {error}") from None
        for rank, (error, _) in sorted(failed.failures.items()):
            if isinstance(error, _DAMAGED):
                raise CheckpointError(f"the {what} failed on rank {rank}: {type(error).__name__}: {error}") from failed
        raise


# ------------------------------------------------------------------------------------------------------------------ reading
class _Reads(LoadPlanner):
    """targets: by a name of our own; one key may go to several."""

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self._targets = targets

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, target in self._targets.items():
            found = self._metadata.state_dict_metadata[target.key]
            assert isinstance(found, TensorStorageMetadata)
            chunks = [ChunkStorageMetadata(offsets=torch.Size(b.offsets), sizes=torch.Size(b.sizes)) for b in target.boxes]
            for item in create_read_items_for_chunk_list(target.key, found, chunks):
                if all(item.lengths):
                    items.append(dataclasses.replace(item, dest_index=MetadataIndex(name, item.dest_index.offset)))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._targets[read_item.dest_index.fqn]
        offset = read_item.dest_index.offset
        assert offset is not None
        (box,) = (box for box in target.boxes if box.offsets == tuple(offset))
        found = box.of(target.here)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was written in place."""


def read(reader: StorageReader, metadata: Metadata, targets: Mapping[str, Target], group: dist.ProcessGroup | None) -> None:
    """Read tensors into their targets; collective over the group (None: this process alone). CheckpointError on every rank if it fails on
    one; then some targets may have been written to."""
    planner = _Reads(targets)
    if group is not None:
        with _said("load"), torch.no_grad():
            dcp.load({}, storage_reader=reader, planner=planner, process_group=group)
        return
    with torch.no_grad():
        _read_alone(reader, metadata, planner)


def _read_alone(reader: StorageReader, metadata: Metadata, planner: LoadPlanner) -> None:
    try:
        planner.set_up_planner({}, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except CheckpointError:
        raise
    except _DAMAGED as error:
        raise CheckpointError(f"the checkpoint cannot be read: {type(error).__name__}: {error}") from error


class _ReadsValues(_Reads):
    def __init__(self, keys: Sequence[str], load: Callable[[str, Any], None]) -> None:
        super().__init__({})
        self._keys, self._load = keys, load

    def create_local_plan(self) -> LoadPlan:
        none = torch.Size((0,))
        return LoadPlan([
            ReadItem(
                type=LoadItemType.BYTE_IO, dest_index=MetadataIndex(key), dest_offsets=none, storage_index=MetadataIndex(key),
                storage_offsets=none, lengths=none,
            )
            for key in self._keys
        ])  # fmt: skip

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self._load(read_item.storage_index.fqn, value)


def read_values(reader: StorageReader, metadata: Metadata, keys: Sequence[str], load: Callable[[str, Any], None]) -> None:
    """Give load(key, bytes) what is stored under keys that are no tensors. On this process alone."""
    _read_alone(reader, metadata, _ReadsValues(keys, load))
