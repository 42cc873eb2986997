"""The inputs of calls of the model itself: copies of them, for a forward may write to them, and whether it has done so."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.held import ABSENT
from autopar.errors import CaptureError

__all__ = [
    "Inputs", "apart", "check_inputs", "check_parameters", "copied", "differentiated", "marks", "other_parameters", "others", "otherwise",
]  # fmt: skip

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def copied(inputs: Inputs) -> Inputs:
    """The inputs with every tensor cloned: a forward may write to them. Those that require a gradient are leaves that do, each for itself;
    of others that are one tensor the clones are one too, of which a forward may ask."""
    clones: dict[int, torch.Tensor] = {}

    def clone(t: torch.Tensor) -> torch.Tensor:
        if t.requires_grad:
            return _clone(t).requires_grad_()
        if id(t) not in clones:
            clones[id(t)] = _clone(t)
        return clones[id(t)]

    made: Inputs = pytree.tree_map_only(torch.Tensor, clone, inputs)
    return made


def otherwise(t: torch.Tensor) -> torch.Tensor:
    """Another tensor of its kind, where it is dense and of real numbers: each entry is nearer to zero by a part of its own, of at most a
    twentieth."""
    if not t.is_floating_point() or t.layout != torch.strided or t.is_meta:
        return t
    steps = torch.arange(t.numel(), dtype=torch.float32, device=t.device).reshape(t.shape)
    return (t.detach() * (1 - 0.05 * torch.cos(steps).square()).to(t.dtype)).requires_grad_(t.requires_grad)


def others(inputs: Inputs) -> Inputs:
    """Inputs of the same kinds as these, which are copies: of what is one tensor there is one here."""
    known: dict[int, torch.Tensor] = {}

    def other(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in known:
            known[id(t)] = otherwise(t)
        return known[id(t)]

    made: Inputs = pytree.tree_map_only(torch.Tensor, other, inputs)
    return made


@contextlib.contextmanager
def other_parameters(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, these have other values."""
    before = [(p, p.data) for p in params]
    try:
        for p, value in before:
            p.data = otherwise(value)
        yield
    finally:
        for p, value in before:
            p.data = value


def apart(inputs: Inputs) -> Inputs:
    """The inputs, of which none is the same tensor as one before it: in another call they may be two."""
    seen: set[int] = set()

    def one(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in seen:
            seen.add(id(t))
            return t
        return _clone(t).requires_grad_(t.requires_grad)

    made: Inputs = pytree.tree_map_only(torch.Tensor, one, inputs)
    return made


def _clone(t: torch.Tensor) -> torch.Tensor:
    """That lies in memory as the tensor does, unless entries of it are at one place."""
    made = t.detach().clone()
    steps = sorted((stride, n) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1)
    one_place_each = all(step >= n * least for (least, n), (step, _) in zip(((1, 1), *steps), steps, strict=False))
    if made.stride() == t.stride() or t.device.type == "meta" or not one_place_each:
        return made
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(made)


def differentiated(inputs: Inputs) -> list[torch.Tensor]:
    """The inputs that require a gradient, in the order of their leaves."""
    return [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]


def marks(inputs: Inputs) -> list[tuple[str, Any, object]]:
    return [(pytree.keystr(path), leaf, _mark(leaf)) for path, leaf in pytree.tree_leaves_with_path(inputs)]


def _mark(leaf: object) -> object:
    return (leaf._version, leaf.shape, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else None


def check_inputs(inputs: Inputs, before: list[tuple[str, Any, object]], into: tuple[int | str, tuple[object, ...]] | None) -> None:
    """into: the dict that the forward writes to and returns, and the keys."""
    now = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(inputs)}
    changed = [path for path, leaf, mark in before if now.get(path, ABSENT) is not leaf or _mark(leaf) != mark]
    changed += [path for path in now if path not in {p for p, _, _ in before}]
    if into is not None and not any(_mark(leaf) != mark for _, leaf, mark in before):
        place, keys = into
        returned = tuple(f"[{int(isinstance(place, str))}][{place!r}][{key!r}]" for key in keys)
        changed = [path for path in changed if not path.startswith(returned)]
    if changed:
        raise CaptureError(
            f"the forward changes its inputs: at {', '.join(changed[:3])} of (args, kwargs)\n  what to do: let it work on a copy "
            f"(x = x.clone(), batch = dict(batch)); a dict that it is given and returns may be written to where outputs='all' or 'trained'"
        )


def check_parameters(model: nn.Module, before: Mapping[str, int], written: Collection[str]) -> None:
    """before: how often each had been written to."""
    found = [name for name, p in model.named_parameters() if name not in written and p._version != before.get(name, p._version)]
    if found:
        raise CaptureError(
            f"the forward of {type(model).__name__} writes to {', '.join(found[:3])}, and a trace of it does not\n  what to do: let it do "
            f"so whether it is traced or not, or change parameters after optimizer.step()"
        )
