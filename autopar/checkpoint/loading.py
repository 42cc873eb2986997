"""`autopar.load`: a checkpoint into a model and its optimizer under any plan, whichever plan or engine it was written under."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata, StorageReader, TensorStorageMetadata

from autopar.checkpoint.boxes import boxes_of, whole_box
from autopar.checkpoint.foreign import METADATA, ForeignReader, contents_for
from autopar.checkpoint.index import INDEX, Contents
from autopar.checkpoint.optimizers import Optimizers, as_optimizers, load_state
from autopar.checkpoint.planners import Target, read
from autopar.checkpoint.saving import finish, prepared_by_all
from autopar.checkpoint.storage import CheckpointReader, told
from autopar.checkpoint.subjects import Named, Subject, subject_of
from autopar.checkpoint.values import decode, tensor_keys
from autopar.errors import CheckpointError
from autopar.progress import working
from autopar.run.part import part_like
from autopar.run.record import CHECKPOINT, LOADING, doing, entered

__all__ = ["load", "open_checkpoint"]


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Load the checkpoint in the folder `path` into a model, and its optimizer if one is given; returns the extra values of `save`.

    The checkpoint may have been written under any plan and number of processes, or by torch.distributed.checkpoint's own writer, of DDP or
    FSDP2 (with get_state_dict: the model's tensors and the optimizer's states by name; what else it holds is returned). model: what
    autopar.compile has returned (all ranks call this together), or a plain module, which this process reads whole. Each rank reads what it
    holds. Afterwards the next step is the one that the run which was saved would have made; what state_dict() leaves out is the model's.

    optimizer: with the parameters that were saved, in any order; groups are matched by the names of their parameters. Its options (learning
    rate, betas) become the saved ones. Without one, states that were saved are left alone.

    Random numbers of a parallel module go on where they were; the generators of the process are the caller's to save and set.

    Raises CheckpointError, on every rank: no checkpoint, one that is not complete or damaged, or tensors that are missing, unknown, of
    another shape or of a dtype with more digits. Before that nothing has been written; where the data itself turns out to be damaged the
    model is half loaded, and the message says so. Nothing in a checkpoint is run, whoever wrote it.
    """
    with doing(LOADING, CHECKPOINT):
        return _load(Path(path), model, as_optimizers(optimizer))


def _load(path: Path, model: nn.Module, optimizers: tuple[Any, ...]) -> dict[str, Any]:
    before = finish()
    subject = subject_of(model, write=False)

    def fit() -> _Fitted:
        if before is not None:
            raise before
        return _fitted(path, subject, optimizers)

    fitted = prepared_by_all(subject, fit, "loading")
    if subject.agreed(fitted.id) != fitted.id:
        raise CheckpointError(f"{path} was replaced while ranks were reading it, or is not the same folder on all: load it again")
    try:
        entered(CHECKPOINT)
        with working(f"loading {path}"):
            read(fitted.reader, fitted.metadata, fitted.targets, subject.group)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {subject.title} is half loaded now: load another checkpoint before it is used") from error
    return prepared_by_all(subject, lambda: _finished(fitted, subject), "loading")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fitted:
    """A checkpoint that fits a subject. id: of the checkpoint; targets: what is read, by a name; apart: pairs of names of targets that
    must be equal; values: key of a tensor among values -> its target's tensor; put: the optimizers' states in their place."""

    id: str
    reader: StorageReader
    metadata: Metadata
    contents: Contents
    targets: Mapping[str, Target]
    apart: tuple[tuple[str, str], ...]
    values: Mapping[str, Tensor]
    put: Callable[[Callable[[str], Tensor]], None] | None


def open_checkpoint(folder: Path) -> CheckpointReader | ForeignReader:
    """The reader of a checkpoint, its index read and checked. CheckpointError if there is none."""
    with told(f"cannot read the checkpoint {folder}", folder):
        return _opened(folder)


def _opened(folder: Path) -> CheckpointReader | ForeignReader:
    if (folder / INDEX).is_file():
        return CheckpointReader(folder)
    if (folder / METADATA).is_file():
        return ForeignReader(folder)
    if not folder.is_dir():
        what = "is a file; a checkpoint is a folder (autopar import makes one of a safetensors file)" if folder.exists() else "is not there"
        raise CheckpointError(f"cannot read the checkpoint {folder}: it {what}")
    if any(folder.glob("data-*.safetensors")) or any(folder.glob("*.distcp")):
        raise CheckpointError(f"the checkpoint {folder} is not complete: its processes ended while they wrote it. Load an earlier one")
    remedy = " (autopar import makes one of the safetensors files that are in it)" if any(folder.glob("*.safetensors")) else ""
    raise CheckpointError(f"{folder} has no checkpoint: there is neither {INDEX} nor {METADATA} in it{remedy}")


def _fitted(folder: Path, subject: Subject, optimizers: tuple[Any, ...]) -> _Fitted:
    reader = open_checkpoint(folder)
    metadata = reader.read_metadata()
    if isinstance(reader, CheckpointReader):
        contents, key_of, number = reader.contents, {name: f"model.{name}" for name in reader.contents.names}, reader.id
    else:
        key_of, contents = contents_for(reader, {one.name: (one.name, *one.aliases) for one in subject.tensors.values()})
        number = str(len(metadata.state_dict_metadata))
    targets: dict[str, Target] = {}
    apart = _model_targets(folder, subject, contents, key_of, metadata, targets)
    put = None
    values: dict[str, Tensor] = {}
    if optimizers:
        if contents.groups is None:
            raise CheckpointError(f"{folder} has no optimizer: it was saved without one. Load it without optimizer")
        put = load_state(optimizers, subject, contents.groups, contents.state)
        for name, state in contents.state.items():
            for key in tensor_keys(list(state.values())):
                values[key] = _state_target(key, name, subject, metadata, targets)
        _whole_targets((group.options for group in contents.groups), subject, metadata, targets, values)
    _whole_targets((contents.extra, contents.module_state), subject, metadata, targets, values)
    _check_modules(folder, subject, contents)
    return _Fitted(
        id=number, reader=reader, metadata=metadata, contents=contents, targets=targets, apart=apart, values=values, put=put
    )  # fmt: skip


