"""What a person runs today, priced, beside what the same software could run and what autopar would: `explain --from FILE TARGET`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.errors import Infeasible
from autopar.planner.plan import Pins, Plan
from autopar.planner.words import axis_words
from autopar.report.columns import wrapped
from autopar.report.units import bytes_text, seconds_text, table
from autopar.stacks.configuration import Configuration, changes, configuration_of, pins_of
from autopar.stacks.stack import Stack

__all__ = ["Compared", "compared", "compared_json", "compared_text"]

Priced = Plan | str  # or why there is none
Planner = Callable[[Pins | None, Stack | None, bool], Plan]
"""Of (pins, the software that runs the plan, whether its plans are those that it can run)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """today: as it is configured; within: the best that the same software can run; free: the best of autopar's own."""

    stack: Stack
    configuration: Configuration
    today: Priced
    within: Priced
    free: Priced


def compared(stack: Stack, configuration: Configuration, gpus: int, batch: int | None, planner: Planner) -> Compared:
    """PlanError where the configuration does not fit so many GPUs or this batch."""
    pins = pins_of(configuration, gpus, batch)

    def priced(given: Pins | None, software: Stack | None, within: bool) -> Priced:
        try:
            return planner(given, software, within)
        except Infeasible as why:
            return str(why)

    return Compared(
        stack=stack, configuration=configuration, today=priced(pins, stack, False), within=priced(None, stack, True),
        free=priced(None, None, False),
    )  # fmt: skip


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
            parts.append("\n".join(wrapped(line, "    ") for line in f"{name}: {priced}".splitlines()))
    said: dict[str, str] = {}
    for name, priced in _rows(found)[1:]:
        if isinstance(priced, Plan) and (lines := _changes(found, priced)):
            listed = table(("what", "today", "then"), lines)
            same = next((other for other, text in said.items() if text == listed), None)
            parts.append(f"{name} changes the same" if same is not None else f"{name} changes\n{listed}")
            said[name] = listed
    if found.configuration.said:
        parts.append("read, and not priced as it stands\n" + "\n".join(wrapped(x, "    ", "  - ") for x in found.configuration.said))
    return "\n\n".join(parts)


def _verdict(found: Compared) -> str:
    title = found.stack.title
    if isinstance(found.today, str):
        return f"what {title} is told does not fit these GPUs, by this account"
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
            "changes": [{"what": what, "today": a, "then": b} for what, a, b in _changes(found, one)],
        }  # fmt: skip

    return {
        "stack": found.stack.name, "today": priced(found.today), "within": priced(found.within), "free": priced(found.free),
        "not_priced": list(found.configuration.said),
    }  # fmt: skip
