"""Fits the constants of one link to measured collectives: prints them beside those of the catalogue, writes nothing.

    python -m benchmarks fit_links LINK [--data FILE.csv ...] [--json]

The rows are those that benchmarks.collectives can predict and that use the link: on one node for a link inside nodes, over
several for one between them. Rows whose source flags them as doubtful are used only where there are no others, rows in which
the tool's own copies take over a fifth of the time never. A constant that the rows say nothing about keeps its value: the search
moves one constant at a time and keeps what lowers the mean absolute logarithm of predicted over measured time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.collectives import DEFAULT, Row, read
from cost_models import Cluster, UnknownHardware, collective_time_s, load_cluster
from cost_models.cluster import Link, load_link

FITTED = (
    "achievable_fraction",
    "low_latency_fraction",
    "start_simple_s",
    "start_low_latency_s",
    "hop_simple_s",
    "hop_low_latency_s",
    "in_switch_fraction",
)
FRACTION_BOUNDS = (0.02, 0.95)
COPIES_SHARE = 0.2
STEPS = (1.6, 1.25, 1.1, 1.04, 1.015)  # factors by which a constant is moved, coarse to fine


def on_link(rows: Sequence[Row], link: Link) -> dict[str, list[Row]]:
    """The rows that speak about a link, by cluster."""
    chosen: dict[str, list[Row]] = {}
    for row in rows:
        cluster = load_cluster(row.hardware)
        used = cluster.inter if row.nodes > 1 else cluster.intra
        if used.name == link.name and row.copies_s < COPIES_SHARE * row.measured_s:
            chosen.setdefault(row.hardware, []).append(row)
    if any(not row.flags for of_cluster in chosen.values() for row in of_cluster):
        chosen = {name: [row for row in of_cluster if not row.flags] for name, of_cluster in chosen.items()}
    return chosen


def loss_of(rows: dict[str, list[Row]]) -> Callable[[Link], float]:
    """Link -> mean |log(predicted / measured)| over the rows with that link in place of its namesake."""
    clusters = {name: load_cluster(name) for name in rows}

    def replaced(cluster: Cluster, link: Link) -> Cluster:
        return dataclasses.replace(
            cluster,
            intra=link if cluster.intra.name == link.name else cluster.intra,
            inter=link if cluster.inter.name == link.name else cluster.inter,
        )

    def loss(link: Link) -> float:
        logs = []
        for name, of_cluster in rows.items():
            cluster = replaced(clusters[name], link)
            for row in of_cluster:
                time_s = collective_time_s(row.kind, row.nbytes, row.ranks, cluster, ranks_per_node=-(-row.ranks // row.nodes))
                logs.append(abs(math.log((time_s + row.copies_s) / row.measured_s)))
        return statistics.fmean(logs)

    return loss


def moved(link: Link, name: str, factor: float) -> Link | None:
    """The link with one constant multiplied; None where that leaves its bounds or inverts the protocols."""
    value = getattr(link, name) * factor
    if not value or (name.endswith("_fraction") and not FRACTION_BOUNDS[0] <= value <= FRACTION_BOUNDS[1]):
        return None
    other = dataclasses.replace(link, **{name: value})
    ordered = other.start_low_latency_s <= other.start_simple_s and other.hop_low_latency_s <= other.hop_simple_s
    return other if ordered else None


def fit(link: Link, loss: Callable[[Link], float]) -> tuple[Link, float]:
    """Pattern search from the given constants, one at a time, coarse to fine. Returns the link and its loss."""
    best = loss(link)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for factor in (step, 1 / step):
                    other = moved(link, name, factor)
                    if other is not None and (value := loss(other)) < best - 1e-5:
                        link, best, improved = other, value, True
    return link, best


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit_links", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("link", help="a link of the catalogue")
    parser.add_argument("--data", type=Path, action="append", help="a CSV file; may be repeated; default: the tables in benchmarks/data")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    options = parser.parse_args(argv)
    try:
        before = load_link(options.link)
        rows = on_link(read(options.data or DEFAULT)[0], before)
    except (OSError, UnknownHardware, ValueError) as error:
        print(f"benchmarks fit_links: {error}", file=sys.stderr)
        return 2
    if not rows:
        print(f"benchmarks fit_links: no row of the data uses {before.name}", file=sys.stderr)
        return 1
    loss = loss_of(rows)
    after, fitted_loss = fit(before, loss)
    if not options.json:
        print(f"{before.name}: {sum(map(len, rows.values()))} rows of {', '.join(rows)}")
        for name in FITTED:
            print(f"  {name:<22} {getattr(before, name):>10.3g} in the catalogue {getattr(after, name):>10.3g} fitted")
        print(f"  mean |log error|       {loss(before):>10.4f}                  {fitted_loss:>10.4f}")
    result = {"link": before.name, "rows": sum(map(len, rows.values())), "loss_before": loss(before), "loss": fitted_loss}
    print(json.dumps(result | {name: getattr(after, name) for name in FITTED}))
    return 0
