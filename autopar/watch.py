"""What is seen while training: a line every few steps, and some steps measured beside what the plan predicted.

MFU (model FLOPs utilisation; Chowdhery et al., PaLM, 2022, appendix B): the FLOPs of the model's forward and backward passes in a second,
without what is recomputed or done by several ranks, divided by the peak of all GPUs at the dtype that is computed in.
"""

from __future__ import annotations

import html
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from autopar import generators
from autopar.axes import BATCH, axes_over
from autopar.files import write_file
from autopar.measure.resident import forget_peak, peak_bytes
from autopar.measured import MOST_SPANS, Calls, RankRun, Run, Span
from autopar.planner.plan import Plan
from autopar.report.units import bytes_text, count_text, seconds_text, table
from autopar.report.words import counted
from autopar.run import comm, record
from autopar.run.deferred import DeferredModule, started
from autopar.run.module import ParallelModule
from autopar.run.part import local
from cost_models.cluster import load_cluster

__all__ = ["Profiled", "StepLine", "model_flops", "profiled"]


class StepLine:
    """Prints a line every `every` steps on process 0: the loss, the throughput, MFU and the memory, beside the plan's figures.

        line = autopar.StepLine(model, every=10)
        for batch in loader:
            ...
            line(loss)  # on every rank

    The time of a step is that between two lines, divided by their steps: with loading, logging and whatever else the loop does. memory:
    the most of any rank since the line before (allocated memory of GPUs; on CPUs the resident set of the process, in which torch's own
    libraries are). file: where it goes, by default standard error. ValueError if `every` is no positive number of steps.
    """

    def __init__(self, model: ParallelModule | DeferredModule, *, every: int = 10, file: IO[str] | None = None) -> None:
        if every < 1:
            raise ValueError(f"every must be a positive number of steps; got {every}")
        self._model, self._every, self._file = model, every, file
        self._steps, self._since = 0, time.perf_counter()

    def __call__(self, loss: Tensor | float) -> str | None:
        """Collective on the steps that have a line: the line, on process 0; None elsewhere."""
        self._steps += 1
        if self._steps % self._every:
            return None
        module = started(self._model)
        if module is None:
            raise ValueError("a StepLine is called after a step: its model has not been called yet")
        value = float(loss)  # which waits for the device
        seconds, self._since = (time.perf_counter() - self._since) / self._every, time.perf_counter()
        memory = _most(module, peak_bytes())
        forget_peak()
        if module.mesh.rank != 0:
            return None
        text = f"step {self._steps}  loss {value:.4f}  {_figures(module, seconds, memory)}"
        print(text, file=self._file or sys.stderr, flush=True)
        return text


def _figures(module: ParallelModule, seconds: float, memory: int | None) -> str:
    plan: Plan | None = module.plan
    parts = [f"{seconds_text(seconds)} a step"]
    if plan is not None:
        parts[0] += f" (plan {seconds_text(plan.step_time_s)})"
        parts.append(f"{count_text(plan.work_per_step / seconds)} {plan.samples_unit}/s")
        if (share := utilisation(module, plan, seconds)) is not None:
            parts.append(f"MFU {share:.1%}")
    if memory is not None:
        parts.append(f"memory {bytes_text(memory)}" + (f" (plan {bytes_text(max(plan.memory_bytes))})" if plan is not None else ""))
    return "  ".join(parts)


def _most(module: ParallelModule, amount: int | None) -> int | None:
    """Collective: the largest of all ranks."""
    known = torch.tensor(-1.0 if amount is None else float(amount), dtype=torch.float64, device=module.device)
    if module.mesh.talks:
        comm.all_reduce_(known, module.mesh.everyone, dist.ReduceOp.MAX)
    return int(known) if float(known) >= 0 else None


def model_flops(plan: Plan) -> float:
    """FLOPs of one step of the plan's model, forward and backward: what all ranks do, less what those that share operators do several
    times."""
    parts = math.prod(plan.mesh[row.name] for row in axes_over("operators"))
    times = plan.micro_batches * plan.mesh[BATCH] / (plan.tensor_split_share / parts + 1 - plan.tensor_split_share)
    return sum(stage.flops for stage in plan.stages) * times


def utilisation(module: ParallelModule, plan: Plan, seconds: float) -> float | None:
    """MFU, between 0 and 1. None where the plan's cluster is not in the catalogue or states no peak for the dtype."""
    try:
        gpu = load_cluster(plan.cluster).gpu
    except (ValueError, OSError):
        return None
    dtype = computed_in(module)
    return model_flops(plan) / (seconds * plan.gpus * gpu.peak_flops_per_s(dtype)) if gpu.has_rate(dtype) else None


