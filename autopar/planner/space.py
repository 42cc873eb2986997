"""What may be chosen: meshes, micro-batches, schedules and resting places, as the pins leave them.

A choice is a value; nothing here is priced. Strategies, stages and recompute are decided inside a choice, by programs of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.axes import AXES, BATCH, LAYERS, Divides, axes_over
from autopar.planner.lower import inner_axes
from autopar.planner.plan import Pins
from autopar.planner.words import choice_words
from autopar.report.units import seconds_text
from cost_models.cluster import Cluster
from cost_models.pipeline import SCHEDULES
from cost_models.rests import RESTS, Rest

__all__ = ["CHUNKS_TRIED", "SCHEDULES_TRIED", "Choice", "Form", "Mesh", "Space", "divisors"]

SCHEDULES_TRIED = ("1f1b", "interleaved")  # of those that are known; 1F1B is as fast as GPipe, with fewer micro-batches in flight
CHUNKS_TRIED = (2,)  # stages on each rank, where a schedule has several and how many is not pinned
MAX_INTERLEAVED = 4  # micro-batches for each pipeline rank, up to which several stages on each are tried
MAX_RANKS_INTERLEAVED = 4  # pipeline ranks up to which they are: of more, the cuts take longest of all to price
MAX_MICRO_BATCHES = 64  # for each stage, beyond which what is left of the bubble is less than a sixty-fourth


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Ranks on each axis of the table, outermost first; one where none are named. An axis' are its attribute: mesh.dp."""

    ranks: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int) -> None:
        if unknown := set(sizes) - set(AXES):
            raise ValueError(f"a mesh has the axes {', '.join(AXES)}, not {', '.join(sorted(unknown))}")
        object.__setattr__(self, "ranks", tuple((axis, sizes.get(axis, 1)) for axis in AXES))

    def __getattr__(self, axis: str) -> int:
        if axis not in AXES:
            raise AttributeError(f"a mesh has no axis {axis}")
        return self.sizes()[axis]

    def __str__(self) -> str:
        return " ".join(f"{axis}={n}" for axis, n in self.ranks)

    def sizes(self) -> dict[str, int]:
        return dict(self.ranks)

    def over(self, divides: Divides) -> int:
        """The ranks among which the layers, the batch or the operators are divided."""
        return math.prod(n for axis, n in self.ranks if AXES[axis].divides == divides)

    @property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """The axes of several ranks that divide operators, and their sizes, in the order in which a program is laid over them."""
        return inner_axes(self.sizes())

    @property
    def has_forms(self) -> bool:
        """Whether an axis of several ranks is asked for Megatron's forms."""
        return any(AXES[axis].forms for axis, _ in self.inner)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What is asked of the tensor axis' assignment; by default the fastest. sequence: Megatron's forms, as in Pins.sequence_parallel.
    split: every heavy operator that can be split is. byte_s: the price of memory, in seconds of a micro-batch for each byte that it
    keeps."""

    sequence: bool | None = None
    split: bool = False
    byte_s: float = 0.0

    def on(self, axis: str) -> Form:
        """What is asked of one axis: only some have Megatron's forms."""
        return self if AXES[axis].forms else Form(split=self.split)

    @property
    def simplicity(self) -> tuple[float, ...]:
        return (self.sequence is not None, self.sequence is False, self.split, self.byte_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One point of the space, before anything inside it is decided. rest: how parameters, gradients and optimizer states rest over the
    data axis; shard: over how many of its ranks the parts of one parameter lie (1: it is whole). form: of the tensor axis. chunks: stages
    on each pipeline rank.
    The fastest form keeps what it likes; where that costs recompute or does not fit, others are tried too."""

    mesh: Mesh
    micro_batches: int
    schedule: str
    rest: Rest
    shard: int
    form: Form = Form()
    chunks: int = 1

    @property
    def words(self) -> str:
        """'tp 2, dp 4, pipeline of 2, ZeRO-1, 4 micro-batches'."""
        return choice_words(self.mesh.sizes(), self.rest, self.shard, self.micro_batches, self.chunks)

    @property
    def simplicity(self) -> tuple[float, ...]:
        """Of choices that cost the same, the one with the smaller value is taken."""
        mesh, form, rest = self.mesh, self.form.simplicity, tuple(RESTS).index(self.rest.name)
        stages, parts = mesh.over("layers"), mesh.over("operators")
        return (parts * stages, stages, parts, self.chunks, *form, rest, abs(self.micro_batches - 2 * stages), self.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """batch: samples of a step, None if nothing can be split. one_stage: as of Program."""

    gpus: int
    cluster: Cluster
    pins: Pins
    batch: int | None
    one_stage: str = ""

    @property
    def too_many(self) -> str:
        """Why the cluster has not so many GPUs; empty where it has."""
        have = self.cluster.gpu_count
        if have is None or self.gpus <= have:
            return ""
        return f"{self.gpus} GPUs were asked for, but the cluster {self.cluster.name} has {have}"

    def meshes(self) -> Iterator[Mesh]:
        """Every division of the GPUs among the axes that the pins allow; none of more GPUs than the cluster has."""
        if self.too_many:
            return
        pinned = {axis: self.pins.of_axis(axis) for axis in AXES}
        if self.pins.blocks is not None:
            pinned[LAYERS] = len(self.pins.blocks) // (self.pins.virtual_stages or 1)
        node = self.cluster.gpus_per_node
        order = [*(row.name for row in reversed(axes_over("operators"))), LAYERS, BATCH]

        def place(left: int, sizes: dict[str, int]) -> Iterator[Mesh]:
            axis = order[len(sizes)]
            known = pinned[axis]
            for n in divisors(left) if axis != order[-1] else [left]:
                if axis == LAYERS and self.one_stage and n > 1:
                    continue
                if known not in (None, n) or (known is None and AXES[axis].within_node and n > node):
                    continue
                if axis == order[-1]:
                    yield Mesh(**sizes, **{axis: n})
                else:
                    yield from place(left // n, {**sizes, axis: n})

        yield from place(self.gpus, {})

    def micro_batch_counts(self, mesh: Mesh) -> list[int]:
        if self.batch is None:
            whole = mesh.over("batch") == 1 and self.pins.micro_batches in (None, 1) and self.pins.micro_batch is None
            return [1] if whole else []
        ranks = mesh.over("batch")
        if self.batch % ranks:
            return []
        local = self.batch // ranks
        if self.pins.micro_batches is not None:
            return [self.pins.micro_batches] if local % self.pins.micro_batches == 0 else []
        if self.pins.micro_batch is not None:
            return [local // self.pins.micro_batch] if local % self.pins.micro_batch == 0 else []
        return [m for m in range(1, min(local, MAX_MICRO_BATCHES * mesh.over("layers")) + 1) if local % m == 0]

    def rests(self, mesh: Mesh) -> list[tuple[Rest, int]]:
        """The rows that the pins allow, each with the number of ranks that a parameter's parts lie over."""
        node = self.cluster.gpus_per_node // mesh.over("operators")
        rows = [row for row in RESTS.values() if self.pins.zero in (None, row.zero)]
        return [(row, shard) for row in rows for shard in row.shards(mesh.over("batch"), node, self.pins.shard)]

    def schedules(self, mesh: Mesh, count: int) -> list[tuple[str, int]]:
        """Schedules, each with the number of stages on a rank."""
        pinned, chunks = self.pins.schedule, self.pins.virtual_stages
        found = []
        for row in [SCHEDULES[pinned]] if pinned else SCHEDULES.values():
            if not row.several:
                found += [(row.name, 1)] if chunks in (None, 1) and (pinned or row.name in SCHEDULES_TRIED) else []
            elif pinned or chunks is not None or (row.name in SCHEDULES_TRIED and self._interleaves(mesh, count)):
                found += [(row.name, n) for n in ([chunks] if chunks else CHUNKS_TRIED) if n > 1 and mesh.over("layers") > 1]
        return found

    def _interleaves(self, mesh: Mesh, count: int) -> bool:
        """Whether several stages on each rank are tried where nothing asks for them: with whole groups of micro-batches, of which there are
        so few that the bubble is a fifth of the step or more, on few pipeline ranks, and unless the layers of each rank's one stage are
        pinned."""
        ranks = mesh.over("layers")
        few = ranks <= MAX_RANKS_INTERLEAVED and count <= MAX_INTERLEAVED * ranks
        return few and count % ranks == 0 and self.pins.blocks is None

    def choices(self) -> Iterator[Choice]:
        for mesh in self.meshes():
            for count in self.micro_batch_counts(mesh):
                for schedule, chunks in self.schedules(mesh, count):
                    for rest, shard in self.rests(mesh):
                        form = self.form if mesh.inner else Form()
                        yield Choice(
                            mesh=mesh, micro_batches=count, schedule=schedule, rest=rest, shard=shard, form=form, chunks=chunks
                        )  # fmt: skip

    @property
    def form(self) -> Form:
        """The first form that is tried. A pinned axis is there to split work, also where a small model would be faster without."""
        sequence = self.pins.sequence_parallel
        return Form(sequence=sequence, split=self.pinned_to_split and sequence is None)

    def formed(self, form: Form) -> str:
        """What is asked of the tensor axis beside its first form, in words."""
        if form == self.form:
            return ""
        if form.sequence is not None:
            return f", {'with' if form.sequence else 'without'} sequence parallelism"
        axis = next(name for name, row in AXES.items() if row.forms)
        if form.byte_s:
            return f", split over {axis} so that less is kept for backward (at up to {seconds_text(form.byte_s * 2**30)} for a GiB)"
        return f", all of its work split over {axis}" if form.split else ""

    @property
    def pinned_to_split(self) -> bool:
        """Whether an axis that divides operators is pinned."""
        return any(self.pins.of_axis(row.name) is not None for row in axes_over("operators"))

    def leaner(self, choice: Choice, prices: Sequence[float]) -> Iterator[Choice]:
        """The same in the other forms of the tensor axis that may need less memory. prices: of a byte that a micro-batch keeps."""
        form = choice.form
        if not choice.mesh.has_forms or form.sequence is not None or form.byte_s:
            return
        found = [dataclasses.replace(form, byte_s=price) for price in prices]
        if form == self.form:
            found += [Form(sequence=True), Form(sequence=False)]
        if not form.split:
            found.append(dataclasses.replace(form, split=True))
        yield from (dataclasses.replace(choice, form=x) for x in found)

    def refused(self) -> Iterator[str]:
        """Why there is no choice for a mesh that the pins allow."""
        if self.too_many:
            yield self.too_many
        for mesh in self.meshes():
            if not self.micro_batch_counts(mesh):
                divides = f"a global batch of {self.batch} does not divide into {mesh.over('batch')} ranks" + self._counts_pin()
                yield f"{BATCH}={mesh.over('batch')}: {divides if self.batch is not None else 'no input has a dim that could be the batch'}"
            elif not self.schedules(mesh, 1):
                yield f"{LAYERS}={mesh.over('layers')}: a rank can hold several stages (virtual_stages) only where there are several ranks"
            elif not self.rests(mesh):
                pins = " ".join(f"{k}={v}" for k in ("zero", "shard") if (v := getattr(self.pins, k)) is not None)
                why = f"the parts of a parameter cannot lie so over the {mesh.over('batch')} ranks of the data axis"
                yield f"{pins}: {why if mesh.over('batch') > 1 else 'there is no data axis to shard parameters over'}"

    def _counts_pin(self) -> str:
        if self.pins.micro_batches is not None:
            return f" of {self.pins.micro_batches} micro-batches"
        return f" of micro-batches of {self.pins.micro_batch}" if self.pins.micro_batch is not None else ""


@functools.lru_cache(maxsize=256)
def divisors(n: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return (*small, *(n // k for k in reversed(small) if k * k != n))
