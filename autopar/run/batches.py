"""Whether all ranks are given the same, in every call: the same batches, by a few elements of each input, and the same gradients of what
the call returned, where the user makes the loss. Ranks read numbers of these in each other's records.

The first calls compare all of a batch (`inputs.Batch.check_equal`). Later batches differ where ranks have drawn other random numbers, from
the next shuffle on: what one rank alone draws (a sample to be shown, an evaluation) is enough for that. Nothing is waited for here: numbers
on a GPU are read in a later call, when they have been computed.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import LaunchError
from autopar.run import record, watchdog
from autopar.run.mesh import Mesh
from autopar.run.record import Batch

__all__ = ["ROUNDING", "SMALL", "GivenBatches", "numbers_of_all"]

_ELEMENTS = 256  # of each input
_PARTS = 2**40  # numbers that must be equal are below it: float64 has all of these
ROUNDING = {  # how far apart, relative to their size, the elements of two ranks may be: ranks may compute their inputs
    torch.float16: 1e-3, torch.bfloat16: 1e-3, torch.float32: 1e-4, torch.float64: 1e-4,
}  # fmt: skip
SMALL = 1e-6  # sizes below this are compared relative to this
_EXACT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_ROUNDED = frozenset(ROUNDING)
_KNOWN = _EXACT | _ROUNDED


@dataclass(frozen=True, slots=True)
class _Coming:
    """The numbers of a call's inputs, or gradients, one after the other: one of what must be equal, two of what may be rounded. call: its
    number, or that of the gradients (`record.gradients`). within: of each input, how far apart it may be on two ranks; 0: it must be equal.
    ready: the event after which they are there, all in one tensor; None: they are, each by itself."""

    call: int
    what: int
    numbers: list[Tensor]
    within: list[float]
    ready: Any

    @property
    def there(self) -> bool:
        return self.ready is None or self.ready.query()

    def two(self) -> tuple[int, float]:
        """Of all inputs together: what must be equal, and what is equal within rounding."""
        read: list[Any] = [one.tolist() for one in self.numbers]
        numbers = iter(read[0] if self.ready is not None else read)
        equal, near = 0, 0.0
        for place, within in enumerate(self.within, 1):
            if not within:
                equal = (equal + place * int(next(numbers))) % _PARTS
            else:
                total, absolute = next(numbers), next(numbers)
                near += place * (total / absolute + math.asinh(absolute / SMALL) if 0 < absolute < math.inf else 0.0)
        return equal, near


class GivenBatches:
    """Of a module. local: each data-parallel rank is given its own part of the batch, the same as the others of its tensor-parallel group
    and pipeline."""

    def __init__(self, mesh: Mesh, *, local: bool) -> None:
        self._part = mesh.dp.rank if local else 0
        self._local = local
        self._needed = mesh.talks and not (local and mesh.dp.size == mesh.world)
        self._places: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._coming: deque[_Coming] = deque()

    def compare(self, inputs: Iterable[Tensor]) -> None:
        """The call that has begun is given these. LaunchError where another rank of this machine was given others, in this call or in one
        of the last ones."""
        self._compare(record.BATCH_OF, inputs)

    def compare_gradients(self, grads: Iterable[Tensor | None]) -> None:
        """What the call returned has these gradients. LaunchError where it has others on another rank of this machine."""
        self._compare(record.GRADIENTS_OF, grads)

    def _compare(self, what: int, tensors: Iterable[Tensor | None]) -> None:
        watch = watchdog.current()
        if not self._needed or watch is None or torch.compiler.is_compiling():
            return
        known = [x for x in tensors if type(x) is Tensor and x.layout == torch.strided and x.dtype in _KNOWN and x.numel()]
        number = record.gradients() if what == record.GRADIENTS_OF else record.calls()
        if known:
            self._coming.append(self._sent(number, what, known))
        while self._coming and self._coming[0].there:
            one = self._coming.popleft()
            equal, near = one.two()
            batch = record.was_given(one.call, one.what, self._part * _PARTS + equal, near)
            differs = functools.partial(_differ, batch, within=sum(map(operator.mul, itertools.count(1), one.within)))
            if (rank := watch.differing_from(operator.methodcaller("batch", one.call, one.what), differs)) is not None:
                raise self._error(one.what, watch.rank, rank, record.calls() - record.given_in(one.call, one.what))

    def _sent(self, call: int, what: int, inputs: list[Tensor]) -> _Coming:
        """The numbers of these, or on their way from a GPU."""
        numbers = self._numbers if what == record.BATCH_OF else numbers_of_all
        with torch.no_grad():
            found, within = [number for x in inputs for number in numbers(x)], [ROUNDING.get(x.dtype, 0.0) for x in inputs]
            device = next((x.device for x in inputs if x.device.type != "cpu"), None)
            if device is None:
                return _Coming(call, what, found, within, None)
            here = torch.empty(len(found), dtype=torch.float64, device="cpu", pin_memory=True)
            here.copy_(torch.stack([x.to(device, torch.float64, non_blocking=True) for x in found]), non_blocking=True)
            ready = torch.get_device_module(device).Event()
            ready.record()
            return _Coming(call, what, [here], within, ready)

    def _numbers(self, x: Tensor) -> tuple[Tensor, ...]:
        """Scalars on the device of x: a sum of elements, which must be equal; or one that may be rounded, and what it is relative to."""
        places, weights = self._places_of(x)
        sample = torch.take(x, places).to(weights.dtype)
        if x.dtype in _EXACT:
            return (torch.dot(sample, weights) if x.device.type == "cpu" else (sample * weights).sum(),)  # CUDA has no dot of integers
        return torch.dot(sample, weights), torch.linalg.vector_norm(sample)

    def _places_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which elements of x are read, and their weights, of both signs, by which another order is seen; where elements may be rounded the
        weights are a vector of length 1."""
        key = x.numel(), x.device, x.dtype
        if key not in self._places:
            generator = torch.Generator().manual_seed(0)  # at equal distances they might all be first words, which say nothing
            places = torch.randint(x.numel(), (min(_ELEMENTS, x.numel()),), generator=generator, device="cpu")
            signs = 2 * torch.randint(2, (len(places),), generator=generator, device="cpu") - 1
            weights = torch.arange(1, 1 + len(places), device="cpu") * signs
            if x.dtype in _ROUNDED:
                weights = torch.nn.functional.normalize(weights.to(torch.promote_types(x.dtype, torch.float32)), dim=0)
            self._places[key] = places.to(x.device), weights.to(x.device)
        return self._places[key]

    def _error(self, what: int, mine: int, other: int, ago: int) -> LaunchError:
        ranks = f"ranks {min(mine, other)} and {max(mine, other)}"
        when = "" if ago == 0 else f" {ago} calls ago" if ago > 1 else " in the call before"
        if what == record.GRADIENTS_OF:
            return LaunchError(
                f"{ranks} have made different losses of what the model returned{when}: they would train different models. Make every rank "
                f"compute the same: give all the same targets and the same seed (torch, numpy and random), or use what one has drawn "
                f"(dist.broadcast) on all"
            )
        remedy = (
            "All ranks of one data-parallel rank load the same part: autopar.sampler(dataset, model) says which"
            if self._local
            else "Give every rank the same global batch. What one rank alone draws from torch's generator makes its next shuffle another: "
            "give the loader a generator of its own (DataLoader(..., generator=torch.Generator().manual_seed(0)))"
        )
        return LaunchError(f"{ranks} were given different batches{when}. {remedy}")


def numbers_of_all(x: Tensor) -> tuple[Tensor, Tensor]:
    """As of a few elements, of all of them: a gradient may differ in the places of a few classes alone. The first is a sum of elements, of
    both signs, the second the sum of their absolute values."""
    flat = x.reshape(-1)
    whole = len(flat) // _ELEMENTS * _ELEMENTS
    wide = torch.promote_types(x.dtype, torch.float32)
    columns = flat[:whole].view(whole // _ELEMENTS, _ELEMENTS).sum(0, dtype=wide).double()
    columns[: len(flat) - whole] += flat[whole:]
    return columns @ _signs(x.device), torch.linalg.vector_norm(flat, 1, dtype=wide)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    found = 2 * torch.randint(2, (_ELEMENTS,), generator=torch.Generator().manual_seed(0), device="cpu").double() - 1
    return found.to(device)


def _differ(mine: Batch, theirs: Batch, *, within: float) -> bool:
    """Whether they are of one call and of the same part, and not alike. within: how far apart what may be rounded is."""
    if theirs.call != mine.call or theirs.exact // _PARTS != mine.exact // _PARTS:
        return False
    return theirs.exact != mine.exact or abs(theirs.rounded - mine.rounded) > within
