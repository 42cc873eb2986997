"""Numbers by name, found here and there: the worst relative error and where it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest", "finite", "leaves", "unequal", "worst", "worst_leaf"]


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, floor: float) -> tuple[float, str]:
    """The largest |found - expected| of any tensor, relative to the tensor's largest finite magnitude (at least `floor`)."""
    largest, at = 0.0, ""
    for name, b in expected.items():
        a = found.get(name)
        if a is None or a.shape != b.shape:
            return float("inf"), name
        if not b.numel():
            continue
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        off = torch.where(a == b, 0.0, (a - b).abs()).max().item()  # of a mask, whose infinities are no numbers to subtract
        scale = torch.where(b.isfinite(), b.abs(), 0.0).max().item()
        error = finite(off / max(scale, floor, 1e-30))
        if error > largest:
            largest, at = error, name
    return largest, at


def finite(error: float) -> float:
    """A comparison with what is not a number has failed."""
    return error if error == error else float("inf")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The path and value of each number, tensor or text in nested dicts and lists; the length of each list is one of them."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
        yield f"len({path})", len(value)
    else:
        yield path, value


def worst_leaf(found: Any, expected: Any, *, floor: float) -> tuple[float, str]:
    """The largest relative error of any leaf: infinite where one is missing, too much, of another kind or shape, or no number and not
    equal."""
    ours, theirs = dict(leaves(found)), dict(leaves(expected))
    if different := sorted(ours.keys() ^ theirs.keys()):
        return float("inf"), different[0]
    largest, at = 0.0, ""
    for path, b in theirs.items():
        error = _error(ours[path], b, floor)
        if error > largest:
            largest, at = error, path
    return largest, at


def _error(a: Any, b: Any, floor: float) -> float:
    if isinstance(b, Tensor) and isinstance(a, Tensor):
        return worst({"": a}, {"": b}, floor=floor)[0]
    if isinstance(b, float) and isinstance(a, float):
        return 0.0 if a == b or (a != a and b != b) else finite(abs(a - b) / max(abs(b), floor))
    return 0.0 if type(a) is type(b) and a == b else float("inf")


def digest(tensor: Tensor) -> str:
    """Equal for tensors of equal bits."""
    own = tensor.detach().cpu().contiguous()
    return hashlib.sha256(own.view(torch.uint8).numpy().tobytes() if own.dim() else repr(own.item()).encode()).hexdigest()


def unequal(ranks: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """The parts whose digests differ between the ranks that hold them."""
    seen: dict[str, str] = {}
    bad = []
    for rank in ranks:
        for part, value in rank.items():
            if seen.setdefault(part, value) != value:
                bad.append(part)
    return tuple(dict.fromkeys(bad))
