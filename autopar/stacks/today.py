"""What a person runs today, priced, beside what the same software could run and what autopar would: `explain --from FILE TARGET`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.planner.plan import Pins, Plan
from autopar.planner.words import axis_words
from autopar.report.columns import wrapped
from autopar.report.explanation import cut_short
from autopar.report.limits import idle_axes
from autopar.report.units import bytes_text, seconds_text, table
from autopar.report.words import counted
from autopar.stacks.configuration import Configuration, changes, configuration_of, pins_of
from autopar.stacks.remedies import Price, Remedy, of_another_batch, of_another_size, remedies, remedies_text
from autopar.stacks.stack import Stack, StackError

__all__ = ["Compared", "compared", "compared_json", "compared_text"]

Priced = Plan | str  # or why there is none
Planner = Callable[[Pins, int, int | None, Stack | None, bool], Plan | Callable[[], str]]
"""Of (pins, GPUs, global batch, the software that runs the plan, whether the pins are all that it is told) the plan, or what says why there
is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """today: as it is configured, and remedies: what of it would have to be other, where it does not fit; within: the best that the same
    software can run; free: the best of autopar's own. ended: by the user, before all was tried."""

    stack: Stack
    configuration: Configuration
    today: Priced
    remedies: list[Remedy]
    within: Priced
    free: Priced
    ended: bool = False


def compared(
    stack: Stack, configuration: Configuration, gpus: int, batch: int | None, planner: Planner, stop: Callable[[], bool] = lambda: False
) -> Compared:
    """stop: whether the user has enough, who is then told no further remedies. PlanError where the configuration is not one of so many
    GPUs or of this batch, StackError where it cannot be priced: each with what would do, which was tried."""

    def price(pins: Pins, gpus: int, batch: int | None) -> Plan | None:
        if stop():
            return None
        found = planner(pins, gpus, batch, stack, True)
        return found if isinstance(found, Plan) else None

    def priced(pins: Pins, software: Stack | None, configured: bool) -> Priced:
        found = planner(pins, gpus, batch, software, configured)
        return found if isinstance(found, Plan) else found()

    today = priced(_pins(stack, configuration, gpus, batch, price), stack, True)
    return Compared(
        stack=stack, configuration=configuration, today=today,
        remedies=[] if isinstance(today, Plan) else remedies(stack, configuration, gpus, batch, price),
        within=priced(Pins(), stack, False), free=priced(Pins(), None, False), ended=stop(),
    )  # fmt: skip


def _pins(stack: Stack, c: Configuration, gpus: int, batch: int | None, price: Price) -> Pins:
    """Those of the configuration."""
    if c.unpriced:
        why, instead = c.unpriced
        plan = price(pins_of(dataclasses.replace(c, dp=None), gpus, batch), gpus, batch)
        raise StackError(f"{why} cannot be priced yet" + remedies_text([] if plan is None else [Remedy(change=instead, plan=plan)]))
    try:
        return pins_of(c, gpus, batch)
    except PlanError as why:
        stated = c.batch_on(gpus)
        if c.ranks_on(gpus) is None:
            found = of_another_size(stack, c, gpus, batch, price)
        elif batch is not None and stated is not None and stated != batch:
            found = of_another_batch(stack, c, gpus, stated, batch, price)
        else:
            found = remedies(stack, c, gpus, batch, price)
        raise type(why)(f"{why}{remedies_text(found)}") from why


def _rows(found: Compared) -> list[tuple[str, Priced]]:
    title = found.stack.title
    return [("today", found.today), (f"best for {title}", found.within), ("autopar's own", found.free)]


