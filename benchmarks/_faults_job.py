"""The training job that `benchmarks.faults` kills: its model, its plans, and what one of its ranks does from start to end.

Every rank is forked from a process that has imported everything, and ends as an interpreter ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.render import load
from autopar.run import Mesh, comm, record
from autopar.variants import tensors_of

__all__ = ["PHASES", "PLANS", "Job", "Kill", "emitted", "noting_cost", "reference", "run_rank"]

B, T, D, V = 8, 4, 8, 16
PHASES = {
    "forward": record.FORWARD, "backward": record.BACKWARD, "optimizer": record.OPTIMIZER, "saving": record.SAVING,
    "between": record.OUTSIDE,
}  # fmt: skip
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"dp": 2}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, "micro_batches": 2}),
    "dp2zero3": (2, {"dp": 2, "zero": 3}),
    "1": (1, {}),
}


class Model(nn.Module):
    """Two blocks behind an embedding that is tied to the head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = h + layer(h)
        return F.cross_entropy(self.head(h).view(-1, V), labels.view(-1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(step))
    return ids, labels


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def emitted(plan: str) -> tuple[str, dict[str, Tensor]]:
    """The source of a plan's module, and the constants of its graph."""
    gpus, pins = PLANS[plan]
    made: Any = autopar.compile(Model(), gpus=gpus, example_inputs=batch(0), cluster="cpu", pins=pins)
    if gpus == 1:
        return made.source, dict(made._tree.constants)
    return made.source, {name: t for name, t in tensors_of(made.compiled.captured).items() if name.startswith("constant_")}


def reference(steps: int) -> list[float]:
    """The losses of the original on one process."""
    model = Model()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """rank: which kills itself with SIGKILL, in the second step that it makes or the third; phase: in which; share: at which of its events
    there, from 0 (the first) to 1 (the last)."""

    rank: int
    phase: str
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """folder: of the checkpoint and the log; store: a new file; asynchronous: how it saves."""

    folder: Path
    store: Path
    plan: str
    steps: int
    asynchronous: bool
    kill: Kill | None


class _Killer:
    """Counts the calls of functions (of Python and of C) in a phase: of the first step to know how many there are, then of later steps to
    kill at one of them."""

    def __init__(self, kill: Kill) -> None:
        self._phase, self._share = PHASES[kill.phase], kill.share
        self._count = 0
        self._at: int | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        writes = threading.current_thread() is not threading.main_thread()  # an asynchronous save
        if (record.SAVING if writes else record.now()) == self._phase:
            self._count += 1
            if self._count == self._at:
                os.kill(os.getpid(), signal.SIGKILL)

    def next_step(self) -> None:
        if self._at is None:
            self._at = 1 + int(self._share * max(self._count - 1, 0))
            self._count = 0


def noting_cost(store: Path, rank: int) -> tuple[float, float]:
    """Seconds of processor time that noting a collective takes, and that the smallest collective on two ranks takes, without waiting."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    mesh = Mesh({"dp": 2})
    x = torch.ones(1)

    def timed(what: Callable[[], object], times: int) -> float:
        start = time.process_time()
        for _ in range(times):
            what()
        return (time.process_time() - start) / times

    def noted() -> None:
        record.note_line(record.line(1))
        record.entered(record.ALL_REDUCE, "dp")
        record.left()
        record.note_line(0)

    timed(lambda: comm.all_reduce(x, mesh.dp), 50)
    return min(timed(noted, 5000) for _ in range(5)), min(timed(lambda: comm.all_reduce(x, mesh.dp), 300) for _ in range(5))


def run_rank(job: Job, rank: int, made: tuple[str, dict[str, Tensor]]) -> None:
    """Load what is there, train on, and save after every step."""
    gpus, _ = PLANS[job.plan]
    if gpus > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(job.store), gpus), rank=rank, world_size=gpus)
    source, constants = made
    original = Model()
    tensors = {**dict(original.named_parameters()), **constants}
    model = autopar.ParallelModule(load(source), tensors, original=original)
    optimizer = optimizer_of(model)
    path = job.folder / "checkpoint"
    losses: list[float] = []
    if (path / "checkpoint.json").exists():  # the mark of a complete one
        losses = autopar.load(path, model, optimizer)["losses"]
    os.write(3, f"from {len(losses)}\n".encode())
    killer = _Killer(job.kill) if job.kill is not None and job.kill.rank == rank else None
    if killer is not None:
        threading.setprofile(killer)
        sys.setprofile(killer)
    saving = None
    for step in range(len(losses), job.steps):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if saving is not None:
            saving.result()
            os.write(3, f"saved {len(losses) - 1}\n".encode())
        saving = autopar.save(path, model, optimizer, losses=losses, async_save=job.asynchronous)
        if saving is None:
            os.write(3, f"saved {len(losses)}\n".encode())
        if killer is not None:
            killer.next_step()
    if saving is not None:
        saving.result()
        os.write(3, f"saved {len(losses)}\n".encode())
    sys.setprofile(None)
    os.write(3, ("losses " + " ".join(map(repr, losses)) + "\n").encode())
