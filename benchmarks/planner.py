"""Wall time and peak memory of planning large models on large clusters, split by pass; each model in a process of its own.

    python -m benchmarks planner [--model llama3-8b,gpt2-xl] [--gpus 64] [--cluster dgx-h100] [--limit-s 900] [--json]

Models have transformers' published sizes, are built on the meta device in bfloat16, and are never run. Peak memory is the
process's largest resident set until the end of the pass. Nothing needs a GPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks._transformers import load_transformers

DEFAULT = ("gpt2-xl", "llama3-8b")
LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A class of transformers, its config's fields, and the global batch [samples, tokens]."""

    kind: str
    batch: int
    length: int
    config: Mapping[str, Any] = field(default_factory=dict)


# Sizes: the config.json that each model is published with.
MODELS = {
    "gpt2-xl": Model(kind="GPT2LMHeadModel", batch=64, length=1024, config={"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "llama3-8b": Model(
        kind="LlamaForCausalLM", batch=16, length=8192,
        config=LLAMA3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "llama3-70b": Model(
        kind="LlamaForCausalLM", batch=64, length=8192,
        config=LLAMA3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "mixtral-8x7b": Model(
        kind="MixtralForCausalLM", batch=64, length=4096,
        config={
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "max_position_embeddings": 32768,
        },
    ),
    "gpt2": Model(kind="GPT2LMHeadModel", batch=64, length=1024, config={"n_embd": 768, "n_layer": 12, "n_head": 12}),
    "gpt3-175b": Model(
        kind="GPT2LMHeadModel", batch=1536, length=2048,
        config={"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048, "vocab_size": 51200},
    ),
    "gpt-1t": Model(
        kind="GPT2LMHeadModel", batch=3072, length=2048,
        config={"n_embd": 25600, "n_layer": 128, "n_head": 160, "n_positions": 2048, "vocab_size": 51200},
    ),
    "t5-11b": Model(
        kind="T5ForConditionalGeneration", batch=64, length=512,
        config={"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128, "decoder_start_token_id": 0},
    ),
}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks planner", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=",".join(DEFAULT), help=f"comma-separated, of {', '.join(MODELS)}; or all")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--cluster", default="dgx-h100", help="a cluster of the catalogue, or FILE.toml")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for one model")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, which is fresh
    args = parser.parse_args(argv)
    names = list(MODELS) if args.model == "all" else [n for n in args.model.split(",") if n]
    unknown = [n for n in names if n not in MODELS]
    if unknown or not names:
        parser.error(f"--model: {', '.join(unknown) or 'nothing'} is none of {', '.join(MODELS)}")
    if args.here:
        print(json.dumps(measured(names[0], args.gpus, args.cluster)))
        return 0
    out = sys.stderr if args.json else sys.stdout
    results = []
    for name in names:
        found = _in_fresh_process(name, args.gpus, args.cluster, args.limit_s)
        print(_text(found), file=out, flush=True)
        results.append(found)
    print(json.dumps({"gpus": args.gpus, "cluster": args.cluster, "models": results}))
    return 0 if all("error" not in r for r in results) else 1


def _in_fresh_process(name: str, gpus: int, cluster: str, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "planner", "--here", "--model", name, "--gpus", str(gpus), "--cluster", cluster]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"model": name, "error": f"more than {limit_s:g} s"}
    if done.returncode:
        return {"model": name, "error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"}
    return {**json.loads(done.stdout.splitlines()[-1]), "process_s": round(time.perf_counter() - start, 2)}


# ----------------------------------------------------------------------------------------------- in the fresh process
class _Clock:
    """Seconds and peak resident bytes of one pass after another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._start = round(now - self._start, 3), now
        self.peak_bytes[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def build(model: Model) -> tuple[Any, dict[str, Any]]:
    """The model on the meta device in bfloat16, and its global batch of token ids and labels, int64 [batch, length]."""
    import torch

    cls = getattr(load_transformers(), model.kind)
    config = cls.config_class(**model.config, use_cache=False)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            built = cls(config)
            tokens = torch.zeros(model.batch, model.length, dtype=torch.int64)
    finally:
        torch.set_default_dtype(default)
    return built.train(), {"input_ids": tokens, "labels": tokens}


def measured(name: str, gpus: int, cluster: str) -> dict[str, Any]:
    """Build, capture and plan; seconds and peak bytes of each, the planner's own passes, and what was planned."""
    clock = _Clock()
    importlib.import_module("autopar.compiler")
    load_transformers()
    clock.lap("import")
    model, inputs = build(MODELS[name])
    parameters = sum(p.numel() for p in model.parameters())
    clock.lap("build")

    from autopar.capture import capture
    from autopar.compiler import emit
    from autopar.planner import Pins
    from autopar.planner.resources import choose_cluster, usable_bytes
    from autopar.planner.search import Search

    captured = capture(model, inputs)
    clock.lap("capture")
    described = choose_cluster(cluster, gpus)
    search = Search(
        program=captured.program, gpus=gpus, cluster=described, memory_limit_bytes=usable_bytes(described.gpu), optimizer="adamw",
        precision="bf16", pins=Pins(),
    )  # fmt: skip
    plan = search.best()
    clock.lap("plan")
    source = emit(captured, plan)
    clock.lap("emit")
    return {
        "model": name, "parameters": parameters, "operators": len(captured.program.ops), "gpus": gpus, "cluster": cluster,
        "seconds": clock.seconds, "planning_s": {k: round(v, 3) for k, v in search.known.seconds.items()},
        "total_s": round(sum(clock.seconds.values()), 2),
        "peak_bytes": clock.peak_bytes, "mesh": plan.mesh, "micro_batches": plan.micro_batches, "zero": plan.zero,
        "programs": search.known.programs, "binaries": search.known.binaries, "rows": search.known.rows, **plan.searched,
        "step_time_s": plan.step_time_s, "bound_s": plan.bound_s, "gap": plan.gap,
        "memory_bytes": plan.memory_bytes, "source_lines": source.count("\n"),
    }  # fmt: skip


def _text(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"{found['model']}: {found['error']}"
    head = (
        f"{found['model']}: {found['parameters'] / 1e9:.2f}e9 parameters, {found['operators']} operators, {found['gpus']} GPUs of "
        f"{found['cluster']}\n"
        f"  plan: {' '.join(f'{k}={v}' for k, v in found['mesh'].items())}, micro-batches {found['micro_batches']}, zero {found['zero']}, "
        f"step {found['step_time_s']:.3f} s, bound {found['bound_s']:.3f} s, gap {100 * found['gap']:.2f}%, "
        f"fullest stage {max(found['memory_bytes']) / 2**30:.1f} GiB\n"
        f"  search: {found['choices']} choices, {found['explored']} priced, {found['cut']} cut into stages, {found['left']} left; "
        f"{found['programs']} integer programs of up to {found['binaries']} binaries and {found['rows']} rows"
    )
    rows = [f"  {name:<16}{s:9.2f} s{found['peak_bytes'][name] / 2**30:9.2f} GiB" for name, s in found["seconds"].items()]
    inner = [f"    {name:<14}{s:9.2f} s" for name, s in found["planning_s"].items()]
    place = next((k for k, row in enumerate(rows) if row.startswith("  plan ")), len(rows) - 1) + 1
    total = f"  {'total':<16}{found['total_s']:9.2f} s{max(found['peak_bytes'].values()) / 2**30:9.2f} GiB"
    return "\n".join([head, *rows[:place], *inner, *rows[place:], total])
