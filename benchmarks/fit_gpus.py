"""Fits the constants of a GPU to published training runs; writes nothing.

    python -m benchmarks fit_gpus GPU [GPU ...] [--data FILE.csv ...] [--constants A,B] [--limit N] [--forms FILE] [--json]

Several GPUs are boards of one chip, which share its constants; the search starts from the first one's. The runs are those of
`published` on these GPUs, none that their source doubts or of which the planner chose a part. A constant is launch_s or a class
of operators (matmul, attention, conv, other, pointwise: reduction and gather follow it); launch_s is that of an interpreter, and
not of compiled programs. What a software adds is its recipe's. The loss is the mean absolute logarithm of predicted over measured step
time, at most 0.4 of one run: some runs of any sweep were slow for reasons of their own, and must not decide. Plans are priced once; then
only times are evaluated. --forms FILE: as of `published`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._cross import Priced
from benchmarks._fitted import Fitted, Point, constants_of
from benchmarks._forms import Form, forms_of
from benchmarks._runs import DATA, Skip, load
from cost_models import UnknownHardware
from cost_models.cluster import load_gpu
from cost_models.fit import search

__all__ = ["CONSTANTS", "loss_of", "main"]

CONSTANTS = ("matmul", "attention", "conv", "pointwise", "other", "launch_s")
CLIP = 0.4
ROWS = 150
MOST = 0.97  # of a peak


def loss_of(found: Sequence[Priced]) -> Callable[[Point], float]:
    """Constants -> loss over these runs."""
    fitted = Fitted([p.form for p in found], [p.run.cluster.gpu for p in found])
    own = [constants_of(p.run.cluster.gpu, p.run.recipe) for p in found]
    measured = [p.run.step_time_s or 1.0 for p in found]

    def loss(point: Point) -> float:
        if "pointwise" in point:
            point = {**point, "reduction": point["pointwise"], "gather": point["pointwise"]}
        points = []
        for p, c in zip(found, own, strict=True):
            launch_s = c["launch_s"] if p.run.compiled or "launch_s" not in point else p.run.recipe.launches * point["launch_s"]
            points.append({**c, **point, "launch_s": launch_s})
        return statistics.fmean(min(CLIP, abs(math.log(s / m))) for s, m in zip(fitted.steps_s(points), measured, strict=True))

    return loss


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit_gpus", description=__doc__.splitlines()[0])
    parser.add_argument("gpus", metavar="gpu", nargs="+", help="a name of the catalogue")
    parser.add_argument("--data", type=Path, action="append", help="a CSV of runs; may be given more than once")
    parser.add_argument("--constants", default=",".join(CONSTANTS), help="comma-separated")
    parser.add_argument("--limit", type=int, default=ROWS, help="so many rows of each file")
    parser.add_argument("--forms", type=Path, help="a file of what was priced, which is added to")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    console = Console(stderr=args.json, width=120)
    names = [n for n in args.constants.split(",") if n]
    try:
        gpus = [load_gpu(name) for name in args.gpus]
        runs, _, _ = load(args.data or sorted(DATA.glob("*.csv")), args.limit)
    except (OSError, Skip, UnknownHardware, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    if unknown := [name for name in names if name not in CONSTANTS]:
        print(f"no constant is called {', '.join(unknown)}", file=sys.stderr)
        return 2
    wanted = {gpu.name for gpu in gpus}
    runs = [r for r in runs if r.cluster.gpu.name in wanted and not (r.failed or r.flagged or r.chosen) and r.step_time_s]
    if not runs:
        print(f"no row that can be rebuilt is of {', '.join(args.gpus)}", file=sys.stderr)
        return 2
    with console.status("pricing"):
        found = [Priced(run=run, form=form) for run, form in forms_of(runs, args.forms) if isinstance(form, Form)]
    loss, every = loss_of(found), constants_of(gpus[0])
    before: Point = {name: every[name] for name in names}
    with console.status("fitting"):
        after, least = search(before, names, _moved, loss)
    title = f"{', '.join(args.gpus)}: {len(found)} runs, loss {loss(before):.4f} -> {least:.4f}"
    table = Table("constant", "catalogue", "fitted", title=title)
    for name in names:
        table.add_row(name, f"{before[name]:.4g}", f"{after[name]:.4g}")
    console.print(table)
    print(json.dumps({"gpus": args.gpus, "runs": len(found), "loss_before": loss(before), "loss": least, "constants": dict(after)}))
    return 0


def _moved(point: Point, name: str, factor: float) -> Point | None:
    value = point[name] * factor
    return None if name != "launch_s" and value > MOST else {**point, name: value}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
