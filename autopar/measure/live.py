"""Times of operators measured on this machine's own device, and the file that keeps them.

A call is an operator with its arguments and the types of its operands: two operators that differ in nothing else are one
call, which is run once. Operands are contiguous, random, and in range where they are indices. Local code that communicates
and views are not measured, nor calls too short to matter.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from autopar.capture.interpret import run_op
from autopar.files import write_file
from autopar.ir import Arg, Op, TensorType, nameless

__all__ = ["BUDGET_S", "Call", "Live", "Times", "call_of", "cache_folder", "device_name"]

BUDGET_S = 30.0  # for all measurements of one plan; what is not measured by then keeps its estimate
LEAST_SHARE = 1e-3  # of a program's estimated time: calls that take less of it in all are not measured
REPEATS = 5  # of which the median is taken
SAMPLE_S, MOST_LOOPS = 1e-3, 20  # short calls are repeated within a sample until it takes about so long
LEAST_CPU_SHARE = 0.8  # of the time that passes: with less, other processes held the core, and times are not kept for other plans
CPU_THREADS = 1  # what a worker of autopar.launch, and of torchrun by default, has

FORMAT, VERSION = "autopar-times", 1

# What torch raises when an operator does not run: on operands that it refuses, without a kernel or a derivative, or memory.
REFUSALS = (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError, LookupError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An operator (its operands are %x0, %x1, ...) on operands of these types. returns: how many results it has."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    returns: int
    multi: bool
    no_grad: bool
    ins: tuple[TensorType, ...]
    differentiable: bool

    def __str__(self) -> str:
        types = ", ".join(f"{t}{' grad' if t.grad else ''}" for t in self.ins)
        words = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs)]
        return f"{self.target}({', '.join(words)}) on {types or 'nothing'}{' without gradients' if self.no_grad else ''}"


def call_of(op: Op, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...]) -> Call:
    """The call that an operator makes on operands of these types."""
    plain = nameless(op)
    differentiable = not op.no_grad and any(t.grad for t in ins) and any(t.grad for t in outs)
    return Call(
        target=op.target, args=plain.args, kwargs=plain.kwargs, returns=len(op.outputs), multi=op.multi, no_grad=op.no_grad, ins=ins,
        differentiable=differentiable,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- device
def device_name(device: torch.device) -> str:
    """The name under which a device's times are kept: 'NVIDIA H100 80GB HBM3', 'AMD EPYC 7B13'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------------------------ file
