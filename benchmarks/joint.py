"""Whether the planner finds the joint optimum of small problems: beside an enumerator of every plan of each.

    python -m benchmarks joint [--problems 200] [--first 0] [--json]

A problem is a random program, a machine, a number of GPUs and a limit of memory; many are tight, some have no plan. The plan's objective,
which is the step time of the fastest plan found, is compared with that of the best of all plans: meshes, micro-batches, rests, assignments
of the tensor axis, cuts, and modes of each piece. Equal is within 1e-6. Every problem in which the two differ is printed. Exit code 1 if
fewer than 95% are equal, or if a bound is wrong.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass

from benchmarks._joint import AMPLE, Answer, Problem, TooMany, draw, enumerated, planned

EQUAL = 1e-6
SHARE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """kind: 'equal', 'infeasible' (and both say so), 'slower', 'faster' (than what the enumerator tried), 'missed' (the planner says that
    there is none), 'wrong bound'."""

    problem: Problem
    limit_bytes: int
    kind: str
    ours: Answer
    best: Answer

    def line(self) -> str:
        p = self.problem
        ours, best = (f"{1e3 * a.step_s:.6f} ms {a.what}" if a.step_s is not None else "none" for a in (self.ours, self.best))
        return f"problem {p.seed} ({p.gpus} GPUs, {self.limit_bytes} bytes): {self.kind}\n    planner     {ours}\n    enumerator  {best}"


def compared(problem: Problem) -> Compared:
    store = problem.store()
    ample = problem.search(store, AMPLE).best()
    limit = round(problem.tightness * max(s.memory.upper_bytes for s in ample.stages))
    ours = planned(problem, store, limit)
    best = enumerated(problem, problem.store(folds=False), limit)
    return Compared(problem=problem, limit_bytes=limit, kind=_kind(ours, best), ours=ours, best=best)


def _kind(ours: Answer, best: Answer) -> str:
    if ours.step_s is None or best.step_s is None:
        return "infeasible" if ours.step_s == best.step_s else "missed" if ours.step_s is None else "faster"
    if ours.bound_s > best.step_s * (1 + EQUAL):
        return "wrong bound"
    if abs(ours.step_s - best.step_s) <= EQUAL * best.step_s:
        return "equal"
    return "slower" if ours.step_s > best.step_s else "faster"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks joint", description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first problem")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    if args.problems < 1:
        print("--problems must be positive", file=sys.stderr)
        return 2
    out = sys.stderr if args.json else sys.stdout
    start, counts, gaps, seed = time.perf_counter(), Counter[str](), list[float](), args.first
    while sum(counts.values()) < args.problems:
        seed += 1
        try:
            found = compared(draw(seed - 1))
        except TooMany:
            continue
        counts[found.kind] += 1
        if found.kind not in ("equal", "infeasible"):
            print(found.line(), file=out, flush=True)
            if found.ours.step_s is not None and found.best.step_s is not None:
                gaps.append(found.ours.step_s / found.best.step_s - 1)
    same = counts["equal"] + counts["infeasible"]
    record = {
        "problems": args.problems, **dict(sorted(counts.items())), "share": round(same / args.problems, 4),
        "worst_gap": round(max(gaps, default=0.0), 6), "wall_s": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    print(f"{same} of {args.problems} equal", file=out)
    print(json.dumps(record))
    return 0 if same >= SHARE * args.problems and not counts["wrong bound"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
