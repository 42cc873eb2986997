"""What the first call of a model computes from its batch and later calls keep: the mean of the first batch, a scale found at the start. A
graph would compute it from every batch anew."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.held import Shape, is_plain, places
from autopar.capture.left import is_read
from autopar.capture.state import Change, State

__all__ = ["Followed", "kept_by_what_happens_once", "numbers_kept", "numbers_once", "said_once"]


class Followed(TorchDispatchMode):
    """Notes what the operators inside compute from the values of some tensors, what they write to included."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._from: dict[int, torch.UntypedStorage] = {}  # which are kept alive, so that no other is taken for one of them
        self._add(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(map(self.has, pytree.tree_leaves((args, kwargs)))) and not _of_sizes(func):
            schema = func._schema.arguments
            given = (*args, *(kwargs or {}).values())
            written = [x for x, a in zip(given, schema, strict=False) if a.alias_info is not None and a.alias_info.is_write]
            self._add(pytree.tree_leaves((found, written)))
        return found

    def has(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.untyped_storage()._cdata in self._from

    def _add(self, values: Iterable[object]) -> None:
        for x in values:
            if isinstance(x, torch.Tensor) and x.layout == torch.strided:
                storage = x.untyped_storage()
                self._from[storage._cdata] = storage


def _of_sizes(func: Any) -> bool:
    """Whether an operator takes no more of a tensor than its shape, dtype and device."""
    name = func._schema.name.rpartition("::")[2]
    return name.startswith("new_") or name.endswith("_like")


def numbers_once(settled: Iterable[Change], traced: Iterable[Change], start: State) -> list[str]:
    """Numbers that the first call makes of values of its inputs, and that later calls read."""
    computed = {c.path for c in traced if not is_plain(c.after)}
    return [c.path for c in settled if isinstance(c.after, (int, float)) and c.path in computed and is_read(c.path, start)]


def numbers_kept(traced: Iterable[Change], numbers: Collection[str], start: State) -> list[str]:
    """The places of numbers at which a call leaves one that it makes of values, whatever that is for the example inputs, and which code
    may read. numbers: those of which the trace knows what they are made of."""
    there = {place.path for value, place in places(start.held) if type(value) in (int, float)}
    computed = (c.path for c in traced if c.path in numbers or not (is_plain(c.after) or isinstance(c.after, torch.Tensor)))
    return [path for path in computed if path in there and is_read(path, start)]


def kept_by_what_happens_once(read: Iterable[str], numbers: Collection[str], settled: Iterable[Change], start: State) -> list[str]:
    """Of numbers that calls make of values and read in the next, those of which the next call may make nothing, or another: of all, if the
    first call changes what code reads, and later ones leave it (`self.ready = True`). numbers: the places of all that it makes."""
    others = (c for c in settled if c.path not in numbers and not isinstance(c.after, Shape))
    return sorted(read) if any(is_read(c.path, start) for c in others) else []


def said_once(name: str, paths: Sequence[str]) -> str:
    """What is said of a model of which these are made once."""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (
        f"the first call of {name} computes {', '.join(paths[:3])}{more} from its batch or its weights, and later calls keep that; the "
        f"parallel module would compute it in every call\n  what to do: call the model once on its first batch before compiling it, so "
        f"that it is there"
    )
