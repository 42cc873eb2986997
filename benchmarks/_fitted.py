"""Many forms at once under other constants: their step times, in a few milliseconds for a thousand runs.

The same account as the planner's (Estimator.times), on the numbers that forms keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy
from numpy.typing import NDArray

from benchmarks._forms import SOFTWARE_S, Asked, Form, OnRank
from cost_models.cluster import OP_CLASSES, Gpu
from cost_models.memory import OPTIMIZERS
from cost_models.pipeline import step_time_s
from cost_models.recipe import Recipe
from cost_models.step import exposed_gathers_s, exposed_reduction_s

__all__ = ["CONSTANTS", "ONCE", "Fitted", "Point", "constants_of"]

ONCE = "once_s"  # what a software does once a step: a field of Recipe
CONSTANTS = ("matmul", "attention", "conv", "pointwise", "reduction", "gather", "other", "launch_s", ONCE, *SOFTWARE_S)
TENSORS_PER_LAUNCH = 64  # as optimizer_time_s takes it
Point = Mapping[str, float]
Vector = NDArray[numpy.float64]


def constants_of(gpu: Gpu, recipe: Recipe | None = None) -> dict[str, float]:
    """Those of the catalogue, and of a training software (by default it adds nothing to the links, and nothing to launches)."""
    found, recipe = {name: gpu.fraction(name) for name in OP_CLASSES if name != "view"}, recipe or Recipe()
    return {**found, "launch_s": recipe.launches * gpu.launch_s, **{name: getattr(recipe, name) for name in (ONCE, *SOFTWARE_S)}}


class _Device:
    """What groups of operators, each of a form's row, ask of devices."""

    def __init__(self, groups: Sequence[tuple[int, Sequence[Asked]]]) -> None:
        place = {name: k for k, name in enumerate((*(c for c in OP_CLASSES if c != "view"), ""))}
        flat = [(k, row, place[c], place[m], c_s, w_s, m_s, n) for k, (row, ops) in enumerate(groups) for c, c_s, w_s, m, m_s, n in ops]
        columns = list(zip(*flat, strict=True)) or [()] * 8
        self._group, self._row, self._compute, self._memory = (numpy.array(x, dtype=int) for x in columns[:4])
        self._compute_s, self._written_s, self._memory_s, self._times = (numpy.array(x, dtype=float) for x in columns[4:])
        self._count = len(groups)

    def seconds(self, fractions: Vector) -> Vector:
        """Of each group. fractions: of each row, what the classes reach."""
        computing, streaming = (fractions[self._row, of] for of in (self._compute, self._memory))
        ops_s = self._times * numpy.maximum(
            self._compute_s / computing + self._written_s / streaming, self._memory_s / streaming
        )  # fmt: skip
        return numpy.asarray(numpy.bincount(self._group, ops_s, minlength=self._count), dtype=float)


