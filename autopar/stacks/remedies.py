"""What a configuration that cannot be priced would have to change, each change priced first: one choice of it, or else several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.planner.plan import Pins, Plan
from autopar.report.columns import listed
from autopar.report.units import bytes_text, seconds_text
from autopar.stacks.configuration import Configuration, changes, pins_of
from autopar.stacks.stack import Stack, beyond

__all__ = ["Price", "Remedy", "of_another_batch", "of_another_size", "remedies", "remedies_text"]

DOUBLINGS = 5  # of the data-parallel ranks
LEAN = ("micro_batch", "recompute", "zero")  # what is changed together where nothing does alone

Price = Callable[[Pins, int, int | None], Plan | None]
"""Of (pins, GPUs, global batch) the plan of a configuration as its software runs it; None where it does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change, in the words of the configuration, and the plan that is made with it."""

    change: str
    plan: Plan

    def as_json(self) -> dict[str, Any]:
        return {
            "change": self.change, "gpus": self.plan.gpus, "step_time_s": self.plan.step_time_s, "memory_bytes": self.plan.memory_bytes,
        }  # fmt: skip


def remedies(stack: Stack, c: Configuration, gpus: int, batch: int | None, price: Price) -> list[Remedy]:
    """The values of one choice with which it runs on these GPUs, and the fewest more that would do; where there are none, several choices
    together. The fewest GPUs first, then the fastest."""
    c = dataclasses.replace(c, dp=c.dp or gpus // (c.tp * c.pp))
    found = list(_priced(stack, c, ((new, gpus) for new in _changed(stack, c)), batch, price))
    more = ((_free(c, dp=(c.dp or 1) * 2**k), gpus * 2**k) for k in range(1, DOUBLINGS + 1))
    found += [remedy for remedy, _ in zip(_priced(stack, c, more, batch, price), range(1), strict=False)]
    return sorted(found or _together(stack, c, gpus, batch, price), key=lambda x: (x.plan.gpus, x.plan.step_time_s))


def _free(c: Configuration, **changes: Any) -> Configuration:
    """With these changes, and as many micro-batches as follow from them."""
    if c.micro_batch or "micro_batch" in changes:
        changes["micro_batches"] = None
    return dataclasses.replace(c, **changes)


def _changed(stack: Stack, c: Configuration) -> Iterator[Configuration]:
    """With one choice changed, as far as the software has it: what takes less memory, or divides otherwise."""
    limits, dp = stack.limits, c.dp or 1
    if c.micro_batch != 1:
        yield _free(c, micro_batch=1)
    yield from (dataclasses.replace(c, recompute=way, recomputed=None) for way in limits.recomputes)
    yield from (dataclasses.replace(c, zero=zero) for zero in limits.zeros if dp > 1)
    if c.tp > 1:
        yield from (dataclasses.replace(c, sequence_parallel=cut) for cut in limits.sequence)
    if c.pp > 1:
        chunks = {"interleaved": max(2, c.virtual_stages)}
        yield from (dataclasses.replace(c, schedule=s, virtual_stages=chunks.get(s, 1), blocks=None) for s in limits.schedules)
    for n in (2 * c.tp, c.tp // 2) if limits.sequence else ():
        if n and dp * c.tp % n == 0:
            cut = c.sequence_parallel if c.tp > 1 else limits.sequence[-1]
            yield _free(c, tp=n, dp=dp * c.tp // n, sequence_parallel=cut if n > 1 else None)
    for n in (2 * c.pp, c.pp // 2) if limits.schedules else ():
        if n and dp * c.pp % n == 0:
            yield _free(c, pp=n, dp=dp * c.pp // n, blocks=None, schedule="1f1b", virtual_stages=1)


def _priced(
    stack: Stack, c: Configuration, changed: Iterable[tuple[Configuration, int]], batch: int | None, price: Price
) -> Iterator[Remedy]:
    """Those of these configurations that fit, each on so many GPUs."""
    cannot = set(beyond(c, stack))
    for new, gpus in changed:
        if new != c and set(beyond(new, stack)) <= cannot and (plan := _plan(new, gpus, batch, price)) is not None:
            yield Remedy(change=_words(c, new, plan), plan=plan)


def _plan(c: Configuration, gpus: int, batch: int | None, price: Price) -> Plan | None:
    try:
        return price(pins_of(c, gpus, batch), gpus, batch)
    except AutoparError:  # its pins exclude each other, or the model does not take such a batch
        return None


def _together(stack: Stack, c: Configuration, gpus: int, batch: int | None, price: Price) -> Iterator[Remedy]:
    """The leanest values of several choices, without those that are not needed."""
    zeros = stack.limits.staged_zeros if c.pp > 1 else stack.limits.zeros
    leanest: dict[str, Any] = {"micro_batch": 1, "recompute": stack.limits.recomputes[-1], "zero": max(zeros, default=0)}

    def changed(names: Sequence[str]) -> Configuration:
        return _free(c, **{name: leanest[name] for name in names})

    names = list(LEAN)
    plan = _plan(changed(names), gpus, batch, price)
    for name in LEAN if plan is not None else ():
        fewer = [n for n in names if n != name]
        if (leaner := _plan(changed(fewer), gpus, batch, price)) is not None:
            names, plan = fewer, leaner
    if plan is not None:
        yield Remedy(change=_words(c, changed(names), plan), plan=plan)


def of_another_size(stack: Stack, c: Configuration, gpus: int, batch: int | None, price: Price) -> list[Remedy]:
    """Where the configuration is not one of so many GPUs: as many as it says, or the nearest that it divides into; and as many
    data-parallel ranks as make these."""
    others = c.tp * c.pp
    sizes = [c.gpus] if c.gpus else [n for n in (gpus // others * others, -(-gpus // others) * others) if n]
    found = [Remedy(change=f"--gpus {n}", plan=plan) for n in sizes if (plan := _plan(c, n, batch, price)) is not None]
    if c.dp and gpus % others == 0:
        found += _priced(stack, c, [(_free(c, dp=gpus // others), gpus)], batch, price)
    return found or [_with(f"--gpus {n}", x) for n in sizes for x in remedies(stack, c, n, batch, price)]


def of_another_batch(stack: Stack, c: Configuration, gpus: int, stated: int, batch: int, price: Price) -> list[Remedy]:
    """Where the configuration is of another global batch than the inputs: inputs of its own, or the configuration with that of theirs."""
    tried = [
        (f"a TARGET whose inputs have {stated} samples", c, stated),
        (f"a global batch of {batch} samples in the configuration", _free(c, global_batch=batch), batch),
    ]
    found = [Remedy(change=words, plan=plan) for words, own, size in tried if (plan := _plan(own, gpus, size, price)) is not None]
    return found or [_with(words, x) for words, own, size in tried[1:] for x in remedies(stack, own, gpus, size, price)]


def _with(change: str, further: Remedy) -> Remedy:
    return dataclasses.replace(further, change=f"{change}, and {further.change}")


def _words(c: Configuration, new: Configuration, plan: Plan) -> str:
    filled = dataclasses.replace(new, micro_batches=plan.micro_batches)
    said = ", ".join(f"{what} {a} -> {b}" for what, a, b in changes(c, filled))
    return f"{plan.gpus} GPUs ({said})" if c.gpus not in (None, plan.gpus) else said


def remedies_text(found: Sequence[Remedy]) -> str:
    """As the end of a refusal; empty where nothing does."""
    lines = [
        f"{x.change}: {seconds_text(x.plan.step_time_s)} a step, {bytes_text(max(x.plan.memory_bytes))} on the fullest GPU" for x in found
    ]
    return f"\n{listed('Tried of the configuration, and each would do:', lines)}" if lines else ""
