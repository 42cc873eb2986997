"""Training as people do it, feature by plan: verified beside one process, refused with the reason, or wrong.

    python -m benchmarks training [--features A,B] [--plans dp2,tp2,pp2,zero1,zero3,...] [--results FILE.jsonl] [--redo failed,wrong]
                                  [--limit-s 300] [--json] [--list]

A feature is a row: mixed precision, checkpoints, data, what people do with parameters and optimizers, and the tools that they use.
Behind it are programs of `traps`, which run with the plain model on one process and with autopar.compile on gloo workers under each plan.
verified: every rank found every number of all of them, to 1e-9; refused: at least one raised an error that says what to do, and none is
wrong. A row whose package is not installed is left out by name. With --results each outcome is appended to the file as it is found, and
what stands there already is not done again. Exit code 1 if anything is wrong or failed.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: workers share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.targets import did_you_mean
from benchmarks._traps_run import PLANS, USUAL, Judge, Outcome
from benchmarks.traps import _append, _known, _listed, _read


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """programs: of `traps`. needs: packages that are not autopar's own."""

    group: str
    programs: tuple[str, ...]
    needs: tuple[str, ...] = ()


def _feature(group: str, *programs: str, needs: Sequence[str] = ()) -> Feature:
    return Feature(group=group, programs=programs, needs=tuple(needs))


FEATURES: Mapping[str, Feature] = {
    "autocast": _feature("precision", "autocast_around_the_call", "lower_precision_inside"),
    'precision="bf16"': _feature("precision", "computes_in_bf16", "reduces_in_bf16"),
    "GradScaler": _feature("precision", "grad_scaler"),
    "save and load": _feature("checkpoints", "saved_and_resumed", "saved_beside_training"),
    "state_dict": _feature("checkpoints", "full_state_dict_saved", "loaded_by_the_original_keys", "optimizer_resumed"),
    "parts of a batch": _feature("data", "local_parts_of_the_batch"),
    "last batch": _feature("data", "last_batch_is_short", "last_batch_is_odd", "evaluated_on_an_odd_batch"),
    "lengths that vary": _feature("data", "lengths_that_vary", "lengths_in_buckets"),
    "gradient accumulation": _feature("the loop", "accumulated_by_the_user", "two_batches_in_one_backward"),
    "scaled loss": _feature("the loop", "loss_scaled", "function_of_the_loss"),
    "clipping": _feature("the loop", "clipped_norm", "clipped_norm_by_the_module", "clipped_values"),
    "schedulers": _feature("the loop", "scheduled", "scheduled_by_the_gradient"),
    "groups by name": _feature("the loop", "groups_by_name", "groups_before_compile", "groups_by_the_kind_of_module"),
    "elementwise optimizers": _feature("the loop", "adamw", "adamw_foreach", "sgd_with_nesterov", "rprop"),
    "other optimizers": _feature("the loop", "adafactor", "muon_of_torch", "lamb", "shampoo", "lbfgs"),
    "frozen parameters": _feature("the loop", "frozen_before_compile", "frozen_midway", "frozen_but_the_head"),
    "averaged weights (EMA)": _feature("the loop", "averaged_model_of_a_copy", "averaged_model_exponential", "average_by_hand"),
    "average of a compiled one": _feature("the loop", "averaged_model"),
    "low-rank adapters": _feature("the loop", "low_rank_adapters"),
    "torch.compile of stages": _feature("the loop", "stages_compiled"),
    "torch.compile around": _feature("the loop", "compiled_by_torch", "step_compiled_by_torch"),
    "peft (LoRA)": _feature("tools", "adapters_of_peft", needs=("peft",)),
    "Hugging Face Trainer": _feature("tools", "trainer_of_hugging_face", "trainer_of_preferences", needs=("transformers", "accelerate")),
    "Accelerate": _feature("tools", "accelerated", needs=("accelerate",)),
    "Lightning": _feature("tools", "lightning_trainer", needs=("lightning",)),
}  # fmt: skip
WORDS = {"right": "verified", "refused": "refused", "wrong": "WRONG", "failed": "failed"}


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    try:
        plans = _known(args.plans or ",".join(USUAL), tuple(PLANS), "plan")
        wished = [w for w in args.features.split(",") if w] or list(FEATURES)
        for wish in wished:
            if wish not in FEATURES:
                raise ValueError(f"there is no feature {wish!r}{did_you_mean(wish, FEATURES)}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{FEATURES[name].group:<12} {name:<24} {', '.join(FEATURES[name].programs)}" for name in wished))
        return 0
    absent = {name: gone for name in wished if (gone := [n for n in FEATURES[name].needs if importlib.util.find_spec(n) is None])}
    rows = {name: FEATURES[name] for name in wished if name not in absent}
    out = sys.stderr if args.json else sys.stdout
    start = time.perf_counter()
    found = _outcomes(rows, plans, args, out)
    print(_table(rows, plans, found), _listed(found.values()), sep="\n\n", file=out)
    for name, gone in absent.items():
        print(f"left out: {name}, for want of {', '.join(gone)} (the extra tools)", file=out)
    cells = {name: {plan: _cell(rows[name], plan, found) for plan in plans} for name in rows}
    total = Counter(word for row in cells.values() for word in row.values())
    summary = {"features": len(rows), "left_out": sorted(absent), "wall_s": round(time.perf_counter() - start, 1)}
    print(json.dumps({**summary, **{word.lower(): total[word] for word in WORDS.values()}, "cells": cells}))
    return 1 if total["WRONG"] or total["failed"] else 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks training", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--features", default="", help="comma-separated rows of the table")
    parser.add_argument("--plans", default="", help=f"comma-separated, of {', '.join(PLANS)}; by default {', '.join(USUAL)}")
    parser.add_argument("--results", type=Path, help="JSON lines: outcomes are appended, and those in it are not done again")
    parser.add_argument("--redo", type=lambda s: tuple(filter(None, s.split(","))), default=(), help="outcomes in --results to do again")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one run of a program, tried twice; ends workers that hang")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    parser.add_argument("--list", action="store_true", help="name the features and their programs, and run none")
    return parser.parse_args(argv)


