"""Predicted against published step times and peak memory of real training runs.

    python -m benchmarks published [--data FILE.csv ...] [--limit N] [--forms FILE] [--cross-validate] [--json]

Each row is rebuilt (its dimensions as a module on the meta device), captured, and planned with every knob pinned as the row says; rows
of one model share the capture. Rows that cannot be rebuilt are counted with the reason; rows that their source flags as doubtful are
listed and not scored. --limit takes N rows spread evenly over each file. Relative errors: |predicted - measured| / measured; bias: the
median of predicted / measured - 1; inside: the share of measured figures within the predicted interval of 80%. kendall_tau: agreement in
the order of step times within a group (model, GPUs, global batch), the median over groups of at least three runs. fit: of runs that ran, of
those that did not, and of those of them that certainly ran out of memory, the shares that are predicted not to fit; and of those that are
predicted so, how many did not run. Where a source leaves one dimension out (the micro-batches, or how a solver divided the GPUs) it is the
planner's to choose; such rows are in no group. Without --data: the tables that the project carries.

--forms FILE keeps what was priced, and takes from it what is there, so that a long table can be priced in parts; it holds good as long as
neither the planner nor the cost models change. --cross-validate: constants of chips, of softwares and of memory are fitted anew to all
runs, to all but those of one source, and to all but those of one model's size, and the runs that were left out are predicted by them
(benchmarks/_cross.py says how; the step, order, memory and regret of each, and what is said to fit, are printed in and out of sample).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._cross import Priced
from benchmarks._cross_report import cross_validated
from benchmarks._fits import fit_table, fits
from benchmarks._forms import Form, figures_of, forms_of
from benchmarks._predict import Figures
from benchmarks._runs import DATA, Run, Skip, load
from benchmarks._scores import LEAST_GROUP, Score, score, tau

__all__ = ["main"]

WORST = 12


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks published", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", help="a CSV of runs; may be given more than once")
    parser.add_argument("--limit", type=int, help="so many rows of each file")
    parser.add_argument("--forms", type=Path, help="a file of what was priced, which is added to")
    parser.add_argument("--cross-validate", action="store_true", help="fit constants without a source, or a model, and predict it")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        print("--limit must be a positive number of rows", file=sys.stderr)
        return 2
    start = time.perf_counter()
    console = Console(stderr=args.json, width=160)
    try:
        runs, skipped, total = load(args.data or sorted(DATA.glob("*.csv")), args.limit)
    except (OSError, Skip, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    forms = list(_priced(runs, skipped, console, args.forms))
    if args.cross_validate:
        record = cross_validated(forms, console)
        print(json.dumps({**record, "wall_s": round(time.perf_counter() - start, 1)}))
        return 0
    priced = [figures_of(p.run, p.form) for p in forms]
    fit, found = fits(priced), [p for p in priced if not p.run.failed]
    skipped["did not run"] += len(priced) - len(found)
    doubtful = [p for p in found if p.run.flagged]
    scored = [p for p in found if not p.run.flagged]
    _report(scored, doubtful, skipped, console)
    console.print(fit_table(fit))
    taus = [t for group in _groups(scored).values() if len(group) >= LEAST_GROUP and (t := _tau_of(group)) is not None]
    times, memories = _times(scored), _memories(scored)
    record = {
        "rows": total, "scored": len(scored), "skipped": {k: v for k, v in skipped.most_common() if v}, "doubtful": len(doubtful),
        "time": times.record() if times else None, "memory": memories.record() if memories else None,
        "kendall_tau": statistics.median(taus) if taus else None, "groups": len(taus), "fit": fit,
        "wall_s": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    print(json.dumps(record))
    return 0


def _priced(runs: list[Run], skipped: Counter[str], console: Console, path: Path | None) -> Iterable[Priced]:
    """path: of forms that are there already, and are kept."""
    with console.status("pricing") as status:
        for run, form in forms_of(runs, path, lambda done, of: status.update(f"pricing {done} of {of}")):
            if isinstance(form, Form):
                yield Priced(run=run, form=form)
            else:
                skipped[form.reason] += 1


def _times(found: Iterable[Figures]) -> Score | None:
    ran = [(p, p.run.step_time_s) for p in found if p.run.step_time_s]
    return score([p.step_time_s / s - 1 for p, s in ran], [p.step_interval_s[0] <= s <= p.step_interval_s[1] for p, s in ran])


def _memories(found: Iterable[Figures]) -> Score | None:
    ran = [(p, p.run.memory_bytes) for p in found if p.run.memory_bytes]
    inside = [p.memory_interval_bytes[0] <= m <= p.memory_interval_bytes[1] for p, m in ran]
    return score([p.memory_bytes / m - 1 for p, m in ran], inside)


def _groups(found: Iterable[Figures]) -> dict[tuple[object, ...], list[Figures]]:
    groups: dict[tuple[object, ...], list[Figures]] = {}
    for p in found:
        if p.run.step_time_s and not p.run.chosen:
            groups.setdefault(p.run.group, []).append(p)
    return groups


def _tau_of(group: list[Figures]) -> float | None:
    return tau([(p.step_time_s, p.run.step_time_s or 0.0) for p in group])


# ------------------------------------------------------------------------------------------------------------- report
def _report(scored: list[Figures], doubtful: list[Figures], skipped: Counter[str], console: Console) -> None:
    views: dict[str, Callable[[Figures], object]] = {
        "source": lambda p: p.run.row["source"],
        "GPU": lambda p: p.run.row["gpu"],
        "model": lambda p: p.run.row["model"],
        "GPUs": lambda p: p.run.gpus,
        "tensor parallel": lambda p: p.run.pins.tp or "chosen",
        "stages": lambda p: p.run.pins.pp,
        "ZeRO": lambda p: "chosen" if p.run.pins.zero is None else p.run.pins.zero,
        "the planner's choice": lambda p: p.run.chosen or "nothing",
    }
    table = Table("", "", "runs", "time: median", "90%", "bias", "inside", "memory: median", "90%", "bias", "inside")
    for name, key in views.items():
        groups: dict[object, list[Figures]] = {}
        for p in scored:
            groups.setdefault(key(p), []).append(p)
        for label, group in sorted(groups.items(), key=lambda item: (isinstance(item[0], str), item[0])):
            table.add_row(name, str(label), str(len(group)), *_cells(_times(group)), *_cells(_memories(group)))
        table.add_section()
    table.add_row("all", "", str(len(scored)), *_cells(_times(scored)), *_cells(_memories(scored)))
    console.print(table)
    worst = sorted((p for p in scored if p.run.step_time_s), key=lambda p: -abs(p.step_time_s / (p.run.step_time_s or 1.0) - 1))[:WORST]
    _rows(f"the {len(worst)} worst of {len(scored)}", worst, console)
    if doubtful:
        _rows(f"{len(doubtful)} rows that their source flags, not scored; the first {min(WORST, len(doubtful))}", doubtful[:WORST], console)
    if skipped:
        table = Table("rows", "not rebuilt, because", title="")
        for reason, count in skipped.most_common():
            if count:
                table.add_row(str(count), reason)
        console.print(table)


def _cells(s: Score | None) -> tuple[str, str, str, str]:
    if s is None:
        return "-", "-", "-", "-"
    return f"{100 * s.median_ape:.1f}%", f"{100 * s.p90_ape:.1f}%", f"{100 * s.bias:+.1f}%", f"{100 * (s.inside or 0):.0f}%"


def _rows(title: str, found: Sequence[Figures], console: Console) -> None:
    table = Table("line", "model", "GPUs", "plan", "predicted s", "measured s", "predicted GiB", "measured GiB", "flag", title=title)
    for p in found:
        measured = f"{p.run.memory_bytes / 2**30:.1f}" if p.run.memory_bytes else "-"
        table.add_row(
            str(p.run.number), p.run.row["model"], str(p.run.gpus), p.run.parallelism, f"{p.step_time_s:.3f}",
            f"{p.run.step_time_s:.3f}" if p.run.step_time_s else "-", f"{p.memory_bytes / 2**30:.1f}", measured, p.run.flagged[:40],
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
