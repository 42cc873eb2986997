"""Many models under many plans: each model is built, captured and planned in a process of its own, forked from one that has
imported everything, and every plan runs on worker processes that stay up. A hang, a crash or a run out of memory costs its own
plan and nothing else.

    this process  --fork server-->  a process for the model: build, reference, plan, emit
         |  <-- what to run on n workers, progress, outcomes --
         +--> WorkerPool(n), kept for all models
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import pickle
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

from autopar.errors import AutoparError, CaptureError, Infeasible, LaunchError, PlanError, UnsupportedOp
from autopar.run import WorkerPool

__all__ = ["OUTCOMES", "Outcome", "PlanSpec", "Verifier"]

OUTCOMES = ("verified", "refused", "wrong", "failed", "timeout")
REFUSALS = (CaptureError, Infeasible, PlanError, UnsupportedOp)
_POLL_S = 0.25
_TARGETS = "AUTOPAR_BENCHMARK_TARGETS"
_OWN = str(Path(__file__).parent.parent / "autopar") + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSpec:
    """What is asked of the planner: its name in tables, the number of workers, the pins."""

    name: str
    gpus: int
    pins: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One model under one plan. outcome: one of OUTCOMES. reason: the first line of the error, or which errors were too large.
    where: the last frame in autopar. errors: worst relative errors. seconds: by pass; those of build, capture and reference are
    the model's and are repeated for every plan. split_share: of the FLOPs, by the tp axis."""

    name: str
    plan: str
    outcome: str
    reason: str = ""
    where: str = ""
    trace: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    micro_batches: int = 0
    zero: int = 0
    split_share: float | None = None
    ops: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    planning_s: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def record(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v not in ("", {}, (), [], None)}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Outcome:
        return Outcome(**{k: v for k, v in record.items() if k in Outcome.__slots__})


class Verifier:
    """Verifies targets of one file or module, `jobs` models at a time. Use as a context.

    limit_s: for building, capturing and training a model on one process, and again for each of its plans. memory_bytes: of the
    model's process; beyond it the process is ended and the outcome is 'failed'. device: of the workers; models run on the CPU before.
    """

    def __init__(
        self, place: str, *, limit_s: float, jobs: int = 1, memory_bytes: int = 6 * 2**30, steps: int = 3, device: str = "cpu"
    ) -> None:
        self.place, self.limit_s, self.jobs, self.memory_bytes, self.steps = place, limit_s, jobs, memory_bytes, steps
        self._device = device
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["autopar.run.launch", "benchmarks._preload"])
        self._local = threading.local()
        self._pools: list[WorkerPool] = []

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.close()

    def outcomes(self, work: Sequence[tuple[str, Sequence[PlanSpec]]]) -> Iterator[list[Outcome]]:
        """The outcomes of each (name, plans), in the order in which the models are done."""
        os.environ[_TARGETS] = "\n".join([self.place, *(name for name, _ in work)])  # the fork server has not started yet
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):  # models run on the CPU: CUDA works in no fork of what asked for it
            forkserver.ensure_running()
        with ThreadPoolExecutor(self.jobs) as executor:
            pending = deque(work)
            running: list[Any] = []
            while pending or running:
                while pending and len(running) < self.jobs:
                    running.append(executor.submit(self._model, *pending.popleft()))
                done = next((f for f in running if f.done()), None)
                if done is None:
                    time.sleep(_POLL_S / 5)
                    continue
                running.remove(done)
                yield done.result()

    # ------------------------------------------------------------------------------------------------- one model
    def _model(self, name: str, plans: Sequence[PlanSpec]) -> list[Outcome]:
        found: list[Outcome] = []
        while len(found) < len(plans):
            found += self._in_child(name, plans[len(found) :])
        return found

    def _in_child(self, name: str, plans: Sequence[PlanSpec]) -> list[Outcome]:
        """Outcomes of the first plans: of all, unless the child had to be ended at one."""
        ours, theirs = self._context.Pipe()
        child = self._context.Process(target=_child, args=(theirs, self.place, name, list(plans), self.steps), daemon=True)
        child.start()
        theirs.close()
        found: list[Outcome] = []
        step, deadline = "starting", time.monotonic() + self.limit_s + 60.0  # the first start imports everything
        try:
            while len(found) < len(plans):
                if ours.poll(_POLL_S):
                    kind, value = pickle.loads(ours.recv_bytes())
                    if kind == "begin":
                        step, deadline = value, time.monotonic() + self.limit_s
                    elif kind == "outcome":
                        found.append(value)
                    elif kind == "run":
                        ours.send_bytes(pickle.dumps(self._run(*value, timeout_s=deadline - time.monotonic())))
                    continue
                outcome, reason = "", ""
                if time.monotonic() > deadline:
                    outcome, reason = "timeout", f"more than {self.limit_s:g} s in {step}"
                elif (used := _resident_bytes(child.pid)) > self.memory_bytes:
                    outcome, reason = "failed", f"memory: {used / 2**30:.1f} GiB used in {step}"
                if outcome:
                    whole = step in ("starting", "build", "reference")
                    left = plans[len(found) :] if whole else plans[len(found) : len(found) + 1]
                    return found + [Outcome(name=name, plan=p.name, outcome=outcome, reason=reason) for p in left]
        except EOFError:
            child.join(5.0)
            left = plans[len(found) :][: 1 if step not in ("starting", "build", "reference") else None]
            reason = f"the process ended with exit code {child.exitcode} in {step}"
            found += [Outcome(name=name, plan=p.name, outcome="failed", reason=reason) for p in left]
        finally:
            if child.is_alive():
                child.join(0.5)
                child.kill()
            child.join()
            ours.close()
        return found

    def _run(self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], *, timeout_s: float) -> tuple[bool, Any, float]:
        """Run on this thread's pool of n workers. (True, results, s), or (False, LaunchError's message, s)."""
        pools: dict[int, WorkerPool] = self._local.__dict__.setdefault("pools", {})
        if n not in pools:
            pools[n] = WorkerPool(n, device=self._device)
            self._pools.append(pools[n])
            pools[n].run(os.getpid)  # starting them is not the plan's time
        start = time.perf_counter()
        try:
            return True, pools[n].run(fn, *args, timeout_s=max(timeout_s, 1.0)), time.perf_counter() - start
        except LaunchError as error:
            return False, str(error), time.perf_counter() - start


