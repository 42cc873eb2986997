"""Ordinary programs around a model, beside the same program on one process: right, refused with a remedy, wrong, or failed.

    python -m benchmarks traps [--names A,B] [--kinds A,B] [--plans dp2,tp2,pp2,zero1,zero2,zero3,hybrid3,dp2mb2,pp2mb2,dp2tp2,
                               dp2pp2,tp2pp2,dp2pp2zero3,one,one2]
                               [--device cpu] [--default-device cpu] [--json] [--results FILE.jsonl] [--redo failed,wrong]
                               [--limit-s 180] [--list]

Each program is a small training script, written once as a function of `compile`. It runs with the plain model on one process, and
with autopar.compile on gloo workers under each plan, in float64. right: every rank found every number (losses, norms, weights,
buffers, outputs) equal to 1e-9; refused: autopar raised an error of its own that says what to do; wrong: another number without a
word; failed: a crash, a hang, any other error.

With --device cuda what is compiled runs on GPUs, which workers share where there are fewer. Programs make their tensors on the CPU all the
same (and fail where they mix them with what the model returns), unless --default-device cuda gives that to torch.set_default_device.

Names may have wildcards. With --results each outcome is appended to the file as it is found, and what stands there already is not done
again, except for outcomes in --redo. Exit code 1 if any is wrong or failed.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: workers share the cores

import argparse
import fnmatch
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from autopar.targets import did_you_mean
from benchmarks._traps import PROGRAMS
from benchmarks._traps_run import OUTCOMES, PLANS, USUAL, Judge, Outcome


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    try:
        names = _chosen(args.names, args.kinds)
        plans = _known(args.plans or ",".join(PLANS), tuple(PLANS), "plan")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{PROGRAMS[n].kind:<11} {n:<44} {_summary(n)}" for n in names))
        return 0
    usual = plans if args.plans else USUAL
    wanted = [(n, p) for n in names for p in plans if p in usual or p in PROGRAMS[n].plans]
    known = {(o.name, o.plan): o for o in _read(args.results) if o.outcome not in args.redo and (o.name, o.plan) in wanted}
    out = sys.stderr if args.json else sys.stdout
    start, outcomes = time.perf_counter(), dict(known)
    with Judge(limit_s=args.limit_s, device=args.device, made_on=args.default_device) as judge:
        for count, name in enumerate(names, 1):
            if not (left := [p for n, p in wanted if n == name and (n, p) not in known]):
                continue
            found = list(judge.outcomes(name, left))
            outcomes |= {(o.name, o.plan): o for o in found}
            _append(args.results, found)
            said = "  ".join(f"{o.plan} {o.outcome.upper() if o.outcome == 'wrong' else o.outcome}" for o in found)
            print(f"[{count}/{len(names)} {time.perf_counter() - start:.0f}s] {PROGRAMS[name].kind}: {name}  {said}", file=out, flush=True)
    found = [outcomes[key] for key in wanted]
    print(_table(found, plans), _listed(found), sep="\n\n", file=out)
    counts = {plan: dict(Counter(o.outcome for o in found if o.plan == plan)) for plan in plans}
    total = {outcome: sum(o.outcome == outcome for o in found) for outcome in OUTCOMES}
    bad = {kind: sorted(f"{o.name}/{o.plan}" for o in found if o.outcome == kind) for kind in ("wrong", "failed")}
    print(json.dumps({"programs": len(names), "wall_s": round(time.perf_counter() - start, 1), **total, "plans": counts, "names": bad}))
    return 1 if total["wrong"] or total["failed"] else 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks traps", description=__doc__.splitlines()[0])
    parser.add_argument("--names", default="", help="comma-separated programs; wildcards")
    parser.add_argument("--kinds", default="", help="comma-separated classes of programs")
    everywhere = f"by default {', '.join(USUAL)}, and for some programs others"
    parser.add_argument("--plans", default="", help=f"comma-separated, of {', '.join(PLANS)}; {everywhere}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where what is compiled runs")
    parser.add_argument("--default-device", choices=("cpu", "cuda"), help="have programs call torch.set_default_device")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    parser.add_argument("--results", type=Path, help="JSON lines: outcomes are appended, and those in it are not done again")
    parser.add_argument("--redo", type=lambda s: tuple(filter(None, s.split(","))), default=(), help="outcomes in --results to do again")
    parser.add_argument("--limit-s", type=float, default=180.0, help="for one run of a program, tried twice; ends workers that hang")
    parser.add_argument("--list", action="store_true", help="name the programs and run none")
    return parser.parse_args(argv)


def _summary(name: str) -> str:
    return (PROGRAMS[name].run.__doc__ or name.replace("_", " ")).splitlines()[0]


def _chosen(names: str, kinds: str) -> list[str]:
    wished = _known(kinds, tuple(dict.fromkeys(p.kind for p in PROGRAMS.values())), "class") if kinds else []
    chosen: dict[str, None] = {}
    for wish in [w for w in names.split(",") if w] or ["*"]:
        matched = fnmatch.filter(PROGRAMS, wish)
        if not matched:
            raise ValueError(f"there is no program {wish!r}{did_you_mean(wish, PROGRAMS)}")
        chosen |= dict.fromkeys(n for n in matched if not wished or PROGRAMS[n].kind in wished)
    return list(chosen)


def _known(text: str, known: Sequence[str], what: str) -> list[str]:
    wished = [w for w in text.split(",") if w]
    if unknown := [w for w in wished if w not in known]:
        raise ValueError(f"there is no {what} {', '.join(unknown)}; there is: {', '.join(known)}")
    return wished


def _read(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    return [Outcome.of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _append(path: Path | None, found: Iterable[Outcome]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(o.record()) + "\n" for o in found)


def _table(found: Sequence[Outcome], plans: Sequence[str]) -> str:
    """Classes by plans; in each cell how many are right, refused, wrong, failed."""
    kinds = list(dict.fromkeys(o.kind for o in found))
    rows = [["class", *plans, "all"]]
    for kind in [*kinds, ""]:
        own = [o for o in found if kind in ("", o.kind)]
        rows.append([kind or "all", *(_cell([o for o in own if o.plan == plan]) for plan in plans), _cell(own)])
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows]
    return "\n".join(["", f"{' / '.join(OUTCOMES)}:", *lines])


def _cell(own: Sequence[Outcome]) -> str:
    counts = Counter(o.outcome for o in own)
    return "/".join(str(counts[outcome] or "-") for outcome in OUTCOMES) if own else ""


def _listed(found: Iterable[Outcome]) -> str:
    """Everything that is not right, wrong results first, alike ones of a program together; and for what is refused whether the form
    with the remedy is right."""
    every = list(found)
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for o in every:
        if o.outcome != "right":
            alike = "" if o.outcome == "wrong" else re.sub(r"\d+", "#", o.reason)
            groups.setdefault((o.outcome, o.name, alike), []).append(o)
    rank = ("wrong", "failed", "refused")
    lines = []
    for (outcome, name, _), own in sorted(groups.items(), key=lambda g: rank.index(g[0][0])):
        where = f"\n    at {own[0].where}" if own[0].where else ""
        lines.append(f"{outcome} {name} ({', '.join(o.plan for o in own)}): {own[0].reason}{where}")
        remedies = [n for n, p in PROGRAMS.items() if p.remedy_of == name]
        for remedy in remedies if outcome == "refused" else ():
            theirs = Counter(o.outcome for o in every if o.name == remedy)
            lines.append(f"    the form that autopar recommends, {remedy}: {', '.join(f'{n} {k}' for k, n in theirs.items()) or 'not run'}")
    return "\n".join(lines) or "everything is right"
