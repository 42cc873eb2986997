"""CPU seconds, wall time and peak memory of planning large models on large clusters, split by pass; each model in a process of its own.

    python -m benchmarks planner [--model llama3-8b,unet] [--gpus 64] [--cluster dgx-h100] [--layers 2,12,96] [--limit-s 900] [--json]

What is counted is what planning a model takes that is there on the meta device: the interpreter and the imports, capture, the plan, and
writing it to a file. Importing transformers and building the model, and emitting the source, are listed beside it. CPU seconds are of all
threads of the process, and are what can be compared on a machine that others use too. Peak memory is the process's largest
resident set until the end of the pass. Models have their published sizes (`_planned.py`) and are never run. Nothing needs a GPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import autopar
from benchmarks._planned import DEFAULT, MODELS, build
from benchmarks._transformers import load_transformers

COUNTED = ("import", "capture", "plan", "save")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks planner", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=",".join(DEFAULT), help=f"comma-separated, of {', '.join(MODELS)}; or all")
    parser.add_argument("--gpus", type=int, help="by default as many as the model's row says")
    parser.add_argument("--cluster", help="a cluster of the catalogue, or FILE.toml; by default the row's")
    parser.add_argument("--layers", default="", help="comma-separated depths, for models that are stacks of equal layers")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for one model")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, which is fresh
    args = parser.parse_args(argv)
    names = list(MODELS) if args.model == "all" else [n for n in args.model.split(",") if n]
    unknown = [n for n in names if n not in MODELS]
    if unknown or not names:
        parser.error(f"--model: {', '.join(unknown) or 'nothing'} is none of {', '.join(MODELS)}")
    depths: list[int | None] = [int(n) for n in args.layers.split(",") if n] or [None]
    if depths != [None] and any(not MODELS[n].layers for n in names):
        parser.error(f"--layers: {', '.join(n for n in names if not MODELS[n].layers)} is no stack of equal layers")
    if args.here:
        print(json.dumps(measured(names[0], args.gpus or MODELS[names[0]].gpus, args.cluster or MODELS[names[0]].cluster, depths[0])))
        return 0
    out = sys.stderr if args.json else sys.stdout
    results = []
    for name in names:
        for layers in depths:
            found = _in_fresh_process(name, args.gpus or MODELS[name].gpus, args.cluster or MODELS[name].cluster, layers, args.limit_s)
            print(_text(found), file=out, flush=True)
            results.append(found)
    print(_table(results), file=out, flush=True)
    print(json.dumps({"models": results}))
    return 0 if all("error" not in r for r in results) else 1


def _in_fresh_process(name: str, gpus: int, cluster: str, layers: int | None, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "planner", "--here", "--model", name, "--gpus", str(gpus), "--cluster", cluster]
    command += [] if layers is None else ["--layers", str(layers)]
    title = name if layers is None else f"{name} of {layers} layers"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as Python is by itself
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"model": title, "error": f"more than {limit_s:g} s"}
    if done.returncode:
        return {"model": title, "error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"}
    return {**json.loads(done.stdout.splitlines()[-1]), "model": title, "process_s": round(time.perf_counter() - start, 2)}


# ----------------------------------------------------------------------------------------------- in the fresh process
class _Clock:
    """CPU and wall seconds and peak resident bytes of one pass after another; the first one's CPU seconds begin with the process."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.wall_s: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self._cpu, self._wall = 0.0, time.perf_counter()

    def lap(self, name: str) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self.cpu_s[name], self._cpu = round(cpu - self._cpu, 3), cpu
        self.wall_s[name], self._wall = round(wall - self._wall, 3), wall
        self.peak_bytes[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def total(self, seconds: Mapping[str, float]) -> float:
        return round(sum(seconds[name] for name in COUNTED if name in seconds), 2)


def measured(name: str, gpus: int, cluster: str, layers: int | None) -> dict[str, Any]:
    """Build, capture, plan, save and emit; seconds and peak bytes of each, the planner's own passes, and what was planned."""
    clock = _Clock()
    _ = autopar.plan  # which imports the compiler
    clock.lap("import")
    if isinstance(MODELS[name].kind, str):
        load_transformers()
    model, inputs = build(MODELS[name], layers)
    parameters = sum(p.numel() for p in model.parameters())
    clock.lap("build")

    from autopar.capture import capture
    from autopar.compiler import emit
    from autopar.errors import Infeasible
    from autopar.planner import Pins
    from autopar.planner.resources import choose_cluster, usable_bytes
    from autopar.planner.search import Search

    captured = capture(model, inputs)
    clock.lap("capture")
    described, memory_gib = choose_cluster(cluster), MODELS[name].memory_gib
    search = Search(
        program=captured.program, gpus=gpus, cluster=described, optimizer="adamw", precision="bf16", pins=Pins(),
        memory_limit_bytes=usable_bytes(described.gpu) if memory_gib is None else int(memory_gib * 2**30),
    )  # fmt: skip
    try:
        plan = search.best()
    except Infeasible as why:
        clock.lap("plan")
        said = [line for line in str(why).splitlines() if line.startswith("The binding constraint")] or str(why).splitlines()[:1]
        return {
            "model": name, "parameters": parameters, "operators": len(captured.program.ops), "gpus": gpus, "cluster": cluster,
            "memory_gib": memory_gib, "cpu_s": clock.cpu_s, "wall_s": clock.wall_s,
            "planning_s": {k: round(v, 3) for k, v in search.known.seconds.items()},
            "total_cpu_s": clock.total(clock.cpu_s), "total_wall_s": clock.total(clock.wall_s), "peak_bytes": clock.peak_bytes,
            "programs": search.known.programs, "binaries": search.known.binaries, "rows": search.known.rows, **search.said.counts(),
            "infeasible": said[0],
        }  # fmt: skip
    clock.lap("plan")
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
    clock.lap("save")
    source = emit(captured, plan)
    clock.lap("emit")
    return {
        "model": name, "parameters": parameters, "operators": len(captured.program.ops), "gpus": gpus, "cluster": cluster,
        "memory_gib": memory_gib, "cpu_s": clock.cpu_s, "wall_s": clock.wall_s,
        "planning_s": {k: round(v, 3) for k, v in search.known.seconds.items()},
        "total_cpu_s": clock.total(clock.cpu_s), "total_wall_s": clock.total(clock.wall_s),
        "peak_bytes": clock.peak_bytes, "mesh": plan.mesh, "micro_batches": plan.micro_batches, "zero": plan.zero,
        "programs": search.known.programs, "binaries": search.known.binaries, "rows": search.known.rows, **plan.searched,
        "objective_s": plan.objective_s, "bound_s": plan.bound_s, "gap": plan.gap,
        "memory_bytes": plan.memory_bytes, "source_lines": source.count("\n"),
    }  # fmt: skip


def _text(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"{found['model']}: {found['error']}"
    each = "" if found["memory_gib"] is None else f", of {found['memory_gib']:g} GiB each"
    head = (
        f"{found['model']}: {found['parameters'] / 1e9:.2f}e9 parameters, {found['operators']} operators, {found['gpus']} GPUs of "
        f"{found['cluster']}{each}\n  {_answer(found)}\n"
        f"  search: {found['choices']} choices, {found['explored']} priced, {found['cut']} cut into stages, {found['left']} left, "
        f"{found['unexplored']} out of budget; {found['programs']} integer programs of up to {found['binaries']} binaries and "
        f"{found['rows']} rows"
    )
    lines = [f"  {'':<16}{'CPU':>9}  {'wall':>9}  {'peak':>9}"]
    for name, cpu_s in found["cpu_s"].items():
        beside = "" if name in COUNTED else "  (beside it)"
        lines.append(f"  {name:<16}{cpu_s:9.2f} s{found['wall_s'][name]:9.2f} s{found['peak_bytes'][name] / 2**30:9.2f} GiB{beside}")
        if name == "plan":
            lines += [f"    {inner:<14}{s:9.2f} s" for inner, s in found["planning_s"].items()]
    peak = _peak(found) / 2**30
    lines.append(f"  {'in all':<16}{found['total_cpu_s']:9.2f} s{found['total_wall_s']:9.2f} s{peak:9.2f} GiB")
    return "\n".join([head, *lines])


def _answer(found: Mapping[str, Any]) -> str:
    if "infeasible" in found:
        return f"no plan: {found['infeasible']}"
    return (
        f"plan: {' '.join(f'{k}={v}' for k, v in found['mesh'].items())}, micro-batches {found['micro_batches']}, zero {found['zero']}, "
        f"objective {found['objective_s']:.4f} s, bound {found['bound_s']:.4f} s, gap {100 * found['gap']:.2f}%, "
        f"fullest stage {max(found['memory_bytes']) / 2**30:.1f} GiB"
    )


def _peak(found: Mapping[str, Any]) -> int:
    """Bytes until the last pass that is counted."""
    return int(found["peak_bytes"].get("save", found["peak_bytes"]["plan"]))


def _table(results: list[dict[str, Any]]) -> str:
    """One line a model."""
    head = f"{'model':<28}{'GPUs':>6}{'CPU s':>8}{'wall s':>8}{'import':>8}{'capture':>9}{'plan':>8}{'GiB':>7}{'objective':>12}{'gap':>8}"
    lines = ["", head]
    for r in results:
        if "error" in r:
            lines.append(f"{r['model']:<28}  {r['error'][:90]}")
            continue
        s = r["cpu_s"]
        lines.append(
            f"{r['model']:<28}{r['gpus']:>6}{r['total_cpu_s']:>8.1f}{r['total_wall_s']:>8.1f}{s['import']:>8.1f}{s['capture']:>9.1f}"
            f"{s['plan']:>8.1f}{_peak(r) / 2**30:>7.2f}"
            + ("  no plan" if "infeasible" in r else f"{r['objective_s']:>10.4f} s{100 * r['gap']:>7.2f}%")
        )
    return "\n".join(lines)
