"""The table of `published --cross-validate`: each source, and each model of a source, by constants that never saw it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from autopar.planner.plan import MemoryPlan
from benchmarks._cross import Constants, Priced, fitted, memory_terms, out_of_sample, steps_s
from benchmarks._fits import fit_table, fits
from benchmarks._forms import figures_of
from benchmarks._predict import Figures
from benchmarks._scores import LEAST_GROUP, score, tau
from benchmarks.regret import chosen, groups_of, regret_of

__all__ = ["cross_validated"]

SLOW = "implausibly slow"  # how a table flags runs under 1% of the peak
Figure = dict[str, float | int | None]


def cross_validated(found: Sequence[Priced], console: Console) -> dict[str, Any]:
    with console.status("fitting"):
        whole = fitted(found)
        everything = _figures(found, whole)
        sources, sizes, without = {}, {}, list[Figures]()
        for source in sorted({p.source for p in found}):
            mine = [p for p in found if p.source == source]
            constants = out_of_sample(found, mine, whole)
            left_out = list(_figures(mine, constants).values())
            without += left_out
            sources[source] = {"in": _scores([everything[id(p)] for p in mine]), "out": _scores(left_out)}
            models = sorted({p.run.row["model"] for p in mine})
            apart = list[Figures]()
            for model in models if len(models) > 1 else []:
                those = [p for p in mine if p.run.row["model"] == model]
                apart += _figures(those, out_of_sample(found, those, whole, few=True)).values()
            if apart:
                sizes[source] = {"models": len(models), "in": sources[source]["in"], "out": _scores(apart)}
    _table("without a source", sources, console)
    _table("without a model's size", sizes, console)
    fit = {"in": fits(everything.values()), "out": fits(without)}
    console.print(fit_table(fit["in"], "does it fit? In sample"), fit_table(fit["out"], "does it fit? Without the source"))
    _constants(whole, console)
    return {
        "without_source": sources, "without_size": sizes, "fit": fit, "chips": whole.chips, "software": whole.software,
        "slack": whole.slack,
    }  # fmt: skip


def _figures(found: Sequence[Priced], constants: Constants) -> dict[int, Figures]:
    predicted = {}
    without = steps_s(found, constants, hardware_alone=True)
    for p, step_s, plain_s in zip(found, steps_s(found, constants), without, strict=True):
        spread = constants.spread(p, step_s - plain_s, step_s)
        shown, fullest = (msgspec.convert(memory_terms(p, constants, which), MemoryPlan) for which in ("memory", "fullest"))
        predicted[id(p)] = figures_of(p.run, p.form, step_s, shown, fullest, spread)
    return predicted


def _scores(found: Sequence[Figures]) -> dict[str, Figure]:
    """plain: of the runs that their source does not doubt; with_slow: with those under 1% of the peak."""
    slow = [f for f in found if SLOW in f.run.flagged]
    plain = [f for f in found if not f.run.flagged]
    scores = {"plain": _score(plain, found)}
    return {**scores, "with_slow": _score([*plain, *slow], [])} if slow else scores


def _score(scored: Sequence[Figures], found: Sequence[Figures]) -> Figure:
    """found: with what did not run, among which a choice is made."""
    ran = [f for f in scored if not f.run.failed]
    timed = [(f, f.run.step_time_s) for f in ran if f.run.step_time_s]
    times = score([f.step_time_s / s - 1 for f, s in timed], [f.step_interval_s[0] <= s <= f.step_interval_s[1] for f, s in timed])
    held = [(f, f.run.memory_bytes) for f in ran if f.run.memory_bytes]
    inside = [f.memory_interval_bytes[0] <= m <= f.memory_interval_bytes[1] for f, m in held]
    memory = score([f.memory_bytes / m - 1 for f, m in held], inside)
    groups: dict[object, list[tuple[float, float]]] = {}
    for f, s in ((f, s) for f, s in timed if not f.run.chosen):
        groups.setdefault(f.run.group, []).append((f.step_time_s, s))
    taus = [t for pairs in groups.values() if len(pairs) >= LEAST_GROUP and (t := tau(pairs)) is not None]
    regrets = [regret_of(chosen(g), g) for g in groups_of(found)] if found else []
    return {
        "runs": len(timed), "time": times.median_ape if times else None, "time_90": times.p90_ape if times else None,
        "bias": times.bias if times else None, "inside": times.inside if times else None,
        "memory": memory.median_ape if memory else None, "memory_inside": memory.inside if memory else None,
        "tau": statistics.median(taus) if taus else None, "groups": len(regrets),
        "regret": statistics.median(regrets) if regrets else None, "regret_mean": statistics.fmean(regrets) if regrets else None,
        "regret_worst": max(regrets, default=None),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ print
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step: median", "time", "{:.1%}".format), ("90%", "time_90", "{:.0%}".format), ("bias", "bias", "{:+.1%}".format),
    ("inside", "inside", "{:.0%}".format), ("memory: median", "memory", "{:.1%}".format), ("inside", "memory_inside", "{:.0%}".format),
    ("tau", "tau", "{:.2f}".format), ("regret: median", "regret", "{:.1%}".format), ("mean", "regret_mean", "{:.1%}".format),
    ("worst", "regret_worst", "{:.0%}".format),
)  # fmt: skip


def _table(title: str, found: dict[str, Any], console: Console) -> None:
    """In sample / out of sample."""
    table = Table("", "runs", *(name for name, _, _ in _COLUMNS), title=f"{title}: in sample / out of sample")
    for source, both in found.items():
        for kind, mark in (("plain", ""), ("with_slow", ", with runs under 1% of peak")):
            if kind in both["in"]:
                ins, outs = both["in"][kind], both["out"][kind]
                cells = [_cell(ins[key], outs[key], show) for _, key, show in _COLUMNS]
                table.add_row(source + mark, str(outs["runs"]), *cells)
    console.print(table)


def _cell(inside: float | None, outside: float | None, show: Callable[[float], str]) -> str:
    return "-" if inside is None or outside is None else f"{show(inside)} / {show(outside)}"


def _constants(whole: Constants, console: Console) -> None:
    for what, points in (("chip", whole.chips), ("software", whole.software)):
        names = list(dict.fromkeys(name for point in points.values() for name in point))
        table = Table(what, *names, title="constants, fitted to all runs")
        for label, point in points.items():
            table.add_row(label, *(f"{point[name]:.3g}" if name in point else "-" for name in names))
        console.print(table)
