"""Operators of models as a GPU runs them, forward and backward, beside what its constants price them at.

    python -m benchmarks kernels [--gpu NAME|FILE.toml] [--data FILE.csv] [--measure FILE.csv] [--json]

Without a GPU: prices what was measured (benchmarks/data/kernels_h100.csv) at the constants of a GPU of the catalogue; or of a file of
`autopar profile`. --measure FILE: on a machine with a GPU, times its kernels first and writes them. Each operator is run on as many sets
of operands as no cache holds (eight at most), all of which are issued while the GPU is still busy, so that no time of the host is in
it; backward is all its gradients.

An error is the predicted time of a kernel over the measured one, less 1, without the floor of launches. What has no kernel in backward
(the gradient of a sum is passed on as it is) is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from autopar.capture.interpret import run_op
from autopar.files import write_file
from autopar.ir import TensorType
from autopar.measure.costs import Pricer
from autopar.measure.count import Counts, count
from autopar.measure.live import REFUSALS, device_name
from benchmarks._kernels import OPERATORS, Kernel, kernels
from cost_models import UnknownHardware, load_cluster
from cost_models.cluster import Cluster

DATA = Path(__file__).parent / "data" / "kernels_h100.csv"
FIELDS = ("source", "gpu", "dtype", "op", "shape", "pass", "flops", "bytes", "time_s")
COPIES, COPIED_BYTES = 8, 2**28  # of operands: more than caches hold
SAMPLES = 5
LEAST_S = 2e-6  # what takes less has no kernel: gradients that pass as they are
BUSY, MOST_BUSY = 8192, 64  # a product of square matrices of so many rows keeps a GPU busy for a millisecond or more; so many at most
PASSES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A pass of a kernel, and the seconds of the device that it took."""

    kernel: Kernel
    of: str
    seconds: float
    gpu: str = ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="dgx-h100", help="a cluster of the catalogue or a file, whose GPU is meant")
    parser.add_argument("--data", type=Path, default=DATA, help="what was measured")
    parser.add_argument("--measure", type=Path, help="time the kernels of this machine's GPU, and write them to this file")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    console = Console(stderr=args.json, width=150)
    try:
        cluster = load_cluster(args.gpu)
        if args.measure is not None:
            if not torch.cuda.is_available():
                print("there is no GPU on this machine: nothing was measured", file=sys.stderr)
                return 3
            found = list(measured(kernels(), torch.device("cuda", torch.cuda.current_device())))
            write(args.measure, found)
        else:
            found = read(args.data)
    except (OSError, UnknownHardware, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = [(t, predicted_s(t, cluster)) for t in found]
    console.print(_each(rows, cluster))
    errors = _errors(rows)
    console.print(_table(errors, cluster.gpu.name))
    print(json.dumps({"gpu": cluster.gpu.name, "kernels": len(rows), "by_class": errors}))
    return 0


# ----------------------------------------------------------------------------------------------------------------- the file
def write(path: Path, found: Iterable[Timed]) -> None:
    lines = [",".join(FIELDS)]
    for t in found:
        flops, moved = work_of(t)
        lines.append(f"autopar,{t.gpu},{t.kernel.dtype},{t.kernel.op},{t.kernel.shape},{t.of},{flops:.0f},{moved:.0f},{t.seconds:.4e}")
    write_file(path, ("\n".join(lines) + "\n").encode())


def read(path: Path) -> list[Timed]:
    """ValueError for a file that `write` does not write."""
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                kernel = Kernel(op=row["op"], sizes=tuple(map(int, row["shape"].split("x"))), dtype=row["dtype"])
                seconds, of = float(row["time_s"]), row["pass"]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: no row of timed kernels: {row}") from error
            if kernel.op not in OPERATORS or of not in PASSES or not 0 < seconds < math.inf:
                raise ValueError(f"{path}: no row of timed kernels: {row}")
            found.append(Timed(kernel=kernel, of=of, seconds=seconds, gpu=row["gpu"]))
    return found


# ------------------------------------------------------------------------------------------------------------------ prices
def counts_of(kernel: Kernel) -> Counts:
    op, ins, outs = kernel.call()
    return count(op, ins, outs, True)


def work_of(t: Timed) -> tuple[float, int]:
    """FLOPs, and the bytes of the operands and the result, in backward twice."""
    c, back = counts_of(t.kernel), t.of == "backward"
    return c.backward_flops if back else c.flops, (1 + back) * (c.bytes_read + c.bytes_written)


def predicted_s(t: Timed, cluster: Cluster) -> float:
    """Seconds that the device is busy."""
    return Pricer(cluster, {"tp": 1}).counted_s(counts_of(t.kernel), t.kernel.dtype)[PASSES.index(t.of)]


def _errors(rows: Sequence[tuple[Timed, float]]) -> dict[str, dict[str, float]]:
    groups = defaultdict(list)
    for t, seconds in rows:
        groups[f"{counts_of(t.kernel).op_class} {t.kernel.dtype} {t.of}"].append(seconds / t.seconds - 1)
    return {
        name: {"n": len(errors), "median": statistics.median(errors), "median_abs": statistics.median(map(abs, errors))}
        for name, errors in sorted(groups.items())
    }


def _each(rows: Sequence[tuple[Timed, float]], cluster: Cluster) -> Table:
    columns = ("kernel", "pass", "predicted us", "measured us", "error", "TFLOP/s", "GB/s")
    table = Table(*columns, title=f"kernels, priced at {cluster.gpu.name}")
    for t, seconds in rows:
        flops, moved = work_of(t)
        rates = f"{flops / t.seconds / 1e12:.0f}", f"{moved / t.seconds / 1e9:.0f}"
        table.add_row(str(t.kernel), t.of, f"{1e6 * seconds:.1f}", f"{1e6 * t.seconds:.1f}", f"{seconds / t.seconds - 1:+.0%}", *rates)
    return table


def _table(errors: Mapping[str, Mapping[str, float]], gpu: str) -> Table:
    table = Table("class, dtype, pass", "kernels", "median error", "median of |error|", title=f"by class, priced at {gpu}")
    for name, e in errors.items():
        table.add_row(name, str(e["n"]), f"{e['median']:+.0%}", f"{e['median_abs']:.0%}")
    return table


# --------------------------------------------------------------------------------------------------------------- measuring
def measured(wanted: Iterable[Kernel], device: torch.device) -> Iterable[Timed]:
    """Each kernel's passes; what does not run on the device is said on standard error and left out."""
    gpu = device_name(device)
    for kernel in wanted:
        try:
            for of, seconds in zip(PASSES, seconds_of(kernel, device), strict=True):
                if seconds >= LEAST_S:
                    yield Timed(kernel=kernel, of=of, seconds=seconds, gpu=gpu)
        except REFUSALS as error:
            print(f"not measured: {kernel}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)


def seconds_of(kernel: Kernel, device: torch.device) -> tuple[float, float]:
    """Of one call forward, and of one backward, which is nothing where gradients pass as they are."""
    op, ins, outs = kernel.call()
    nbytes = sum(t.nbytes for t in (*ins, *outs))
    sets = [_operands(ins, device) for _ in range(max(1, min(COPIES, math.ceil(COPIED_BYTES / nbytes))))]
    results = [y for env in sets if (y := run_op(op, env)[0]) is not None]
    leaves = [[x for x in env.values() if x.requires_grad] for env in sets]
    arriving = [torch.randn_like(y) for y in results]

    def forward(k: int) -> object:
        return run_op(op, sets[k])

    def backward(k: int) -> object:
        return torch.autograd.grad([results[k]], leaves[k], [arriving[k]], retain_graph=True)

    with torch.no_grad():
        ahead = _seconds(forward, len(sets), device)
    return ahead, _seconds(backward, len(sets), device)


def _operands(ins: Sequence[TensorType], device: torch.device) -> dict[str, torch.Tensor]:
    """Integers are numbers of rows, or, beside an operand that has a row for each of them, of channels."""
    made = {}
    for k, t in enumerate(ins):
        if t.dtype.is_floating_point:
            made[f"x{k}"] = torch.randn(t.shape, device=device).to(t.dtype).requires_grad_(t.grad)
        else:
            below = 2 if t.dtype == torch.bool else ins[0].shape[-1] if t.shape == ins[0].shape[:1] else ins[0].shape[0]
            made[f"x{k}"] = torch.randint(below, t.shape, device=device).to(t.dtype)
    return made


def _seconds(run: Callable[[int], object], sets: int, device: torch.device) -> float:
    """Seconds of one run, the median of a few samples. On a GPU all runs of a sample are issued while it is busy with something else."""
    if device.type != "cuda":
        run(0)
        start = time.perf_counter()
        for k in range(sets):
            run(k)
        return (time.perf_counter() - start) / sets
    for k in range(sets):
        run(k)
    side = torch.randn(BUSY, BUSY, device=device, dtype=torch.bfloat16)
    samples: list[float] = []
    products = 1
    while len(samples) < SAMPLES and products <= MOST_BUSY:
        torch.cuda.synchronize(device)
        first, begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        first.record()
        for _ in range(products):
            torch.mm(side, side)
        begun.record()
        for k in range(sets):
            run(k)
        ended.record()
        ahead = not begun.query()  # the device was still busy with the products
        torch.cuda.synchronize(device)
        if ahead:
            samples.append(begun.elapsed_time(ended) / 1e3 / sets)
        else:
            products *= 2
    return statistics.median(samples) if samples else 0.0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
