"""The planner's choice beside the other plans of its space, all of them run on this machine: time, memory, order, regret.

    python -m benchmarks measured [--models gpt,vit] [--workers 2,4] [--links loopback,10gbit] [--plans 8] [--steps 4] [--repeats 10]
        [--measure roofline]

Each worker has its share of the cores, and a network card of the stated rate (benchmarks/_shaped.py; latency is this machine's own: its
kernel has no queue that delays). The machine is profiled as it is, all workers at once, and the small model is planned for what was found
(--measure live: with the operators of the best candidates measured one by one). The plan that the planner chooses and the fastest others
of its space, as many as --plans, are trained, and so are plans after Megatron's and GPipe's manner that autopar runs, and what
people write by hand with torch's own engines (benchmarks/_by_hand.py), where that computes the same model. All are made once and trained
in turns, a few steps each, --repeats times, so that an hour in which the machine is slower is slower for all.

A step takes as long as its slowest worker; of a turn the lower quartile of its timed steps counts, and of the turns again: other
processes only add. spread: between that of the odd turns and that of the even ones; a difference within the spread of both is not called
one. memory: the growth of the fullest worker's resident set from before the model was built, after a smaller one was trained, to the peak
of a step, in a run of its own in which what is freed goes back to the system at once (which makes steps slower). regret: 1 - best measured
/ measured of the choice. cpu: the share of the cores that the workers had while they were timed; a pipeline's is low where it waits.
--out FILE keeps the figures of each group as soon as they are there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: workers share the cores

import argparse
import functools
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.measure.profile import Sizes, profile
from autopar.measure.resident import forget_peak, give_back, give_back_at_once, now_bytes, peak_bytes
from autopar.planner import Pins, Plan
from autopar.planner.answer import plan_of
from autopar.planner.search import Search
from autopar.run import WorkerPool
from benchmarks._by_hand import ENGINES, ByHand
from benchmarks._scores import tau
from benchmarks._shaped import LINKS, Place, shaped
from benchmarks._small import MODELS, Mlp, build
from cost_models import Cluster, load_cluster

__all__ = ["Row", "lower_quartile", "main", "summary"]

WARM_UP = 1  # of each turn
SIZES = Sizes(largest=1024, nbytes=(2**10, 2**14, 2**18, 2**22))  # a profile of seconds
BY_HAND: dict[str, dict[str, Any]] = {
    "megatron": {"pp": 1, "dp": 1, "zero": 0, "recompute": "none"},
    "gpipe": {"dp": 1, "tp": 1, "schedule": "gpipe", "recompute": "none"},
}
NONE_BY_HAND = "nobody writes it by hand"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker trains: an engine of torch, or the plan of a file. weighed: for its memory, not for its time."""

    model: str
    who: str
    plan_file: str
    steps: int
    weighed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Of one worker: the seconds of each timed step. cpu_s: of its process while they were timed."""

    steps_s: tuple[float, ...] = ()
    memory_bytes: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    refused: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A plan as it ran. predicted: None of torch's engines. chosen: by the planner."""

    name: str
    chosen: bool
    predicted_s: float | None
    predicted_bytes: float | None
    step_s: float | None
    spread: float
    memory_bytes: float | None
    cpu: float
    refused: str = ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks measured", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--workers", default="2", help="comma-separated numbers of processes")
    parser.add_argument("--links", default="loopback", help=f"comma-separated, of {', '.join(LINKS)}")
    parser.add_argument("--plans", type=int, default=8, help="so many of the fastest of the space, by the prediction")
    parser.add_argument("--measure", default="roofline", choices=("live", "roofline"), help="where times of operators come from")
    parser.add_argument("--steps", type=int, default=4, help="of a turn that are timed")
    parser.add_argument("--repeats", type=int, default=10, help="turns")
    parser.add_argument("--out", type=Path, help="a file of one JSON line for each group, which is added to")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    models, links = ([n for n in text.split(",") if n] for text in (args.models, args.links))
    if unknown := [n for n in models if n not in MODELS] + [n for n in links if n not in LINKS]:
        parser.error(f"{', '.join(unknown)} is none of {', '.join((*MODELS, *LINKS))}")
    if not all(n.isdigit() and int(n) > 1 for n in args.workers.split(",")) or min(args.plans, args.steps, args.repeats) < 1:
        parser.error("--workers are numbers of 2 or more, --plans, --steps and --repeats positive")
    console = Console(stderr=args.json, width=150)
    found: dict[str, list[Row]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    try:
        for link, workers in itertools.product(links, map(int, args.workers.split(","))):
            with shaped(link, workers) as place, console.status("") as status:
                for model in models:
                    status.update(f"{model}, {workers} workers on {link}")
                    cluster = profile(load_cluster("cpu"), workers, sizes=SIZES, enter=place).cluster
                    name = f"{model}, {workers} workers, {link}"
                    found[name] = run(model, cluster, place, args.plans, args.steps, args.repeats, args.measure)
                    console.print(_table(name, found[name]))
                    if args.out is not None:
                        with args.out.open("a", encoding="utf-8") as file:
                            print(json.dumps({"group": name, **summary(found[name]), "rows": [asdict(r) for r in found[name]]}), file=file)
    except AutoparError as error:
        print(error, file=sys.stderr)
        return 1
    every = {name: summary(rows) for name, rows in found.items()}
    console.print(_summaries(every))
    shown = {name: [asdict(row) for row in group] for name, group in found.items()}
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "groups": every, "rows": shown}))
    return 0


