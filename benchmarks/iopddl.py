"""How near to the best known the planner's solver comes on strangers' sharding problems, with the bound that it proves.

    python -m benchmarks iopddl --data DIR [--problem B,G] [--seconds S] [--rounds N] [--programs N] [--json]

The problems are of the contest on intra-operator parallelism of ASPLOS / EuroSys 2025 (google/iopddl): what XLA met on real models. DIR
holds its files, *.json or *.json.gz. Each is solved by autopar.planner.graphs with budgets counted in work, so that its answer does not
depend on how busy the machine is; --seconds, by default the contest's limit for a problem, is a stop before each step that might not end
in time, and what it cut off is said. best known: the least cost that is published or was proven (benchmarks/data/iopddl.csv); over it:
how much dearer ours is. gap: of ours to the bound. Every answer is checked on the file as it is: strategies, costs, memory.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.table import Table

from autopar.errors import Infeasible
from autopar.planner.graphs import Graph, Use, solve_graph
from autopar.planner.graphs.solve import PROGRAMS, ROUNDS
from autopar.planner.solver import OutOfBudget

__all__ = ["check", "main", "read"]

KNOWN = Path(__file__).parent / "data" / "iopddl.csv"
IMPOSSIBLE = 1e17  # costs from here on mean that a strategy or a pair of them is none
LIMIT_S = 180.0  # the contest's, of a problem that the table does not know


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks iopddl", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of the contest's files")
    parser.add_argument("--problem", help="comma-separated, of the files' names; default: all")
    parser.add_argument("--seconds", type=float, help="for one problem; default: the contest's limit for it")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of messages and prices")
    parser.add_argument("--programs", type=int, default=PROGRAMS, help="integer programs of neighbourhoods")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    files = {p.name.split(".")[0]: p for p in sorted(args.data.glob("*.json*"))} if args.data.is_dir() else {}
    names = [n for n in (args.problem or ",".join(files)).split(",") if n]
    unknown = [n for n in names if n not in files]
    if unknown or not names:
        print(f"--data {args.data}: there is no {', '.join(unknown) or 'problem'}; it has {', '.join(files) or 'none'}", file=sys.stderr)
        return 2
    known = {row["problem"]: row for row in csv.DictReader(KNOWN.read_text(encoding="utf-8").splitlines())}
    console = Console(stderr=args.json, width=160)
    records = []
    for name in names:
        with console.status(f"solving {name}"):
            records.append(_solved(name, files[name], known.get(name), args))
    console.print(_table(records))
    print(json.dumps({"problems": records}))
    return 0 if all(r.get("cost") is not None for r in records) else 1


def read(path: Path) -> tuple[Graph, dict[str, Any]]:
    """The problem of a file, and the file's own content. ValueError where it is no such file."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        problem = json.loads(text)["problem"]
        nodes, edges = problem["nodes"], problem["edges"]
        limit = float(problem.get("usage_limit", "inf"))
        costs = [_possible(c) for c in nodes["costs"]]
        spans = [(int(a), int(b)) for a, b in nodes["intervals"]]
        uses = [
            [Use(start=a, stop=b, bytes=numpy.array(u, dtype=float))] if a < b else []
            for (a, b), u in zip(spans, nodes["usages"], strict=True)
        ]
        between: dict[tuple[int, int], Any] = {}
        for (u, v), cost in zip(edges["nodes"], edges["costs"], strict=True):
            matrix = _possible(cost).reshape(len(costs[u]), len(costs[v]))
            pair, matrix = ((u, v), matrix) if u < v else ((v, u), matrix.T)
            between[pair] = between[pair] + matrix if pair in between else matrix
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no problem of the contest: {error!r}") from error
    times = max((b for _, b in spans), default=0)
    return Graph(costs=costs, uses=uses, edges=between, room=numpy.full(times, limit)), problem


def _possible(values: list[float]) -> Any:
    array = numpy.array(values, dtype=float)
    array[array >= IMPOSSIBLE] = numpy.inf
    return array


def check(problem: dict[str, Any], chosen: tuple[int, ...]) -> float:
    """The cost of a choice by the file alone; ValueError if it breaks a rule of the contest."""
    nodes, edges = problem["nodes"], problem["edges"]
    total = sum(cost[x] for cost, x in zip(nodes["costs"], chosen, strict=True))
    for (u, v), cost in zip(edges["nodes"], edges["costs"], strict=True):
        total += cost[chosen[u] * len(nodes["costs"][v]) + chosen[v]]
    if total >= IMPOSSIBLE:
        raise ValueError("the choice takes a strategy or a pair of them that is impossible")
    changes: dict[int, int] = {}
    for (start, stop), usage, x in zip(nodes["intervals"], nodes["usages"], chosen, strict=True):
        if start < stop:
            changes[start] = changes.get(start, 0) + usage[x]
            changes[stop] = changes.get(stop, 0) - usage[x]
    taken = 0
    for t in sorted(changes):
        taken += changes[t]
        if taken > problem.get("usage_limit", float("inf")):
            raise ValueError(f"at time {t} the choice takes {taken} of {problem['usage_limit']} bytes")
    return float(total)


def _solved(name: str, path: Path, known: dict[str, str] | None, args: argparse.Namespace) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    limit_s = args.seconds or (float(known["seconds"]) if known else LIMIT_S)
    graph, problem = read(path)
    record: dict[str, Any] = {"problem": name, "nodes": len(graph.costs), "edges": len(graph.edges), "limit_s": limit_s}
    record["best_known"] = float(known["best_known"]) if known else None
    try:
        found = solve_graph(
            graph, rounds=args.rounds, programs=args.programs, stop=lambda ahead_s: time.perf_counter() - start + ahead_s > limit_s
        )
    except (Infeasible, OutOfBudget) as error:
        return {**record, "cost": None, "error": str(error), "seconds": round(time.perf_counter() - start, 1)}
    cost = check(problem, found.chosen)
    if abs(cost - found.cost) > 1e-6 * abs(cost):
        raise ValueError(f"{name}: the solver says {found.cost}, the file {cost}")
    return {
        **record, "cost": cost, "over_best": cost / record["best_known"] - 1 if known else None, "bound": found.bound, "gap": found.gap,
        "left_nodes": found.nodes, "left_strategies": found.strategies, "rounds": found.rounds, "programs": found.programs,
        "stopped": found.stopped, "seconds": round(time.perf_counter() - start, 1), "cpu_s": round(time.process_time() - cpu, 1),
    }  # fmt: skip


def _table(records: list[dict[str, Any]]) -> Table:
    table = Table("problem", "nodes", "left", "best known", "ours", "over it", "bound", "gap", "rounds", "programs", "seconds", "of")
    for r in records:
        best = f"{r['best_known']:,.0f}" if r["best_known"] else "-"
        if r["cost"] is None:
            table.add_row(r["problem"], f"{r['nodes']:,}", "", best, r["error"], "", "", "", "", "", f"{r['seconds']:.0f}", "")
            continue
        over = f"{100 * r['over_best']:+.2f}%" if r["over_best"] is not None else "-"
        table.add_row(
            r["problem"], f"{r['nodes']:,}", f"{r['left_nodes']:,}", best, f"{r['cost']:,.0f}", over, f"{r['bound']:,.0f}",
            f"{100 * r['gap']:.2f}%", str(r["rounds"]), str(r["programs"]), f"{r['seconds']:.0f}{' (cut off)' if r['stopped'] else ''}",
            f"{r['limit_s']:.0f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
