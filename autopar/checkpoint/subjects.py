"""What is saved and loaded into: a parallel module, one that is not planned yet, or a plain model on one process.

All three are seen alike: tensors under the original model's names, and which boxes of each are on this rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint.boxes import Box, boxes_of, whole_box
from autopar.checkpoint.index import Stream
from autopar.errors import CheckpointError
from autopar.run import ParallelModule
from autopar.run.alike import done_by_every_rank
from autopar.run.deferred import DeferredModule, started
from autopar.run.groups import group_of
from autopar.run.lies import Lies
from autopar.run.part import is_part
from autopar.run.random_numbers import just_seeded
from autopar.run.together import talking

__all__ = ["Subject", "Named", "subject_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A tensor of the model's state. name: the first of its names; aliases: the others. shape: of the whole. here: what is on this rank,
    plain, sharing memory. boxes: of it."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    here: Tensor
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """title: of the model, for errors. tensors: parameters and persistent buffers, by name. param_names: id of a parameter -> its name;
    lies: name of a parameter that is held in parts -> how. group: of all ranks, None if this process is alone. rank: of this process.
    writes: its tensors are to be written by this rank (of copies of a whole model rank 0 writes)."""

    title: str
    model: nn.Module
    original: nn.Module | None
    tensors: Mapping[str, Named]
    param_names: Mapping[int, str]
    lies: Mapping[str, Lies]
    group: dist.ProcessGroup | None
    rank: int
    writes: bool

    @property
    def module_state(self) -> dict[str, nn.Module]:
        """The modules that keep state beside tensors, by name."""
        found = self.original.named_modules() if self.original is not None else ()
        return {name: module for name, module in found if type(module).get_extra_state is not nn.Module.get_extra_state}

    @property
    def config(self) -> str | None:
        """The model's own configuration as JSON, where it has one that says so (as Hugging Face's have)."""
        write = getattr(getattr(self.original, "config", None), "to_json_string", None)
        if not callable(write):
            return None
        text = write()
        return text if isinstance(text, str) and isinstance(json.loads(text), dict) else None

    @property
    def stream(self) -> Stream | None:
        if not isinstance(self.model, ParallelModule):
            return None
        seed, calls = self.model.random_stream
        return Stream(seed=seed, calls=calls)

    def agreed(self, text: str) -> str:
        """Collective where there is a group: rank 0's text on every rank."""
        boxed = [text]
        if self.group is not None:
            dist.broadcast_object_list(boxed, src=0, group=self.group)
        return boxed[0]

    def resume(self, stream: Stream | None) -> None:
        """Go on with a stream of random numbers, until the user seeds the generator again."""
        if stream is not None and isinstance(self.model, ParallelModule | DeferredModule):
            self.model.random_stream = (stream.seed, stream.calls)
            if just_seeded():
                torch.rand((), device="cpu")  # else the next call would take it for seeded by now


def subject_of(model: nn.Module, *, write: bool) -> Subject:
    """How a model is saved (write) or loaded into. Collective for what autopar.compile has returned. CheckpointError if it cannot be,
    LaunchError if another rank of this machine does something else."""
    if isinstance(model, DeferredModule) and (running := started(model)) is not None:
        model = running
    if isinstance(model, (ParallelModule, DeferredModule)):
        done_by_every_rank("save" if write else "load", "a checkpoint")
    if isinstance(model, ParallelModule):
        return _in_parts(model)
    if isinstance(model, DeferredModule):
        return _whole(model, model.original, _group(), _rank())
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"a checkpoint is of a torch.nn.Module; got {type(model).__name__}")
    if write and talking():
        raise CheckpointError(
            f"{type(model).__name__} is a plain module in a group of {dist.get_world_size()} processes, and which part of it each has is "
            f"not known. Save what autopar.compile has returned, or save a plain module from a process of its own"
        )
    return _whole(model, model, None, 0)


def _rank() -> int:
    return dist.get_rank() if talking() else 0


def _group() -> dist.ProcessGroup | None:
    """Of all ranks, over gloo: what is planned are objects on the CPU, by a thread of its own where a save goes on beside training."""
    return group_of(tuple(range(dist.get_world_size())), "checkpoints", backend="gloo").process_group if talking() else None


def _in_parts(model: ParallelModule) -> Subject:
    if beside := sorted(model.buffers_beside()):
        raise CheckpointError(
            f"{', '.join(beside[:3])}{' and others' if len(beside) > 3 else ''}: registered on the model after it was compiled, so that no "
            f"plan says how they lie. Register them before autopar.compile, or keep them in a dict of your own, and give that to save"
        )
    tensors = {}
    parts = {part.name: part for part in model.state_at_rest()}
    for name, part in parts.items():
        tensors[name] = Named(
            name=name, aliases=part.aliases, shape=tuple(part.lies.shape), here=part.here, boxes=boxes_of(part.lies.spans())
        )  # fmt: skip
    split = model.mesh.world > 1
    return Subject(
        title=model.manifest.model, model=model, original=model.original, tensors=tensors,
        param_names={id(part.param): name for name, part in parts.items() if part.param is not None},
        lies={name: part.lies for name, part in parts.items() if part.param is not None and split},
        group=_group(), rank=model.mesh.rank, writes=True,
    )  # fmt: skip


def _whole(model: nn.Module, plain: nn.Module, group: dist.ProcessGroup | None, rank: int) -> Subject:
    title = type(plain).__name__
    names: dict[int, list[str]] = {}
    found: dict[int, Tensor] = {}
    for path, module in plain.named_modules(remove_duplicate=False):
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is None:
                continue
            name = f"{path}.{key}" if path else key
            if is_part(tensor):
                raise CheckpointError(f"{title} was compiled, and {name} is held in parts: give what autopar.compile has returned")
            if type(tensor) not in (Tensor, nn.Parameter):
                engine = "load it by torch.distributed.checkpoint.load(..., storage_reader=autopar.checkpoint.CheckpointReader(path))"
                remedy = engine if isinstance(tensor, DTensor) else "a checkpoint is of plain tensors"
                raise CheckpointError(f"{name} of {title} is a {type(tensor).__name__}: {remedy}")
            names.setdefault(id(tensor), []).append(name)
            found[id(tensor)] = tensor
    tensors = {}
    for key, tensor in found.items():
        first, *others = names[key]
        shape = tuple(tensor.shape)
        tensors[first] = Named(name=first, aliases=tuple(others), shape=shape, here=tensor.detach(), boxes=whole_box(shape))
    params = {id(p): names[id(p)][0] for p in found.values() if isinstance(p, nn.Parameter)}
    return Subject(
        title=title, model=model, original=plain, tensors=tensors, param_names=params, lies={}, group=group, rank=rank, writes=rank == 0
    )  # fmt: skip