def computed_in(module: ParallelModule) -> str:
    """The dtype in which most of the numbers of the parameters are used."""
    for around in module._forms.autocast:
        return str(around.dtype).removeprefix("torch.")
    counts: Counter[str] = Counter()
    for spec in module.manifest.params:
        counts[spec.dtype] += torch.Size(spec.shape).numel()
    found = max(counts, key=lambda name: counts[name], default="float32")
    return str(module._dtype).removeprefix("torch.") if module._dtype is not None and found == "float32" else found


# --------------------------------------------------------------------------------------------------------------- profile
@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """steps_s: of forward and backward of each step, on the slowest rank. predicted_s: the same by the plan, without the optimizer.
    memory_bytes: the most on any rank; None where the system does not tell. run: of each rank, with one more step under
    torch.profiler; writes: this process is the one that saves it. Bytes and seconds."""

    steps_s: tuple[float, ...]
    memory_bytes: int | None
    predicted_s: float | None
    predicted_memory_bytes: int | None
    work_per_step: float | None
    unit: str
    mfu: float | None
    run: Run | None = None
    writes: bool = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to the file `path`, for `autopar explain plan.json --measured FILE`; on process 0, nothing on the others.
        OutputError; ValueError if there is no plan that it could be beside."""
        if self.run is None:
            raise ValueError("the module has no plan that a run could be beside")
        if self.writes:
            write_file(path, self.run.to_json())

    @property
    def step_s(self) -> float:
        """The median."""
        return sorted(self.steps_s)[len(self.steps_s) // 2]

    def _repr_html_(self) -> str:
        """In a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        rows: list[tuple[str, str, str]] = [
            ("forward and backward", seconds_text(self.step_s), seconds_text(self.predicted_s) if self.predicted_s is not None else "-")
        ]
        if self.work_per_step is not None:
            predicted = count_text(self.work_per_step / self.predicted_s) if self.predicted_s else "-"
            rows.append((f"{self.unit} a second", count_text(self.work_per_step / self.step_s), predicted))
        if self.memory_bytes is not None:
            predicted = bytes_text(self.predicted_memory_bytes) if self.predicted_memory_bytes is not None else "-"
            rows.append(("memory of the fullest rank", bytes_text(self.memory_bytes), predicted))
        if self.mfu is not None:
            rows.append(("MFU", f"{self.mfu:.1%}", "-"))
        return table(("", "measured", "predicted"), rows)


