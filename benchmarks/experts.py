"""Our free plan beside the layouts that experts published for their models, both priced by the same models.

    python -m benchmarks experts [--data FILE.csv ...] [--model 39.1B,BLOOM] [--gpus N] [--most N] [--json]

Layouts: benchmarks/data/experts.csv (Megatron's series, its 530B, BLOOM, torchtitan), and of the published runs llm-foundry's and Alpa's,
the largest batch of each model and number of GPUs. A layout is pinned with every knob as it was and priced under its software's recipe;
then the planner is free, under the same recipe, with the memory of the GPU, or what the layout needs where our account says that it needs
more. predicted: seconds of a step, and the interval that holds the predictions of 90% of the published runs (python -m benchmarks
published). Ours must never be slower where the layout lies in the space of the search; where it does not, the part that lies outside is
named. Layouts that cannot be rebuilt are listed with the reason. Exit code 1 where ours is slower inside its space.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.planner import Pins
from autopar.planner.candidate import GIB, Candidate
from autopar.planner.resources import usable_bytes
from autopar.planner.search import Search
from autopar.planner.space import Space
from benchmarks._predict import ANY_MEMORY, search_of
from benchmarks._runs import Run, Skip, read, rebuilt

__all__ = ["differences", "interval", "layouts", "main", "outside"]

DATA = Path(__file__).parent / "data"
DEFAULT = (DATA / "experts.csv", DATA / "runs" / "llm_foundry_fsdp.csv", DATA / "runs" / "alpa_v100.csv")
LARGEST_ERROR = 0.24  # of the step time of 90% of the published runs
SAME = 1e-3  # what two prices of one plan may differ by: the gap to which the stages' program is solved


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks experts", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", help="a CSV of layouts; may be given more than once")
    parser.add_argument("--model", help="comma-separated: parts of the models' names")
    parser.add_argument("--gpus", type=int, help="on so many GPUs at most")
    parser.add_argument("--most", type=int, help="so many layouts")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    wanted = [part.lower() for part in (args.model or "").split(",") if part]
    try:
        runs, skipped = layouts(args.data or DEFAULT)
    except (OSError, Skip, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    runs = [r for r in runs if (not wanted or any(w in r.row["model"].lower() for w in wanted)) and r.gpus <= (args.gpus or r.gpus)]
    console = Console(stderr=args.json, width=180)
    records: list[dict[str, Any]] = []
    for run in runs[: args.most]:
        with console.status(f"{run.row['model']} on {run.gpus} GPUs"):
            records.append(_compared(run))
    console.print(_table(records))
    for model, reason in skipped.items():
        console.print(f"not rebuilt: {model}: {reason}")
    slower = [r for r in records if r.get("slower")]
    print(json.dumps({"layouts": records, "skipped": skipped, "slower": len(slower)}))
    return 1 if slower else 0


def layouts(paths: Iterable[Path]) -> tuple[list[Run], dict[str, str]]:
    """Of each model and number of GPUs the layout with the largest batch; models without any that can be rebuilt, with the reason."""
    found: dict[tuple[object, ...], Run] = {}
    skipped: dict[str, str] = {}
    for path in paths:
        for number, row in enumerate(read(path), 2):
            try:
                run = rebuilt(row, number)
            except Skip as reason:
                skipped.setdefault(f"{row['model']} ({row['source']})", str(reason))
                continue
            if run.chosen:
                skipped.setdefault(f"{row['model']} ({row['source']})", f"{run.chosen} are not stated")
                continue
            key = (row["source"], row["model"], row["gpu"], run.gpus)
            if key not in found or run.global_batch > found[key].global_batch:
                found[key] = run
    done = {f"{r.row['model']} ({r.row['source']})" for r in found.values()}
    return list(found.values()), {k: v for k, v in skipped.items() if k not in done}


def interval(step_s: float) -> tuple[float, float]:
    """What a step that is predicted so may take: |predicted - measured| / measured is at most LARGEST_ERROR in 90% of the runs."""
    return step_s / (1 + LARGEST_ERROR), step_s / (1 - LARGEST_ERROR)


def outside(run: Run, space: Space) -> list[str]:
    """The parts of a layout that are not in a space."""
    pins, found = run.pins, []
    meshes = [m for m in space.meshes() if (m.pp, m.dp, m.tp) == (pins.pp, pins.dp, pins.tp)]
    if not meshes:
        return [f"tp={pins.tp} reaches over nodes of {space.cluster.gpus_per_node} GPUs"]
    if pins.micro_batches not in space.micro_batch_counts(meshes[0]):
        found.append(f"{pins.micro_batches} micro-batches")
    if pins.zero not in [rest.zero for rest, _ in space.rests(meshes[0])]:
        found.append(f"zero={pins.zero}")
    scheduled = pins.schedule, pins.virtual_stages or 1
    if scheduled not in space.schedules(meshes[0], pins.micro_batches or 1):
        found.append("schedule {}, {} stages on each rank".format(*scheduled))
    return found


def differences(theirs: Candidate, ours: Candidate) -> list[str]:
    """What differs between two plans, theirs -> ours."""
    pairs: dict[str, tuple[object, object]] = {
        "pp": (theirs.mesh.pp, ours.mesh.pp),
        "dp": (theirs.mesh.dp, ours.mesh.dp),
        "tp": (theirs.mesh.tp, ours.mesh.tp),
        "micro-batches": (theirs.rank.micro_batches, ours.rank.micro_batches),
        "zero": (theirs.rest.zero, ours.rest.zero),
        "sharded over": (theirs.shard, ours.shard),
        "sequence parallel": (theirs.form and theirs.form.sequence, ours.form and ours.form.sequence),
        "pieces recomputed": (len(theirs.part.recomputed), len(ours.part.recomputed)),
        "cuts": (tuple(theirs.part.cuts), tuple(ours.part.cuts)),
    }
    return [name if name == "cuts" else f"{name} {a} -> {b}" for name, (a, b) in pairs.items() if a != b]


def _compared(run: Run) -> dict[str, Any]:
    start = time.perf_counter()
    record: dict[str, Any] = {"model": run.row["model"], "source": run.row["source"], "gpus": run.gpus, "layout": run.parallelism}
    shared = search_of([run])
    theirs = _best(shared, run, run.pins, ANY_MEMORY)
    if isinstance(theirs, str):
        return {**record, "refused": theirs, "seconds": round(time.perf_counter() - start, 1)}
    needs = max(s.memory.upper_bytes for s in theirs.stages)
    room = usable_bytes(run.cluster.gpu)
    free = shared.other(gpus=run.gpus, pins=Pins(), batch_size=run.global_batch, recipe=run.recipe, memory_limit_bytes=max(room, needs))
    ours = next(free.candidates(), None)
    parts = outside(run, free.space)
    record |= {
        "theirs_s": theirs.step_time_s, "theirs_interval_s": interval(theirs.step_time_s), "theirs_gib": needs / GIB,
        "theirs_fits": needs <= room, "outside": parts,
    }  # fmt: skip
    if ours is None:
        return {**record, "refused": "the free search finds no plan", "slower": not parts, "seconds": round(time.perf_counter() - start, 1)}
    counts = ours.rank.micro_batches
    return {
        **record, "ours_s": ours.step_time_s, "ours_interval_s": interval(ours.step_time_s), "bound_s": free.said.bound_s,
        "ours": f"dp{ours.mesh.dp} tp{ours.mesh.tp} pp{ours.mesh.pp} zero{ours.rest.zero} mb{run.global_batch // ours.mesh.dp // counts}",
        "ours_gib": max(s.memory.total_bytes for s in ours.stages) / GIB, "differs": differences(theirs, ours),
        "slower": not parts and ours.step_time_s > theirs.step_time_s * (1 + SAME), "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def _best(shared: Search, run: Run, pins: Pins, limit_bytes: int) -> Candidate | str:
    search = shared.other(gpus=run.gpus, pins=pins, batch_size=run.global_batch, recipe=run.recipe, memory_limit_bytes=limit_bytes)
    found = next(search.candidates(), None)
    return found if found is not None else next(iter(search.refused), "no mesh")


def _table(records: list[dict[str, Any]]) -> Table:
    table = Table("model", "GPUs", "theirs", "s (90% of runs)", "GiB", "ours", "s (90% of runs)", "GiB", "ours / theirs", "differs", "s")
    for r in records:
        if "theirs_s" not in r:
            table.add_row(r["model"], str(r["gpus"]), r["layout"], r["refused"], *[""] * 6, f"{r['seconds']:.0f}")
            continue
        theirs = f"{r['theirs_gib']:.0f}{'' if r['theirs_fits'] else ' (too much)'}"
        if "ours_s" not in r:
            table.add_row(
                r["model"], str(r["gpus"]), r["layout"], _with(r, "theirs"), theirs, r["refused"], *[""] * 4, f"{r['seconds']:.0f}"
            )
            continue
        remarks = "; ".join([*r["differs"], *(f"outside of the space: {x}" for x in r["outside"])])
        ratio = f"{r['ours_s'] / r['theirs_s']:.3f}{' SLOWER' if r['slower'] else ''}"
        table.add_row(
            r["model"], str(r["gpus"]), r["layout"], _with(r, "theirs"), theirs, r["ours"], _with(r, "ours"), f"{r['ours_gib']:.0f}", ratio,
            remarks, f"{r['seconds']:.0f}",
        )  # fmt: skip
    return table


def _with(r: dict[str, Any], whose: str) -> str:
    low, high = r[f"{whose}_interval_s"]
    return f"{r[f'{whose}_s']:.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
