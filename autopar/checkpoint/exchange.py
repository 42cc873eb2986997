"""`autopar export` and `autopar import`: between checkpoints and safetensors files, with one tensor in memory and no GPU."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata

from autopar.checkpoint import index as format
from autopar.checkpoint.boxes import whole_box
from autopar.checkpoint.foreign import ForeignReader
from autopar.checkpoint.index import Chunk, Contents, File, TensorEntry, data_file
from autopar.checkpoint.loading import open_checkpoint
from autopar.checkpoint.planners import Target, read
from autopar.checkpoint.safetensors_file import Entry, itemsize, read_elements, read_header, write
from autopar.checkpoint.storage import CheckpointReader, told
from autopar.errors import CheckpointError

__all__ = ["Exchanged", "export_model", "import_model"]

MODEL, CONFIG, PARTS = "model.safetensors", "config.json", "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """written: the files; tensors: their number; nbytes: of all of them. left: what of the model is not in the result."""

    written: tuple[Path, ...]
    tensors: int
    nbytes: int
    left: tuple[str, ...] = ()


def export_model(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], *, prefix: str | None = None) -> Exchanged:
    """Write the model of a checkpoint as one safetensors file under the original's names, tied ones under each of theirs: it loads in the
    original with strict=True, and by from_pretrained.

    out: the file, which is replaced; or a folder, which gets model.safetensors, and config.json where the checkpoint has the model's own
    configuration. prefix: in a checkpoint of torch.distributed.checkpoint, what stands before the names of the model ('model').
    Raises CheckpointError.
    """
    reader = open_checkpoint(Path(checkpoint))
    metadata = reader.read_metadata()
    config: str | None = None
    left: tuple[str, ...] = ()
    if isinstance(reader, CheckpointReader):
        contents = reader.contents
        keys = {name: f"model.{name}" for name in contents.names}
        keys |= {alias: f"model.{name}" for alias, name in contents.tied.items()}
        config = contents.config
        beside = {f"{name}._extra_state".lstrip("."): value for name, value in contents.module_state.items()}
        keys |= {name: value["v"] for name, value in beside.items() if isinstance(value, dict) and value.get("!") == "tensor"}
        left = tuple(name for name in beside if name not in keys)
        if prefix is not None:
            raise CheckpointError(f"{checkpoint} is a checkpoint of autopar, whose model has no prefix: leave it out")
    else:
        keys = _foreign_keys(reader, prefix)
    entries = {name: metadata.state_dict_metadata[key] for name, key in keys.items()}
    tensors = []
    for name, entry in entries.items():
        assert isinstance(entry, TensorStorageMetadata)
        tensors.append((name, entry.properties.dtype, tuple(entry.size)))
    names = list(keys)

    def data(i: int) -> Tensor:
        whole = torch.empty(tensors[i][2], dtype=tensors[i][1], device="cpu")
        read(reader, metadata, {"": Target(key=keys[names[i]], here=whole, boxes=whole_box(whole.shape))}, None)
        return whole

    target = Path(out)
    file = target / MODEL if target.suffix != ".safetensors" else target
    nbytes = sum(torch.Size(shape).numel() * itemsize(dtype) for _, dtype, shape in tensors)
    with told(f"cannot write {file}", file.parent, nbytes):
        if file is not target:
            target.mkdir(parents=True, exist_ok=True)
        if file.exists() and not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(f"cannot write {file}: it is not a file")
        part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
        try:
            write(part, tensors, data, {"format": "pt"})
            os.replace(part, file)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        written = [file]
        if config is not None and file is not target:
            (target / CONFIG).write_text(config, encoding="utf-8")
            written.append(target / CONFIG)
    return Exchanged(written=tuple(written), tensors=len(tensors), nbytes=nbytes, left=left)


def _foreign_keys(reader: ForeignReader, prefix: str | None) -> dict[str, str]:
    """Name -> key of a model that is not at hand."""
    entries = reader.read_metadata().state_dict_metadata
    tensors = sorted(key for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata))
    if prefix is None:
        named = {key[: key.index("model.") + 6] for key in tensors if key.startswith("model.") or ".model." in key.partition(".state.")[0]}
        optimizer = any(key.startswith("state.") or ".state." in key for key in tensors)
        if len(named) > 1 or (not named and optimizer):
            raise CheckpointError(f"{reader.folder} does not say which of its tensors are the model's: give --prefix, as --prefix model")
        prefix = named.pop() if named else ""
    elif prefix:
        prefix = prefix.rstrip(".") + "."
    found = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
    if not found:
        raise CheckpointError(f"{reader.folder} has no tensor under {prefix!r}; it has {', '.join(tensors[:4])}, ...")
    return found


def import_model(source: str | os.PathLike[str], checkpoint: str | os.PathLike[str]) -> Exchanged:
    """Make a checkpoint of a safetensors file, or of a folder with model.safetensors (or its parts and their index) as from_pretrained
    reads it: autopar.load then takes it under any plan, without optimizer. One that is there is replaced. Raises CheckpointError."""
    path, folder = Path(source), Path(checkpoint)
    with told(f"cannot read {path}", path.parent):
        where = _sources(path)
    names = sorted(where)
    tensors = [(f"model.{name}", where[name][1].dtype, where[name][1].shape) for name in names]
    config = _config(path)

    def data(i: int) -> Tensor:
        file, entry = where[names[i]]
        with told(f"cannot read {file}", file.parent), file.open("rb", buffering=0) as stream:
            return read_elements(stream, entry.start, entry.dtype, entry.shape)

    with told(f"cannot write the checkpoint {folder}", folder):
        is_no_folder = folder.exists() and not folder.is_dir()
    if is_no_folder:
        raise CheckpointError(f"cannot write the checkpoint {folder}: it is a file, and a checkpoint is a folder")
    save_id = secrets.token_hex(8)
    file = folder / data_file(save_id, 0)
    nbytes = sum(entry.nbytes for _, entry in where.values())
    try:
        with told(f"cannot write {file}", folder, nbytes):
            folder.mkdir(parents=True, exist_ok=True)
            placed = write(file, tensors, data)
            entries = {}
            for (key, dtype, shape), place in zip(tensors, placed, strict=True):
                chunk = Chunk(file=0, start=place.start, crc=place.crc, offsets=(0,) * len(shape), sizes=tuple(shape))
                entries[key] = TensorEntry(dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), chunks=(chunk,))
            files = (File(name=file.name, nbytes=file.stat().st_size),)
            format.commit(folder, save_id, files, entries, Contents(names=tuple(names), config=config))
    except CheckpointError:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        raise
    return Exchanged(written=(folder,), tensors=len(names), nbytes=nbytes)


def _sources(path: Path) -> Mapping[str, tuple[Path, Entry]]:
    """Name -> the file that has the tensor, and where."""
    if not path.exists():
        raise CheckpointError(f"there is no {path}")
    if not path.is_dir():
        return {name: (path, entry) for name, entry in read_header(path)[0].items()}
    if (path / MODEL).is_file():
        return _sources(path / MODEL)
    if not (path / PARTS).is_file():
        raise CheckpointError(f"{path} has neither {MODEL} nor {PARTS}: give a safetensors file, or a folder that from_pretrained reads")
    try:
        of_name = json.loads((path / PARTS).read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in of_name.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / PARTS} is not an index of safetensors files: {type(error).__name__}: {error}") from error
    if wrong := [file for file in files.values() if Path(file).name != file]:
        raise CheckpointError(f"{path / PARTS} names {wrong[0][:80]!r}, which is not a file beside it")
    headers = {file: read_header(path / file)[0] for file in sorted(set(files.values()))}
    if missing := [name for name, file in files.items() if name not in headers[file]]:
        raise CheckpointError(f"{path / files[missing[0]]} has no {missing[0]}, which {PARTS} says it has")
    return {name: (path / file, headers[file][name]) for name, file in files.items()}


def _config(path: Path) -> str | None:
    file = path / CONFIG if path.is_dir() else None
    if file is None or not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        return text if isinstance(json.loads(text), dict) else None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