def profiled(module: ParallelModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, steps: int) -> Profiled:
    """Collective: `steps` forward and backward passes of a batch (args, kwargs: of a call of the module), after one that is not counted.
    See ParallelModule.profile. ValueError if `steps` is not positive."""
    if steps < 1:
        raise ValueError(f"steps must be positive; got {steps}")
    plan: Plan | None = module.plan
    with _as_it_was(module):
        _pass(module, args, kwargs)
        forget_peak()
        times = [_timed(module, lambda: _pass(module, args, kwargs)) for _ in range(steps)]
        own = peak_bytes()
        memory = _most(module, own)
        run = None if plan is None else _recorded(module, plan, times, own, lambda: _pass(module, args, kwargs))
    median = sorted(times)[len(times) // 2]
    return Profiled(
        steps_s=tuple(times), memory_bytes=memory,
        predicted_s=plan.step_time_s - plan.optimizer_s if plan is not None else None,
        predicted_memory_bytes=max(plan.memory_bytes) if plan is not None else None,
        work_per_step=plan.work_per_step if plan is not None else None, unit=plan.samples_unit if plan is not None else "samples",
        mfu=utilisation(module, plan, median) if plan is not None else None, run=run, writes=module.mesh.rank == 0,
    )  # fmt: skip


def _recorded(module: ParallelModule, plan: Plan, times: list[float], memory: int | None, run: Callable[[], None]) -> Run:
    """Collective: one more step under torch.profiler, and what every rank has seen of it."""
    spans = _Spans(lambda: _wait(module))
    cuda = module.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    _most(module, 0)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler, record.telling(spans):
        start = spans.begin()
        run()
        _wait(module)
        step_s = time.perf_counter() - start
    seen = _collectives(profiler.key_averages()) or spans.calls(lambda span: span.what)
    own = RankRun(
        rank=module.mesh.rank, step_s=step_s, passes=spans.passes(), collectives=seen, memory_bytes=memory,
        axes=spans.calls(lambda span: span.axis), spans=spans.all(),
    )  # fmt: skip
    every = [own]
    if module.mesh.talks:
        texts: list[Any] = [None] * plan.gpus
        dist.all_gather_object(texts, msgspec.json.encode(own), group=module.mesh.everyone.group)
        every = [msgspec.json.decode(text, type=RankRun) for text in texts]
    threads = f"{module.device.type} ({counted(torch.get_num_threads(), 'thread')} a process)"
    device = torch.cuda.get_device_name(module.device) if cuda else threads
    return Run(
        program_hash=plan.program_hash, mesh=plan.mesh, micro_batches=plan.micro_batches, schedule=plan.schedule, device=device,
        steps_s=times, ranks=sorted(every, key=lambda r: r.rank),
    )  # fmt: skip


def _collectives(events: Iterable[Any]) -> dict[str, Calls]:
    """Those that the backends have run, as torch.profiler names them: 'gloo:all_reduce', 'nccl:all_gather'."""
    found: dict[str, Calls] = {}
    for event in events:
        backend, colon, kind = str(event.key).partition(":")
        if not colon or backend not in ("gloo", "nccl"):
            continue
        seconds = max(event.cpu_time_total, getattr(event, "device_time_total", 0.0)) * 1e-6
        before = found.get(kind, Calls(count=0, seconds=0.0))
        found[kind] = Calls(count=before.count + event.count, seconds=before.seconds + seconds)
    return found


class _Spans:
    """What a step is spent on, as the run tells it (record.telling): passes, and what is waited for. wait: until the device is done."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._start = self._since = time.perf_counter()
        self._phase, self._waited = record.OUTSIDE, 0.0
        self._entered: tuple[int, float] | None = None
        self._passes: dict[str, list[float]] = {}
        self._runs: list[Span] = []
        self._waits: list[Span] = []

    def begin(self) -> float:
        """The step begins now."""
        self._start = self._since = time.perf_counter()
        return self._start

    def __call__(self, what: str, number: int) -> None:
        if what == "phase":
            self._wait()
            now = time.perf_counter()
            name = {record.FORWARD: "forward", record.BACKWARD: "backward"}.get(self._phase)
            taken = now - self._since - self._waited
            if name is not None and taken > 0:
                self._passes.setdefault(name, []).append(taken)
                self._runs.append(Span(what=name, start_s=self._since - self._start, end_s=now - self._start))
            self._phase, self._since, self._waited = number, now, 0.0
        elif what == "entered":
            self._entered = number, time.perf_counter()
        elif self._entered is not None:
            (kind, axis), start, now = record.collective(self._entered[0]), self._entered[1], time.perf_counter()
            self._waited += now - start if kind == record.EXCHANGE else 0.0
            name = record.KINDS[kind].removeprefix("an ").removeprefix("a ")
            self._waits.append(Span(what=name, start_s=start - self._start, end_s=now - self._start, axis=axis))
            self._entered = None

    def all(self) -> list[Span]:
        return sorted([*self._runs, *self._waits], key=lambda span: (span.start_s, -span.end_s))[:MOST_SPANS]

    def passes(self) -> dict[str, Calls]:
        return {name: Calls(count=len(taken), seconds=sum(taken)) for name, taken in self._passes.items()}

    def calls(self, by: Callable[[Span], str]) -> dict[str, Calls]:
        """What was waited for, by its kind or its axis."""
        found: dict[str, Calls] = {}
        for span in self._waits:
            before = found.get(by(span), Calls(count=0, seconds=0.0))
            found[by(span)] = Calls(count=before.count + 1, seconds=before.seconds + span.end_s - span.start_s)
        return found


def _pass(module: ParallelModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    ParallelModule.train_step(module, *args, **kwargs)  # the model's class may have its own
    for param in module.parameters():
        param.grad = None


def _timed(module: ParallelModule, run: Callable[[], None]) -> float:
    """Seconds on the slowest rank."""
    _most(module, 0)  # all begin together
    _wait(module)
    start = time.perf_counter()
    run()
    _wait(module)
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=module.device)
    if module.mesh.talks:
        comm.all_reduce_(taken, module.mesh.everyone, dist.ReduceOp.MAX)
    return float(taken)


def _wait(module: ParallelModule) -> None:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)


@contextmanager
def _as_it_was(module: ParallelModule) -> Iterator[None]:
    """Afterwards gradients, buffers and random numbers are what they were."""
    params = list(module.parameters())
    grads = [param.grad for param in params]
    changing = {**dict(module.named_buffers()), **module.written_parameters}
    before = {name: local(b).clone() for name, b in changing.items()}
    stream, drawn = module.random_stream, generators.states()
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        now = {**dict(module.named_buffers()), **module.written_parameters}
        for name, value in before.items():
            local(now[name]).copy_(value)
        module.random_stream = stream
        generators.restore(drawn)
