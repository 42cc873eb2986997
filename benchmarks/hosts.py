"""What the host of a GPU takes to issue operators, forward and backward, beside the launches that they are priced as.

    python -m benchmarks hosts [--data FILE.csv] [--measure FILE.csv] [--json]

Without a GPU: compares what was measured (benchmarks/data/hosts_h100.csv). --measure FILE: on a machine with a GPU, times its host first
and writes it. Each operator is one of a chain of 40 on operands too small to keep the device busy; the seconds are those until all of them
are issued, over 40, the median of several. Backward adds the gradients of the parameters up, since every link of the chain has the same.

A launch is what a product takes in forward (`autopar.measure.launches`).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.files import write_file
from autopar.ir import refs
from autopar.measure import Pricer
from autopar.measure.launches import ADDED
from autopar.measure.live import device_name
from autopar.measure.timings import wait
from autopar.planner.price import Ledger
from cost_models import load_cluster
from cost_models.recipe import Recipe

__all__ = ["LINKS", "Timed", "counted", "main", "measured", "read"]

DATA = Path(__file__).parent / "data" / "hosts_h100.csv"
FIELDS = ("gpu", "torch", "op", "pass", "time_s")
PASSES = ("forward", "backward")
CHAIN, WARM, SAMPLES = 40, 3, 9
UNIT = "linear"
ROWS, HEADS, IMAGE = (8, 16, 32), (2, 4, 16, 32), (2, 8, 8, 8)


class Operands(nn.Module):
    """What operators of the chain read beside what comes before."""

    rows: Tensor
    heads: Tensor
    matrix: Tensor
    row: Tensor
    scale: Tensor
    kernel: Tensor
    still: Tensor
    mask: Tensor
    numbers: Tensor

    def __init__(self) -> None:
        super().__init__()
        half = torch.bfloat16
        shapes = {"rows": ROWS, "heads": HEADS, "matrix": (32, 32), "row": (32,), "scale": (32,), "kernel": (8, 8, 3, 3)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=half)))
        self.gain, self.bias = (nn.Parameter(torch.randn(8)) for _ in range(2))
        self.register_buffer("still", torch.randn(32, dtype=half))
        self.register_buffer("mask", torch.ones(ROWS, dtype=torch.bool))
        self.register_buffer("numbers", torch.arange(16))


Operator = Callable[[Tensor, Operands], Tensor]
LINKS: dict[str, tuple[tuple[int, ...], Operator]] = {
    "linear": (ROWS, lambda y, o: F.linear(y, o.matrix)),
    "linear with bias": (ROWS, lambda y, o: F.linear(y, o.matrix, o.row)),
    "add": (ROWS, lambda y, o: y + o.rows),
    "add what is still": (ROWS, lambda y, o: y + o.still),
    "mul": (ROWS, lambda y, o: y * o.rows),
    "mul by what is still": (ROWS, lambda y, o: y * o.still),
    "gelu": (ROWS, lambda y, o: F.gelu(y)),
    "silu": (ROWS, lambda y, o: F.silu(y)),
    "relu": (IMAGE, lambda y, o: F.relu(y)),
    "cos": (ROWS, lambda y, o: y.cos()),
    "layer norm": (ROWS, lambda y, o: F.layer_norm(y, (32,), o.scale, o.row)),
    "rms norm": (ROWS, lambda y, o: F.rms_norm(y, (32,), o.scale, 1e-5)),
    "softmax": (ROWS, lambda y, o: F.softmax(y, -1)),
    "dropout": (ROWS, lambda y, o: F.dropout(y, 0.1, True)),
    "two casts": (ROWS, lambda y, o: y.to(torch.float32).to(torch.bfloat16)),
    "two reshapes": (ROWS, lambda y, o: y.reshape(8, 16, 4, 8).reshape(ROWS)),
    "two transpositions": (ROWS, lambda y, o: y.transpose(0, 1).transpose(0, 1)),
    "halves put together": (ROWS, lambda y, o: torch.cat((y[..., :16], y[..., 16:]), -1)),
    "masked fill": (ROWS, lambda y, o: y.masked_fill(o.mask, 0.0)),
    "where": (ROWS, lambda y, o: torch.where(o.mask, y, o.rows)),
    "index select": (ROWS, lambda y, o: y.index_select(1, o.numbers)),
    "attention": (HEADS, lambda y, o: F.scaled_dot_product_attention(y, o.heads, o.heads, is_causal=True)),
    "convolution": (IMAGE, lambda y, o: F.conv2d(y, o.kernel, padding=1)),
    "batch norm": (IMAGE, lambda y, o: F.batch_norm(y, None, None, o.gain, o.bias, True)),
    "max pool": (IMAGE, lambda y, o: F.max_pool2d(y, 3, 1, 1)),
}
"""Name -> the shape of what goes through the chain, and one of its links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Seconds of the host for one link, forward and backward."""

    op: str
    seconds: tuple[float, float]
    gpu: str
    torch: str


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hosts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="what was measured")
    parser.add_argument("--measure", type=Path, help="time the host of this machine's GPU, and write it to this file")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    console = Console(stderr=args.json, width=120)
    try:
        if args.measure is not None:
            if not torch.cuda.is_available():
                print("there is no GPU on this machine: nothing was measured", file=sys.stderr)
                return 3
            write(args.measure, list(measured(torch.device("cuda", torch.cuda.current_device()))))
        found = read(args.measure or args.data)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    unit_s = next(t.seconds[0] for t in found if t.op == UNIT)
    rows = [(t, counted(t.op), (t.seconds[0] / unit_s, t.seconds[1] / unit_s)) for t in found]
    columns = ("operator", "forward us", "launches", "priced", "backward us", "launches", "priced")
    table = Table(*columns, title=f"{found[0].gpu}, torch {found[0].torch}")
    for t, priced, own in rows:
        cells = [[f"{1e6 * s:.1f}", f"{a:.2f}", f"{b:.2f}"] for s, a, b in zip(t.seconds, own, priced, strict=True)]
        table.add_row(t.op, *cells[0], *cells[1])
    console.print(table)
    errors = [abs(b / a - 1) for _, priced, own in rows for a, b in zip(own, priced, strict=True)]
    print(json.dumps({"gpu": found[0].gpu, "operators": len(rows), "unit_s": unit_s, "error": statistics.median(errors)}))
    return 0


def write(path: Path, found: list[Timed]) -> None:
    lines = [f"{t.gpu},{t.torch},{t.op},{of},{s:.4e}" for t in found for of, s in zip(PASSES, t.seconds, strict=True)]
    write_file(path, "\n".join((",".join(FIELDS), *lines, "")).encode())


def read(path: Path) -> list[Timed]:
    """ValueError for a file that `write` does not write."""
    found: dict[str, dict[str, float]] = {}
    gpu = made_by = ""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                gpu, made_by, op, of, seconds = row["gpu"], row["torch"], row["op"], row["pass"], float(row["time_s"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: no row of operators that a host issues: {row}") from error
            if op not in LINKS or of not in PASSES or not 0 < seconds < math.inf:
                raise ValueError(f"{path}: no row of operators that a host issues: {row}")
            found.setdefault(op, {})[of] = seconds
    if UNIT not in found or any(len(each) < len(PASSES) for each in found.values()):
        raise ValueError(f"{path}: a pass is missing, or all of {UNIT!r}")
    return [Timed(op=op, seconds=(each["forward"], each["backward"]), gpu=gpu, torch=made_by) for op, each in found.items()]


class _Link(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.operands = name, Operands()

    def forward(self, y: Tensor) -> Tensor:
        return LINKS[self.name][1](y, self.operands)


class _Total(nn.Module):
    """Between two sums, so that what a link reads and gives is the value of an operator."""

    def __init__(self, link: nn.Module) -> None:
        super().__init__()
        self.link = link

    def forward(self, y: Tensor) -> Tensor:
        return self.link(y).float().sum()


def counted(name: str) -> tuple[float, float]:
    """Launches of one link as they are priced, with the gradients of its parameters added up."""
    shape, _ = LINKS[name]
    link = _Link(name)
    program = capture(_Total(link), {"y": torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)}).program
    pricer = Pricer(load_cluster("dgx-h100"), {}, None, Recipe())
    costs = [c for op, c in zip(program.ops, Ledger(program, pricer).costs, strict=True) if op.module.startswith("link")]
    ahead, back = (sum(c.host_s[way] for c in costs) / pricer.launch_s for way in (0, 1))
    read = {r for op in program.ops for r in refs(op)}
    return ahead, back + ADDED * sum(p.trainable and p.value in read for p in program.params)


def measured(device: torch.device) -> Iterator[Timed]:
    for name, (shape, link) in LINKS.items():
        operands = Operands().to(device)
        x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        samples = [_sample(link, x, operands, device) for _ in range(WARM + SAMPLES)][WARM:]
        ahead, back = (statistics.median(s) for s in zip(*samples, strict=True))
        yield Timed(op=name, seconds=(ahead, back), gpu=device_name(device), torch=str(torch.__version__))


def _sample(link: Operator, x: Tensor, operands: Operands, device: torch.device) -> tuple[float, float]:
    wait(device)
    begun = time.perf_counter()
    y = x
    for _ in range(CHAIN):
        y = link(y, operands)
    ahead = time.perf_counter() - begun
    loss = y.float().sum()
    wait(device)
    begun = time.perf_counter()
    loss.backward()
    back = time.perf_counter() - begun
    wait(device)
    operands.zero_grad()
    x.grad = None
    return ahead / CHAIN, back / CHAIN


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
