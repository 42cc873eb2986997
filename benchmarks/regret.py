"""How much slower than the best measured plan of a real sweep the planner's choice is, beside common advice.

    python -m benchmarks regret [--data FILE.csv ...] [--limit N] [--json]

A sweep measured many plans of one model on one number of GPUs. In each group (source, model, sequence, GPUs, global batch) the planner
chooses among the sweep's plans, under its recipe, the one that it predicts to be fastest of those that it predicts to fit at the upper end
of their intervals. Regret is 1 - measured throughput of the choice / best measured throughput. A choice that did not run counts as 1; a
plan that was not measured, or whose measurement its source doubts, cannot be chosen, nor one that crashed though its ranks had room, as the
same plan on other GPUs shows (_fits.had_room): why it did, nothing of the plan says. The advice is given the benefit of the doubt: of
the plans in its order it takes the first that did run; `random` is the mean over all that ran. --limit takes N groups spread evenly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._fits import had_room
from benchmarks._predict import Figures, predictions
from benchmarks._runs import DATA, Run, Skip, load

__all__ = ["ADVICE", "Group", "groups_of", "main", "regret_of"]

LEAST_RUNS = 3  # measured plans of a group, below which there is nothing to choose


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The plans of one choice. Each is priced; those that failed have no step time."""

    name: str
    gpus: int
    found: tuple[Figures, ...]

    @property
    def ran(self) -> list[Figures]:
        return [p for p in self.found if not p.run.failed]

    def best_s(self) -> float:
        return min(measured_s(p, self) for p in self.ran)


def measured_s(p: Figures, group: Group) -> float:
    """The measured step time of a plan: the median of its repetitions."""
    same = [q.run.step_time_s for q in group.ran if (q.run.pins, q.run.micro_batch) == (p.run.pins, p.run.micro_batch)]
    return statistics.median([s for s in same if s is not None])


def regret_of(p: Figures, group: Group) -> float:
    return 1.0 if p.run.failed else 1.0 - group.best_s() / measured_s(p, group)


def chosen(group: Group) -> Figures:
    """The planner's choice; where it thinks that nothing fits, the leanest."""
    fitting = [p for p in group.found if p.fullest_interval_bytes[1] <= p.run.cluster.gpu.memory_bytes]
    return min(fitting, key=lambda p: p.step_time_s) if fitting else min(group.found, key=lambda p: p.fullest_bytes)


def _pure_data(run: Run) -> tuple[float, ...]:
    pins = run.pins
    return ((pins.tp or 1) * (pins.pp or 1), pins.zero or 0, pins.pp or 1, -run.micro_batch)


def _tensor_in_node(run: Run) -> tuple[float, ...]:
    pins = run.pins
    wanted = min(run.gpus, run.cluster.gpus_per_node)
    return (abs((pins.tp or 1) - wanted), pins.pp or 1, -(pins.zero or 0), -run.micro_batch)


def _least_model(run: Run) -> tuple[float, ...]:
    pins = run.pins
    return ((pins.tp or 1) * (pins.pp or 1), pins.pp or 1, -(pins.zero or 0), -run.micro_batch)


ADVICE: dict[str, Callable[[Run], tuple[float, ...]]] = {
    "data parallel if it fits, else ZeRO-1": _pure_data,
    "tensor parallel = GPUs of a node": _tensor_in_node,
    "smallest tensor x pipeline parallel that fits": _least_model,
}


def groups_of(found: Sequence[Figures]) -> list[Group]:
    """The choices that there are, without plans whose measurement is doubted, and those that had room and crashed."""
    by_key: dict[tuple[str, str, str, int, int], list[Figures]] = {}
    roomy = had_room([p.run for p in found])
    for p in (p for p in found if not p.run.chosen and id(p.run) not in roomy):  # what the planner chose is no choice
        if p.run.failed or (not p.run.flagged and p.run.step_time_s):
            by_key.setdefault(p.run.group, []).append(p)
    groups = [
        Group(name=f"{source} {model}, batch {batch}", gpus=gpus, found=tuple(plans))
        for (source, model, _, gpus, batch), plans in sorted(by_key.items())
    ]
    return [g for g in groups if len(g.ran) >= LEAST_RUNS]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks regret", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", help="a CSV of runs; may be given more than once")
    parser.add_argument("--limit", type=int, help="so many groups")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        print("--limit must be a positive number of groups", file=sys.stderr)
        return 2
    start = time.perf_counter()
    console = Console(stderr=args.json, width=160)
    try:
        runs, _, _ = load(args.data or sorted(DATA.glob("*sweep*.csv")))
    except (OSError, Skip, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    runs = _limited(runs, args.limit)
    with console.status("pricing"):
        groups = groups_of([found for _, found in predictions(runs) if not isinstance(found, Skip)])
    if not groups:
        print(f"no group has {LEAST_RUNS} measured plans that can be rebuilt", file=sys.stderr)
        return 2
    record = summary(groups)
    _report(groups, record, console)
    print(json.dumps({**record, "wall_s": round(time.perf_counter() - start, 1)}))
    return 0


def _limited(runs: list[Run], limit: int | None) -> list[Run]:
    keys = list(dict.fromkeys(r.group for r in runs))
    if limit is None or limit >= len(keys):
        return runs
    kept = {keys[k * len(keys) // limit] for k in range(limit)}
    return [r for r in runs if r.group in kept]


def summary(groups: Sequence[Group]) -> dict[str, object]:
    """The figures of the JSON line."""
    ours = [regret_of(chosen(g), g) for g in groups]
    advice = {name: [regret_of(min(g.ran, key=lambda p: order(p.run)), g) for g in groups] for name, order in ADVICE.items()}
    advice["random"] = [statistics.fmean(regret_of(p, g) for p in g.ran) for g in groups]
    failed = sum(chosen(g).run.failed for g in groups)
    return {"groups": len(groups), **_figures(ours), "failed": failed, "advice": {k: _figures(v) for k, v in advice.items()}}


def _figures(regrets: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(regrets), "mean": statistics.fmean(regrets), "worst": max(regrets)}


def _report(groups: Sequence[Group], record: dict[str, object], console: Console) -> None:
    table = Table("group", "GPUs", "plans", "chosen", "predicted s", "measured s", "best measured", "s", "regret")
    for g in sorted(groups, key=lambda g: -regret_of(chosen(g), g)):
        c, best = chosen(g), min(g.ran, key=lambda p: measured_s(p, g))
        table.add_row(
            g.name, str(g.gpus), f"{len(g.ran)}+{len(g.found) - len(g.ran)}", c.run.parallelism, f"{c.step_time_s:.3f}",
            "did not run" if c.run.failed else f"{measured_s(c, g):.3f}", best.run.parallelism, f"{g.best_s():.3f}",
            f"{100 * regret_of(c, g):.1f}%",
        )  # fmt: skip
    console.print(table)
    table = Table("", "median", "mean", "worst", title=f"regret over {len(groups)} groups")
    advice = record["advice"]
    assert isinstance(advice, dict)
    for name, figures in (("the planner", record), *advice.items()):
        table.add_row(name, *(f"{100 * figures[k]:.1f}%" for k in ("median", "mean", "worst")))
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