class Fitted:
    """gpus: of each form. All forms may have constants of their own."""

    def __init__(self, forms: Sequence[Form], gpus: Sequence[Gpu]) -> None:
        self.forms, self.gpus = forms, gpus
        passes, products = list[tuple[int, Sequence[Asked]]](), list[tuple[int, Sequence[Asked]]]()
        links, hosts, gathers, scatters, rows, hidden, hidden_in = (list[int]() for _ in range(7))
        self._first_pass, self._first_figure, figures = list[int](), list[int](), 0
        for row, form in enumerate(forms):
            self._first_pass.append(len(links))
            self._first_figure.append(figures)
            every = [(p.forward, p.gathers[0], -1) for p in form.parts] + [(p.backward, p.gathers[1], p.scatters) for p in form.parts]
            for each, gathered, scattered in [*every, *((a, -1, -1) for a in form.again)]:
                passes.append((row, each.ops))
                for collective, beside in each.hidden:
                    hidden.append(figures + collective)
                    hidden_in.append(len(links))
                    products.append((row, beside))
                links.append(figures + each.links)
                hosts.append(figures + each.host)
                gathers.append(figures + gathered if gathered >= 0 else -1)
                scatters.append(figures + scattered if scattered >= 0 else -1)
                rows.append(row)
            figures += len(form.figures)
        self._passes, self._products = _Device(passes), _Device(products)
        self._links, self._hosts, self._gathers, self._scatters, self._row, self._hidden, self._hidden_in = (
            numpy.array(x, dtype=int) for x in (links, hosts, gathers, scatters, rows, hidden, hidden_in)
        )  # fmt: skip
        self._figures = numpy.array([*(x for f in forms for x in f.figures), 0.0])
        self._figure_row = numpy.array([*(k for k, f in enumerate(forms) for _ in f.figures), 0], dtype=int)
        self._slopes = {
            name: numpy.array([*(x for f in forms for x in f.slopes.get(name, [0.0] * len(f.figures))), 0.0])
            for name in ("launch_s", *SOFTWARE_S)
        }  # fmt: skip
        self._updates = [
            list(dict.fromkeys(_update(f, rank, gpu) for rank in f.ranks)) for f, gpu in zip(forms, gpus, strict=True)
        ]  # fmt: skip
        self._overlaps = numpy.array([f.overlaps_reduction for f in forms], dtype=bool)

    def steps_s(self, points: Sequence[Point]) -> list[float]:
        """The step times of the forms, each under its own constants."""
        figures, device = self._priced(points)
        seconds = numpy.maximum(device, figures[self._hosts])
        gathered = numpy.where(self._gathers >= 0, figures[self._gathers], 0.0)
        scattered = numpy.where(self._scatters >= 0, figures[self._scatters], 0.0)
        hidden = numpy.where(self._overlaps[self._row], numpy.maximum(0.0, scattered - seconds), scattered)
        seconds = seconds + numpy.maximum(0.0, gathered - seconds) + hidden
        return [self._step_s(row, form, points[row], seconds, figures) for row, form in enumerate(self.forms)]

    def ahead(self, points: Sequence[Point]) -> list[list[bool]]:
        """Of each stage of the forms: whether the host issues the passes of a micro-batch faster than the device runs them, without what
        runs again."""
        figures, device = self._priced(points)
        ahead = (device - figures[self._hosts]).tolist()
        found = []
        for first, form in zip(self._first_pass, self.forms, strict=True):
            n = len(form.parts)
            found.append([sum(count * (ahead[first + p] + ahead[first + n + p]) for p, _, count in stage) > 0 for stage in form.stages])
        return found

    def _priced(self, points: Sequence[Point]) -> tuple[Vector, Vector]:
        """The affine figures, and the device's seconds of each pass."""
        names = [c for c in OP_CLASSES if c != "view"]
        fractions = numpy.array([[*(p[n] for n in names), 1.0] for p in points])
        figures = self._figures.copy()
        for name, slope in self._slopes.items():
            figures += slope * numpy.array([p[name] for p in points])[self._figure_row]
        hidden_s = numpy.minimum(figures[self._hidden], self._products.seconds(fractions))
        device = self._passes.seconds(fractions) + figures[self._links]
        return figures, device - numpy.bincount(self._hidden_in, hidden_s, minlength=len(device))

    def _step_s(self, row: int, form: Form, point: Point, seconds: Vector, figures: Vector) -> float:
        first, n, at = self._first_pass[row], len(form.parts), self._first_figure[row]
        mine = seconds[first : first + 2 * n + len(form.again)].tolist()
        forwards = [sum(count * mine[p] for p, _, count in stage) for stage in form.stages]
        backwards = [sum(count * (mine[n + p] + (mine[2 * n + a] if a >= 0 else 0.0)) for p, a, count in stage) for stage in form.stages]
        figure = figures[at : at + len(form.figures)].tolist()
        sync = 0.0
        update = max((_update_s(n, kernel_s, point) for n, kernel_s in self._updates[row] if n), default=0.0)
        for rank in form.ranks:
            forward_s, backward_s = sum(forwards[s] for s in rank.stages), sum(backwards[s] for s in rank.stages)
            sync = max(sync, _exposed_s(form, rank, figure, forward_s, backward_s) + figure[rank.ends])
        pipeline = step_time_s(form.schedule, forwards, backwards, form.micro_batches, figure[form.hop], len(form.ranks))
        return max(figure[form.prologue], figure[form.prologue_host]) + pipeline + sync + update + point[ONCE]


def _exposed_s(form: Form, rank: OnRank, figure: Sequence[float], forward_s: float, backward_s: float) -> float:
    reduced, gathers = ([(n, figure[k]) for n, k in each] for each in (rank.reduced, rank.gathers))
    if reduced and form.overlaps_reduction:
        exposed = exposed_reduction_s([s for _, s in reduced], backward_s, [n for n, _ in reduced])
    else:
        exposed = sum(n * s for n, s in reduced)
    if not form.overlaps_gathers:
        exposed += sum(n * s for n, s in gathers)
    elif gathers:
        exposed += exposed_gathers_s([s for _, s in gathers], forward_s, [n for n, _ in gathers])
    return exposed + figure[rank.last]


def _update(form: Form, rank: OnRank, gpu: Gpu) -> tuple[int, float]:
    """Launches of a rank's update, and the seconds of each kernel at the full bandwidth (cost_models.step.optimizer_time_s)."""
    rules, item = form.optimizer, rank.item
    if rules["optimizer"] == "none" or not rank.numel:
        return 0, 0.0
    states = OPTIMIZERS[str(rules["optimizer"])]
    passes = float(rules["passes"] or 1.0) if states else 1.0
    state_itemsize, gradient_itemsize = (int(rules[name] or item) for name in ("state_itemsize", "grad_itemsize"))
    per_param = gradient_itemsize + 2 * (item + states * state_itemsize + int(rules["master_itemsize"] or 0))
    launches = max(1, math.ceil(rank.tensors / TENSORS_PER_LAUNCH))
    return launches, passes * rank.numel * per_param / launches / gpu.memory_bandwidth_bytes_per_s


def _update_s(launches: int, kernel_s: float, point: Point) -> float:
    """Of equal kernels that the host issues one after the other (cost_models.step.launched_s)."""
    each_s, launch_s = kernel_s / point["pointwise"], point["launch_s"]
    return launch_s + launches * each_s if each_s >= launch_s else launches * launch_s + each_s
