"""autopar's runtime beside torch's own engines for the plans that both can run: DDP, FSDP2, torch.distributed.pipelining.

    python -m benchmarks engines [--plans ddp,fsdp2,pp_1f1b] [--hidden 128] [--layers 4] [--length 128] [--batch 32] [--json]

A GPT is trained by autopar and by the engine on as many local workers, in turns. Ratios are autopar's figure over the engine's: of the
time of a step (the least of all steps), and of what the fullest worker's memory grows by from before the model is built (a smaller one
has been trained then, so that code is not counted). Both must leave the weights that one process leaves; else the exit code is 1. On
a machine with fewer cores than workers only the ratios mean something.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: workers share the cores
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**16))  # glibc: what tensors free goes back to the system (mallopt(3))

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.measure.resident import forget_peak, give_back, now_bytes, peak_bytes
from autopar.run import WorkerPool
from benchmarks._decoders import Decoder, build

RATE = 0.1  # of SGD: one step must be seen in the weights
CHECKED, TIMED = 2, 4  # steps: compared with one process, which are not timed; timed
ROUNDS = 3  # the first of which checks, the others measure
TOLERANCE = 1e-5
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    hidden: int
    layers: int
    length: int
    batch: int
    vocabulary: int = 512

    def decoder(self) -> Decoder:
        return Decoder(
            layers=self.layers, hidden=self.hidden, heads=4, kv_heads=4, ffn=4 * self.hidden, vocabulary=self.vocabulary,
            length=self.length, tied=False, gated=False, norm="layer", bias=True, positions="learned",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan that an engine of torch can run. engine: the name of a function below; micro_batches: of a pipeline."""

    engine: str
    workers: int
    pins: Mapping[str, Any]

    @property
    def micro_batches(self) -> int:
        return int(self.pins.get("micro_batches", 1))


