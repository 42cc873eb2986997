"""Functions whose results have sizes that follow from values, or which take values for sizes, where these values follow from sizes, numbers
and the model's state alone (`answers.Tape`): a trace knows them.

    s[~torch.eye(n, dtype=torch.bool)]            an index by the places of the mask
    x[:, start : start + height * width]          a slice of numbers
    torch.tensor(widths).unique_consecutive()     the values

What they compute then is a graph of fixed sizes, where values of inputs would decide what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.answers import Tape, listed

__all__ = ["with_known_values"]

_OF_VALUES = frozenset({"argwhere", "bincount", "nonzero", "repeat_interleave", "unique", "unique_consecutive", "where"})
"""The names of functions whose results have sizes that follow from values."""
_OF_SIZES = frozenset({"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"})
"""Of functions that take sizes alone."""
_TAKE_SIZES = frozenset({
    "broadcast_to", "chunk", "expand", "interpolate", "narrow", "new_empty", "new_full", "new_ones", "new_zeros", "pad", "repeat",
    "reshape", "roll", "select", "split", "split_with_sizes", "tensor_split", "tile", "unflatten", "unfold", "view",
})  # fmt: skip
"""Of functions that take them behind a tensor."""

Call = Callable[[], Any]


def with_known_values(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """A torch function that is about to be called, by the values that are known, as calls of others; None if it is called as it is."""
    name = getattr(func, "__name__", "")
    if name == "__iter__" and args[0].dim() and tape.knows(args[0]):
        return lambda: iter(args[0].unbind(0))
    if name in ("__getitem__", "__setitem__"):
        index = _index(tape, args[1], masks=name == "__getitem__")
        return None if index is None else lambda: func(args[0], index(), *args[2:])
    if name in _OF_VALUES and (values := _values(tape, name, func, args, kwargs)) is not None:
        return values
    if name == "repeat_interleave" and len(args) > 1 and "output_size" not in kwargs:
        return _repeated(tape, func, args, kwargs)
    if name in _OF_SIZES or name in _TAKE_SIZES:
        first = () if name in _OF_SIZES else args[:1]
        given = _numbers(tape, (args[len(first) :], dict(kwargs)))
        return None if given is None else lambda: func(*first, *given[0], **given[1])
    return None


def _values(tape: Tape, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    given = len(args) + len(kwargs)
    if name == "where" and given != 1:  # that chooses among values, and has their size
        return None
    if name == "repeat_interleave" and given > 1 and not isinstance(kwargs.get("repeats", args[1] if len(args) > 1 else None), Tensor):
        return None
    found = tape.values(func, args, kwargs)
    if found is None:
        return None
    device = next(x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)).device
    return lambda: pytree.tree_map_only(Tensor, lambda x: _constant(x, device), found[0])


def _repeated(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """repeat_interleave of anything by known repeats."""
    repeats = args[1]
    if not isinstance(repeats, Tensor) or repeats.numel() < 2 or (found := tape.values(torch.sum, (repeats,), {})) is None:
        return None
    size = int(found[0])
    return lambda: func(*args, **kwargs, output_size=size)


def _index(tape: Tape, index: Any, *, masks: bool) -> Call | None:
    """What makes an index in which numbers are known, and masks (bool[n, ...]) are the places where they are True; None if it is as it was.
    masks: whether these are."""
    parts: list[Call] = []
    changed = False
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) and part.dim() and masks:
            if (places := tape.values(torch.nonzero, (part,), {"as_tuple": True})) is not None:
                parts += [functools.partial(_constant, x, part.device) for x in places[0]]
                changed = True
                continue
        bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else part
        if isinstance(part, (slice, list, Tensor)) and (numbers := _numbers(tape, bounds)) is not None:
            part = slice(*numbers) if isinstance(part, slice) else numbers
            changed = True
        parts.append(functools.partial(_same, part))
    return (lambda: tuple(made() for made in parts)) if changed else None


def _same(x: Any) -> Any:
    return x


def _numbers(tape: Tape, tree: Any) -> Any:
    """With the number in place of each integer tensor of no dimensions that is known; None if there is none of these."""
    found = dict[int, int]()
    for x in pytree.tree_leaves(tree):
        if isinstance(x, Tensor) and not x.dim() and not x.dtype.is_floating_point and x.dtype != torch.bool:
            value = tape.values(torch.Tensor.item, (x,), {})
            if value is None:
                return None
            found[id(x)] = value[0]
    return pytree.tree_map(lambda x: found.get(id(x), x), tree) if found else None


def _constant(value: Tensor, device: torch.device) -> Tensor:
    """As code would write it: of the same values."""
    made = torch.tensor(listed(value), dtype=value.dtype, device=device)
    return made if made.shape == value.shape else made.reshape(value.shape)
