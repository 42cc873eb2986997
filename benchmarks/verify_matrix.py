"""Eleven real architectures under every kind of plan, in float64 on real processes: the table of what is verified.

    python -m benchmarks verify_matrix [--models A,B] [--plans C,D] [--limit-s 120] [--jobs 1] [--device cpu] [--results FILE.jsonl]
                                      [--json]

Exit code 1 if anything is wrong, failed or timed out; what a pin makes impossible is refused with the reason, which is no failure.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: workers share the cores

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._verifier import OUTCOMES, Outcome, PlanSpec, Verifier

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "mixtral", "mamba", "mlp", "scaled", "unet", "unruled")
PLANS = (
    PlanSpec(name="auto2", gpus=2),
    PlanSpec(name="auto3", gpus=3),
    PlanSpec(name="auto4", gpus=4),
    PlanSpec(name="dp4", gpus=4, pins={"dp": 4}),
    PlanSpec(name="tp4", gpus=4, pins={"tp": 4}),
    PlanSpec(name="pp4", gpus=4, pins={"pp": 4}),
    PlanSpec(name="dp2tp2", gpus=4, pins={"dp": 2, "tp": 2}),
    PlanSpec(name="tp2pp2", gpus=4, pins={"tp": 2, "pp": 2}),
    PlanSpec(name="dp2pp2m4", gpus=4, pins={"dp": 2, "pp": 2, "micro_batches": 4}),
    PlanSpec(name="interleaved", gpus=4, pins={"dp": 2, "pp": 2, "virtual_stages": 2, "micro_batches": 4}),
    PlanSpec(name="zero1", gpus=4, pins={"dp": 4, "zero": 1}),
    PlanSpec(name="zero2", gpus=4, pins={"dp": 4, "zero": 2}),
    PlanSpec(name="zero3", gpus=4, pins={"dp": 4, "zero": 3}),
    PlanSpec(name="hybrid3", gpus=4, pins={"dp": 4, "zero": 3, "shard": 2}),
    PlanSpec(name="recompute", gpus=4, pins={"dp": 4, "recompute": "full"}),
    PlanSpec(name="selective", gpus=4, pins={"dp": 4, "recompute": "selective"}),
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks verify_matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=_listed(MODELS), default=MODELS, help=", ".join(MODELS))
    names = tuple(p.name for p in PLANS)
    parser.add_argument("--plans", type=_listed(names), default=names, help=", ".join(names))
    parser.add_argument("--limit-s", type=float, default=120.0, help="for a model's capture and training, and for each plan")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each with workers of its own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the workers, who may share GPUs")
    parser.add_argument("--results", type=Path, help="every outcome is appended to this file, a JSON object a line")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    plans = [p for p in PLANS if p.name in args.plans]
    out = sys.stderr if args.json else sys.stdout
    start = time.perf_counter()
    outcomes: dict[tuple[str, str], Outcome] = {}
    with Verifier("benchmarks._models", limit_s=args.limit_s, jobs=args.jobs, device=args.device) as verifier:
        for found in verifier.outcomes([(name, plans) for name in args.models]):
            outcomes |= {(o.name, o.plan): o for o in found}
            if args.results is not None:
                with args.results.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(o.record()) + "\n" for o in found)
            print(f"{time.perf_counter() - start:6.0f} s  {found[0].name}: " + _counted(found), file=out, flush=True)
    print(table(outcomes, args.models, [p.name for p in plans]), file=out)
    counts = Counter(o.outcome for o in outcomes.values())
    worst = {k: max((o.errors.get(k, 0.0) for o in outcomes.values()), default=0.0) for k in ("loss", "gradient", "parameter")}
    rows = [{k: v for k, v in o.record().items() if k in ("name", "plan", "outcome", "reason", "mesh")} for o in outcomes.values()]
    wall_s = round(time.perf_counter() - start, 1)
    print(json.dumps({"wall_s": wall_s, **{k: counts[k] for k in OUTCOMES}, "worst_relative_error": worst, "results": rows}))
    return 1 if any(counts[k] for k in ("wrong", "failed", "timeout")) else 0


def _listed(known: Sequence[str]):  # type: ignore[no-untyped-def]
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        unknown = [n for n in names if n not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is none of {', '.join(known)}")
        return names

    return parse


def _counted(found: Sequence[Outcome]) -> str:
    counts = Counter(o.outcome for o in found)
    return ", ".join(f"{counts[k]} {k}" for k in OUTCOMES if counts[k])


def table(outcomes: Mapping[tuple[str, str], Outcome], models: Sequence[str], plans: Sequence[str]) -> str:
    """Models by plans: the worst relative error of what is verified, else the outcome; then each reason."""
    rows = [["", *plans], *([model, *(_cell(outcomes[model, plan]) for plan in plans)] for model in models)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rank = {k: n for n, k in enumerate(("wrong", "failed", "timeout", "refused"))}
    for o in sorted((o for o in outcomes.values() if o.outcome in rank), key=lambda o: rank[o.outcome]):
        lines.append(f"{o.outcome}: {o.name} {o.plan}: {o.reason}" + (f"  at {o.where}" if o.outcome == "failed" and o.where else ""))
    return "\n" + "\n".join(lines)


def _cell(o: Outcome) -> str:
    if o.outcome == "verified":
        return f"{max(o.errors.values()):.0e}"
    return o.outcome.upper() if o.outcome == "wrong" else o.outcome