# --------------------------------------------------------------------------------------------------------------- one model
def run(model: str, cluster: Cluster, place: Place, most: int, steps: int, repeats: int, measure: str) -> list[Row]:
    """The plans of one model, and the engines."""
    with tempfile.TemporaryDirectory() as folder:
        plans = _plans(model, cluster, place.workers, most, measure)
        for number, (_, plan) in enumerate(plans):
            plan.save(Path(folder) / f"{number}.json")
        jobs = [Job(model=model, who="autopar", plan_file=f"{folder}/{n}.json", steps=steps) for n in range(len(plans))]
        jobs += [Job(model=model, who=who, plan_file="", steps=steps) for who in ENGINES]
        times: list[list[list[Ran]]] = [[] for _ in jobs]
        with WorkerPool(place.workers, enter=place) as pool:
            for turn in range(repeats + 1):
                for number, job in enumerate(jobs):
                    ran = pool.run(train, job)
                    times[number] += [ran] if turn else []  # the first one is for memory to be taken from the system
        with WorkerPool(place.workers, enter=place) as pool:
            weighed = [replace(job, steps=1, weighed=True) for job in (jobs[0], *jobs)]  # the first one loads code for the others
            memory = [max(r.memory_bytes for r in pool.run(train, job)) for job in weighed][1:]
    cores = min(place.workers, len(os.sched_getaffinity(0)))
    named = [*plans, *((f"by hand: {who}", None) for who in ENGINES)]
    rows = [
        _row(name, plan, name == "chosen", each, nbytes, cores) for (name, plan), each, nbytes in zip(named, times, memory, strict=True)
    ]
    return [row for row in rows if row.refused != NONE_BY_HAND]


def _plans(model: str, cluster: Cluster, workers: int, most: int, measure: str) -> list[tuple[str, Plan]]:
    """The planner's choice, the fastest others, and those after the manner of others; each once."""
    program = capture(*build(model)).program

    def search(**pins: Any) -> Search:
        return Search(
            program=program, gpus=workers, cluster=cluster, memory_limit_bytes=int(cluster.gpu.memory_bytes), optimizer="adamw",
            precision="fp32", pins=Pins(**pins), measure=measure,
        )  # fmt: skip

    free = search()
    plans = [("chosen", search().best())]
    others = list(itertools.islice(free.candidates(), most))
    plans += [(_said(p), p) for p in (plan_of(free, c) for c in (free.measured(others) if measure == "live" else others))]
    for name, pins in BY_HAND.items():
        asked: dict[str, Any] = {**pins, **({"tp": workers} if name == "megatron" else {"pp": workers})}
        try:
            plans.append((f"{name}: {_said(plan := search(**asked).best())}", plan))
        except AutoparError:
            continue  # the model has no such plan
    return list({_said(plan): (name, plan) for name, plan in reversed(plans)}.values())[::-1]


def _said(plan: Plan) -> str:
    again = f" recompute {len(plan.recompute)}" if plan.recompute else ""
    axes = " ".join(f"{axis}{n}" for axis, n in plan.mesh.items() if n > 1)
    return f"{axes} zero{plan.zero} mb{plan.micro_batches} {plan.schedule if plan.mesh['pp'] > 1 else ''}{again}".strip()


