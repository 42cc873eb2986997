"""Training scripts mixed at random, beside the same script on one process: what people do, in orders and with models that nobody chose.

    python -m benchmarks mixed [--seed 0] [--count 20] [--plans dp2,tp2,pp2,zero3] [--names mixed-17,...] [--limit-s 180]
                               [--results FILE.jsonl]

A script has a model of options that are drawn (its body, norms, what else it holds, what it returns), an optimizer, and six to eleven of
the things that people do in a loop, one after the other: steps, accumulation, clipping, evaluation, short batches, frozen layers,
checkpoints, averages, penalties, hooks. It is judged as `traps` judges its programs. Of what is wrong or fails, the shortest script that
still does so is looked for, and printed with its name, by which it can be run again. Exit code 1 if any is wrong or failed.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: workers share the cores

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks._mixed import mixed_program, script_named, shorter
from benchmarks._traps_run import OUTCOMES, PLANS, Judge, Outcome

BAD = ("wrong", "failed")


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    names = [n for n in args.names.split(",") if n] or [f"mixed-{args.seed + k}" for k in range(args.count)]
    plans = [p for p in args.plans.split(",") if p]
    if unknown := [n for n in names if mixed_program(n) is None] + [p for p in plans if p not in PLANS]:
        print(f"there is no script or plan {', '.join(unknown)}", file=sys.stderr)
        return 2
    start, outcomes = time.perf_counter(), list[Outcome]()
    with Judge(limit_s=args.limit_s) as judge:
        for at, name in enumerate(names, 1):
            found = list(judge.outcomes(name, plans))
            outcomes += found
            said = "  ".join(f"{o.plan} {o.outcome.upper() if o.outcome == 'wrong' else o.outcome}" for o in found)
            print(f"[{at}/{len(names)} {time.perf_counter() - start:.0f}s] {name}  {said}", flush=True)
            if args.results:
                with args.results.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(o.record()) + "\n" for o in found)
            for o in found:
                if o.outcome == "refused":
                    print(f"    refused under {o.plan}: {o.reason[:200]}", flush=True)
                elif o.outcome in BAD:
                    least = shortest(judge, o)
                    print(f"    {least.outcome} under {least.plan}: {least.name}: {script_named(least.name)}", flush=True)
                    print(f"        {least.reason[:600]} {least.where}", flush=True)
    total = Counter(o.outcome for o in outcomes)
    print(json.dumps({"scripts": len(names), "wall_s": round(time.perf_counter() - start, 1), **{k: total[k] for k in OUTCOMES}}))
    return 1 if any(total[k] for k in BAD) else 0


class Judges(Protocol):
    def outcomes(self, name: str, plans: Sequence[str], /) -> Iterator[Outcome]: ...


def shortest(judge: Judges, bad: Outcome) -> Outcome:
    """The same outcome of a script of which no single action can be left out."""
    going = True
    while going:
        going = False
        for name in shorter(bad.name):
            (found,) = judge.outcomes(name, (bad.plan,))
            if found.outcome == bad.outcome:
                bad, going = found, True
                break
    return bad


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks mixed", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first script; the others follow")
    parser.add_argument("--count", type=int, default=20, help="how many")
    parser.add_argument("--names", default="", help="comma-separated, as they were printed, in the place of seeds")
    parser.add_argument("--plans", default="dp2,tp2,pp2,zero3", help=f"comma-separated, of {', '.join(PLANS)}")
    parser.add_argument("--results", type=Path, help="JSON lines: outcomes are appended")
    parser.add_argument("--limit-s", type=float, default=180.0, help="for one run of a script, tried twice; ends workers that hang")
    return parser.parse_args(argv)