def compared_text(found: Compared) -> str:
    """A line that says whether a change pays, a table, what changes, and what was not read."""
    rows = []
    for name, priced in _rows(found):
        if isinstance(priced, Plan):
            fullest = max(priced.memory_bytes)
            mesh = ", ".join(axis_words(axis, n) for axis, n in reversed(list(priced.mesh.items())) if n > 1) or "one GPU"
            rows.append(
                (
                    name,
                    mesh,
                    f"ZeRO-{priced.zero}" if priced.zero else "-",
                    str(priced.micro_batches),
                    seconds_text(priced.step_time_s),
                    bytes_text(fullest),
                )
            )
        else:
            rows.append((name, "does not fit", "", "", "", ""))
    parts = [wrapped(_verdict(found)), table(("", "mesh", "ZeRO", "micro-batches", "step", "memory"), rows)]
    for name, priced in _rows(found):
        if isinstance(priced, str):
            more = remedies_text(found.remedies) if priced is found.today else ""
            parts.append("\n".join(wrapped(line, "    ") for line in f"{name}: {priced}{more}".splitlines()))
    said: dict[str, str] = {}
    for name, priced in _rows(found)[1:]:
        if isinstance(priced, Plan) and (lines := _changes(found, priced)):
            listed = table(("what", "today", "then"), lines)
            same = next((other for other, text in said.items() if text == listed), None)
            parts.append(f"{name} changes the same" if same is not None else f"{name} changes\n{listed}")
            said[name] = listed
    parts += [wrapped(f"{name}: {_idle(x, axis)}") for name, x in _rows(found) if isinstance(x, Plan) for axis in idle_axes(x)]
    parts += [wrapped(f"{name}: {more}") for name, x in _rows(found) if isinstance(x, Plan) and (more := cut_short(x))]
    if found.ended:
        parts.append("ended by Ctrl-C: not all was tried")
    if found.configuration.said:
        parts.append("read, and not priced as it stands\n" + "\n".join(wrapped(x, "    ", "  - ") for x in found.configuration.said))
    return "\n\n".join(parts)


def _idle(plan: Plan, axis: str) -> str:
    n = plan.mesh[axis]
    return f"{axis} {n} splits nothing in it, all of its ranks do the same work: {counted(plan.gpus // n, 'GPU')} would do as much"


def _verdict(found: Compared) -> str:
    title = found.stack.title
    if isinstance(found.today, str):
        others = [(f"another configuration of {title}", found.within), ("autopar's own plan", found.free)]
        better = [f"{name} does, in {seconds_text(x.step_time_s)} a step" for name, x in others if isinstance(x, Plan)]
        return "; ".join([f"what {title} is told does not fit these GPUs, by this account", *better])
    today_s = found.today.step_time_s
    parts = [
        f"{title}, as it is configured: {seconds_text(today_s)} a step, {bytes_text(max(found.today.memory_bytes))} on the fullest GPU"
    ]
    for name, priced in (("another configuration of it", found.within), ("autopar's own plan", found.free)):
        if isinstance(priced, Plan):
            share = priced.step_time_s / today_s
            slower = f" ({seconds_text(priced.step_time_s)})" if share > 1.005 else ""  # by the recipe of its own software
            parts.append(f"{name} takes {share:.0%} of that" if share < 0.995 else f"{name} is no faster{slower}")
    return "; ".join(parts)


def _changes(found: Compared, plan: Plan) -> list[tuple[str, str, str]]:
    today = found.configuration if isinstance(found.today, str) else configuration_of(found.today)
    return [(what, str(a), str(b)) for what, a, b in changes(today, configuration_of(plan))]


def compared_json(found: Compared) -> dict[str, Any]:
    """The same as JSON values; a plan that there is none of has its reason."""

    def priced(one: Priced) -> dict[str, Any]:
        if isinstance(one, str):
            return {"infeasible": one}
        return {
            "step_time_s": one.step_time_s, "memory_bytes": one.memory_bytes, "mesh": one.mesh, "micro_batches": one.micro_batches,
            "schedule": one.schedule, "virtual_stages": one.virtual_stages, "zero": one.zero, "shard": one.shard,
            "cut_short": cut_short(one),
            "changes": [{"what": what, "today": a, "then": b} for what, a, b in _changes(found, one)],
        }  # fmt: skip

    return {
        "stack": found.stack.name, "today": priced(found.today), "remedies": [x.as_json() for x in found.remedies],
        "within": priced(found.within), "free": priced(found.free),
        "ended": found.ended, "not_priced": list(found.configuration.said),
    }  # fmt: skip
