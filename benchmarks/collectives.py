"""How far predicted times of collectives are from published measurements: error by message size, table, hardware.

    python -m benchmarks collectives [--data FILE.csv ...] [--json] [--worst N]

Two kinds of tables are read. nccl-tests style: columns collective, gpu, n_gpus, n_nodes, intra_link, inter_link, size_bytes, and
one of time_us, algbw_GBps, busbw_GBps, with `flags` saying why a row is doubtful. All-reduce tables of one node: columns gpu,
group, MB, ms. Rows that do not say what hardware, or what size, cannot be predicted: they are counted with the reason. Flagged
rows that can be predicted are listed and summed up apart and do not count in the totals.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cost_models import Cluster, UnknownHardware, load_cluster, price_collective
from cost_models.collectives import Kind
from cost_models.compute import kernel_time_s

DATA = Path(__file__).parent / "data"
DEFAULT = (DATA / "collectives.csv", DATA / "nccl_allreduce_a100_v100.csv")
MIB = 2**20

KINDS: dict[str, Kind] = {  # letters of the printed name, up to a bracket, without nccl-tests' "perf"
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "p2p",
    "p2p": "p2p",
}
BUS_FACTOR: dict[Kind, Callable[[int], float]] = {  # bus bandwidth over algorithm bandwidth, nccl-tests doc/PERFORMANCE.md
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "p2p": lambda n: 1.0,
}
# (words that the row's hardware columns contain, cluster), the first match counts; a row names GPUs and links, seldom a machine
MACHINES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("p4de",), "p4de"),
    (("p4d",), "p4d"),
    (("p5en",), "p5en"),
    (("p5",), "p5"),
    (("p3dn",), "p3dn.24xlarge"),
    (("p3.24xlarge",), "p3dn.24xlarge"),
    (("p3.",), "p3.16xlarge"),
    (("h200", "efa"), "p5en"),
    (("h200",), "dgx-h200"),
    (("b200",), "dgx-b200"),
    (("h100", "efa"), "p5"),
    (("h100", "pcie"), ""),
    (("h100",), "dgx-h100"),
    (("a100", "pcie"), "pcie-box"),
    (("a100", "efa", "40"), "p4d"),
    (("a100", "efa"), "p4de"),
    (("a100",), "dgx-a100"),
    (("v100", "nvswitch"), "dgx-2"),
    (("v100", "efa"), "p3dn.24xlarge"),
    (("v100",), "dgx-1v"),
    (("mi300",), "mi300x-8x"),
    (("mi250",), "mi250x-8x"),
    (("mi200",), "mi250x-8x"),
    (("4090",), "rtx4090-8x"),
    (("l40s",), "l40s-8x"),
)

# What a tool times besides the collective, when it does: whole buffers copied (clone: contiguous; strided: chunk, concat) and calls
# issued for each rank. nnscaler benchmark_comm: nnscaler/runtime/adapter/collectives.py clones before an all-reduce, and gathers
# and scatters lists that torch flattens and that are cut or joined along the last dim. Its sizes are those of the full tensor
# for all four collectives (nnscaler/profiler/benchmark_comm.py, profile_primitive).
COPY_LAUNCH_S = 6e-6  # assumed: a copy that the host launches by itself, without autograd: 5-7 us
TIMED_COPIES: dict[str, dict[Kind, tuple[str, float, int]]] = {
    "nnscaler benchmark_comm": {
        "all_reduce": ("pointwise", 1, 0),
        "all_gather": ("gather", 2, 2),
        "reduce_scatter": ("gather", 2, 3),
        "all_to_all": ("gather", 2, 4),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement and its prediction. size_bytes: as printed; nbytes: the full buffer.

    copies_s: the part of the prediction for what the tool times besides the collective.
    """

    table: str
    hardware: str
    kind: Kind
    ranks: int
    nodes: int
    size_bytes: float
    nbytes: float
    measured_s: float
    predicted_s: float
    copies_s: float
    algorithm: str
    flags: str

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


class Skip(Exception):
    """A row that cannot be predicted; the message is the reason it is counted under."""


@cache
def machine(*words: str) -> Cluster:
    """The cluster that a row's hardware columns describe. Raises Skip."""
    text = " ".join(words).lower()
    for needles, name in MACHINES:
        if all(needle in text for needle in needles):
            if not name:
                break
            try:
                return load_cluster(name)
            except UnknownHardware as error:
                raise Skip(str(error)) from error
    raise Skip("hardware not stated" if "not stated" in text or not text.strip() else f"no cluster described for {text.strip()}")