SMALL = Size(hidden=16, layers=2, length=8, batch=32)
CASES = {
    "ddp": Case(engine="ddp", workers=4, pins={"dp": 4, "zero": 0}),
    "fsdp2": Case(engine="fsdp2", workers=4, pins={"dp": 4, "zero": 3}),
    "pp_1f1b": Case(engine="1f1b", workers=2, pins={"pp": 2, "micro_batches": 16, "schedule": "1f1b"}),
    "pp_gpipe": Case(engine="gpipe", workers=2, pins={"pp": 2, "micro_batches": 16, "schedule": "gpipe"}),
    "pp_one": Case(engine="1f1b", workers=2, pins={"pp": 2, "micro_batches": 1, "schedule": "1f1b"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Of one engine: seconds of a step; bytes that the fullest worker grows by; the worst relative difference of a weight from those that
    one process leaves; why the engine refuses the plan, if it does."""

    step_s: float = math.inf
    memory_bytes: float = math.inf
    worst_error: float = 0.0
    refused: str = ""

    def figures(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        return {name: value if value != math.inf else None for name, value in asdict(self).items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks engines", description=__doc__.splitlines()[0])
    parser.add_argument("--plans", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    for name, default in (("hidden", 128), ("layers", 4), ("length", 128), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    names = [n for n in args.plans.split(",") if n]
    if unknown := [n for n in names if n not in CASES]:
        parser.error(f"--plans: {', '.join(unknown)} is none of {', '.join(CASES)}")
    if min(args.hidden, args.layers, args.length) < 1 or args.hidden % 4 or args.layers % 2 or args.batch < 1 or args.batch % 32:
        parser.error("--hidden divides by 4, --layers by 2, --batch by 32, and all are positive")
    size = Size(hidden=args.hidden, layers=args.layers, length=args.length, batch=args.batch)
    console = Console(stderr=args.json, width=120)
    found = {}
    for name in names:
        with console.status(name):
            found[name] = compared(CASES[name], size)
        console.print(_table({name: found[name]}))
    figures = {name: {who: m.figures() for who, m in pair.items()} for name, pair in found.items()}
    print(json.dumps({"size": asdict(size), "plans": figures}))
    return 1 if any(m.worst_error > TOLERANCE for pair in found.values() for m in pair.values()) else 0


def compared(case: Case, size: Size) -> dict[str, Measured]:
    """Both engines on one plan, in turns."""
    found: dict[str, Measured] = {}
    pins = autopar.Pins(**{"recompute": "none", **case.pins})
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("plan", size), ("small", SMALL)):
            plan = autopar.plan(model_of(model), case.workers, example_inputs=batch_of(model), pins=pins)
            plan.save(Path(folder) / f"{name}.json")
        for turn in range(ROUNDS):
            for who in ("autopar", case.engine):
                if who in found and found[who].refused:
                    continue
                with WorkerPool(case.workers) as pool:  # fresh processes: their memory begins with nothing
                    ranks = pool.run(train, who, case.micro_batches, size, folder, turn == 0)
                found[who] = _least(found.get(who), ranks)
    return found


def _least(before: Measured | None, ranks: list[Measured]) -> Measured:
    """The slowest, fullest and worst of the workers; the least of turns."""
    refused = next((m.refused for m in ranks if m.refused), "")
    before = before or Measured()
    return Measured(
        step_s=min(before.step_s, max(m.step_s for m in ranks)),
        memory_bytes=min(before.memory_bytes, max(m.memory_bytes for m in ranks)),
        worst_error=max(before.worst_error, *(m.worst_error for m in ranks)), refused=refused,
    )  # fmt: skip


def _table(found: Mapping[str, Mapping[str, Measured]]) -> Table:
    table = Table("plan", "engine", "step", "memory", "worst error", "step, autopar / engine", "memory, autopar / engine")
    for name, pair in found.items():
        ours, theirs = pair.values()
        for who, m in pair.items():
            cells = (f"{1e3 * m.step_s:.1f} ms", f"{m.memory_bytes / 2**20:.0f} MiB", f"{m.worst_error:.1e}")
            cells = (m.refused, "", "") if m.refused else cells
            last = who != "autopar" and not m.refused
            ratios = (f"{ours.step_s / theirs.step_s:.2f}", f"{ours.memory_bytes / theirs.memory_bytes:.2f}") if last else ("", "")
            table.add_row(name if who == "autopar" else "", who, *cells, *ratios)
    return table


# ------------------------------------------------------------------------------------------------------------ on a worker
def model_of(size: Size) -> nn.Module:
    torch.manual_seed(SEED)
    return build(size.decoder())


def batch_of(size: Size) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(size.vocabulary, (size.batch, size.length), generator=generator)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


@dataclass(frozen=True, slots=True)
class Trained:
    """What an engine makes of the model. step: one training step; weights: those of all workers by name, on rank 0."""

    step: Callable[[], None]
    weights: Callable[[], dict[str, Tensor]]


def train(who: str, micro_batches: int, size: Size, folder: str, checked: bool) -> Measured:
    """Some steps of one engine on this worker: checked against one process, or timed."""
    try:
        ENGINES[who](SMALL, micro_batches, f"{folder}/small.json").step()  # loads its code
    except ValueError as error:
        return Measured(refused=str(error))
    give_back()
    before = now_bytes()
    engine = ENGINES[who](size, micro_batches, f"{folder}/plan.json")
    for _ in range(CHECKED):
        engine.step()
    if checked:
        weights = engine.weights()
        expected = _alone(size) if dist.get_rank() == 0 else {}
        return Measured(worst_error=max((_difference(weights[name], want) for name, want in expected.items()), default=0.0))
    give_back()  # what it took to plan and to build
    forget_peak()
    times = []
    for _ in range(TIMED):
        dist.barrier()
        start = time.perf_counter()
        engine.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    peak = peak_bytes()
    memory = math.inf if peak is None or before is None else float(peak - before)
    return Measured(step_s=min(times), memory_bytes=memory)


def _alone(size: Size) -> dict[str, Tensor]:
    model = model_of(size)
    step = _stepper(model, batch_of(size))
    for _ in range(CHECKED):
        step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest weight; infinite where either has no number."""
    difference = float((found - expected).abs().max() / expected.abs().max())
    return difference if math.isfinite(difference) else math.inf


def _stepper(model: nn.Module, inputs: Mapping[str, Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step() -> None:
        model(**inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _own(size: Size, micro_batches: int, plan_file: str) -> Trained:
    batch = batch_of(size)
    model = autopar.compile(model_of(size), example_inputs=batch, plan=plan_file)
    return Trained(_stepper(model, batch), model.full_state_dict)


def _part(size: Size) -> dict[str, Tensor]:
    """This worker's samples."""
    return {name: value.chunk(dist.get_world_size())[dist.get_rank()].contiguous() for name, value in batch_of(size).items()}


def _ddp(size: Size, micro_batches: int, plan_file: str) -> Trained:
    model = DistributedDataParallel(model_of(size))
    return Trained(_stepper(model, _part(size)), lambda: dict(model.module.state_dict()))


def _fsdp2(size: Size, micro_batches: int, plan_file: str) -> Trained:
    model = model_of(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    whole = StateDictOptions(full_state_dict=True)
    return Trained(_stepper(model, _part(size)), lambda: cast("dict[str, Tensor]", get_model_state_dict(model, options=whole)))


class _Half(nn.Module):
    """The first or the last half of the layers, with what comes before or after them."""

    def __init__(self, model: nn.Module, last: bool) -> None:
        super().__init__()
        layers = list(model.get_submodule("layers").named_children())
        half = len(layers) // 2
        self.tokens = None if last else model.get_submodule("tokens")
        self.positions = None if last else model.get_submodule("positions")
        self.layers = nn.ModuleDict(dict(layers[half:] if last else layers[:half]))
        self.norm = model.get_submodule("norm") if last else None
        self.head = model.get_submodule("head") if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x, None)
        return self.head(self.norm(x)).float() if self.norm is not None and self.head is not None else x


def _pipelined(schedule: type[Schedule1F1B] | type[ScheduleGPipe]) -> Callable[[Size, int, str], Trained]:
    def made(size: Size, micro_batches: int, plan_file: str) -> Trained:
        rank, stages = dist.get_rank(), dist.get_world_size()
        half = _Half(model_of(size), last=rank == stages - 1)
        stage = PipelineStage(half, rank, stages, torch.device("cpu"))
        runner = schedule(stage, micro_batches, loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        optimizer, batch = torch.optim.SGD(half.parameters(), RATE), batch_of(size)

        def step() -> None:
            given = (batch["ids"],) if rank == 0 else ()
            runner.step(*given, target=batch["labels"] if rank == stages - 1 else None, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()

        def weights() -> dict[str, Tensor]:
            parts: list[dict[str, Tensor] | None] = [None] * stages
            dist.all_gather_object(parts, dict(half.state_dict()))
            return {name: value for part in parts if part is not None for name, value in part.items()}

        return Trained(step, weights)

    return made


ENGINES: dict[str, Callable[[Size, int, str], Trained]] = {
    "autopar": _own, "ddp": _ddp, "fsdp2": _fsdp2, "1f1b": _pipelined(Schedule1F1B), "gpipe": _pipelined(ScheduleGPipe),
}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
