"""What torch.compile of the emitted stages gains: the time of a step with it over the time without, in one run.

    python -m benchmarks compiled [--backend inductor] [--plans one,dp2,tp2,pp2,recompute] [--hidden 128] [--layers 4] [--length 128]
                                  [--batch 8] [--rounds 5] [--json]

A decoder is trained by two modules of the same plan, one compiled and one not, whose steps (forward and backward) take turns on the same
workers. Times are of the processor, of all threads of the slowest rank, and the ratio is that of their medians: below 1 the compiled one is
faster. Before it the losses of both are compared: exit code 1 if they differ by more than rounding. The first step of the compiled module,
in which everything is compiled, is given apart.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: workers share the cores

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

import autopar
from autopar.run import WorkerPool
from benchmarks._decoders import Decoder, build

PLANS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {"dp": 2}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, "micro_batches": 2}),
    "recompute": (1, {"recompute": "full"}),
}
TOLERANCE = 1e-5


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compiled", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--plans", default=",".join(PLANS))
    for name, value in (("hidden", 128), ("layers", 4), ("length", 128), ("batch", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    plans = [p for p in args.plans.split(",") if p]
    if unknown := [p for p in plans if p not in PLANS]:
        print(f"there is no plan {', '.join(unknown)}; there is: {', '.join(PLANS)}", file=sys.stderr)
        return 2
    out = sys.stderr if args.json else sys.stdout
    size = {"hidden": args.hidden, "layers": args.layers, "length": args.length, "batch": args.batch}
    print(f"{'plan':<10} {'eager':>10} {'compiled':>10} {'ratio':>7} {'first step':>11}", file=out)
    found: dict[str, dict[str, float]] = {}
    for plan in plans:
        gpus, pins = PLANS[plan]
        with WorkerPool(gpus, backend="gloo", children=True) as pool:
            ranks = pool.run(measured, size, gpus, dict(pins), args.backend, args.rounds)
        eager, fast, first, error = (max(column) for column in zip(*ranks, strict=True))
        found[plan] = {"eager_s": eager, "compiled_s": fast, "ratio": round(fast / eager, 3), "first_step_s": first, "error": error}
        print(f"{plan:<10} {eager * 1e3:>7.0f} ms {fast * 1e3:>7.0f} ms {fast / eager:>7.2f} {first:>9.1f} s", file=out, flush=True)
    print(json.dumps({"backend": args.backend, **size, "plans": found}))
    return 1 if any(row["error"] > TOLERANCE for row in found.values()) else 0


def measured(size: Mapping[str, int], gpus: int, pins: dict[str, Any], backend: str, rounds: int) -> tuple[float, float, float, float]:
    """CPU seconds of a step without and with, of the first step with, and how far the losses are apart (relative). Of this rank."""
    inputs, modules = None, []
    for compiles in (False, True):
        model, inputs = decoder(**size)
        more = {"compile_stages": backend} if compiles else {}
        modules.append(autopar.compile(model, gpus, example_inputs=inputs, cluster="cpu", pins=pins, **more))
    eager, fast = modules
    begin = time.process_time()
    losses = [_step(fast, inputs)]
    first = time.process_time() - begin
    losses.append(_step(eager, inputs))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for own, module in zip(times, modules, strict=True):
            begin = time.process_time()
            _step(module, inputs)
            own.append(time.process_time() - begin)
    error = abs(losses[0] - losses[1]) / abs(losses[1])
    return statistics.median(times[0]), statistics.median(times[1]), first, error


def decoder(*, hidden: int, layers: int, length: int, batch: int) -> tuple[Any, Any]:
    """A model with the same weights each time, and its batch."""
    torch.manual_seed(0)
    heads = max(1, hidden // 32)
    form = Decoder(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=3 * hidden, vocabulary=512, length=length, tied=True, gated=True,
        norm="rms", bias=False, positions="rotary",
    )  # fmt: skip
    ids = torch.randint(512, (batch, length), generator=torch.Generator().manual_seed(1))
    return build(form), (ids, ids.roll(-1, 1))


def _step(module: Any, inputs: Any) -> float:
    loss = module(*inputs)
    loss.backward()
    module.zero_grad()
    return float(loss.detach())