def _number(row: dict[str, str], key: str) -> float | None:
    """A column's number, None where it is empty. Raises Skip on what is neither."""
    text = (row.get(key) or "").strip()
    try:
        return float(text) if text else None
    except ValueError as error:
        raise Skip(f"{key} is not a number") from error


def nccl_row(row: dict[str, str]) -> Row:
    """A row of nccl-tests style. Raises Skip."""
    name = row["collective"].partition("(")[0].strip()
    kind = KINDS.get(re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("perf"))
    if kind is None:
        raise Skip(f"not a collective: {name}")
    size_bytes, ranks, nodes = (_number(row, key) for key in ("size_bytes", "n_gpus", "n_nodes"))
    if not size_bytes:
        raise Skip("message size not stated")
    if not ranks or ranks < 2:
        raise Skip("fewer than two ranks")
    time_us, algbw, busbw = (_number(row, key) for key in ("time_us", "algbw_GBps", "busbw_GBps"))
    if not time_us:
        algbw = algbw or (busbw / BUS_FACTOR[kind](int(ranks)) if busbw else None)
        if not algbw:
            raise Skip("neither time nor bandwidth")
        time_us = size_bytes / (algbw * 1e3)
    cluster = machine(row["gpu"], row.get("intra_link") or "", row.get("inter_link") or "")
    return predict(
        cluster,
        kind,
        ranks=int(ranks),
        nodes=int(nodes or 1),
        size_bytes=size_bytes,
        measured_s=time_us * 1e-6,
        table=row.get("source") or "",
        tool=row.get("tool") or "",
        flags=row.get("flags") or "",
    )


def all_reduce_row(row: dict[str, str]) -> Row:
    """A row of a one-node all-reduce table (MB of 2**20 bytes, as nccl-tests counts them). Raises Skip."""
    megabytes, ranks, ms = (_number(row, key) for key in ("MB", "group", "ms"))
    if not megabytes or not ranks or not ms or ranks < 2:
        raise Skip("size, ranks or time not stated")
    return predict(
        machine(row["gpu"]),
        "all_reduce",
        ranks=int(ranks),
        nodes=1,
        size_bytes=megabytes * MIB,
        measured_s=ms * 1e-3,
        table="vtrain",
    )