def _outcomes(
    rows: Mapping[str, Feature], plans: Sequence[str], args: argparse.Namespace, out: object
) -> dict[tuple[str, str], Outcome]:
    programs = list(dict.fromkeys(p for feature in rows.values() for p in feature.programs))
    wanted = {(name, plan) for name in programs for plan in plans}
    found = {(o.name, o.plan): o for o in _read(args.results) if o.outcome not in args.redo and (o.name, o.plan) in wanted}
    with Judge(limit_s=args.limit_s) as judge:
        for count, name in enumerate(programs, 1):
            if not (left := [plan for plan in plans if (name, plan) not in found]):
                continue
            new = list(judge.outcomes(name, left))
            found |= {(o.name, o.plan): o for o in new}
            _append(args.results, new)
            print(f"[{count}/{len(programs)}] {name}  {'  '.join(f'{o.plan} {WORDS[o.outcome]}' for o in new)}", file=out, flush=True)  # type: ignore[call-overload]
    return found


def _cell(feature: Feature, plan: str, found: Mapping[tuple[str, str], Outcome]) -> str:
    outcomes = {found[name, plan].outcome for name in feature.programs}
    return WORDS[next(word for word in ("wrong", "failed", "refused", "right") if word in outcomes)]


def _table(rows: Mapping[str, Feature], plans: Sequence[str], found: Mapping[tuple[str, str], Outcome]) -> str:
    lines, width = [], max(map(len, rows), default=0)
    for group in dict.fromkeys(feature.group for feature in rows.values()):
        lines.append(f"\n{group:<{width}}  " + "  ".join(f"{plan:>8}" for plan in plans))
        for name, feature in rows.items():
            if feature.group == group:
                lines.append(f"{name:<{width}}  " + "  ".join(f"{_cell(feature, plan, found):>8}" for plan in plans))
    return "\n".join(lines)