def _row(name: str, plan: Plan | None, chosen: bool, repeats: Sequence[Sequence[Ran]], memory_bytes: float, cores: int) -> Row:
    """repeats: of each, the workers."""
    refused = next((r.refused for ranks in repeats for r in ranks if r.refused), "")
    steps = [] if refused else [lower_quartile([max(each) for each in zip(*(r.steps_s for r in ranks), strict=True)]) for ranks in repeats]
    halves = [lower_quartile(steps[half::2]) for half in (0, 1) if steps[half::2]]
    wall_s = sum(max(r.wall_s for r in ranks) for ranks in repeats)
    return Row(
        name=f"chosen: {_said(plan)}" if chosen and plan else name, chosen=chosen, predicted_s=plan.step_time_s if plan else None,
        predicted_bytes=max(s.memory.total_bytes - s.memory.framework_context_bytes for s in plan.stages) if plan else None,
        step_s=None if refused else lower_quartile(steps), spread=max(halves) / min(halves) - 1 if not refused else 0.0,
        memory_bytes=None if refused else memory_bytes,
        cpu=sum(r.cpu_s for ranks in repeats for r in ranks) / wall_s / cores if wall_s else 0.0, refused=refused,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- on a worker
@dataclass(frozen=True, slots=True)
class _Ready:
    """A job that was made. before_bytes: resident then."""

    made: ByHand | None
    optimizer: torch.optim.Optimizer | None
    before_bytes: int
    refused: str = ""


def train(job: Job) -> Ran:
    """A turn of a job on this worker, which makes it if it is the first."""
    ready = _ready(job)
    if ready.made is None or ready.optimizer is None:
        return Ran(refused=ready.refused)
    times, cpu_s, start = list[float](), 0.0, 0.0
    for step in range(WARM_UP + job.steps):
        if step == WARM_UP:
            if job.weighed:
                give_back()
                forget_peak()
            dist.barrier()
            cpu_s, start = time.process_time(), time.perf_counter()
        dist.barrier()
        began = time.perf_counter()
        ready.made.compute()
        ready.optimizer.step()
        ready.optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    wall_s = time.perf_counter() - start
    cpu_s = time.process_time() - cpu_s
    if not job.weighed:
        return Ran(steps_s=tuple(times[WARM_UP:]), cpu_s=cpu_s, wall_s=wall_s)
    _ready.cache_clear()
    return Ran(memory_bytes=float((peak_bytes() or 0) - ready.before_bytes))


@functools.cache
def _ready(job: Job) -> _Ready:
    if job.weighed:
        give_back_at_once()
    _load_code(job.who)
    give_back()
    before = now_bytes() or 0
    torch.manual_seed(0)
    try:
        made = _made(job.who, *build(job.model), job.plan_file)
    except (AutoparError, RuntimeError, ValueError) as error:
        return _Ready(None, None, before, f"{type(error).__name__}: {error}".splitlines()[0])
    except _NotByHand:
        return _Ready(None, None, before, NONE_BY_HAND)
    return _Ready(made, torch.optim.AdamW(made.parameters), before)


class _NotByHand(Exception):
    """The engine has no plan for the model."""


@functools.cache
def _load_code(who: str) -> None:
    """Trains a small model, once."""
    batch = {name: torch.ones(16, 8) for name in ("x", "y")}
    made = _made(who, Mlp(8, dist.get_world_size()), batch, None)
    made.compute()
    torch.optim.AdamW(made.parameters).step()


def _made(who: str, model: nn.Module, batch: dict[str, torch.Tensor], plan_file: str | None) -> ByHand:
    """plan_file: None for data parallel."""
    if who != "autopar":
        if (found := ENGINES[who](model, batch)) is None:
            raise _NotByHand
        return found
    how: dict[str, Any] = {"plan": plan_file} if plan_file else {"pins": {"dp": dist.get_world_size(), "zero": 0}}
    compiled = autopar.compile(model, example_inputs=batch, **how)
    return ByHand(lambda: compiled(**batch).backward(), compiled.parameters())


# ------------------------------------------------------------------------------------------------------------------ figures
def lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[(len(times) - 1) // 4]


def summary(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """step, memory: median relative errors of the predictions; beside: the choice's step over that of the best engine by hand."""
    ran = [r for r in rows if r.step_s]
    planned = [(r.predicted_s, r.step_s) for r in ran if r.predicted_s and r.step_s]
    held = [(r.predicted_bytes, r.memory_bytes) for r in ran if r.predicted_bytes and r.memory_bytes]
    choice = next((r for r in ran if r.chosen), None)
    engines = [r.step_s for r in ran if r.predicted_s is None and r.step_s]
    best = min((s for _, s in planned), default=None)
    return {
        "plans": len(planned),
        "step": statistics.median(abs(p / s - 1) for p, s in planned) if planned else None,
        "memory": statistics.median(abs(p / m - 1) for p, m in held) if held else None,
        "tau": tau(planned), "regret": 1 - best / choice.step_s if choice and choice.step_s and best else None,
        "spread": max((r.spread for r in ran), default=None), "cpu": min((r.cpu for r in ran), default=None),
        "beside": choice.step_s / min(engines) if choice and choice.step_s and engines else None,
    }  # fmt: skip


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table("plan", "predicted ms", "measured ms", "error", "spread", "predicted MiB", "measured MiB", "cpu", title=title)
    for r in sorted(rows, key=lambda r: r.step_s or 1e9):
        predicted, measured = (f"{1e3 * s:.1f}" if s else "-" for s in (r.predicted_s, r.step_s))
        error = f"{r.predicted_s / r.step_s - 1:+.0%}" if r.predicted_s and r.step_s else "-"
        memory = [f"{b / 2**20:.0f}" if b else "-" for b in (r.predicted_bytes, r.memory_bytes)]
        table.add_row(r.name, predicted, r.refused or measured, error, f"{r.spread:.0%}", *memory, f"{r.cpu:.0%}")
    return table


def _summaries(every: dict[str, dict[str, float | int | None]]) -> Table:
    table = Table("", "plans", "step: median error", "memory", "tau", "regret", "spread", "cpu", "choice / best engine", title="in all")
    for name, s in every.items():
        shares = [f"{s[key]:.0%}" if s[key] is not None else "-" for key in ("step", "memory")]
        last = [f"{s[key]:.2f}" if s[key] is not None else "-" for key in ("tau", "regret", "spread", "cpu", "beside")]
        table.add_row(name, str(s["plans"]), *shares, *last)
    return table


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
