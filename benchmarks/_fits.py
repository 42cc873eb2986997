"""Does it fit? Runs that ran, and those that did not, against what is predicted of the fullest stage's memory and of its interval.

Where a source mixes what ran out of memory with what crashed or took too long, its other runs tell some apart: `ran_out`, `had_room`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec
from rich.table import Table

from benchmarks._predict import Figures
from benchmarks._runs import Run
from cost_models.uncertainty import SPREADS

__all__ = ["CERTAIN", "ROOM", "fit_table", "fits", "had_room", "ran_out"]

CERTAIN = "ran out of memory for certain"
ROOM = "did not run, and had room for certain"
Shares = dict[str, dict[str, float]]  # of each status


def fits(found: Iterable[Figures]) -> Shares:
    """Of the runs of each status: how many, and the shares of them that are predicted not to fit into the GPU's memory, by the prediction
    and by the upper end of its interval. ROOM: those of the failed that certainly had room; they are no runs of their status. CERTAIN:
    those that certainly ran out of memory; "precision": of all that are predicted not to fit the share that did not run, and had no room
    for certain."""
    every = list(found)
    roomy = had_room([p.run for p in every])
    groups: dict[str, list[Figures]] = {}
    for p in every:
        groups.setdefault("ran" if not p.run.failed else ROOM if id(p.run) in roomy else p.run.row["status"], []).append(p)
    if certain := ran_out([p.run for p in every]):
        groups[CERTAIN] = [p for p in every if id(p.run) in certain]
    shares = {
        status: {
            "count": len(group),
            "too_large": statistics.fmean(_too_large(p, p.fullest_bytes) for p in group),
            "too_large_at_the_end": statistics.fmean(_too_large(p, p.fullest_interval_bytes[1]) for p in group),
        }
        for status, group in sorted(groups.items())
    }
    refused = [p for p in every if _too_large(p, p.fullest_bytes)]
    at_the_end = [p for p in every if _too_large(p, p.fullest_interval_bytes[1])]
    if refused:
        shares["precision"] = {
            "count": len(refused), "too_large": statistics.fmean(p.run.failed and id(p.run) not in roomy for p in refused),
            "too_large_at_the_end": statistics.fmean(p.run.failed and id(p.run) not in roomy for p in at_the_end),
        }  # fmt: skip
    return shares


def _too_large(p: Figures, nbytes: float) -> bool:
    return nbytes > p.run.cluster.gpu.memory_bytes


def ran_out(runs: Sequence[Run]) -> set[int]:
    """The ids of failed runs that certainly ran out of memory: their source states an estimate above the GPU's, or two runs that differ in
    nothing but a smaller micro-batch (with as many micro-batches as stages, or more) show by a line what this one would take."""
    measured: dict[tuple[object, ...], dict[int, float]] = {}

    def alike(run: Run) -> tuple[object, ...]:
        return *run.group, msgspec.structs.replace(run.pins, micro_batches=None)

    def filled(run: Run) -> bool:
        return (run.pins.micro_batches or 0) >= (run.pins.pp or 1)

    for run in runs:
        if not run.failed and not run.flagged and run.memory_bytes and filled(run):
            sizes = measured.setdefault(alike(run), {})
            sizes[run.micro_batch] = max(run.memory_bytes, sizes.get(run.micro_batch, 0.0))
    certain = set()
    for run in runs:
        if not run.failed:
            continue
        room = run.cluster.gpu.memory_bytes - run.cluster.gpu.context_bytes
        below = sorted(item for item in measured.get(alike(run), {}).items() if item[0] < run.micro_batch)[-2:]
        if len(below) == 2 and filled(run):
            (small, lower), (large, upper) = below
            needed = upper + (upper - lower) / (large - small) * (run.micro_batch - large)
        else:
            needed = run.memory_bytes or 0.0
        if needed > room:
            certain.add(id(run))
    return certain


def had_room(runs: Sequence[Run]) -> set[int]:
    """The ids of failed runs that certainly did not run out of memory: another run ran whose ranks hold as much or more (it differs in
    nothing but how many copies of the model there are, and with ZeRO in no more parts of what rests; it keeps as many micro-batches), and
    left as much memory free as a figure that is derived from another may be off. Not those whose source states what they would take."""

    def alike(run: Run) -> tuple[object, ...]:
        same = msgspec.structs.replace(run.pins, dp=None, shard=None, micro_batches=None)
        return run.key, run.recipe, run.optimizer, run.micro_batch, same

    ran: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        room = run.cluster.gpu.memory_bytes - run.cluster.gpu.context_bytes
        if not run.failed and not run.chosen and run.memory_bytes and run.memory_bytes * (1 + SPREADS["derived"]) <= room:
            ran.setdefault(alike(run), []).append(run)
    unsaid = [x for x in runs if x.failed and not x.chosen and not x.memory_bytes]
    return {id(x) for x in unsaid if any(_holds_as_much(r, x) for r in ran.get(alike(x), ()))}


def _holds_as_much(ran: Run, other: Run) -> bool:
    """Of runs that differ in dp, in how many parts what rests is, and in the number of micro-batches: with more of these than stages,
    still more change nothing; gradients of several copies are brought together in buffers, those of one are not."""
    here, there, stages = ran.pins.micro_batches or 0, other.pins.micro_batches or 0, ran.pins.pp or 1
    copies, others = ran.pins.dp or 1, other.pins.dp or 1
    return (here >= there or here > stages) and (copies > 1 or others == 1) and (ran.pins.shard or 1) <= (other.pins.shard or 1)


def fit_table(fit: Shares, title: str = "does it fit?") -> Table:
    """What `fits` says."""
    table = Table("runs that", "", "predicted not to fit", "at the upper end", title=title)
    for status, f in fit.items():
        said = "did not run, of those predicted not to fit" if status == "precision" else status
        table.add_row(said, str(f["count"]), f"{f['too_large']:.1%}", f"{f['too_large_at_the_end']:.1%}")
    return table
