"""What each term of the cost model contributes: errors and regret with one term at a time removed.

    python -m benchmarks ablation [--data FILE.csv ...] [--limit N] [--json]

The runs are those of `published` and the choices those of `regret`, priced once and then anew without the term. A term whose removal
makes neither worse pays nothing. --limit takes N rows spread evenly over each file (default 240; regret needs whole groups, so that it
is taken over the groups that the rows make up).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.planner.estimate import Times
from autopar.planner.plan import MemoryPlan
from benchmarks._predict import Prediction, predictions, repriced
from benchmarks._runs import DATA, Skip, load
from benchmarks._scores import score
from benchmarks.regret import groups_of, summary
from cost_models import Cluster
from cost_models.cluster import Gpu, Link
from cost_models.recipe import MIB, Recipe

__all__ = ["TERMS", "Term", "main", "without"]

DEFAULT_ROWS = 240


def _same_cluster(cluster: Cluster) -> Cluster:
    return cluster


def _same_recipe(recipe: Recipe) -> Recipe:
    return recipe


def _step(times: Times) -> float:
    return times.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """How a term is taken out: of the hardware, of the recipe, of the sum of a step, or of the memory (the figures left out)."""

    cluster: Callable[[Cluster], Cluster] = _same_cluster
    recipe: Callable[[Recipe], Recipe] = _same_recipe
    step: Callable[[Times], float] = _step
    memory: tuple[str, ...] = ()


def _gpu(**changes: float) -> Callable[[Cluster], Cluster]:
    return lambda cluster: dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, **changes))  # type: ignore[arg-type]


def _links(change: Callable[[Link], Link]) -> Callable[[Cluster], Cluster]:
    return lambda cluster: dataclasses.replace(cluster, intra=change(cluster.intra), inter=change(cluster.inter))


def _flat(cluster: Cluster) -> Cluster:
    """One fraction for all classes of operators: their mean."""
    gpu: Gpu = cluster.gpu
    mean = statistics.fmean(value for _, value in gpu.fractions)
    return dataclasses.replace(cluster, gpu=dataclasses.replace(gpu, fractions=tuple((name, mean) for name, _ in gpu.fractions)))


TERMS: dict[str, Term] = {
    "nothing": Term(),
    "launch floor": Term(cluster=_gpu(launch_s=0.0)),
    "efficiency by class": Term(cluster=_flat),
    "latency of collectives": Term(
        cluster=_links(
            lambda link: dataclasses.replace(
                link, start_simple_s=0.0, start_low_latency_s=0.0, hop_simple_s=0.0, hop_low_latency_s=0.0, peer_s=0.0
            )
        )
    ),
    "contention of a pipeline's transfers": Term(
        recipe=lambda recipe: dataclasses.replace(recipe, contended_step_s=0.0, contended_hop_s=0.0)
    ),
    "overlap of gradient reduction": Term(recipe=lambda recipe: dataclasses.replace(recipe, overlaps_reduction=False)),
    "buckets": Term(recipe=lambda recipe: dataclasses.replace(recipe, bucket_bytes=MIB)),
    "gathering again in backward": Term(recipe=lambda recipe: dataclasses.replace(recipe, regathers=False)),
    "pipeline bubble": Term(step=lambda times: times.step_s - times.bubble_s),
    "exposed gradient reduction": Term(step=lambda times: times.step_s - times.sync_s),
    "optimizer step": Term(step=lambda times: times.step_s - times.optimizer_s),
    "largest temporary": Term(memory=("largest_temporary_bytes",)),
    "communication buffers": Term(memory=("communication_buffers_bytes",)),
    "allocator slack": Term(memory=("allocator_slack_bytes",)),
    "saved activations": Term(memory=("saved_activations_bytes",)),
}


def without(term: Term, found: Sequence[Prediction]) -> list[Prediction]:
    """The predictions with a term removed."""
    changed = []
    for p, times in zip(found, repriced(found, term.cluster, term.recipe), strict=True):
        stages = [s.memory for s in p.candidate.stages]
        less = [sum(getattr(m, name) for name in term.memory) for m in stages]
        of = 0 if p.run.first_stage else max(range(len(stages)), key=lambda s: stages[s].total_bytes)
        full = max(m.total_bytes - less[s] for s, m in enumerate(stages))
        changed.append(
            dataclasses.replace(p, step_time_s=term.step(times), memory_bytes=_shown(stages[of]) - less[of], fullest_bytes=full)
        )
    return changed


def _shown(memory: MemoryPlan) -> float:
    return memory.total_bytes - memory.framework_context_bytes


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", help="a CSV of runs; may be given more than once")
    parser.add_argument("--limit", type=int, default=DEFAULT_ROWS, help="so many rows of each file")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    if args.limit < 1:
        print("--limit must be a positive number of rows", file=sys.stderr)
        return 2
    start = time.perf_counter()
    console = Console(stderr=args.json, width=160)
    try:
        runs, _, _ = load(args.data or sorted(DATA.glob("*.csv")), args.limit)
    except (OSError, Skip, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    with console.status("pricing"):
        found = [p for _, p in predictions(runs) if not isinstance(p, Skip)]
    figures = {name: _figures(without(term, found)) for name, term in TERMS.items()}
    _report(figures, console)
    print(json.dumps({"rows": len(found), "terms": figures, "wall_s": round(time.perf_counter() - start, 1)}))
    return 0


def _figures(found: Sequence[Prediction]) -> dict[str, float | None]:
    scored = [p for p in found if not p.run.flagged and not p.run.failed]
    times = score([p.step_time_s / p.run.step_time_s - 1 for p in scored if p.run.step_time_s])
    memories = score([p.memory_bytes / p.run.memory_bytes - 1 for p in scored if p.run.memory_bytes])
    groups = groups_of(found)
    regret: dict[str, Any] = summary(groups) if groups else {}
    return {
        "time_median_ape": times.median_ape if times else None, "time_p90_ape": times.p90_ape if times else None,
        "memory_median_ape": memories.median_ape if memories else None,
        "regret_median": regret.get("median"), "regret_mean": regret.get("mean"),
    }  # fmt: skip


def _report(figures: dict[str, dict[str, float | None]], console: Console) -> None:
    names = list(next(iter(figures.values())))
    table = Table("without", *(n.replace("_", " ") for n in names), title="change against the whole model in brackets")
    whole = figures["nothing"]
    for term, row in figures.items():
        cells = []
        for n in names:
            value, base = row[n], whole[n]
            change = f" ({100 * (value - base):+.1f})" if value is not None and base is not None and term != "nothing" else ""
            cells.append(f"{100 * value:.1f}%{change}" if value is not None else "-")
        table.add_row(term, *cells)
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
