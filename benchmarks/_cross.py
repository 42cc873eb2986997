"""Constants fitted without a source, or without a model's size, predict it.

Constants of a chip: the achievable fractions of the operator classes. Constants of a software on a chip: the host's time for a launch, what
it does once a step, and what its collectives take between nodes beyond the links (SOFTWARE_S), where its runs use several nodes. Both are
fitted to step times of the runs that are left, each drawn towards what it would be without them: a fraction towards the other chips' and
what CLASSES assumes (each the less, the less is known of it), a software's towards those of the other softwares that issue operators as it
does. A software whose runs are all left out takes these. The loss is the mean absolute logarithm of predicted over measured, at most CLIP
of one run. Links are not fitted here: their constants come from datasheets and timings of collectives alone. Memory has two constants: the
allocator's slack and the held gathers of a software that gathers without waiting.

How far a prediction may be off follows from what the runs that are left say of each constant: `Constants.spread`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy
from numpy.typing import NDArray

from autopar.planner.interval import LAUNCHES as ISSUING
from autopar.planner.interval import UPDATE, spread_of_kind
from benchmarks._decoders import Decoder
from benchmarks._fitted import ONCE, Fitted, Point, constants_of
from benchmarks._forms import SOFTWARE_S, Form
from benchmarks._runs import COMPILED_LAUNCH_S, MXNET, Run
from cost_models.fit import search
from cost_models.recipe import AUTOPAR
from cost_models.uncertainty import OTHER_SOFTWARE, SPREADS, step_spread

__all__ = ["CLASSES", "Constants", "Priced", "chip_of", "fitted", "memory_terms", "out_of_sample", "steps_s", "usual"]

Vector = NDArray[numpy.float64]

CLASSES = {"matmul": 0.7, "attention": 0.4, "conv": 0.67, "pointwise": 0.85, "other": 0.1}
"""What large operators reach of a chip that nothing is known of. matmul, attention, pointwise: the assumed figures
of the catalogue. conv: the median of DeepBench's convolutions in half precision, of 10 GFLOP or more, on V100 (data/kernels.csv), when
their results are written at three quarters of the bandwidth. other: depthwise convolutions, by 12 timings of PyTorch's kernels on
V100 (pytorch/pytorch, pull request 40801): 6 to 10% of the bandwidth."""

EAGER, COMPILED = "PyTorch", "compiled programs"  # who issues operators
LAUNCH_SPREAD = 0.7  # of the host's work for one operator: hosts and softwares differ
ASSUMED = dict.fromkeys(CLASSES, SPREADS["assumed"])
"""How far a constant of CLASSES may be off."""

CONSTANT_OF = {UPDATE: "pointwise", "reduction": "pointwise", "gather": "pointwise"}
"""Kind of seconds -> the constant that they depend on, where it is called otherwise."""

CLIP = 0.4
ROWS = 100  # of one source, for a chip: no sweep outweighs the others by its length
KERNELS: Mapping[str, Point] = {
    "a100": {"attention": 0.61, "pointwise": 0.89},
    "h100": {"attention": 0.35},
    "v100": {"matmul": 0.86, "conv": 0.67, "pointwise": 0.89},
}
"""What timings of kernels say of a chip. matmul, conv: the medians of DeepBench's on V100 in half precision, of 10 GFLOP or more.
attention, in forward: FlashAttention-2 reaches 50 to 73% of an A100's rate (Dao 2023, abstract) and 35% of an H100's (Shah et al.
2024, "FlashAttention-3", abstract). pointwise: what copying with a factor ("scale") reaches of the bandwidth with every thread in use, 802
of 900 GB/s on a V100, 1,381 of 1,555 on an A100 of 40 GB (te42kyfo/gpu-benches, gpu-stream/v100.txt, a100_40.txt @a7dc559)."""

LAUNCH = "launch_s"
START_S = {LAUNCH: 2e-5, ONCE: 1e-2, **dict.fromkeys(SOFTWARE_S, 2e-4)}
"""A launch by Python; of collectives, and of what is done once a step, nothing but the order of magnitude."""
UNREAD_S = 2e-3
"""Once a step, of trainers that read nothing back from the device: those of convolutional networks do not clip gradients by their norm, and
a compiled program does that on the device."""
MOST_S = {LAUNCH: 1e-3, ONCE: 0.5, **dict.fromkeys(SOFTWARE_S, 5e-3)}
SLACK_ROWS = 10
BEYOND = "beyond_bytes"  # of MemoryPlan: no memory, but how far an interval reaches
HELD = 1.0  # of the gathers that may be held
SCALE = 0.07  # of a run's error about a right prediction, by which runs are weighed against what is assumed
LAUNCHES = (1.0, 2.0, 4.0)  # times what is assumed, where fits begin: while the host is not what takes time, nothing says how fast it is
SOFTWARE_SPREAD = 1.5  # nothing but the order of magnitude is assumed of them
OTHERS, STRANGERS = OTHER_SOFTWARE, SPREADS["assumed"]
"""Of a step of a software that is not known, by what others reach of the same chip: those that issue operators as it does, or none."""
ONCE_SPREAD = 0.8  # it is tens of milliseconds, or a few
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
    def software(self) -> str:
        """Whose constants these are: hosts and networks differ between a software's clusters."""
        return f"{self.run.software} on {self.chip}"

    @property
    def kind(self) -> str:
        """Of what issues its operators."""
        return COMPILED if self.run.compiled else MXNET if MXNET in self.run.software else EAGER

    @property
    def once_s(self) -> float:
        """What is assumed of what is done once a step."""
        return START_S[ONCE] if isinstance(self.run.dims, Decoder) and not self.run.compiled else UNREAD_S

    @property
    def across(self) -> bool:
        """Whether constants of a software show in it."""
        return SOFTWARE_S[0] in self.form.slopes

    @property
    def counts(self) -> bool:
        """Whether constants may be fitted to it: what the planner chose of it may not be what ran."""
        return not (self.run.failed or self.run.flagged or self.run.chosen) and bool(self.run.step_time_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """chips: chip -> constant -> value; software: that of Priced -> constant -> value; slack, held: of memory, by source. first, alone:
    chips and softwares by their own runs alone, which others are drawn towards. known: chip -> constant -> its spread. said: software ->
    (what issues its operators, the inverse variance of its launches)."""

    chips: Mapping[str, Point]
    software: Mapping[str, Point]
    slack: float
    held: Mapping[str, float]
    first: Mapping[str, Point] = field(default_factory=dict)
    alone: Mapping[str, Point] = field(default_factory=dict)
    known: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    said: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def of(self, p: Priced, hardware_alone: bool = False) -> dict[str, float]:
        """hardware_alone: collectives take what their links take, and nothing is done once a step but the update."""
        chip = self.chips[p.chip]
        every = {**constants_of(p.run.cluster.gpu), **chip, "reduction": chip["pointwise"], "gather": chip["pointwise"]}
        every |= self.software.get(p.software) or {**usual(self.software, self.said, p.kind)[0], ONCE: p.once_s}
        return {**every, ONCE: 0.0, **dict.fromkeys(SOFTWARE_S, 0.0)} if hardware_alone else every

    def spread(self, p: Priced, software_s: float, step_s: float) -> float:
        """How far the step of a run may be off. software_s: of it, what the software's own constants add to the hardware's."""
        mine = p.software in self.software
        launches = usual(self.software, self.said, p.kind)[1]
        launches = (launches**-2 + self.said.get(p.software, ("", 0.0))[1]) ** -0.5 if mine else launches
        kinds = {**self.known.get(p.chip, {}), ISSUING: launches}
        spreads = {kind: kinds.get(CONSTANT_OF.get(kind, kind), spread_of_kind(kind, p.run.cluster)) for kind in p.form.seconds}
        kernels = OTHERS if any(kind == p.kind for kind, _ in self.said.values()) else STRANGERS  # they, too, are a software's own
        unseen = math.hypot(SOFTWARE_SPREAD * software_s / step_s, kernels)
        return math.hypot(step_spread(p.form.seconds, spreads), 0.0 if mine else unseen)


def chip_of(gpu: str) -> str:
    """Boards of one chip share its constants."""
    return gpu.partition("-")[0]


def steps_s(found: Sequence[Priced], constants: Constants, hardware_alone: bool = False) -> list[float]:
    fitted = Fitted([p.form for p in found], [p.run.cluster.gpu for p in found])
    return fitted.steps_s([constants.of(p, hardware_alone) for p in found])


def held_bytes(found: Sequence[Priced], constants: Constants) -> list[tuple[float, float]]:
    """Of each run: the bytes of gathers that the allocator may hold, on the rank of the stage that the source states, and of the fullest:
    those of the stages where the host is ahead of the device by these constants."""
    if not found:
        return []
    stages = Fitted([p.form for p in found], [p.run.cluster.gpu for p in found]).ahead([constants.of(p) for p in found])

    def on_rank(form: Form, shown: int, ahead: Sequence[bool]) -> float:
        return sum(form.held[s] for rank in form.ranks if shown in rank.stages for s in rank.stages if ahead[s])

    return [(on_rank(p.form, p.form.shown[0], a), on_rank(p.form, p.form.shown[1], a)) for p, a in zip(found, stages, strict=True)]


def memory_terms(p: Priced, constants: Constants, held: float, which: str = "memory") -> dict[str, int]:
    """The terms of MemoryPlan of the stage that the source states, or of the 'fullest' one, by these constants. held: of held_bytes."""
    terms = dict(p.form.memory if which == "memory" else p.form.fullest)
    allocated = sum(n for name, n in terms.items() if name not in ("framework_context_bytes", "allocator_slack_bytes", BEYOND))
    return {**terms, "allocator_slack_bytes": round(constants.slack * allocated + held * constants.held.get(p.source, HELD))}


def memory_bytes(p: Priced, constants: Constants, held: float) -> float:
    """Of the stage that the source states, without the framework's own."""
    return float(sum(n for name, n in memory_terms(p, constants, held).items() if name not in ("framework_context_bytes", BEYOND)))


# ------------------------------------------------------------------------------------------------------------------ fit
def fitted(
    found: Sequence[Priced], known: Constants | None = None, chips: Sequence[str] | None = None, begin: Constants | None = None
) -> Constants:
    """Constants by these runs. chips: those to be fitted anew, all by default; the others are as known. Chips without runs of their own are
    what is assumed of them. begin: where the fit looks first."""
    usable = [p for p in found if p.counts]
    every = sorted({p.chip for p in found} | set(chips or ()))
    again = every if chips is None or known is None else list(chips)
    first, alone = (dict(known.first), dict(known.alone)) if known else ({}, {})
    of_chips, software = (dict(known.chips), dict(known.software)) if known else ({}, {})
    for names in (first, alone, of_chips, software):  # what is fitted anew is not known
        for name in [n for n in names if n.rpartition(" on ")[2] in again]:
            del names[name]
    begin_alone = replace(begin, chips=begin.first, software=begin.alone) if begin else None
    for chip in again:
        mine = [p for p in usable if p.chip == chip]
        assumed = {p.software: ({**usual({}, {}, p.kind)[0], ONCE: p.once_s}, SOFTWARE_SPREAD) for p in mine}
        first[chip], added = _chip(mine, {**CLASSES, **KERNELS.get(chip, {})}, assumed, begin_alone)
        alone |= added
    say, about = {chip: _said([p for p in usable if p.chip == chip]) for chip in every}, dict[str, tuple[str, float]]()
    for name, runs in _by_software(usable).items():
        about[name] = runs[0].kind, _said(runs).get(ISSUING, 0.0)
    known_by = dict[str, Mapping[str, float]]()
    for chip in every:
        centre, spreads = _pooled([(first[c], say[c]) for c in every if c != chip and c in first], KERNELS.get(chip, {}))
        known_by[chip] = {name: (spread**-2 + say[chip].get(name, 0.0)) ** -0.5 for name, spread in spreads.items()}
        if chip not in again:
            continue
        mine = [p for p in usable if p.chip == chip]
        towards = dict[str, tuple[Point, float]]()
        for p in mine:
            others = {name: point for name, point in alone.items() if not name.startswith(f"{p.source} ")}
            if p.software not in towards:
                launches, spread = usual(others, about, p.kind)
                towards[p.software] = {**launches, ONCE: p.once_s}, spread
        point, added = _chip(mine, centre, towards, begin, spreads)
        of_chips[chip] = {**centre, **point}
        software |= added
    constants = Constants(chips=of_chips, software=software, slack=0.0, held={}, first=first, alone=alone, known=known_by, said=about)
    slack, held = _memory(usable, constants)
    return replace(constants, slack=slack, held=held)


def _by_software(found: Sequence[Priced]) -> dict[str, list[Priced]]:
    groups: dict[str, list[Priced]] = {}
    for p in found:
        groups.setdefault(p.software, []).append(p)
    return groups


def usual(points: Mapping[str, Point], said: Mapping[str, tuple[str, float]], kind: str) -> tuple[dict[str, float], float]:
    """What softwares take: of launches the mean of those that issue operators in the same way, in which each counts by what its runs say
    of them; of what is added to links the median, of all where none of that kind is known. And how far its launches may be off that."""
    alike = [name for name in points if said.get(name, ("", 0.0))[0] == kind]
    seen = [(math.log(COMPILED_LAUNCH_S if kind == COMPILED else START_S[LAUNCH]), SOFTWARE_SPREAD**-2)]
    seen += [(math.log(points[n][LAUNCH]), 1 / ((LAUNCH_SPREAD / 2) ** 2 + 1 / said[n][1])) for n in alike if said.get(n, ("", 0.0))[1]]
    total = sum(weight for _, weight in seen)
    found = {LAUNCH: math.exp(sum(value * weight for value, weight in seen) / total)}
    across = [points[n] for n in alike if SOFTWARE_S[0] in points[n]] or [p for p in points.values() if SOFTWARE_S[0] in p]
    found |= {name: statistics.median(p[name] for p in across) for name in SOFTWARE_S} if across else {}
    return found, math.hypot(LAUNCH_SPREAD / 2, total**-0.5)


def _pooled(others: Sequence[tuple[Point, Mapping[str, float]]], kernels: Point) -> tuple[dict[str, float], dict[str, float]]:
    """What a chip's constants are expected to be, and how far they may be off: what its kernels were measured to reach; else by the
    others', where what is assumed of every chip counts as one observation, each other chip as one that is the less certain the less its
    runs say (the second of each pair, inverse variances)."""
    centre, spreads = {}, {}
    for name, default in CLASSES.items():
        if name in kernels:
            centre[name], spreads[name] = kernels[name], SPREADS["derived"]
            continue
        between = ASSUMED[name] / 2
        seen = [(math.log(point[name]), 1 / (between**2 + 1 / said[name])) for point, said in others if said.get(name)]
        seen.append((math.log(default), ASSUMED[name] ** -2))
        total = sum(weight for _, weight in seen)
        centre[name] = math.exp(sum(value * weight for value, weight in seen) / total)
        spreads[name] = math.hypot(between, total**-0.5) if len(seen) > 1 else ASSUMED[name]
    return centre, spreads


def _said(found: Sequence[Priced]) -> dict[str, float]:
    """Constant -> the inverse variance of its logarithm by the runs of a chip. A source says of a constant as much as its seconds are of
    the runs' steps; two sources are as good as apart."""
    shares: dict[str, dict[str, list[float]]] = {}
    for p in found:
        total = sum(p.form.seconds.values()) or 1.0
        for kind, seconds in p.form.seconds.items():
            shares.setdefault(CONSTANT_OF.get(kind, kind), {}).setdefault(p.source, []).append(seconds / total)
    sources = Counter(p.source for p in found)
    return {
        name: sum((sum(each) / sources[source] / SPREADS["fitted"]) ** 2 for source, each in of_sources.items())
        for name, of_sources in shares.items()
    }  # fmt: skip


def out_of_sample(found: Sequence[Priced], left_out: Sequence[Priced], whole: Constants, *, few: bool = False) -> Constants:
    """Constants by the runs found but for those left out. whole: by all of them, from which only what changes is fitted again. few: of runs
    that change little, so that the fit may begin with them."""
    out = {id(p) for p in left_out}
    left = [p for p in found if id(p) not in out]
    return fitted(left, whole, sorted({p.chip for p in left_out}), whole if few else None)


def _sampled(found: Sequence[Priced]) -> list[Priced]:
    """At most ROWS of a source, spread evenly."""
    by_source: dict[str, list[Priced]] = {}
    for p in found:
        by_source.setdefault(p.source, []).append(p)
    return [rows[k * len(rows) // n] for rows in by_source.values() for n in (min(ROWS, len(rows)),) for k in range(n)]


def _chip(
    found: Sequence[Priced], centre: Point, softwares: Mapping[str, tuple[Point, float]], known: Constants | None = None,
    spreads: Point | None = None,
) -> tuple[dict[str, float], dict[str, Point]]:
    """A chip's constants by its runs, and those of their softwares. centre, softwares: what both are drawn
    towards, the first by `spreads`. known: where the fit begins."""
    rows = _sampled(found)
    if not rows:
        return dict(centre), {}
    owned = {
        name: (LAUNCH, ONCE, *(SOFTWARE_S if any(p.across for p in runs) else ())) for name, runs in sorted(_by_software(rows).items())
    }  # fmt: skip
    forms = Fitted([p.form for p in rows], [p.run.cluster.gpu for p in rows])
    measured = numpy.log([p.run.step_time_s or 1.0 for p in rows])
    constants_of_softwares = [(software, name) for software, names in owned.items() for name in names]

    def parts(logs: Vector) -> Constants:
        values = numpy.exp(logs).tolist()
        software: dict[str, dict[str, float]] = {}
        for (of, name), value in zip(constants_of_softwares, values[len(CLASSES) :], strict=True):
            software.setdefault(of, {})[name] = value
        return Constants(chips={rows[0].chip: dict(zip(CLASSES, values, strict=False))}, software=software, slack=0.0, held={})

    def off(logs: Vector) -> Vector:
        constants = parts(logs)
        return numpy.log(forms.steps_s([constants.of(p) for p in rows])) - measured

    towards = {name: softwares.get(name, ({}, SOFTWARE_SPREAD)) for name in owned}
    start = numpy.log([*(centre[n] for n in CLASSES), *({**START_S, **towards[s][0]}[n] for s, n in constants_of_softwares)])
    most = numpy.log([*[0.97] * len(CLASSES), *(MOST_S[n] for _, n in constants_of_softwares)])
    launches = numpy.array([*[False] * len(CLASSES), *(n == LAUNCH for _, n in constants_of_softwares)])
    wide = [towards[s][1] if n == LAUNCH else ONCE_SPREAD if n == ONCE else SOFTWARE_SPREAD for s, n in constants_of_softwares]
    spread = numpy.array([*((spreads or ASSUMED)[name] for name in CLASSES), *wide])
    begins = [start + math.log(factor) * launches for factor in LAUNCHES]
    if known is not None and rows[0].chip in known.chips and set(owned) <= set(known.software):
        chip = known.chips[rows[0].chip]
        begins = [numpy.log([*(chip[n] for n in CLASSES), *(known.software[s].get(n, START_S[n]) for s, n in constants_of_softwares)])]
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


def _memory(found: Sequence[Priced], known: Constants) -> tuple[float, dict[str, float]]:
    """The allocator's slack, the median over all runs that state their memory, and the held gathers of each source that has them, beside
    it; with too few runs what autopar assumes. known: by which the host is ahead or not."""
    rows = [p for p in found if p.run.memory_bytes]
    if len(rows) < SLACK_ROWS:
        return AUTOPAR.allocator_slack, {}
    holds = sorted({p.source for p in rows if p.run.recipe.held_gathers})
    shown = [held for held, _ in held_bytes(rows, known)]

    def loss(point: Point) -> float:
        constants = Constants(chips={}, software={}, slack=point["slack"], held={s: point[s] for s in holds})
        return statistics.fmean(
            min(CLIP, abs(math.log(memory_bytes(p, constants, held) / (p.run.memory_bytes or 1.0))))
            for p, held in zip(rows, shown, strict=True)
        )

    start: Point = {"slack": AUTOPAR.allocator_slack, **dict.fromkeys(holds, HELD)}
    point, _ = search(start, tuple(start), lambda at, name, factor: {**at, name: min(1.0, at[name] * factor)}, loss)
    return point["slack"], {s: point[s] for s in holds}