def _resident_bytes(pid: int | None) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has ended, or this is no Linux
        return 0


# ----------------------------------------------------------------------------------------------------- in the child
class _RemotePool:
    """The parent's worker pool, seen from the child."""

    def __init__(self, connection: Connection, n: int) -> None:
        self._connection, self.n, self.seconds = connection, n, 0.0

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        del timeout_s  # the parent knows how much is left
        _send(self._connection, "run", (self.n, fn, args))
        ok, value, self.seconds = pickle.loads(self._connection.recv_bytes())
        if not ok:
            raise LaunchError(value)
        return list(value)


def _send(connection: Connection, kind: str, value: Any) -> None:
    """As bytes: torch would teach Connection.send to pass tensors as shared memory, which is slower for small ones."""
    connection.send_bytes(pickle.dumps((kind, value)))


def target_object(place: str, name: str) -> Callable[[], Any]:
    """The callable `name` of a file or module."""
    from autopar.targets import load_object

    found: Callable[[], Any] = load_object(f"{place}:{name}")
    return found


def _child(connection: Connection, place: str, name: str, plans: list[PlanSpec], steps: int) -> None:
    import torch

    from autopar import verify

    torch.set_num_threads(1)
    seconds: dict[str, float] = {}
    try:
        _send(connection, "begin", "build")
        start = time.perf_counter()
        model, inputs, *loss = target_object(place, name)()
        seconds["build"] = time.perf_counter() - start
        _send(connection, "begin", "reference")
        start = time.perf_counter()
        ref = verify.reference(model, inputs, steps=steps, loss=loss[0] if loss else None)
        seconds["capture"] = ref.capture_s
        seconds["reference"] = time.perf_counter() - start - ref.capture_s
        if not all(map(math.isfinite, ref.losses)):
            raise ArithmeticError(f"the original model's losses are not finite: {ref.losses}")
    except Exception as error:  # noqa: BLE001  (whatever a model does is its outcome)
        for plan in plans:
            _send(connection, "outcome", _failure(name, plan.name, error, "reference", 0, seconds))
        return
    for plan in plans:
        _send(connection, "begin", plan.name)
        _send(connection, "outcome", _verified(connection, name, ref, plan, dict(seconds)))