def cache_folder() -> Path:
    """Where times are kept: $XDG_CACHE_HOME/autopar/times, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar" / "times"


class Times:
    """(forward, backward) seconds by key, in a JSON file that several processes may write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = self._read()
        self._new: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> tuple[float, float] | None:
        return self._known.get(key)

    def add(self, key: str, seconds: tuple[float, float], *, keep: bool = True) -> None:
        """keep: beyond this process."""
        self._known[key] = seconds
        if keep:
            self._new[key] = seconds

    def save(self) -> None:
        """Write what is new, beside what others have written, atomically. OSError where that cannot be done."""
        if not self._new:
            return
        kept = {**self._read(), **self._new}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {"format": FORMAT, "version": VERSION, "times_s": {k: list(v) for k, v in sorted(kept.items())}}
        write_file(self.path, f"{json.dumps(data, indent=1)}\n".encode())
        self._new = {}

    def _read(self) -> dict[str, tuple[float, float]]:
        try:
            return _checked(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            text = f"the file of measured times {self.path} cannot be used ({error}); they are measured again, and the file is written anew"
            warnings.warn(text, stacklevel=3)
            return {}


def _checked(data: object) -> dict[str, tuple[float, float]]:
    """The times of a file's content. ValueError if it is not what `Times.save` writes."""
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ValueError(f"its format is not {FORMAT} {VERSION}")
    found = data.get("times_s")
    if not isinstance(found, dict):
        raise ValueError("it holds no times")
    for key, value in found.items():
        good = isinstance(value, list) and len(value) == 2 and all(type(x) in (int, float) and math.isfinite(x) and x >= 0 for x in value)
        if not good:
            raise ValueError(f"the times of {key!r} are {value!r}")
    return {key: (float(value[0]), float(value[1])) for key, value in found.items()}


# ------------------------------------------------------------------------------------------------------------- measuring
@dataclass(kw_only=True)
class Live:
    """Measures calls on a device, within a budget of seconds. workers: processes that will share this machine; on a CPU of fewer
    cores each of them is slower by that factor (`shared`). failed: call -> why it could not be measured; skipped: calls for
    which no time was left; disturbed: calls measured beside other work, which are slower than they need be; unsaved: why the file
    could not be written; runs: calls measured, not found in the file."""

    device: torch.device
    workers: int = 1
    budget_s: float = BUDGET_S
    folder: Path | None = None
    failed: dict[str, str] = field(default_factory=dict)
    disturbed: int = 0
    unsaved: str = ""
    skipped: set[str] = field(default_factory=set)
    spent_s: float = 0.0
    runs: int = 0
    _times: Times | None = None

    @property
    def threads(self) -> int:
        return CPU_THREADS if self.device.type == "cpu" else 1

    @property
    def shared(self) -> float:
        """How many times slower a worker computes because others share its cores."""
        return max(1.0, self.workers * self.threads / cores()) if self.device.type == "cpu" else 1.0

    @property
    def name(self) -> str:
        """The device, and under which conditions, as provenance states it."""
        if self.device.type != "cpu":
            return device_name(self.device)
        share = f", times {self.shared:g} for {self.workers} workers on {cores()} cores" if self.shared > 1 else ""
        return f"{device_name(self.device)} with {self.threads} thread{share}"

    @property
    def times(self) -> Times:
        if self._times is None:
            slug = re.sub(r"[^a-z0-9]+", "-", device_name(self.device).lower()).strip("-")
            self._times = Times((self.folder or cache_folder()) / f"{slug}.json")
        return self._times

    def key(self, call: Call) -> str:
        return f"{call} | {device_name(self.device)}, torch {torch.__version__}, {self.threads} threads"

    def notes(self) -> list[str]:
        """What a reader of the plan should know of the measurements."""
        found = [self.unsaved] if self.unsaved else []
        found += [f"not measured, estimated instead: {call}: {why}" for call, why in self.failed.items()]
        if self.disturbed:
            found.append(f"{self.disturbed} calls were measured while other processes used the cores: they hold for now, and are not kept")
        if self.skipped:
            found.append(f"{len(self.skipped)} calls of operators were not measured: the budget of {self.budget_s:g} s was spent")
        return found

    def measure(self, wanted: Mapping[Call, float]) -> dict[Call, tuple[float, float]]:
        """(forward, backward) seconds of one call on one worker, of those that matter. wanted: call -> estimated seconds of all
        its occurrences; what takes longest is measured first. Calls that are missing from the result were not measured."""
        found: dict[Call, tuple[float, float]] = {}
        total = sum(wanted.values())
        for call, estimate_s in sorted(wanted.items(), key=lambda x: -x[1]):
            if estimate_s < LEAST_SHARE * total or str(call) in self.failed:
                continue
            seconds = self.times.get(self.key(call)) or self._run(call)
            if seconds is not None:
                found[call] = (seconds[0] * self.shared, seconds[1] * self.shared)
        try:
            self.times.save()
        except OSError as error:
            self.unsaved = f"measured times are not kept for other plans: {error}"
        return found

    def _run(self, call: Call) -> tuple[float, float] | None:
        if self.spent_s >= self.budget_s:
            self.skipped.add(str(call))
            return None
        start, cpu_start = time.perf_counter(), time.thread_time()
        self.runs += 1
        try:
            with self._conditions():
                seconds = _timed(call, self.device, self.budget_s - self.spent_s)
        except REFUSALS as error:
            self.failed[str(call)] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a message'}"
            return None
        finally:
            elapsed_s = time.perf_counter() - start
            self.spent_s += elapsed_s
        disturbed = self.device.type == "cpu" and time.thread_time() - cpu_start < LEAST_CPU_SHARE * elapsed_s
        self.disturbed += disturbed
        self.times.add(self.key(call), seconds, keep=not disturbed)
        return seconds

    @contextmanager
    def _conditions(self) -> Iterator[None]:
        """As many threads as a worker has, gradients on, and random numbers that leave the user's alone."""
        threads = torch.get_num_threads()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(0)
            if self.device.type == "cpu":
                torch.set_num_threads(self.threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)


def _timed(call: Call, device: torch.device, remaining_s: float) -> tuple[float, float]:
    """(forward, backward) seconds of one call, each the median of REPEATS; fewer where so many do not fit into remaining_s."""
    op = Op(
        target=call.target, args=call.args, kwargs=call.kwargs, outputs=tuple(f"y{k}" for k in range(call.returns)), multi=call.multi,
        no_grad=call.no_grad,
    )  # fmt: skip
    operands = _operands(call.ins, device)
    env = {f"x{k}": t for k, t in enumerate(operands)}
    forward_s = _median_s(lambda: run_op(op, env, device), device, remaining_s / 2)
    leaves = [t for t in operands if t.requires_grad]
    roots = [t for t in run_op(op, env, device) if t is not None and t.requires_grad and t.grad_fn is not None]
    if not call.differentiable or not roots or not leaves:
        return forward_s, 0.0
    arriving = [torch.ones_like(t) for t in roots]
    backward = lambda: torch.autograd.grad(roots, leaves, arriving, retain_graph=True, allow_unused=True)  # noqa: E731
    return forward_s, _median_s(backward, device, remaining_s / 2)


def _operands(ins: Sequence[TensorType], device: torch.device) -> list[Tensor]:
    """Floats in [0.5, 1.5), so that logarithms and roots are defined; integers below every size, so that they are indices of
    whatever they index; masks that let everything through."""
    least = min((size for t in ins for size in t.shape if t.dtype.is_floating_point), default=2)
    made = []
    for t in ins:
        if t.dtype.is_floating_point or t.dtype.is_complex:
            made.append(torch.rand(t.shape, device=device).add_(0.5).to(t.dtype).requires_grad_(t.grad))
        elif t.dtype == torch.bool:
            made.append(torch.ones(t.shape, dtype=t.dtype, device=device))
        else:
            made.append(torch.randint(max(1, least), t.shape, device=device).to(t.dtype))
    return made


def _median_s(run: Callable[[], object], device: torch.device, remaining_s: float) -> float:
    """Seconds of one run, after a warm-up."""

    def sample(loops: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(loops):
            run()
        _wait(device)
        return (time.perf_counter() - start) / loops

    sample(1)
    once = sample(1)
    loops = min(MOST_LOOPS, max(1, math.ceil(SAMPLE_S / max(once, 1e-9))))
    repeats = max(1, min(REPEATS, int(remaining_s / max(once * loops, 1e-9))))
    return statistics.median(sample(loops) for _ in range(repeats))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
