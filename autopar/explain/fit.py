"""The fewest GPUs that a model fits on: twice as many until it does, then every number between that nodes can be filled with."""

from __future__ import annotations

import dataclasses
import math

import msgspec

from autopar.errors import Infeasible
from autopar.explain.study import Refused, Study
from autopar.planner.plan import Plan
from autopar.report.columns import last_wrapped, wrapped
from autopar.report.explanation import in_words, summary_of, verdict_of
from autopar.report.units import bytes_text, seconds_text

__all__ = ["Fit", "Tried", "fit", "fit_text"]

MOST = 4096  # GPUs that are tried


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One number of GPUs: with a plan, or why there is none."""

    gpus: int
    step_time_s: float | None
    memory_bytes: int | None
    plan: str
    why: str


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """gpus: the fewest; verdict: of the plan on them; ended: by the user, before all fewer ones were tried."""

    schema: int
    gpus: int
    cluster: str
    verdict: str
    tried: list[Tried]
    ended: bool = False


def fit(study: Study, most: int | None = None) -> tuple[Fit, Plan]:
    """Raises Infeasible where no number fits that was tried."""
    cluster = study.asked.cluster
    limit = min(x for x in (most, cluster.gpu_count, MOST) if x is not None)
    tried: dict[int, Plan | Refused] = {}
    below, found = 0, 1
    while True:
        tried[found] = _on(study, found)
        if isinstance(tried[found], Plan):
            break
        if found >= limit:
            raise _none(study, {n: refused for n, refused in tried.items() if isinstance(refused, Refused)})
        below, found = found, min(2 * found, limit)
    ended = False
    for n in (n for n in range(below + 1, found) if n <= cluster.gpus_per_node or n % cluster.gpus_per_node == 0):
        if ended := study.stop():
            break
        tried[n] = _on(study, n)
        if isinstance(tried[n], Plan):
            found = n
            break
    plan = tried[found]
    assert isinstance(plan, Plan)
    listed = [_tried(n, tried[n]) for n in sorted(tried) if n <= found]
    return Fit(schema=1, gpus=found, cluster=cluster.name, verdict=verdict_of(plan), tried=listed, ended=ended), plan


def _none(study: Study, refused: dict[int, Refused]) -> Infeasible:
    """Why none of these numbers of GPUs fits, and what would do on that which is nearest to it."""
    short = {n: min(x.search.said.short.values(), default=math.inf) for n, x in refused.items()}
    nearest = min(refused, key=lambda n: (short[n], n))
    error = refused[nearest].error
    listed = f"{study.program.name} fits on none of {', '.join(map(str, refused))} GPUs of {study.asked.cluster.name}"
    return Infeasible(f"{listed}\nOn {nearest}, which is nearest to it: {error}", more=error.more)


def _on(study: Study, gpus: int) -> Plan | Refused:
    return study.solve(dataclasses.replace(study.asked, gpus=gpus))


def _tried(gpus: int, answer: Plan | Refused) -> Tried:
    if isinstance(answer, Refused):
        return Tried(gpus=gpus, step_time_s=None, memory_bytes=None, plan="", why=answer.why)
    return Tried(gpus=gpus, step_time_s=answer.step_time_s, memory_bytes=summary_of(answer).memory_bytes, plan=in_words(answer), why="")


def fit_text(found: Fit) -> str:
    rows = [
        (
            t.gpus, "fits" if t.step_time_s is not None else "no", seconds_text(t.step_time_s) if t.step_time_s is not None else "-",
            bytes_text(t.memory_bytes) if t.memory_bytes is not None else "-", t.plan or t.why,
        )
        for t in found.tried
    ]  # fmt: skip
    gpus = "1 GPU" if found.gpus == 1 else f"{found.gpus} GPUs"
    said = " (ended by Ctrl-C: fewer may do)" if found.ended else ""
    parts = [wrapped(f"fits on {gpus} of {found.cluster}{said}: {found.verdict}")]
    parts.append("tried\n" + last_wrapped(("GPUs", "", "a step", "memory", "plan"), rows))
    return "\n\n".join(parts)
