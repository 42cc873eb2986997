"""Which of many models are verified under which plans: verified, refused with the reason, wrong, failed, timed out.

    python -m benchmarks zoo --targets FILE.py [--names A,B] [--plans auto,dp2tp2,tp4,pp2,zero3] [--json] [--results FILE.jsonl]
                             [--redo failed,timeout] [--limit-s 90] [--jobs 1] [--device cpu]

FILE.py (or package.module) names callables that return (model, example_inputs), by attributes or a module `__getattr__`; its
NAMES lists them if --names does not. Names may have wildcards (lm_*) where there is a NAMES. With --results each outcome is
appended to the file as it is found, and what stands there already is not done again, except for outcomes in --redo.
Exit code 1 if any result is wrong.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: workers share the cores

import argparse
import fnmatch
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from autopar.targets import TargetError, did_you_mean, load_object
from benchmarks._verifier import OUTCOMES, Outcome, PlanSpec, Verifier

PLANS = {
    "auto": PlanSpec(name="auto", gpus=4),
    "dp2tp2": PlanSpec(name="dp2tp2", gpus=4, pins={"dp": 2, "tp": 2}),
    "tp4": PlanSpec(name="tp4", gpus=4, pins={"tp": 4}),
    "pp2": PlanSpec(name="pp2", gpus=2, pins={"pp": 2}),
    "zero3": PlanSpec(name="zero3", gpus=4, pins={"dp": 4, "zero": 3}),
}


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    try:
        names, plans = _names(args.targets, args.names), _plans(args.plans)
    except TargetError as error:
        print(error, file=sys.stderr)
        return 2
    known = {(o.name, o.plan): o for o in _read(args.results) if o.outcome not in args.redo}
    work = [(n, left) for n in names if (left := [p for p in plans if (n, p.name) not in known])]
    outcomes = {key: o for key, o in known.items() if key[0] in names and key[1] in {p.name for p in plans}}
    out = sys.stderr if args.json else sys.stdout
    start = time.perf_counter()
    with Verifier(args.targets, limit_s=args.limit_s, jobs=args.jobs, device=args.device) as verifier:
        for count, found in enumerate(verifier.outcomes(work), 1):
            outcomes |= {(o.name, o.plan): o for o in found}
            _append(args.results, found)
            print(_line(found, count, len(work), time.perf_counter() - start), file=out, flush=True)
    summary = summarised(outcomes.values(), [p.name for p in plans])
    print(_table(summary), file=out)
    print(_reasons(outcomes.values()), file=out)
    print(json.dumps({"targets": args.targets, "models": len(names), "wall_s": round(time.perf_counter() - start, 1), **summary}))
    return 1 if any(o.outcome == "wrong" for o in outcomes.values()) else 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks zoo", description=__doc__.splitlines()[0])
    parser.add_argument("--targets", required=True, help="FILE.py or package.module")
    parser.add_argument("--names", default="", help="comma-separated; wildcards where the targets have NAMES")
    parser.add_argument("--plans", default=",".join(PLANS), help=f"comma-separated, of {', '.join(PLANS)}")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    parser.add_argument("--results", type=Path, help="JSON lines: outcomes are appended, and those in it are not done again")
    parser.add_argument("--redo", type=lambda s: tuple(filter(None, s.split(","))), default=(), help="outcomes in --results to do again")
    parser.add_argument("--limit-s", type=float, default=90.0, help="for a model's capture and training, and for each plan")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each with workers of its own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the workers, who may share GPUs")
    return parser.parse_args(argv)


def _names(place: str, wished: str) -> list[str]:
    listed = load_object(f"{place}:__dict__").get("NAMES")
    wishes = [w for w in wished.split(",") if w]
    if listed is None:
        if not wishes:
            raise TargetError(f"{place} has no NAMES that lists its targets; name them with --names A,B")
        return wishes
    names: dict[str, None] = {}
    for wish in wishes or ["*"]:
        matched = fnmatch.filter(listed, wish)
        if not matched:
            raise TargetError(f"{place} lists no {wish!r} in its NAMES{did_you_mean(wish, listed)}")
        names |= dict.fromkeys(matched)
    return list(names)


def _plans(wished: str) -> list[PlanSpec]:
    names = [w for w in wished.split(",") if w]
    unknown = [n for n in names if n not in PLANS]
    if unknown or not names:
        raise TargetError(f"there is no plan {', '.join(unknown)!r}; there is: {', '.join(PLANS)}")
    return [PLANS[n] for n in names]


# ------------------------------------------------------------------------------------------------------------ results
def _read(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    return [Outcome.of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _append(path: Path | None, found: Iterable[Outcome]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(o.record()) + "\n" for o in found)


def _line(found: Sequence[Outcome], count: int, total: int, elapsed_s: float) -> str:
    first = found[0]
    own = {k: v for k, v in first.seconds.items() if k in ("build", "capture", "reference")}
    times = " ".join(f"{k} {v:.1f}s" for k, v in own.items())
    head = f"[{count}/{total} {elapsed_s:.0f}s] {first.name}  {max(o.ops for o in found)} ops  {times}"
    if len({(o.outcome, o.reason) for o in found}) == 1 and first.outcome != "verified":
        return f"{head}\n    every plan: {_said(first)}"
    return "\n".join([head, *(f"    {o.plan:<7} {_said(o)}" for o in found)])


def _said(o: Outcome) -> str:
    times = " ".join(f"{k} {o.seconds[k]:.1f}s" for k in ("plan", "run") if k in o.seconds)
    if o.outcome == "verified":
        split = "" if o.split_share is None else f"  split {100 * o.split_share:.0f}%"
        return f"verified  worst {max(o.errors.values()):.0e}{split}  {times}"
    word = o.outcome.upper() if o.outcome == "wrong" else o.outcome
    return f"{word}  {o.reason}{f'  at {o.where}' if o.where and o.outcome == 'failed' else ''}  {times}"


def summarised(outcomes: Iterable[Outcome], plans: Sequence[str]) -> dict[str, object]:
    """Counts, shares and seconds by plan."""
    every = list(outcomes)
    by_plan = {}
    for plan in plans:
        own = [o for o in every if o.plan == plan]
        counts = Counter(o.outcome for o in own)
        split = [o.split_share for o in own if o.split_share is not None and o.outcome == "verified"]
        by_plan[plan] = {
            "models": len(own),
            **{k: counts[k] for k in OUTCOMES},
            "verified_share": round(counts["verified"] / len(own), 4) if own else 0.0,
            "median_split_share": round(statistics.median(split), 4) if split else None,
            "seconds": {k: round(sum(o.seconds.get(k, 0.0) for o in own), 1) for k in ("plan", "emit", "run")},
        }
    first = {o.name: o for o in reversed(every)}.values()
    seconds = {k: round(sum(o.seconds.get(k, 0.0) for o in first), 1) for k in ("build", "capture", "reference")}
    passes: Counter[str] = Counter()
    for o in every:
        passes.update(dict(o.planning_s))
    wrong = sorted(f"{o.name} {o.plan}: {o.reason}" for o in every if o.outcome == "wrong")
    return {"plans": by_plan, "seconds_by_model": seconds, "planning_s": {k: round(v, 1) for k, v in passes.items()}, "wrong": wrong}


def _table(summary: dict[str, object]) -> str:
    plans: dict[str, dict[str, object]] = summary["plans"]  # type: ignore[assignment]
    rows = [["plan", "models", *OUTCOMES, "verified", "tp split", "plan s", "run s"]]
    for name, s in plans.items():
        seconds: dict[str, float] = s["seconds"]  # type: ignore[assignment]
        split = "" if s["median_split_share"] is None else f"{100 * s['median_split_share']:.0f}%"  # type: ignore[operator]
        shares = f"{100 * s['verified_share']:.1f}%"  # type: ignore[operator]
        times = (f"{seconds['plan']:.0f}", f"{seconds['run']:.0f}")
        rows.append([name, str(s["models"]), *(str(s[k]) for k in OUTCOMES), shares, split, *times])
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows]
    lines.append("seconds by model: " + ", ".join(f"{k} {v}" for k, v in summary["seconds_by_model"].items()))  # type: ignore[attr-defined]
    return "\n" + "\n".join(lines)


def _reasons(outcomes: Iterable[Outcome]) -> str:
    """What is not verified, alike reasons together, wrong results first."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for o in outcomes:
        if o.outcome != "verified":
            alike = o.plan if o.outcome == "wrong" else re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", o.reason)[:160]
            groups.setdefault((o.outcome, alike), []).append(o)
    rank = {"wrong": 0, "failed": 1, "timeout": 2, "refused": 3}
    lines = []
    for (outcome, _), own in sorted(groups.items(), key=lambda g: (rank[g[0][0]], -len(g[1]))):
        first = own[0]
        lines.append(f"{outcome} x{len(own)}: {first.reason}{f'  at {first.where}' if first.where else ''}")
        lines.append("    " + ", ".join(sorted(f"{o.name}/{o.plan}" for o in own)[:12]) + (" ..." if len(own) > 12 else ""))
    return "\n".join(lines)