def _verified(connection: Connection, name: str, ref: Any, spec: PlanSpec, seconds: dict[str, float]) -> Outcome:
    from autopar import verify
    from autopar.compiler import plan_of

    phase, start = "plan", time.perf_counter()
    ops = len(ref.captured.program.ops)
    facts: dict[str, Any] = {"ops": ops}
    pool = _RemotePool(connection, spec.gpus)
    try:
        plan = plan_of(ref.captured, spec.gpus, cluster="cpu", pins=spec.pins)
        seconds["plan"] = time.perf_counter() - start
        facts |= {
            "mesh": plan.mesh, "micro_batches": plan.micro_batches, "zero": plan.zero, "planning_s": plan.planning_s,
            "split_share": plan.tensor_split_share if plan.mesh["tp"] > 1 else None,
            "notes": [n for n in plan.notes if n.startswith("micro-batches")],
        }  # fmt: skip
        phase, start = "run", time.perf_counter()
        report = verify.verify_plan(ref, plan, pool)  # type: ignore[arg-type]
        seconds["run"] = pool.seconds
        seconds["emit"] = time.perf_counter() - start - pool.seconds
    except Exception as error:  # noqa: BLE001  (whatever it raises is the outcome)
        seconds[phase] = time.perf_counter() - start
        return _failure(name, spec.name, error, phase, ops, seconds, facts)
    errors = {k: e for k, e in report.by_kind().items() if k in ("loss", "gradient", "parameter", "buffer")}
    reason = "" if report.ok else _beyond(verify.with_rounding(report, ref))
    outcome = "verified" if report.ok else "wrong"
    return Outcome(name=name, plan=spec.name, outcome=outcome, reason=reason, errors=errors, seconds=seconds, **facts)


def _beyond(report: Any) -> str:
    """Which errors are too large, beside what rounding alone does to the original, and which copies differ."""
    own, moved = report.by_kind(), report.rounding.by_kind() if report.rounding else {}
    parts = []
    for kind in report.beyond:
        place = getattr(report, f"{kind}_at", "")
        alone = f", rounding alone {moved[kind]:.1e}" if kind in moved else ""
        parts.append(f"{kind} {own[kind]:.1e}{f' ({place}{alone})' if place or alone else ''}")
    return ", ".join([*parts, *([f"unequal copies of {', '.join(report.unequal[:3])}"] if not report.copies_equal else [])])


def _failure(
    name: str, plan: str, error: Exception, phase: str, ops: int, seconds: Mapping[str, float], facts: Mapping[str, Any] | None = None
) -> Outcome:
    text = str(error).strip()
    trace = "".join(traceback.format_exception(error))
    facts = dict(facts or {}) | {"ops": ops}
    kind = type(error).__name__
    if isinstance(error, REFUSALS) and phase != "run":
        outcome, reason = "refused", f"{kind}: {_one_line(text)}"
    elif isinstance(error, LaunchError) and "did not end within" in text:
        outcome, reason = "timeout", text.splitlines()[0]
    elif isinstance(error, LaunchError) and phase == "run":
        outcome, reason = "failed", text.splitlines()[0]
        trace = text
    else:
        outcome, reason = "failed", f"{kind}: {_one_line(text)}"
    return Outcome(
        name=name, plan=plan, outcome=outcome, reason=f"{phase}: {reason}" if outcome == "failed" else reason, where=_where(trace),
        trace=trace[-4000:] if outcome == "failed" or not isinstance(error, AutoparError) else "", seconds=seconds, **facts,
    )  # fmt: skip


def _one_line(text: str) -> str:
    """The first line; with the next, where it only announces it."""
    first, *rest = text.splitlines() or [""]
    return (f"{first} {rest[0].strip()}" if rest and first.rstrip().endswith(":") else first)[:400]


def _where(trace: str) -> str:
    """The last frame in autopar or an emitted module, and the very last one where it is elsewhere."""
    frames = [f for f in _FRAME.findall(trace) if "_verifier.py" not in f[0]]
    own = [f for f in frames if f[0].startswith(_OWN) or "autopar" in Path(f[0]).name or f[0].startswith("<")]
    return " -> ".join(dict.fromkeys(f"{Path(p).parent.name}/{Path(p).name}:{line} {fn}" for p, line, fn in (*own[-1:], *frames[-1:])))


def preload() -> None:
    """Import what every child needs. Runs once, in the fork server: builds one target of each kind (by the name up to the first
    underscore) for the imports of its library, and exports a layer for those of torch. No backward: autograd may start threads,
    which a fork does not copy."""
    import torch
    from torch import nn

    from autopar.capture import capture

    importlib.import_module("autopar.verify")
    torch.set_num_threads(1)
    with contextlib.suppress(AutoparError):
        capture(nn.Sequential(nn.Linear(2, 2)), (torch.zeros(2, 2),), loss=torch.sum, check=False)
    place, *names = os.environ[_TARGETS].split("\n")
    for name in {name.partition("_")[0]: name for name in names}.values():
        with contextlib.suppress(Exception):  # it is told where the target itself is verified
            target_object(place, name)()
