"""Fits the constants of one link to measured collectives: prints them beside those of the catalogue, writes nothing.

    python -m benchmarks fit_links LINK [--data FILE.csv ...] [--start LINK] [--keep CONSTANT ...] [--json]

The rows are those that benchmarks.collectives can predict and that use the link: on one node for a link inside nodes, over
several for one between them. Rows whose source flags them as doubtful are used only where there are no others, rows in which
the tool's own copies take over a fifth of the time never. The search is that of `cost_models.fit`; a constant that the rows say
nothing about keeps its value.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.collectives import DEFAULT, Row, read
from cost_models import UnknownHardware, load_cluster
from cost_models.cluster import Link, load_link
from cost_models.fit import LINK_CONSTANTS, CollectiveTime, fit_link, link_loss

COPIES_SHARE = 0.2


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


def timed(row: Row) -> CollectiveTime:
    return CollectiveTime(
        kind=row.kind, nbytes=row.nbytes, ranks=row.ranks, nodes=row.nodes, measured_s=row.measured_s, copies_s=row.copies_s
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit_links", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("link", help="a link of the catalogue")
    parser.add_argument("--data", type=Path, action="append", help="a CSV file; may be repeated; default: the tables in benchmarks/data")
    parser.add_argument("--start", help="another link, from whose latencies and fractions the search begins")
    parser.add_argument("--keep", action="append", default=[], choices=LINK_CONSTANTS, help="a constant that stays; may be repeated")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    options = parser.parse_args(argv)
    fitted = [name for name in LINK_CONSTANTS if name not in options.keep]
    try:
        before = load_link(options.link)
        start = dataclasses.replace(before, **{name: getattr(load_link(options.start or before.name), name) for name in fitted})
        rows = on_link(read(options.data or DEFAULT)[0], before)
    except (OSError, UnknownHardware, ValueError) as error:
        print(f"benchmarks fit_links: {error}", file=sys.stderr)
        return 2
    if not rows:
        print(f"benchmarks fit_links: no row of the data uses {before.name}", file=sys.stderr)
        return 1
    loss = link_loss([(load_cluster(name), [timed(row) for row in of_cluster]) for name, of_cluster in rows.items()], before.name)
    after, fitted_loss = fit_link(start, loss, fitted)
    if not options.json:
        print(f"{before.name}: {sum(map(len, rows.values()))} rows of {', '.join(rows)}")
        for name in LINK_CONSTANTS:
            print(f"  {name:<22} {getattr(before, name):>10.3g} in the catalogue {getattr(after, name):>10.3g} fitted")
        print(f"  mean |log error|       {loss(before):>10.4f}                  {fitted_loss:>10.4f}")
    result = {"link": before.name, "rows": sum(map(len, rows.values())), "loss_before": loss(before), "loss": fitted_loss}
    print(json.dumps(result | {name: getattr(after, name) for name in LINK_CONSTANTS}))
    return 0
