"""Comparing what was captured with the model, where that is too much for the whole batch.

Capture runs the model on the global batch, on one device: of eight GPUs one may have room for an eighth of it, and on a CPU a step of the
whole may take hours.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.utils import _pytree as pytree

from autopar.capture.given import Inputs
from autopar.errors import CaptureError

__all__ = ["MOST", "TooMuchWork", "captured_and_compared"]

MOST = {"cpu": 2e11, "cuda": 2e14}
"""By the kind of device, how much work (`flops.work_of`) one pass may be that is compared: seconds on one core, a second on a GPU. Five
are run."""
OF_FEWEST = 25  # times that much may two samples be, or one

C = TypeVar("C")


class TooMuchWork(Exception):  # noqa: N818  (it is no error of capture's)
    """A pass would be more than it may be. work: how much."""

    def __init__(self, work: float) -> None:
        super().__init__(work)
        self.work = work


class _OutOfMemory(Exception):  # noqa: N818
    """The device has no memory for what was run."""


def captured_and_compared(
    captured: Callable[[Inputs, float], C], example: Inputs, alike: Callable[[C, C], bool]
) -> tuple[C, tuple[str, ...]]:
    """What captured(inputs, how much work a pass may be that is compared with the model) gives of the example, compared; where a device has
    no memory for that, or it is too much work, compared on as many samples as may be, or not at all, which is then noted in words. alike:
    whether what was captured of fewer samples is the same program."""
    devices = {t.device.type for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor)}
    most = MOST["cuda" if "cuda" in devices else "cpu"]
    try:
        with contextlib.suppress(_OutOfMemory), _told_apart():
            return captured(example, most), ()
    except TooMuchWork as error:
        work = error.work
        with contextlib.suppress(_OutOfMemory):
            return _on_less_work(captured, example, alike, work, most)
    _let_go()
    return _in_less_memory(captured, example, alike)


def _on_less_work(
    captured: Callable[[Inputs, float], C], example: Inputs, alike: Callable[[C, C], bool], work: float, most: float
) -> tuple[C, tuple[str, ...]]:
    samples = _samples(example)
    count = math.floor(samples * most / work)
    if count < 2:  # of which statistics can be made
        count = next((n for n in (2, 1) if n <= samples and n * work <= OF_FEWEST * most * samples), 0)
    try:
        with _told_apart():
            whole = captured(example, 0.0)
            same = bool(count) and alike(captured(_first_of(example, count), math.inf), whole)
    except CaptureError:  # of the model, or of its first samples alone
        with _told_apart():
            return captured(example, math.inf), ()
    if same:
        return whole, (f"the captured program was compared with the model on {_counted(count)} alone: all of the batch is much to compute",)
    return whole, ("the captured program was not compared with the model, of which one sample is much to compute",)


def _in_less_memory(
    captured: Callable[[Inputs, float], C], example: Inputs, alike: Callable[[C, C], bool]
) -> tuple[C, tuple[str, ...]]:
    """On half of the samples, a quarter, and so on."""
    whole = captured(example, 0.0)
    count = _samples(example) // 2
    said = "not compared with the model, for a sample of which one device has no memory"
    while count:
        with contextlib.suppress(_OutOfMemory), _told_apart():
            part = captured(_first_of(example, count), math.inf)
            if alike(part, whole):
                said = f"compared with the model on {_counted(count)} alone: one device has no memory for the whole batch"
            break
        _let_go()
        count //= 2
    return whole, (f"the captured program was {said}",)


def _counted(count: int) -> str:
    return f"{count} sample{'s' * (count > 1)}"


def _samples(example: Inputs) -> int:
    """How many there are; 0 if that is not known."""
    sizes = {t.shape[0] for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor) and t.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def _first_of(example: Inputs, count: int) -> Inputs:
    found: Inputs = pytree.tree_map_only(torch.Tensor, functools.partial(_first, count), example)
    return found


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
