"""Comparing what was captured with the model where one device has no memory for the whole batch.

Capture runs the model on the global batch, and one of eight GPUs may have room for an eighth of it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.utils import _pytree as pytree

from autopar.capture.calls import Inputs
from autopar.errors import CaptureError

__all__ = ["captured_and_compared"]

C = TypeVar("C")


class _OutOfMemory(Exception):  # noqa: N818  (it is no error of capture's)
    """The device has no memory for what was run."""


def captured_and_compared(
    captured: Callable[[Inputs, bool], C], example: Inputs, alike: Callable[[C, C], bool]
) -> tuple[C, tuple[str, ...]]:
    """What captured(inputs, whether to compare it with the model) gives of the example, compared; where a device has no memory for that,
    compared on half of the samples, a quarter, and so on, or not at all, which is then noted in words. alike: whether what was captured of
    fewer samples is the same program."""
    with contextlib.suppress(_OutOfMemory), _told_apart():
        return captured(example, True), ()
    _let_go()
    whole = captured(example, False)
    sizes = {t.shape[0] for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor) and t.dim()}
    count = sizes.pop() // 2 if len(sizes) == 1 else 0
    said = "not compared with the model, for a sample of which one device has no memory"
    while count:
        with contextlib.suppress(_OutOfMemory), _told_apart():
            part = captured(pytree.tree_map_only(torch.Tensor, functools.partial(_first, count), example), True)
            if alike(part, whole):
                said = f"compared with the model on {count} sample{'s' * (count > 1)} alone: one device has no memory for the whole batch"
            break
        _let_go()
        count //= 2
    return whole, (f"the captured program was {said}",)


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    """Inside, whatever fails because a device has no memory left is _OutOfMemory, which holds on to nothing."""
    try:
        yield
        return
    except (CaptureError, torch.OutOfMemoryError) as error:
        causes: list[BaseException | None] = [error]
        while (last := causes[-1]) is not None:
            causes.append(last.__cause__)
        if not any(isinstance(e, torch.OutOfMemoryError) for e in causes):
            raise
        causes.clear()
    raise _OutOfMemory


def _first(count: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:count] if tensor.dim() else tensor


def _let_go() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
