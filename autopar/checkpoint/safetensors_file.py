"""Files in the safetensors format, read and written with one tensor in memory.

8 bytes little endian: the length of the header; the header, JSON: name -> {dtype, shape, data_offsets}; the data without holes
(https://huggingface.co/docs/safetensors, "Format"). There is nothing in it that could be executed. What is read is checked: a file that
lies about itself raises CheckpointError.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import torch
from torch import Tensor

from autopar.errors import CheckpointError
from autopar.files import in_line

__all__ = ["Entry", "Placed", "itemsize", "read_elements", "read_header", "write"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
_BLOCK = 1 << 24  # bytes that are written and summed at a time
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor of a file. start: of its data in the file, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where a tensor was written: the offset in the file, in bytes, and the CRC-32 of its data."""

    start: int
    crc: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Size, _Size]


def itemsize(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return int(dtype.itemsize)


def write(
    path: Path,
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    data: Callable[[int], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> list[Placed]:
    """Write a file and sync it to the disk; data(i) gives the i-th tensor when its turn comes. Returns where each of them is.

    A dtype that the format does not have (complex128) is written as the bytes of its elements, one dim more. Raises OSError.
    """
    order = sorted(range(len(tensors)), key=lambda i: -itemsize(tensors[i][1]))  # so that each is aligned to its elements
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[int, int] = {}
    at = 0
    for i in order:
        name, dtype, shape = tensors[i]
        nbytes = math.prod(shape) * itemsize(dtype)
        known = dtype in _NAMES
        header[name] = {
            "dtype": _NAMES[dtype] if known else "U8",
            "shape": [*shape] if known else [*shape, itemsize(dtype)],
            "data_offsets": [at, at + nbytes],
        }
        offsets[i] = at
        at += nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + 8) % 64)
    placed: dict[int, Placed] = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in order:
            placed[i] = Placed(start=8 + len(text) + offsets[i], crc=_write_data(file, data(i)))
        file.flush()
        os.fsync(file.fileno())
    return [placed[i] for i in range(len(tensors))]


def _write_data(file: IO[bytes], tensor: Tensor) -> int:
    view = _memory(_bytes_of(tensor.detach().to("cpu").contiguous()))
    crc = 0
    for start in range(0, len(view), _BLOCK):
        block = view[start : start + _BLOCK]
        crc = zlib.crc32(block, crc)
        file.write(block)
    return crc


def _memory(x: Tensor) -> memoryview:
    array: Any = x.numpy()
    return memoryview(array)


def _bytes_of(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def read_elements(file: IO[bytes], start: int, dtype: torch.dtype, shape: Sequence[int], crc: int | None = None) -> Tensor:
    """The tensor whose data begins at this byte of the file. crc: what the CRC-32 of its bytes must be. CheckpointError if the file ends
    before that, or holds other bytes."""
    data = torch.empty(math.prod(shape) * itemsize(dtype), dtype=torch.uint8, device="cpu")
    view = _memory(data)
    file.seek(start)
    got = 0
    while got < len(view):
        count = file.readinto(view[got:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{file.name} is not complete: it ends at byte {start + got}, and should go on for {len(view) - got}")
        got += count
    if crc is not None and zlib.crc32(view) != crc:
        raise CheckpointError(f"{file.name} is damaged: the {len(view)} bytes at {start} are not those that were written")
    return data.view(dtype).reshape(tuple(shape)) if data.numel() else torch.empty(tuple(shape), dtype=dtype, device="cpu")


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata. CheckpointError if the file is not one."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{path} is not a safetensors file: its header would be {length} bytes long, of {size} in the file")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        found = {name: _entry(path, name, msgspec.json.decode(one, type=_Header), 8 + length, size) for name, one in raw.items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header cannot be read ({in_line(error)})") from error
    end = 8 + length
    for entry in sorted(found.values(), key=lambda e: (e.start, e.nbytes)):
        if entry.start != end:
            raise CheckpointError(f"{path} is not a safetensors file: its tensors overlap, or leave a hole at byte {min(end, entry.start)}")
        end += entry.nbytes
    if end != size:
        raise CheckpointError(f"{path} is {size} bytes long, and its header says {end}: it is not complete, or not a safetensors file")
    return found, metadata


def _entry(path: Path, name: str, header: _Header, base: int, size: int) -> Entry:
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise CheckpointError(f"{path}: {name} has dtype {header.dtype!r}, which is not one of {', '.join(DTYPES)}")
    shape, (begin, end) = header.shape, header.data_offsets
    if not begin <= end <= size - base:
        raise CheckpointError(f"{path}: {name} is at bytes {begin} to {end} of {size - base}, which cannot be")
    if math.prod(shape) * itemsize(dtype) != end - begin:
        raise CheckpointError(f"{path}: {name} is {header.dtype}{list(shape)} in {end - begin} bytes, which is not its size")
    return Entry(dtype=dtype, shape=shape, start=base + begin)
