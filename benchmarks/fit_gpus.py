"""Fits the constants of a GPU, and of the links between its nodes, to published training runs; writes nothing.

    python -m benchmarks fit_gpus GPU [GPU ...] [--data FILE.csv ...] [--constants A,B] [--limit N] [--json]

Several GPUs are boards of one chip, which share its constants; the search starts from the first one's. The runs are those of
`published` on these GPUs, none that their source doubts. A constant is a field of the GPU (launch_s), a class
of operators (matmul, attention, pointwise: reduction follows it, gather at 0.7 of it), or inter.FIELD of the link between nodes. The
loss is the mean absolute logarithm of predicted over measured step time, at most 0.4 of one run: some runs of any sweep were slow for
reasons of their own, and must not decide. Plans are priced once; then only times are evaluated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._predict import Prediction, predictions, repriced
from benchmarks._runs import DATA, Skip, load
from cost_models import Cluster, UnknownHardware
from cost_models.cluster import OP_CLASSES, Gpu, load_gpu
from cost_models.fit import search

__all__ = ["CONSTANTS", "changed", "loss_of", "main"]

CONSTANTS = ("matmul", "attention", "conv", "pointwise", "other", "launch_s")
CLIP = 0.4
ROWS = 150
GATHER_OF_POINTWISE = 0.7

Point = Mapping[str, float]


def changed(cluster: Cluster, point: Point) -> Cluster:
    """The cluster with these constants."""
    fractions, fields, link = dict(cluster.gpu.fractions), dict[str, float](), dict[str, float]()
    for name, value in point.items():
        if name.startswith("inter."):
            link[name.removeprefix("inter.")] = value
        elif name in fractions:
            fractions[name] = value
        else:
            fields[name] = value
    if "pointwise" in point:
        fractions |= {"reduction": point["pointwise"], "gather": GATHER_OF_POINTWISE * point["pointwise"]}
    gpu = dataclasses.replace(cluster.gpu, fractions=tuple(fractions.items()), **fields)  # type: ignore[arg-type]
    return dataclasses.replace(cluster, gpu=gpu, inter=dataclasses.replace(cluster.inter, **link))  # type: ignore[arg-type]


def loss_of(found: Sequence[Prediction]) -> Callable[[Point], float]:
    """Constants -> loss over these runs."""
    measured = [p.run.step_time_s or 1.0 for p in found]

    def loss(point: Point) -> float:
        times = repriced(found, lambda cluster: changed(cluster, point))
        return statistics.fmean(min(CLIP, abs(math.log(t.step_s / m))) for t, m in zip(times, measured, strict=True))

    return loss


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit_gpus", description=__doc__.splitlines()[0])
    parser.add_argument("gpus", metavar="gpu", nargs="+", help="a name of the catalogue")
    parser.add_argument("--data", type=Path, action="append", help="a CSV of runs; may be given more than once")
    parser.add_argument("--constants", default=",".join(CONSTANTS), help="comma-separated")
    parser.add_argument("--limit", type=int, default=ROWS, help="so many rows of each file")
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
    wanted = {gpu.name for gpu in gpus}
    runs = [r for r in runs if r.cluster.gpu.name in wanted and not r.failed and not r.flagged and r.step_time_s]
    if not runs:
        print(f"no row that can be rebuilt is of {', '.join(args.gpus)}", file=sys.stderr)
        return 2
    start = {name: _value(gpus[0], runs[0].cluster, name) for name in names}
    if unknown := [name for name, value in start.items() if value is None]:
        print(f"no constant is called {', '.join(unknown)}", file=sys.stderr)
        return 2
    with console.status("pricing"):
        found = [p for _, p in predictions(runs) if not isinstance(p, Skip)]
    loss = loss_of(found)
    before: Point = {name: value for name, value in start.items() if value is not None}
    with console.status("fitting"):
        after, least = search(before, names, _moved, loss)
    title = f"{', '.join(args.gpus)}: {len(found)} runs, loss {loss(before):.4f} -> {least:.4f}"
    table = Table("constant", "catalogue", "fitted", title=title)
    for name in names:
        table.add_row(name, f"{before[name]:.4g}", f"{after[name]:.4g}")
    console.print(table)
    print(json.dumps({"gpus": args.gpus, "runs": len(found), "loss_before": loss(before), "loss": least, "constants": dict(after)}))
    return 0


def _value(gpu: Gpu, cluster: Cluster, name: str) -> float | None:
    if name in OP_CLASSES:
        return gpu.fraction(name)
    holder, field = (cluster.inter, name.removeprefix("inter.")) if name.startswith("inter.") else (gpu, name)
    value = getattr(holder, field, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _moved(point: Point, name: str, factor: float) -> Point | None:
    value = point[name] * factor
    is_share = name in OP_CLASSES or name.endswith("fraction")
    return None if is_share and value > 0.97 else {**point, name: value}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