def predict(
    cluster: Cluster,
    kind: Kind,
    *,
    ranks: int,
    nodes: int,
    size_bytes: float,
    measured_s: float,
    table: str,
    tool: str = "nccl-tests",
    flags: str = "",
) -> Row:
    """Price one measurement. nccl-tests prints the buffer of one rank for all-to-all, the full one otherwise. Raises Skip."""
    per_node = -(-ranks // nodes)
    if per_node > cluster.gpus_per_node:
        raise Skip(f"{per_node} ranks on a node of {cluster.name}, which has {cluster.gpus_per_node}")
    copied = TIMED_COPIES.get(tool, {}).get(kind)
    nbytes = size_bytes * ranks if kind == "all_to_all" and tool not in TIMED_COPIES else size_bytes
    priced = price_collective(kind, nbytes, ranks, cluster, ranks_per_node=per_node)
    copies_s = 0.0
    if copied:
        op_class, copies, calls = copied
        local_bytes = nbytes / ranks if kind == "all_to_all" else nbytes
        copies_s = kernel_time_s(op_class, 0.0, 2 * copies * local_bytes, "float32", cluster.gpu) + (1 + calls * ranks) * COPY_LAUNCH_S
    return Row(
        table=table,
        hardware=cluster.name,
        kind=kind,
        ranks=ranks,
        nodes=nodes,
        size_bytes=size_bytes,
        nbytes=nbytes,
        measured_s=measured_s,
        predicted_s=priced.time_s + copies_s,
        copies_s=copies_s,
        algorithm=f"{priced.algorithm}/{priced.protocol}",
        flags=flags,
    )


def read(paths: Iterable[Path]) -> tuple[list[Row], Counter[str]]:
    """All rows that can be predicted, and how many could not be, by reason. Raises ValueError on an unknown table."""
    rows, skipped = list[Row](), Counter[str]()
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            columns = set(reader.fieldnames or ())
            if {"collective", "gpu", "n_gpus", "size_bytes"} <= columns:
                parse = nccl_row
            elif {"gpu", "group", "MB", "ms"} <= columns:
                parse = all_reduce_row
            else:
                raise ValueError(f"{path} has neither nccl-tests columns (collective, gpu, ...) nor gpu, group, MB, ms: {sorted(columns)}")
            for row in reader:
                try:
                    rows.append(parse(row))
                except Skip as reason:
                    skipped[str(reason)] += 1
    return rows, skipped


def decade(size_bytes: float) -> str:
    """The power of ten below a size: '1e6 B' holds 1,000,000 to 9,999,999 bytes."""
    return f"1e{len(str(int(size_bytes))) - 1} B"


def summary(rows: Sequence[Row]) -> dict[str, float | int]:
    """Rows, median and 90th percentile of the absolute relative error of time, and the median signed error."""
    if not rows:
        return {"rows": 0}
    errors = sorted(abs(row.error) for row in rows)
    p90 = errors[min(len(errors) - 1, -(-9 * len(errors) // 10) - 1)]
    bias = statistics.median(row.error for row in rows)
    return {"rows": len(rows), "median_ape": round(statistics.median(errors), 4), "p90_ape": round(p90, 4), "bias": round(bias, 4)}


def grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, dict[str, float | int]]:
    return {name: summary([row for row in rows if key(row) == name]) for name in dict.fromkeys(map(key, rows))}


def report(rows: Sequence[Row], skipped: Counter[str]) -> dict[str, Any]:
    """What the last line prints: totals over unflagged rows, and the same for flagged ones apart."""
    sized = sorted(rows, key=lambda row: row.size_bytes)
    scored, flagged = [row for row in sized if not row.flags], [row for row in sized if row.flags]
    return {
        "rows": len(rows) + skipped.total(),
        "scored": len(scored),
        "flagged": len(flagged),
        "skipped": dict(skipped),
        "time": summary(scored),
        "from_1_mib": summary([row for row in scored if row.size_bytes >= MIB]),
        "below_1_mib": summary([row for row in scored if row.size_bytes < MIB]),
        "by_decade": grouped(scored, lambda row: decade(row.size_bytes)),
        "by_hardware": grouped(scored, lambda row: row.hardware),
        "by_collective": grouped(scored, lambda row: row.kind),
        "flagged_time": summary(flagged),
        "flagged_from_1_mib": summary([row for row in flagged if row.size_bytes >= MIB]),
        "flagged_by_table": grouped(flagged, lambda row: f"{row.table} {row.hardware} {row.kind}"),
    }


def show(result: dict[str, Any], rows: Sequence[Row], worst: int) -> None:
    line = "{:<44} {:>6} {:>9} {:>9} {:>9}"
    print(line.format("absolute relative error of time", "rows", "median", "p90", "bias"))

    def put(name: str, part: dict[str, float]) -> None:
        if part["rows"]:
            print(line.format(name, part["rows"], f"{part['median_ape']:.1%}", f"{part['p90_ape']:.1%}", f"{part['bias']:+.1%}"))

    for name, part in (("all scored rows", "time"), ("  from 1 MiB up", "from_1_mib"), ("  below 1 MiB", "below_1_mib")):
        put(name, result[part])
    for title, part in (("by size", "by_decade"), ("by hardware", "by_hardware"), ("by collective", "by_collective")):
        print(title)
        for name, values in result[part].items():
            put(f"  {name}", values)
    print("flagged as doubtful by their source, not scored")
    put("  all", result["flagged_time"])
    put("  from 1 MiB up", result["flagged_from_1_mib"])
    for name, values in result["flagged_by_table"].items():
        put(f"  {name}", values)
    for reason, count in result["skipped"].items():
        print(f"not predicted: {count} rows: {reason}")
    print(f"worst {worst} scored rows")
    for row in sorted((row for row in rows if not row.flags), key=lambda row: -abs(row.error))[:worst]:
        what = f"{row.kind} {row.ranks} ranks {row.nodes} nodes {row.size_bytes:.0f} B"
        print(f"  {row.hardware:<12} {what:<46} {row.measured_s:.3e} s measured, {row.predicted_s:.3e} s {row.algorithm} {row.error:+.0%}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks collectives", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", help="a CSV file; may be repeated; default: the tables in benchmarks/data")
    parser.add_argument("--worst", type=int, default=8, help="how many of the worst rows to list")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    options = parser.parse_args(argv)
    try:
        rows, skipped = read(options.data or DEFAULT)
    except (OSError, ValueError) as error:
        print(f"benchmarks collectives: {error}", file=sys.stderr)
        return 2
    result = report(rows, skipped)
    if not options.json:
        show(result, rows, options.worst)
    print(json.dumps(result))
    return 0
