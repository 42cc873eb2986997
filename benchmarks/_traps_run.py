"""Runs a program of `traps` on one process and on workers, and judges what the workers found.

    reference   the program with the plain model, on one worker process
    found       the same program with autopar.compile under a plan's pins, on the plan's worker processes
    outcome     right: every rank found every number that the reference found; refused: an error that autopar raised on purpose;
                wrong: another number, and no error; failed: any other error, a crash or a hang
"""

from __future__ import annotations

import functools
import gc
import json
import linecache
import math
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, LaunchError, RenderError
from autopar.run import WorkerPool
from benchmarks._forked import begin
from benchmarks._mixed import mixed_program
from benchmarks._traps import PROGRAMS
from benchmarks._traps_kit import Compile, Program, Results

__all__ = ["OUTCOMES", "PLANS", "USUAL", "Judge", "Outcome", "PlanOf", "differences"]

OUTCOMES = ("right", "refused", "wrong", "failed")
TOLERANCE = 1e-9
FLOOR = 1e-3  # what is smaller is compared as if it were this large: a zero but for rounding
_OWN = str(Path(autopar.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent) + os.sep
_ON_PURPOSE = (ValueError, TypeError, RuntimeError, AttributeError, LookupError)
_REMEDIES = re.compile(
    r"\b(what to do|instead|use|call|pass|give|load|make|set|compile|remove|replace|register|assign|recreate|move|ask|wrap|inside|"
    r"before|full_\w+|outputs=|launch)\b"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOf:
    gpus: int
    pins: Mapping[str, Any]


PLANS = {
    "dp2": PlanOf(gpus=2, pins={"dp": 2}),
    "tp2": PlanOf(gpus=2, pins={"tp": 2}),
    "pp2": PlanOf(gpus=2, pins={"pp": 2}),
    "zero1": PlanOf(gpus=2, pins={"dp": 2, "zero": 1}),
    "zero3": PlanOf(gpus=2, pins={"dp": 2, "zero": 3}),
    "zero2": PlanOf(gpus=2, pins={"dp": 2, "zero": 2}),
    "hybrid3": PlanOf(gpus=4, pins={"dp": 4, "zero": 3, "shard": 2}),
    "dp2mb2": PlanOf(gpus=2, pins={"dp": 2, "micro_batches": 2}),
    "pp2mb2": PlanOf(gpus=2, pins={"pp": 2, "micro_batches": 2}),
    "dp2tp2": PlanOf(gpus=4, pins={"dp": 2, "tp": 2}),
    "dp2pp2": PlanOf(gpus=4, pins={"dp": 2, "pp": 2}),
    "tp2pp2": PlanOf(gpus=4, pins={"tp": 2, "pp": 2}),
    "dp2pp2zero3": PlanOf(gpus=4, pins={"dp": 2, "pp": 2, "zero": 3}),
    "one": PlanOf(gpus=1, pins={}),
    "one2": PlanOf(gpus=1, pins={"micro_batches": 2}),
}
USUAL = ("dp2", "tp2", "pp2", "zero1", "zero3")  # every program runs under these; under the others, those that name them


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One program under one plan. reason: the error's message, or what differs."""

    name: str
    kind: str
    plan: str
    outcome: str
    reason: str = ""
    where: str = ""

    def record(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v != ""}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Outcome:
        return Outcome(**{k: v for k, v in record.items() if k in Outcome.__slots__})


class Judge:
    """Keeps a pool of workers for each number of processes. Use as a context. limit_s: for each run of a program. It ends a pool that
    hangs; a run that did not end is tried a second time. device: where what is compiled runs. made_on: what programs
    give to torch.set_default_device; none do without it."""

    def __init__(self, *, limit_s: float, device: str = "cpu", made_on: str | None = None) -> None:
        self.limit_s, self.device, self.made_on = limit_s, device, made_on
        self._pools: dict[tuple[int, str], WorkerPool] = {}

    def __enter__(self) -> Judge:
        begin()
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def outcomes(self, name: str, plans: Sequence[str]) -> Iterator[Outcome]:
        """The outcome of a program under each plan."""
        program = _program(name)
        about = {"name": name, "kind": program.kind}
        try:
            (expected,) = self._run(1, name, None)
        except LaunchError as error:
            stopped = _stopped(error)
            reason = f"on one process, with the plain model: {stopped['kind']}: {stopped['text']}"
            yield from (Outcome(plan=plan, outcome="failed", reason=reason, where=stopped["where"], **about) for plan in plans)
            return
        for plan in plans:
            try:
                ranks = self._run(PLANS[plan].gpus, name, plan)
            except LaunchError as error:
                stopped = _stopped(error)
                outcome = "refused" if stopped["on_purpose"] else "failed"
                reason = f"{stopped['kind']}: {stopped['text']}"
                yield Outcome(plan=plan, outcome=outcome, reason=reason, where=stopped["where"] if outcome == "failed" else "", **about)
                continue
            wrong = [f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in differences(found, expected)]
            yield Outcome(plan=plan, outcome="wrong" if wrong else "right", reason="; ".join(wrong[:4]), **about)

    def not_right(self, name: str, plans: Sequence[str]) -> list[tuple[str, str, str]]:
        """The plans under which it is not right, the outcome of each, and why."""
        return [(found.plan, found.outcome, found.reason) for found in self.outcomes(name, plans) if found.outcome != "right"]

    def _run(self, gpus: int, name: str, plan: str | None) -> list[Any]:
        device = (self.made_on or "cpu") if plan is None else self.device
        if (gpus, device) not in self._pools:
            self._pools[gpus, device] = WorkerPool(gpus, device=device)
        pool = self._pools[gpus, device]
        try:
            return pool.run(run_program, name, plan, device, self.made_on, timeout_s=self.limit_s)
        except LaunchError as error:
            if "did not end within" not in str(error):
                raise
        return pool.run(run_program, name, plan, device, self.made_on, timeout_s=self.limit_s)  # what hangs does so twice


def _program(name: str) -> Program:
    return mixed_program(name) or PROGRAMS[name]


def differences(found: Results, expected: Results) -> list[str]:
    """What is not the same to TOLERANCE, by its path: in tensors relative to the largest entry, in whole numbers exactly. A tensor that the
    reference has in a lower dtype (transformers computes losses in float32) may be rounded to the next number."""
    ours, theirs = dict(_leaves(found)), dict(_leaves(expected))
    texts = [f"{path} is missing" for path in theirs if path not in ours] + [f"{path} is too much" for path in ours if path not in theirs]
    for path, b in theirs.items():
        if path in ours and (text := _difference(ours[path], b)):
            texts.append(f"{path} {text}")
    return texts


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
        if not value:
            yield path, "{}"
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
        yield f"len({path})", len(value)
    else:
        yield path, value


def _difference(a: Any, b: Any) -> str:
    if isinstance(b, Tensor):
        if not isinstance(a, Tensor):
            return f"is {type(a).__name__}, not a tensor"
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
        if not b.numel():
            return ""
        if b.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        if not b.dtype.is_floating_point:
            return "" if torch.equal(a, b) else f"differs in {int((a != b).sum())} of {b.numel()} entries"
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return "is not finite where it should be, or the reverse"
        allowed = max(TOLERANCE, 1.01 * torch.finfo(b.dtype).eps)
        a, b = torch.nan_to_num(a.double()), torch.nan_to_num(b.double())
        error = float((a - b).abs().max()) / max(float(b.abs().max()), FLOOR)
        return "" if error < allowed else f"is off by {error:.1e}"
    if type(a) is not type(b):
        return f"is {a!r}, not {b!r}"
    if isinstance(b, float) and not (math.isnan(a) and math.isnan(b)):
        error = abs(a - b) / max(abs(b), FLOOR) if a != b else 0.0
        return "" if error < TOLERANCE else f"is {a!r}, not {b!r}"
    return "" if a == b or b != b else f"is {a!r}, not {b!r}"


def _stopped(error: LaunchError) -> dict[str, Any]:
    """What a worker reported of its error; of a worker that could not report, that it failed."""
    found = re.search(r"Stopped: (\{.*\})$", str(error), re.MULTILINE)
    if found is not None:
        return dict(json.loads(found[1]))
    return {"kind": "hang or crash", "text": str(error).splitlines()[0], "where": "", "on_purpose": False}


# ------------------------------------------------------------------------------------------------------ in a worker
class Stopped(Exception):  # noqa: N818  (its text is the record of an error)
    """What stopped a program."""


def run_program(name: str, plan: str | None, device: str = "cpu", made_on: str | None = None) -> Any:
    """The program's results on this process, tensors whole, on the CPU and without gradients. plan: None for the plain model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    if made_on is not None:
        torch.set_default_device(made_on)
        _drawn_on(made_on)
    torch.manual_seed(1234)
    try:
        return _plain(_program(name).run(_same if plan is None else _compiled(plan, device)))
    except Exception as error:  # noqa: BLE001  (whatever a program ends with is its outcome)
        raise Stopped(json.dumps(_described(error))) from None
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
        gc.collect()


@functools.cache
def _drawn_on(device: str) -> None:
    """What programs draw from a generator of the CPU is brought to the device from then on."""
    for name in ("rand", "randn", "randint", "randperm"):
        plain = getattr(torch, name)

        def drawn(*args: Any, _plain: Callable[..., Tensor] = plain, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
            if generator is None or generator.device.type != "cpu" or "device" in kwargs:
                return _plain(*args, generator=generator, **kwargs)
            return _plain(*args, generator=generator, device="cpu", **kwargs).to(device)

        setattr(torch, name, drawn)


def _compiled(plan: str, device: str) -> Compile:
    cluster = "cpu" if device == "cpu" else "auto"
    return functools.partial(autopar.compile, gpus=PLANS[plan].gpus, cluster=cluster, pins=PLANS[plan].pins)


def _same(model: nn.Module, *, loss: Callable[[Any], Any] | None = None, **_: Any) -> nn.Module:
    """What compile is on one process: the model, followed by its loss if that is given apart."""
    if loss is not None:
        forward, apart = model.forward, loss
        model.forward = lambda *args, **kwargs: apart(forward(*args, **kwargs))
    return model


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        found = value.detach().cpu()
        return found.clone() if type(found) in (Tensor, nn.Parameter) else torch.tensor(found.tolist(), dtype=found.dtype)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _described(error: Exception) -> dict[str, Any]:
    """The error for the table. on_purpose: one of autopar's own errors, or one of Python's that a line of autopar raises and whose
    message says what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    raised_here = last.filename.startswith(_OWN) and linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise")
    own = isinstance(error, AutoparError) and not isinstance(error, (RenderError, LaunchError))
    text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
    plain = isinstance(error, (*_ON_PURPOSE, LaunchError)) and raised_here and _REMEDIES.search(text) is not None
    shown = [f for f in frames if f.filename.startswith((_OWN, "<autopar"))][-1:] + [last]
    where = " -> ".join(dict.fromkeys(f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.lineno} {f.name}" for f in shown))
    return {"kind": type(error).__name__, "text": text[:1200], "where": where, "on_purpose": own or plain}
