"""Constants fitted without a source, or without a model's size, predict it.

Constants of a chip: the achievable fractions of the operator classes and the host's time for a launch. Constants of a software: what its
collectives take between nodes beyond the links (SOFTWARE_S). Both are fitted to step times of the runs that are left, each constant drawn
towards what it would be without them: a fraction or a launch towards the mean of the other chips' (those of CLASSES where there are
none), by the spread of an assumed figure; a software whose runs are all left out adds nothing to the links. The loss is the mean absolute
logarithm of predicted over measured, at most CLIP of one run. Links are not fitted here: their constants come from datasheets and timings
of collectives alone. Memory has two constants: the allocator's slack and the held gathers of a software that gathers without waiting.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy
from numpy.typing import NDArray

from benchmarks._fitted import Fitted, Point, constants_of
from benchmarks._forms import SOFTWARE_S, Form
from benchmarks._runs import Run
from cost_models.fit import search
from cost_models.recipe import AUTOPAR
from cost_models.uncertainty import SPREADS

__all__ = ["CLASSES", "Constants", "Priced", "chip_of", "fitted", "memory_terms", "out_of_sample", "steps_s"]

Vector = NDArray[numpy.float64]

CLASSES = {"matmul": 0.7, "attention": 0.4, "conv": 0.45, "pointwise": 0.85, "other": 0.5, "launch_s": 2e-5}
"""What large operators reach of a chip that nothing is known of (the assumed figures of the catalogue), and a launch by Python."""

CLIP = 0.4
ROWS = 50  # of one source, for a chip: no sweep outweighs the others by its length
SOFTWARE_START_S = 2e-4
SOFTWARE_MOST_S = 5e-3
SLACK_ROWS = 10
GATHER_OF_POINTWISE = 0.7  # rows of a table are read at random
SCALE = 0.07  # of a run's error about a right prediction, by which runs are weighed against what is assumed
LAUNCH_SPREAD = 0.7  # of the host's work for one operator: hosts and softwares differ
LAUNCHES = (1.0, 2.0, 4.0)  # times what is assumed, where fits begin: while the host is not what takes time, nothing says how fast it is
SOFTWARE_SPREAD = 1.5  # nothing but the order of magnitude is assumed of them
ROUNDS, HALVINGS, LONGEST, BY = 8, 4, 0.5, 0.02  # of the fit; the longest step and that of the slopes are of logarithms
LEAST_ERROR, LEAST_GAIN = 0.01, 0.05  # of a run; of the whole loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A run and its form."""

    run: Run
    form: Form

    @property
    def source(self) -> str:
        return self.run.row["source"]

    @property
    def chip(self) -> str:
        return chip_of(self.form.gpu)

    @property
    def counts(self) -> bool:
        """Whether constants may be fitted to it."""
        return not self.run.failed and not self.run.flagged and bool(self.run.step_time_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """chips: chip -> constant -> value; software: source -> constant -> value; slack, held: of memory, by source. first: chips by their own
    runs alone, which others are drawn towards."""

    chips: Mapping[str, Point]
    software: Mapping[str, Point]
    slack: float
    held: Mapping[str, float]
    first: Mapping[str, Point] = field(default_factory=dict)

    def of(self, p: Priced) -> dict[str, float]:
        chip = self.chips[p.chip]
        every = constants_of(p.run.cluster.gpu, self.software.get(p.source))
        return {**every, **chip, "reduction": chip["pointwise"], "gather": GATHER_OF_POINTWISE * chip["pointwise"]}


def chip_of(gpu: str) -> str:
    """Boards of one chip share its constants."""
    return gpu.partition("-")[0]


def steps_s(found: Sequence[Priced], constants: Constants) -> list[float]:
    fitted = Fitted([p.form for p in found], [p.run.cluster.gpu for p in found])
    return fitted.steps_s([constants.of(p) for p in found])


def memory_terms(p: Priced, constants: Constants, which: str = "memory") -> dict[str, int]:
    """The terms of MemoryPlan of the stage that the source states, or of the 'fullest' one, by these constants."""
    terms = dict(p.form.memory if which == "memory" else p.form.fullest)
    allocated = sum(n for name, n in terms.items() if name not in ("framework_context_bytes", "allocator_slack_bytes"))
    recipe, held = p.run.recipe, 0.0
    if recipe.held_gathers:
        held = max(0.0, terms["allocator_slack_bytes"] - recipe.allocator_slack * allocated) / recipe.held_gathers
    return {**terms, "allocator_slack_bytes": round(constants.slack * allocated + held * constants.held.get(p.source, 0.0))}


def memory_bytes(p: Priced, constants: Constants) -> float:
    """Of the stage that the source states, without the framework's own."""
    return float(sum(n for name, n in memory_terms(p, constants).items() if name != "framework_context_bytes"))


# ------------------------------------------------------------------------------------------------------------------ fit
def fitted(
    found: Sequence[Priced], known: Constants | None = None, chips: Sequence[str] | None = None, begin: Constants | None = None
) -> Constants:
    """Constants by these runs. chips: those to be fitted anew, all by default; the others are as known. Chips without runs of their own are
    what is assumed of them. begin: where the fit looks first."""
    usable = [p for p in found if p.counts]
    every = sorted({p.chip for p in found} | set(chips or ()))
    again = every if chips is None or known is None else list(chips)
    first = dict(known.first) if known else {}
    if known is None or len(again) > 1:  # what a chip itself was by other runs does not matter to it
        first |= {c: _chip([p for p in usable if p.chip == c], CLASSES)[0] for c in again}
    of_chips, software = dict(known.chips if known else {}), dict(known.software if known else {})
    for chip in again:
        others = [first[c] for c in every if c != chip and any(p.chip == c for p in usable)]
        centre = {
            name: math.exp(statistics.fmean(math.log(o[name]) for o in others)) if others else default for name, default in CLASSES.items()
        }  # fmt: skip
        mine = [p for p in usable if p.chip == chip]
        point, added = _chip(mine, centre, begin)
        of_chips[chip] = {**centre, **point}
        software |= added
    slack, held = _memory(usable)
    return Constants(chips=of_chips, software=software, slack=slack, held=held, first=first)


def out_of_sample(found: Sequence[Priced], left_out: Sequence[Priced], whole: Constants, *, few: bool = False) -> Constants:
    """Constants by the runs found but for those left out. whole: by all of them, from which only what changes is fitted again. few: of runs
    that change little, so that the fit may begin with them."""
    out = {id(p) for p in left_out}
    left = [p for p in found if id(p) not in out]
    chips = sorted({p.chip for p in left_out})
    constants = fitted(left, whole, chips, whole if few else None)
    sources = {p.source for p in left if p.counts}
    software = {source: values for source, values in constants.software.items() if source in sources}
    return replace(constants, software=software)


def _sampled(found: Sequence[Priced]) -> list[Priced]:
    """At most ROWS of a source, spread evenly."""
    by_source: dict[str, list[Priced]] = {}
    for p in found:
        by_source.setdefault(p.source, []).append(p)
    return [rows[k * len(rows) // n] for rows in by_source.values() for n in (min(ROWS, len(rows)),) for k in range(n)]


def _chip(found: Sequence[Priced], centre: Point, known: Constants | None = None) -> tuple[dict[str, float], dict[str, Point]]:
    """A chip's constants by its runs, and those of the softwares whose collectives add to its links. known: where the fit begins."""
    rows = _sampled(found)
    if not rows:
        return dict(centre), {}
    added = sorted({p.source for p in rows if any(getattr(p.run.recipe, n) for n in SOFTWARE_S)})
    forms = Fitted([p.form for p in rows], [p.run.cluster.gpu for p in rows])
    measured = numpy.log([p.run.step_time_s or 1.0 for p in rows])
    names = [*CLASSES, *(f"{s}.{n}" for s in added for n in SOFTWARE_S)]

    def parts(logs: Vector) -> Constants:
        point = dict(zip(names, numpy.exp(logs).tolist(), strict=True))
        software = {s: {n: point[f"{s}.{n}"] for n in SOFTWARE_S} for s in added}
        return Constants(chips={rows[0].chip: {name: point[name] for name in CLASSES}}, software=software, slack=0.0, held={})

    def off(logs: Vector) -> Vector:
        constants = parts(logs)
        return numpy.log(forms.steps_s([constants.of(p) for p in rows])) - measured

    start = numpy.log([*(centre[name] for name in CLASSES), *[SOFTWARE_START_S] * (len(names) - len(CLASSES))])
    most = numpy.log([*(1e-3 if name == "launch_s" else 0.97 for name in CLASSES), *[SOFTWARE_MOST_S] * (len(names) - len(CLASSES))])
    spreads = [LAUNCH_SPREAD if name == "launch_s" else SPREADS["assumed"] for name in CLASSES]
    spread = numpy.array([*spreads, *[SOFTWARE_SPREAD] * (len(names) - len(CLASSES))])
    begins = [start + math.log(factor) * (numpy.array(names) == "launch_s") for factor in LAUNCHES]
    if known is not None and rows[0].chip in known.chips and set(added) <= set(known.software):
        chip = known.chips[rows[0].chip]
        begins = [numpy.log([*(chip[n] for n in CLASSES), *(known.software[s][n] for s in added for n in SOFTWARE_S)])]
    constants = parts(closest(off, start, spread, most, begins))
    return dict(constants.chips[rows[0].chip]), dict(constants.software)


def closest(
    off: Callable[[Vector], Vector], start: Vector, spread: Vector, most: Vector, begins: Sequence[Vector] | None = None
) -> Vector:
    """Logarithms of constants at which the errors are least: the sum of their sizes (each at most CLIP) over SCALE, and of the squares of
    how far the constants were drawn from `start` over their spread. Weighted least squares, again and again: the errors are linear in
    small changes of the constants. begins: where to look, by default from the start; of several the one that ends best counts."""

    def loss(errors: Vector, at: Vector, clip: float) -> float:
        return float(numpy.minimum(clip, abs(errors)).sum() / SCALE + (((at - start) / spread) ** 2).sum() / 2)

    def descended(at: Vector) -> tuple[float, Vector]:
        errors = off(at)
        for clip in (math.inf, CLIP):  # from afar every run is far off
            for _ in range(ROUNDS):
                slopes = numpy.stack([(off(at + BY * unit) - errors) / BY for unit in numpy.eye(len(at))], axis=1)
                weights = (abs(errors) < clip) / (SCALE * numpy.maximum(abs(errors), LEAST_ERROR))
                square = slopes.T @ (weights[:, None] * slopes) + numpy.diag(1 / spread**2)
                step = -numpy.linalg.solve(square, slopes.T @ (weights * errors) + (at - start) / spread**2)
                step = numpy.clip(step, -LONGEST, LONGEST)
                for _ in range(HALVINGS):
                    other = numpy.minimum(at + step, most)
                    new = off(other)
                    if loss(new, other, clip) < loss(errors, at, clip) - LEAST_GAIN:
                        break
                    step = step / 2
                else:
                    break
                at, errors = other, new
        return loss(errors, at, CLIP), at

    return min((descended(at.copy()) for at in begins or [start]), key=lambda found: found[0])[1]


def _memory(found: Sequence[Priced]) -> tuple[float, dict[str, float]]:
    """The allocator's slack, the median over all runs that state their memory, and the held gathers of each source that has them, beside
    it; with too few runs what autopar assumes."""
    rows = [p for p in found if p.run.memory_bytes]
    if len(rows) < SLACK_ROWS:
        return AUTOPAR.allocator_slack, {}
    holds = sorted({p.source for p in rows if p.run.recipe.held_gathers})

    def loss(point: Point) -> float:
        constants = Constants(chips={}, software={}, slack=point["slack"], held={s: point[s] for s in holds})
        return statistics.fmean(min(CLIP, abs(math.log(memory_bytes(p, constants) / (p.run.memory_bytes or 1.0)))) for p in rows)

    start: Point = {"slack": AUTOPAR.allocator_slack, **dict.fromkeys(holds, 0.5)}
    point, _ = search(start, tuple(start), lambda at, name, factor: {**at, name: min(1.0, at[name] * factor)}, loss)
    return point["slack"], {s: point[s] for s in holds}