def _model_targets(
    folder: Path, subject: Subject, contents: Contents, key_of: Mapping[str, str], metadata: Metadata, targets: dict[str, Target]
) -> tuple[tuple[str, str], ...]:
    """The targets of the model's tensors. Returns names of targets that must turn out equal: one tensor here, several there."""
    known = dict(key_of) | {alias: key_of[name] for alias, name in contents.tied.items()}
    missing: list[str] = []
    wrong: list[str] = []
    taken: set[str] = set()
    apart: list[tuple[str, str]] = []
    for one in subject.tensors.values():
        keys = dict.fromkeys(known[name] for name in (one.name, *one.aliases) if name in known)
        if not keys:
            missing.append(one.name)
            continue
        taken |= keys.keys()
        if problem := _misfit(one, metadata.state_dict_metadata[next(iter(keys))]):
            wrong.append(problem)
            continue
        for number, key in enumerate(keys):
            here = one.here if number == 0 else torch.empty_like(one.here)
            targets[f"model.{one.name}~{number}"] = Target(key=key, here=here, boxes=one.boxes)
            if number:
                apart.append((f"model.{one.name}~0", f"model.{one.name}~{number}"))
    unknown = sorted(set(key_of.values()) - taken)
    if missing or wrong or unknown:
        texts = [f"it has no {_some(missing)}"] if missing else []
        texts += [f"it has {_some([key.removeprefix('model.') for key in unknown])}, which the model has not"] if unknown else []
        texts += ["; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")] if wrong else []
        raise CheckpointError(f"the checkpoint {folder} is not of this {subject.title}: {'; '.join(texts)}")
    return tuple(apart)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _misfit(one: Named, found: Any) -> str | None:
    shape, dtype = tuple(found.size), found.properties.dtype
    if shape != one.shape:
        return f"{one.name} has shape {shape} there and {one.shape} in the model"
    kept = one.here.dtype
    if dtype != kept and (torch.promote_types(dtype, kept) != kept or dtype.is_floating_point != kept.is_floating_point):
        return f"{one.name} is {_short(dtype)} there and {_short(kept)} in the model, which would lose digits: cast the model before"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _entry(key: str, metadata: Metadata) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata.get(key)
    if not isinstance(found, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint is damaged: it refers to {key[:80]!r}, which is not in it")
    return found


def _state_target(key: str, name: str, subject: Subject, metadata: Metadata, targets: dict[str, Target]) -> Tensor:
    """Room for a state of a parameter: its part, where it has the parameter's shape and that is in parts."""
    found = _entry(key, metadata)
    lies = subject.lies.get(name)
    shape, dtype = tuple(found.size), found.properties.dtype
    one = subject.tensors.get(name)
    device = one.here.device if one is not None else torch.device("cpu")
    if lies is None or shape != tuple(lies.shape) or not shape:
        here = torch.empty(shape, dtype=dtype, device=device if shape else "cpu")
        targets[key] = Target(key=key, here=here, boxes=whole_box(shape))
        return here
    here = torch.empty(lies.cut(torch.empty(shape, device="meta")).shape, dtype=dtype, device=device)
    targets[key] = Target(key=key, here=here, boxes=boxes_of(lies.spans()))
    return part_like(here, lies)


def _whole_targets(
    encoded: Iterable[Any], subject: Subject, metadata: Metadata, targets: dict[str, Target], values: dict[str, Tensor]
) -> None:
    for value in encoded:
        for key in tensor_keys(list(value.values())):
            found = _entry(key, metadata)
            shape = tuple(found.size)
            values[key] = torch.empty(shape, dtype=found.properties.dtype, device="cpu")
            targets[key] = Target(key=key, here=values[key], boxes=whole_box(shape))


def _check_modules(folder: Path, subject: Subject, contents: Contents) -> None:
    missing = sorted(subject.module_state.keys() - contents.module_state.keys())
    unknown = sorted(contents.module_state.keys() - subject.module_state.keys())
    if missing or unknown:
        where = f"none for {_some(missing)}" if missing else f"some for {_some(unknown)}, which has no get_extra_state"
        raise CheckpointError(
            f"the checkpoint {folder} is not of this {subject.title}: of the state that modules keep beside tensors it has {where}"
        )


def _finished(fitted: _Fitted, subject: Subject) -> dict[str, Any]:
    for one, other in fitted.apart:
        if not torch.equal(fitted.targets[one].here, fitted.targets[other].here):
            name, there = fitted.targets[one].key, fitted.targets[other].key
            raise CheckpointError(
                f"the checkpoint has different values for {name} and {there}, which are one tensor in {subject.title}. It is half loaded "
                f"now: load another checkpoint before it is used"
            )

    def tensor(key: str) -> Tensor:
        return fitted.values[key]

    if fitted.put is not None:
        fitted.put(tensor)
    for name, module in subject.module_state.items():
        module.set_extra_state(decode(fitted.contents.module_state[name], tensor))
    subject.resume(fitted.contents.stream)
    return {name: decode(value, tensor) for name, value in fitted.contents.extra.items()}
