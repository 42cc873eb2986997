"""Plans as one GPU runs them, beside what was predicted: whole ones, and single ranks of plans for eight; time, memory, order, regret.

    python -m benchmarks one_gpu [--gpu NAME|FILE.toml] [--data FILE.jsonl] [--measure FILE.jsonl] [--models gpt,vit] [--ranks MODEL,...]
        [--steps 5] [--json]

Without a GPU: plans what was measured (benchmarks/data/one_gpu.jsonl) anew and compares. --measure FILE: on a machine with a GPU, runs the
plans first and writes a line for each. Of a model for one GPU: the module by plain torch, which casts its parameters before they are
used where the precision is bf16; the planner's choice, micro-batches, recompute full and selective, and the choice within less memory.
Of a model for eight GPUs: the rank that is named of each plan, in a process group of torch whose collectives move nothing ("fake"), so
that its memory and its kernels are those of a rank among eight, and its losses mean nothing.

step: the median of the timed steps, by CUDA events, AdamW included. host: until the host has issued a step. memory: the peak that torch's
allocator has given out in the timed steps, beyond what it had before the model was built; what frameworks and the context take is in
neither figure. Of single ranks the time that is predicted is that of computation, the optimizer's included.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import autopar
from autopar.errors import AutoparError
from autopar.measure.live import device_name
from autopar.planner import Plan
from benchmarks._gpu_models import MODELS, MORE, RANKS, build
from benchmarks._plain import between_s, in_precision, now
from benchmarks._scores import tau
from cost_models import UnknownHardware, load_cluster
from cost_models.uncertainty import interval

__all__ = ["Job", "Ran", "jobs", "main", "planned", "summary", "train"]

DATA = Path(__file__).parent / "data" / "one_gpu.jsonl"
CLUSTER = "dgx-h100"
WARM, LR = 2, 1e-4
ONE: tuple[dict[str, Any], ...] = ({}, {"micro_batches": 4}, {"recompute": "full"}, {"recompute": "selective"})
TRANSFORMERS = ("gpt", "llama", "vit")  # of which blocks are recomputed in part
LESS = 0.7  # of the memory that the choice takes without a limit
EIGHT: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    *(({"dp": 8, "zero": zero}, (0,)) for zero in (0, 1, 2, 3)),
    ({"dp": 8, "zero": 3, "recompute": "full"}, (0,)),
    ({"tp": 8, "sequence_parallel": True}, (0,)),
    ({"tp": 8, "sequence_parallel": False}, (0,)),
    ({"tp": 2, "dp": 4, "zero": 3}, (0,)),
    ({"tp": 4, "dp": 2, "zero": 1, "micro_batches": 2}, (0,)),
    ({"pp": 4, "dp": 2, "micro_batches": 8, "zero": 1}, (0, 7)),
    ({"pp": 8, "micro_batches": 16}, (0, 7)),
    ({"pp": 2, "tp": 4, "micro_batches": 8}, (0, 7)),
)
"""Pins of plans for eight GPUs, and the ranks of each that are run."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that is run. less: its memory is limited to so much of what the choice takes; rank: of `gpus` the one that is run. plain: no
    plan, but the module as torch runs it."""

    model: str
    pins: dict[str, Any] = {}
    precision: str = "bf16"
    gpus: int = 1
    rank: int = 0
    less: float = 0.0
    plain: bool = False

    def __str__(self) -> str:
        said = " ".join(f"{k}={v}" for k, v in self.pins.items()) or ("plain torch" if self.plain else "chosen")
        limit = f", {self.less:.0%} of the memory" if self.less else ""
        rank = f", rank {self.rank} of {self.gpus}" if self.gpus > 1 else ""
        return f"{self.model} {self.precision}: {said}{limit}{rank}"


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ran; predicted_*: at that time, by the catalogue. limit_bytes: that was planned for. losses: of the
    steps before those that are timed, of a whole plan. refused: why it did not run."""

    job: Job
    gpu: str = ""
    torch: str = ""
    step_s: float = 0.0
    optimizer_s: float = 0.0
    host_s: float = 0.0
    spread: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    predicted_s: float = 0.0
    predicted_bytes: int = 0
    limit_bytes: int = 0
    micro_batches: int = 0
    recomputed: int = 0
    losses: tuple[float, ...] = ()
    refused: str = ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks one_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default=CLUSTER, help="a cluster of the catalogue or a file, for whose GPUs is predicted")
    parser.add_argument("--data", type=Path, default=DATA, help="what was measured")
    parser.add_argument("--measure", type=Path, help="run the plans on this machine's GPU, and write this file")
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--ranks", default=",".join(RANKS), help=f"comma-separated, of {', '.join(RANKS)}")
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.folder is not None:
        return _run_here(args.folder, args.rank, args.steps)
    models, ranks = ([n for n in text.split(",") if n] for text in (args.models, args.ranks))
    if unknown := [n for n in models if n not in MODELS | MORE] + [n for n in ranks if n not in RANKS]:
        parser.error(f"{', '.join(unknown)} is none of {', '.join((*MODELS, *MORE, *RANKS))}")
    console = Console(stderr=args.json, width=160)
    try:
        load_cluster(args.gpu)
        if args.measure is not None:
            if not torch.cuda.is_available():
                print("there is no GPU on this machine: nothing was run", file=sys.stderr)
                return 3
            _measure(args.measure, list(jobs(models, ranks)), args.steps)
        found = read(args.measure or args.data)
    except (OSError, UnknownHardware, msgspec.DecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = [*zip(found, predictions(found, args.gpu), strict=True)]
    console.print(_table(rows, args.gpu))
    said = summary(rows)
    console.print(_summaries(said))
    print(json.dumps({"gpu": args.gpu, "ran": sum(not r.refused for r in found), "groups": said}))
    return 0


def jobs(models: Iterable[str], ranks: Iterable[str]) -> Iterator[Job]:
    for model in models:
        precisions = ("fp32",) if model == "state-space" else ("bf16", "fp32") if model in ("gpt", "resnet") else ("bf16",)
        for precision in precisions:
            yield Job(model=model, precision=precision, plain=True)
            pinned = ONE if model in TRANSFORMERS else ONE[:3]
            yield from (Job(model=model, pins=pins, precision=precision) for pins in (pinned if precision == precisions[0] else ONE[:1]))
            if precision == precisions[0]:
                yield Job(model=model, precision=precision, less=LESS)
    for model in ranks:
        yield from (Job(model=model, pins=pins, gpus=8, rank=rank) for pins, of in EIGHT for rank in of)


def read(path: Path) -> list[Ran]:
    """msgspec.DecodeError for what is no such file."""
    return [msgspec.json.decode(line, type=Ran) for line in path.read_bytes().splitlines() if line.strip()]


# ----------------------------------------------------------------------------------------------------------------- planning
@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan, or why there is none; limit_bytes: the memory that it was limited to, 0 without a limit."""

    plan: Plan | None
    refused: str = ""
    limit_bytes: int = 0


def planned(wanted: Sequence[Job], cluster: str = CLUSTER, limits: Sequence[int] | None = None) -> list[Planned]:
    """The plans of the jobs of one model, which is built on the meta device. limits: bytes of those that have less memory; by default a
    share of what the choice takes."""
    model, batch = build(wanted[0].model, "meta")
    found: list[Planned] = []
    choice: dict[str, int] = {}
    for k, job in enumerate(wanted):
        if job.plain:
            found.append(Planned(plan=None))
            continue
        context = load_cluster(cluster).gpu.context_bytes
        limit = limits[k] if limits and limits[k] else round(job.less * choice.get(job.precision, 0) + context) if job.less else 0
        try:
            plan = autopar.plan(
                model, job.gpus, example_inputs=batch, cluster=cluster, precision=job.precision, pins=job.pins or None,
                memory=limit or None,
            )  # fmt: skip
        except AutoparError as error:
            found.append(Planned(plan=None, refused=f"{type(error).__name__}: {str(error).splitlines()[0]}", limit_bytes=limit))
            continue
        if not job.pins and not job.less:
            choice[job.precision] = plan.memory_bytes[0] - context
        found.append(Planned(plan=plan, limit_bytes=limit))
    return found


def _by_model(wanted: Sequence[Job]) -> dict[str, list[Job]]:
    return {name: [j for j in wanted if j.model == name] for name in dict.fromkeys(j.model for j in wanted)}


class Predicted(NamedTuple):
    """Seconds of a step, bytes of its peak without the context's, and their intervals of 80%."""

    step_s: float
    peak_bytes: int
    interval_s: tuple[float, float]
    interval_bytes: tuple[float, float]


def predictions(found: Sequence[Ran], cluster: str) -> list[Predicted | None]:
    """The same plans on a cluster's GPU; None where the planner would now take another one, or has none."""
    made: dict[int, Predicted | None] = {}
    for name in dict.fromkeys(r.job.model for r in found):
        places = [k for k, r in enumerate(found) if r.job.model == name]
        plans = planned([found[k].job for k in places], cluster, [found[k].limit_bytes for k in places])
        for k, each in zip(places, plans, strict=True):
            same = each.plan is not None and (each.plan.micro_batches, _again(each.plan)) == (found[k].micro_batches, found[k].recomputed)
            made[k] = predicted(each.plan, found[k].job) if each.plan is not None and same else None
    return [made[k] for k in range(len(found))]


def _again(plan: Plan) -> int:
    return len(plan.recompute)


def predicted(plan: Plan, job: Job) -> Predicted:
    """Of the rank that is run; where it is one of several, without what is communicated, for which its host does not wait."""
    per_stage = job.gpus // plan.mesh["pp"]
    mine = [s for s, rank in enumerate(plan.rank_of) if rank == job.rank // per_stage]
    stages = [plan.stages[s] for s in mine]
    memory = max((s.memory for s in stages), key=lambda m: m.total_bytes)
    least, most = (end - memory.framework_context_bytes for end in memory.interval_bytes)
    seconds, span = plan.step_time_s, plan.step_time_interval_s
    if job.gpus > 1:
        each_s = sum(max(s.forward_s + s.backward_s - s.communication_s, s.issued_s) for s in stages)
        seconds = each_s * plan.micro_batches + plan.optimizer_s
        span = interval(seconds, plan.step_spread)
    return Predicted(seconds, memory.total_bytes - memory.framework_context_bytes, span, (least, most))


# ------------------------------------------------------------------------------------------------------------------ running
def _measure(path: Path, wanted: Sequence[Job], steps: int) -> None:
    """Plans are made by as many processes as there are cores; a process for each rank runs them, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        groups = list(_by_model(wanted).values())
        number, begin = 0, time.perf_counter()
        ranks: set[tuple[int, int]] = set()
        refused: list[Ran] = []
        with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
            for group, plans in zip(groups, pool.map(planned, groups), strict=True):
                for job, each in zip(group, plans, strict=True):
                    if each.refused:
                        refused.append(Ran(job=job, refused=each.refused))
                        continue
                    name = Path(folder) / f"{job.gpus}-{job.rank}-{number:03}"
                    if each.plan is not None:
                        each.plan.save(name.with_suffix(".plan"))
                    name.with_suffix(".job").write_bytes(msgspec.json.encode({"job": job, "limit_bytes": each.limit_bytes}))
                    ranks.add((job.gpus, job.rank))
                    number += 1
        print(f"{number} plans in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in refused))
        for gpus, rank in sorted(ranks):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(gpus), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(gpus)}
            command = [sys.executable, "-m", "benchmarks", "one_gpu", "--folder", folder, "--rank", str(rank), "--steps", str(steps)]
            with path.open("ab") as file:
                subprocess.run(command, check=False, stdout=file, env=environment)


def _run_here(folder: Path, rank: int, steps: int) -> int:
    """Runs the plans of a folder that are this rank's, one after the other, and prints a line for each."""
    gpus = int(os.environ["WORLD_SIZE"])
    if gpus > 1:
        join_fake(rank, gpus)
    for file in sorted(folder.glob(f"{gpus}-{rank}-*.job")):
        told = msgspec.json.decode(file.read_bytes())
        job = msgspec.convert(told["job"], Job)
        plan = None if job.plain else Plan.load(file.with_suffix(".plan"))
        ran = train(job, plan, "cuda", steps)
        print(msgspec.json.encode(msgspec.structs.replace(ran, limit_bytes=told["limit_bytes"])).decode(), flush=True)
        said = ran.refused or f"{1e3 * ran.step_s:.1f} ms, {ran.peak_bytes / 2**30:.2f} GiB"
        print(f"{job}: {said} ({1e3 * ran.predicted_s:.1f} ms, {ran.predicted_bytes / 2**30:.2f} GiB)", file=sys.stderr, flush=True)
    return 0


def join_fake(rank: int, gpus: int) -> None:
    """A process group of torch's tests, in which collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=gpus)


def train(job: Job, plan: Plan | None, device: str, steps: int) -> Ran:
    """Some steps of a plan on this process' device ('cuda'; 'cpu' for tests, which has no peak)."""
    cuda = device == "cuda"
    told = Ran(job=job, gpu=device_name(torch.device(device)), torch=str(torch.__version__))
    if plan is not None:
        said = predicted(plan, job)
        told = msgspec.structs.replace(
            told, predicted_s=said.step_s, predicted_bytes=said.peak_bytes, micro_batches=plan.micro_batches, recomputed=_again(plan),
        )  # fmt: skip
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    try:
        figures = _steps(job, plan, device, steps)
    except (AutoparError, RuntimeError) as error:  # of memory, too
        return msgspec.structs.replace(told, refused=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    return msgspec.structs.replace(told, **figures, peak_bytes=peak, reserved_bytes=torch.cuda.max_memory_reserved() if cuda else 0)


def _steps(job: Job, plan: Plan | None, device: str, steps: int) -> dict[str, Any]:
    cuda = device == "cuda"
    model, batch = build(job.model, device)
    if plan is None:
        trained, compute = model, functools.partial(in_precision(model, job.precision), **batch)
    else:
        trained = autopar.compile(model, job.gpus, example_inputs=batch, plan=plan, precision=job.precision)
        compute = functools.partial(trained, **batch)
    del model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LR)
    losses: list[Tensor] = []
    begun: list[Any] = []
    computed: list[Any] = []
    host: list[float] = []
    for step in range(WARM + steps + 1):
        if step == WARM and cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun.append(now(device))
        if step == WARM + steps:
            break
        start = time.perf_counter()
        found = compute()
        loss = found if isinstance(found, Tensor) else found.loss  # of transformers
        loss.backward()
        losses += [loss.detach()] if step < WARM else []
        computed.append(now(device))
        optimizer.step()
        optimizer.zero_grad()
        host.append(time.perf_counter() - start)
    if cuda:
        torch.cuda.synchronize()
    whole = [between_s(a, b) for a, b in pairwise(begun)][WARM:]
    updates = [between_s(a, b) for a, b in zip(computed, begun[1:], strict=True)][WARM:]
    return {
        "step_s": statistics.median(whole), "optimizer_s": statistics.median(updates), "host_s": statistics.median(host[WARM:]),
        "spread": max(whole) / min(whole) - 1, "losses": tuple(float(x) for x in losses) if job.gpus == 1 else (),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ figures
Row = tuple[Ran, Predicted | None]


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float | int | None]]:
    """By kind of model. step, memory: median relative errors; regret, tau: medians over models, among their plans within all memory.
    inside, memory_inside: the shares of step times and of peaks in their intervals of 80%. loss: the largest relative difference of a
    loss from plain torch's, without dropout; step_beside, memory_beside: of the choice over plain torch's.
    """
    groups: dict[str, list[Row]] = {"one GPU": [], "a rank of eight": []}
    for r, p in rows:
        if not r.refused:
            groups["one GPU" if r.job.gpus == 1 else "a rank of eight"].append((r, p))
    return {name: _scores(found) for name, found in groups.items() if found}


def _scores(rows: Sequence[Row]) -> dict[str, float | int | None]:
    known = [(r, p) for r, p in rows if p is not None]
    both = [(r, p.step_s, p.peak_bytes) for r, p in known]
    inside = [p.interval_s[0] <= r.step_s <= p.interval_s[1] for r, p in known]
    held = [p.interval_bytes[0] <= r.peak_bytes <= p.interval_bytes[1] for r, p in known]
    plain = {(r.job.model, r.job.precision): r for r, _ in rows if r.job.plain}
    beside = [(r, plain[r.job.model, r.job.precision]) for r, _ in rows if (r.job.model, r.job.precision) in plain and not r.job.plain]
    off = [max(abs(a / b - 1) for a, b in zip(r.losses, p.losses, strict=True)) for r, p in beside if "dropout" not in r.job.model]
    ratios = [r.step_s / p.step_s for r, p in beside if not r.job.pins and not r.job.less]
    room = [r.peak_bytes / p.peak_bytes for r, p in beside if not r.job.pins and not r.job.less and p.peak_bytes]
    steps = [abs(s / r.step_s - 1) for r, s, _ in both]
    memory = [abs(b / r.peak_bytes - 1) for r, _, b in both if r.peak_bytes]
    orders, regrets = [], []
    for name in dict.fromkeys((r.job.model, r.job.precision) for r, _, _ in both):
        mine = [(r, s) for r, s, _ in both if (r.job.model, r.job.precision) == name and not r.job.less and r.job.gpus == 1]
        choice = next((r for r, _ in mine if not r.job.pins), None)
        if choice is not None and len(mine) > 1:
            regrets.append(1 - min(r.step_s for r, _ in mine) / choice.step_s)
            orders.append(tau([(s, r.step_s) for r, s in mine]))
    return {
        "loss": max(off, default=None), "step_beside": _median(ratios), "memory_beside": _median(room),
        "ran": len(rows), "compared": len(both), "step": _median(steps), "step_90": _ninth(steps), "memory": _median(memory),
        "memory_90": _ninth(memory), "inside": _share(inside), "memory_inside": _share(held),
        "tau": _median([t for t in orders if t is not None]), "regret": _median(regrets), "regret_worst": max(regrets, default=None),
    }  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _share(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def _ninth(values: Sequence[float]) -> float | None:
    return sorted(values)[min(len(values) - 1, round(0.9 * (len(values) - 1)))] if values else None


def _table(rows: Sequence[Row], gpu: str) -> Table:
    columns = ("plan", "predicted ms", "measured ms", "error", "optimizer ms", "host ms", "predicted GiB", "measured GiB", "error")
    table = Table(*columns, title=f"predicted for a GPU of {gpu}")
    for r, p in rows:
        if r.refused:
            table.add_row(str(r.job), "-", r.refused)
            continue
        s, b = (p.step_s, p.peak_bytes) if p is not None else (0.0, 0)
        memory = f"{b / r.peak_bytes - 1:+.0%}" if b and r.peak_bytes else "-"
        another = "-" if r.job.plain else "another plan"
        table.add_row(
            str(r.job), f"{1e3 * s:.1f}" if s else another, f"{1e3 * r.step_s:.1f}", f"{s / r.step_s - 1:+.0%}" if s else "-",
            f"{1e3 * r.optimizer_s:.1f}", f"{1e3 * r.host_s:.1f}", f"{b / 2**30:.2f}" if b else "-", f"{r.peak_bytes / 2**30:.2f}", memory,
        )  # fmt: skip
    return table


def _summaries(said: dict[str, dict[str, float | int | None]]) -> Table:
    names = (
        "step", "step_90", "inside", "memory", "memory_90", "memory_inside", "tau", "regret", "regret_worst", "loss", "step_beside",
        "memory_beside",
    )  # fmt: skip
    table = Table("", "plans", *(n.replace("_90", ": 90%").replace("_", ": ") for n in names), title="in all")
    for name, s in said.items():
        shown = ["-" if s[n] is None else f"{s[n]:.2f}" if n in ("tau", "step_beside", "memory_beside") else f"{s[n]:.1%}" for n in names]
        table.add_row(name, f"{s['compared']} of {s['ran']}", *shown)
    return table


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
