"""On a machine with GPUs: the tests marked gpu, autopar profile, and a one-GPU training beside plain torch; the figures with provenance.

    python -m benchmarks gpu [--out gpu.json] [--steps 20] [--hidden 1024] [--layers 8] [--length 512] [--batch 8]
                             [--precisions fp32,bf16] [--parts tests,profile,training] [--json]

training: a decoder for so many steps of AdamW, by plain torch and by autopar.compile on one GPU, from the same weights and batches. In
float32 the losses must agree to 1e-4; in bf16 both cast parameters before they are used, and must agree to 5e-2. Times are of the device
(CUDA events), their median without the first steps; the peak is torch.cuda.max_memory_allocated beside what the plan predicts.

--out takes all figures, what has run, on what, and by which command: the devices and their driver, the versions of torch, CUDA and NCCL,
the commit, the time. Exit code 0: all that was asked for ran and agreed; 1: not so; 3: there is no GPU, and nothing was run or written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import autopar
from autopar.files import write_file
from benchmarks._decoders import Decoder as Dimensions
from benchmarks._decoders import build
from benchmarks._plain import between_s, in_precision, now

ROOT = Path(__file__).parent.parent
PARTS = ("tests", "profile", "training")
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2}
NONE, WARM = 3, 5  # the exit code without a GPU; steps that are not timed


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    out = sys.stderr if args.json else sys.stdout
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        print(f"there is no GPU on this machine (torch {torch.__version__}, {built}): nothing was run, and nothing is written", file=out)
        print(json.dumps({"gpu": False, "torch": str(torch.__version__)}))
        return NONE
    parts = [part for part in PARTS if part in args.parts]
    found: dict[str, Any] = {"gpu": True, "provenance": provenance(argv)}
    for part, run in {"tests": _tests, "profile": _profile, "training": _training}.items():
        if part in parts:
            print(f"-- {part}", file=out, flush=True)
            found[part] = run(args)
            print(json.dumps(found[part], indent=1), file=out, flush=True)
    found["agreed"] = all(found[part]["agreed"] for part in parts)
    write_file(args.out, (json.dumps(found, indent=1) + "\n").encode())
    print(f"written to {args.out}", file=out)
    print(json.dumps({"gpu": True, "agreed": found["agreed"], "written": str(args.out)}))
    return 0 if found["agreed"] else 1


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the file of figures; the cluster file is put beside it")
    for name, value in (("steps", 20), ("hidden", 1024), ("layers", 8), ("length", 512), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precisions", type=_listed(TOLERANCES), default=tuple(TOLERANCES), help="comma-separated, of fp32, bf16")
    parser.add_argument("--parts", type=_listed(dict.fromkeys(PARTS)), default=PARTS, help="comma-separated, of tests, profile, training")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    return parser.parse_args(argv)


def _listed(known: Mapping[str, object]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(filter(None, text.split(",")))
        if unknown := [x for x in found if x not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there is: {', '.join(known)}")
        return found

    return parse


def provenance(argv: list[str]) -> dict[str, Any]:
    """On what the figures were measured, when, and by which command. What cannot be found out is None."""
    devices = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if devices and dist.is_nccl_available() else None
    return {
        "command": shlex.join(["python", "-m", "benchmarks", "gpu", *argv]),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _said("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "devices": [{"name": d.name, "memory_bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in devices],
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": nccl, "python": platform.python_version(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
    }  # fmt: skip


def _said(*command: str) -> str | None:
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return found.splitlines()[0] if found else None


def _run(*command: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    return {"command": shlex.join(command), "exit_code": done.returncode, "last_line": last[0] if last else "", "text": done.stdout}


def _tests(args: argparse.Namespace) -> dict[str, Any]:
    ran = _run(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests")
    return {**{k: ran[k] for k in ("command", "exit_code", "last_line")}, "agreed": ran["exit_code"] == 0}


def _profile(args: argparse.Namespace) -> dict[str, Any]:
    cluster = args.out.resolve().with_suffix(".toml")
    ran = _run(sys.executable, "-m", "autopar", "profile", "-o", str(cluster), "--json")
    figures = json.loads(ran["last_line"]) if ran["exit_code"] == 0 else None
    return {"command": ran["command"], "exit_code": ran["exit_code"], "figures": figures, "agreed": ran["exit_code"] == 0}


# ----------------------------------------------------------------------------------------------------------------- training
def _training(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"size": {k: getattr(args, k) for k in ("hidden", "layers", "length", "batch", "steps")}}
    for precision in args.precisions:
        plain, ours = (trained(args, precision, parallel=parallel) for parallel in (False, True))
        error = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(plain["losses"], ours["losses"], strict=True))
        found[precision] = {
            "torch": plain, "autopar": ours, "loss_error": error, "tolerance": TOLERANCES[precision],
            "step_ratio": ours["step_s"] / plain["step_s"], "peak_ratio": ours["peak_bytes"] / plain["peak_bytes"],
        }  # fmt: skip
    return {**found, "agreed": all(found[p]["loss_error"] <= TOLERANCES[p] for p in args.precisions)}


def trained(args: argparse.Namespace, precision: str, *, parallel: bool, device: str = "cuda") -> dict[str, Any]:
    """Losses, seconds of a step (median), bytes at the peak of one run; of autopar's also what the plan says of the last two."""
    torch.manual_seed(0)
    words = 32 * args.hidden // 4
    dimensions = Dimensions(
        layers=args.layers, hidden=args.hidden, heads=args.hidden // 64, kv_heads=args.hidden // 64, ffn=4 * args.hidden, vocabulary=words,
        length=args.length, tied=False, gated=False, norm="layer", bias=True, positions="learned",
    )  # fmt: skip
    model: Any = build(dimensions).to(device)
    tokens = torch.randint(words, (args.steps, args.batch, args.length), generator=torch.Generator().manual_seed(1))
    predicted: dict[str, Any] = {}
    if parallel:
        model = autopar.compile(model, 1, example_inputs=(tokens[0], tokens[0]), precision=precision)
        predicted = {"predicted_step_s": model.plan.step_time_s, "predicted_peak_bytes": model.plan.memory_bytes[0]}
    compute = model if parallel else in_precision(model, precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], [now(device)]
    for given in tokens:
        batch = given.to(device, non_blocking=True)
        loss = compute(batch, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        times.append(now(device))
    values = [float(x) for x in losses]  # which waits for the device
    steps = [between_s(a, b) for a, b in pairwise(times)]
    return {
        "losses": values, "step_s": statistics.median(steps[min(WARM, len(steps) - 1) :]),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 1, **predicted,
    }  # fmt: skip
