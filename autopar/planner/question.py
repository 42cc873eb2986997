"""What is asked, and one choice in answer to it: what it costs at least, its stages by their pieces, and as it will run.

A choice that does not fit leaves its reason in `Searched.refused`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, Literal, Self

from autopar.axes import LAYERS
from autopar.errors import Infeasible, PlanError
from autopar.ir import Program
from autopar.measure import Live
from autopar.planner.bounds import Least
from autopar.planner.candidate import Candidate, Draft, candidate_of
from autopar.planner.estimate import Estimator
from autopar.planner.partition import Over, Place, Refused, TooLarge
from autopar.planner.plan import Pins
from autopar.planner.price import Ledger, param_bytes, zero_dims
from autopar.planner.rank import Rank
from autopar.planner.solver import OutOfBudget
from autopar.planner.space import Choice, Mesh, Space
from autopar.planner.stage_account import NODES
from autopar.planner.stages import segments_of
from autopar.planner.store import Store
from autopar.planner.words import axis_words
from autopar.report.units import bytes_text
from autopar.run.dtypes import itemsize_named
from cost_models.cluster import MOST_GPUS, Cluster
from cost_models.pipeline import flow
from cost_models.recipe import AUTOPAR, Recipe

__all__ = ["NO_BETTER", "Elsewhere", "Ledgers", "Question", "Searched", "Spaces"]

NO_BETTER: Final = "no better"
TRIES = 12  # of the stages of one choice, where several pieces together need more than the account of each says (see `pieces.py`)
AGAIN = 6  # further ones, where what did not fit is refused alone
Ledgers = dict[tuple[object, ...], Ledger]  # by data-parallel ranks, micro-batches, and the axes that divide operators


Spaces = Callable[[Pins], Sequence[Pins] | str]
"""Of what the user has pinned the pins whose plans together are the space, or why there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """Another training software: its name, what it can run, and how it does."""

    name: str
    spaces: Spaces | None
    recipe: Recipe


@dataclass(kw_only=True)
class Searched:
    """What a search can tell at its end. choices: in the space; explored: priced; cut: into stages; unexplored: given up when it was
    stopped; left: never looked at, because they could not be better. drafts, behind: what was priced and is not the plan, the fastest
    first: with stages, and by what its pieces cost at least. short: of each line of `refused` about
    memory, the bytes that are missing; noted: that line of a choice. bound_s: no plan of the space is faster."""

    refused: dict[str, None] = field(default_factory=dict)
    short: dict[str, float] = field(default_factory=dict)
    noted: dict[Choice, str] = field(default_factory=dict)
    least: Least | None = None
    drafts: list[Draft] = field(default_factory=list)
    behind: list[tuple[float, Choice]] = field(default_factory=list)
    choices: int = 0
    explored: int = 0
    cut: int = 0
    unexplored: int = 0
    left: int = 0
    stopped: str = ""
    bound_s: float = math.inf

    def counts(self) -> dict[str, int]:
        return {"choices": self.choices, "explored": self.explored, "cut": self.cut, "left": self.left, "unexplored": self.unexplored}


@dataclass(kw_only=True)
class Question:
    """recipe: of the training software; reduce_dtype: in which it brings gradients together (a name as of precision), None for that in
    which parameters rest. batch_size: the global batch, by default that of the program; with another one candidates can be priced, but no
    plan made. stated: what of the pins is the user's, None: all. spaces: what is searched under the user's pins, None: the pins themselves.
    elsewhere: other training softwares, which a refusal may name. stop: whether the user has enough. nodes: of the search for the modes of
    each stage. known: what was found out about ranks;
    said: about choices; unsure: choices that were tried without proof that nothing fits."""

    program: Program
    gpus: int
    cluster: Cluster
    memory_limit_bytes: int
    optimizer: str
    precision: str
    pins: Pins
    recipe: Recipe = AUTOPAR
    reduce_dtype: str | None = None
    batch_size: int | None = None
    store: Store | None = None
    stated: Pins | None = None
    spaces: Spaces | None = None
    elsewhere: Sequence[Elsewhere] = ()
    stop: Callable[[], bool] = lambda: False
    nodes: int = NODES

    def __post_init__(self) -> None:
        if self.gpus > MOST_GPUS:
            raise PlanError(f"plans are made for at most {MOST_GPUS:,} GPUs, not for {self.gpus:,}")
        if self.reduce_dtype is not None:
            self.recipe = dataclasses.replace(self.recipe, reduced_itemsize=itemsize_named(self.reduce_dtype))
        self.batch_size = self.batch_size or self.program.batch_size
        self.space = Space(gpus=self.gpus, cluster=self.cluster, pins=self.pins, batch=self.batch_size, one_stage=self.program.one_stage)
        self.known = self.store or self.new_store()
        self.said = Searched()
        self.unsure: set[Choice] = set()

    def new_store(self, *, folds: bool = True) -> Store:
        """What is found out about this program, anew."""
        return Store(
            program=self.program, cluster=self.cluster, optimizer=self.optimizer, reduced_itemsize=itemsize_named(self.reduce_dtype),
            folds=folds,
        )  # fmt: skip

    def other(self, *, gpus: int, pins: Pins, batch_size: int | None, recipe: Recipe, memory_limit_bytes: int) -> Self:
        """The same of another size or under other pins, which shares what this one has found out about ranks."""
        found = dataclasses.replace(
            self, gpus=gpus, pins=pins, batch_size=batch_size, recipe=recipe, memory_limit_bytes=memory_limit_bytes, store=self.known
        )
        found.said.least = self.said.least if found.recipe == self.recipe else None
        return found

    @property
    def asked(self) -> Pins:
        """What the user has pinned."""
        return self.pins if self.stated is None else self.stated

    def under(self, asked: Pins) -> Sequence[Pins]:
        """The pins of what is searched where the user pins this; none where that cannot be run."""
        found = (asked,) if self.spaces is None else self.spaces(asked)
        return () if isinstance(found, str) else found

    @property
    def _least(self) -> Least:
        if self.said.least is None:
            self.said.least = self.known.timed("bound", lambda: Least(self.known.folded, self.cluster, self.optimizer, self.recipe))
        return self.said.least

    def could_fit(self, choice: Choice, rank: Rank | str | None = None) -> bool:
        """Whether what rests on the fullest rank leaves room. rank: of this choice, if it is known."""
        nbytes = self._least.bytes(choice, self._alike(rank))
        return nbytes <= self._least.room_bytes(self.memory_limit_bytes, self._batch_bytes(choice.mesh))

    def _alike(self, rank: Rank | str | None) -> frozenset[str]:
        """The parameters that all data-parallel ranks are known to use for the same work."""
        return self.known.alike(rank.data) if isinstance(rank, Rank) else frozenset()

    @property
    def refused(self) -> dict[str, None]:
        """Why choices are none, in the order in which that was found."""
        return self.said.refused

    def estimator(self, rank: Rank | str, choice: Choice, live: Live | None = None, drafted: Estimator | None = None) -> Estimator | str:
        """What prices a choice on this rank, or why it is none. drafted: that of a folded rank, which may be the one of this."""
        mesh = choice.mesh
        if isinstance(rank, str):
            return rank
        ranks = mesh.over("layers")
        stages = ranks * choice.chunks
        segments = segments_of(rank.program, rank.cuts, 1 if self._pins_cuts else stages)
        asked = axis_words(LAYERS, ranks) + (f" with {choice.chunks} stages on each rank" if choice.chunks > 1 else "")
        if len(segments) < stages:
            return f"{asked}: the program has only {len(segments) - 1} places where it can be cut"
        folded = None
        if rank.folded is not None:
            same = drafted is not None and drafted.rank.ledger is rank.folded.ledger
            found = drafted if same else self.estimator(rank.folded, choice, live)
            folded = found if isinstance(found, Estimator) and len(found.segments) == len(segments) else None
        dims = zero_dims(rank.program, choice.shard, choice.rest)
        estimator = Estimator(
            rank=rank, cluster=self.cluster, optimizer=self.optimizer,
            flow=flow(choice.schedule, ranks, rank.micro_batches, choice.chunks), rest=choice.rest, shard=choice.shard,
            dims=dims, params=param_bytes(rank.program, dims, choice.shard, ranks=mesh.over("batch")), segments=segments,
            pricer=self.known.pricer(mesh, self.recipe, live), batch_bytes=self._batch_bytes(mesh), recipe=self.recipe,
            recompute=self.pins.recompute or "auto", folded=folded,
        )  # fmt: skip
        if self.pins.recompute not in (None, "none", "auto") and not estimator.can_run_again:
            return f"recompute={self.pins.recompute}: the program has no repeated block that can be recomputed"
        if stages > 1 and (trained := sum(estimator.trains[k] for k in segments.order)) < stages:
            return f"{asked}: only {trained} of the pieces between cuts have parameters to train, and every stage needs one"
        cuts = self.pinned_cuts(estimator)
        return f"{'even_stages' if self.pins.blocks is None else 'blocks'}: {cuts}" if isinstance(cuts, str) else estimator

    def draft(
        self, choice: Choice, estimator: Estimator, worth_s: float = math.inf, over: Over | None = None, refused: Refused | None = None
    ) -> Draft | Literal["no better"] | None:
        """The stages of a choice by the account of its pieces; None if they do not fit, and `refused` says why. worth_s: NO_BETTER if no
        step of this choice is faster. over: what certain stages need beyond what their pieces say; refused: modes of certain stages that do
        not fit."""
        room = estimator.room_bytes(self.memory_limit_bytes)
        cuts = self.pinned_cuts(estimator)
        assert not isinstance(cuts, str)
        try:
            part = estimator.partition(limit_bytes=room, cuts=cuts, worth_s=worth_s, over=over, refused=refused, nodes=self.nodes)
        except (Infeasible, OutOfBudget) as why:
            if isinstance(why, OutOfBudget):
                self.unsure.add(choice)
            if refused is None:
                least = why.least_bytes if isinstance(why, TooLarge) else estimator.least_bytes
                more = max((over or {}).values(), default=0.0)
                self.note_shortfall(choice, estimator, estimator.upper_bytes(least if least > room else room + more))
            return None
        if part is None:
            return NO_BETTER
        times = estimator.times(part)
        bound_s = min(times.step_s, part.outcome.bound + estimator.least_ends_s)
        return Draft(choice=choice, estimator=estimator, part=part, times=times, bound_s=bound_s)

    def exact(
        self, choice: Choice, live: Live | None = None, ledgers: Ledgers | None = None, drafted: Estimator | None = None
    ) -> Candidate | None:
        """The choice as it will run, None if it does not fit. live, ledgers: with operators measured on this machine, and those that
        were. drafted: what it was drafted with."""
        mesh = choice.mesh
        rank = self.known.whole(mesh, choice.micro_batches, self.batch_size, self.recipe, choice.form)
        if ledgers is not None and not isinstance(rank, str):
            program, pricer = rank.program, self.known.pricer(mesh, self.recipe, live)
            key = mesh.over("batch"), rank.micro_batches, mesh.inner
            if key not in ledgers:
                ledgers[key] = self.known.timed("measure", lambda: Ledger(program, pricer))
            rank = dataclasses.replace(rank, ledger=ledgers[key], folded=None)
        estimator = self.estimator(rank, choice, live, drafted)
        if isinstance(estimator, str):
            self.refused[estimator] = None
            return None
        over: dict[Place, float] = {}
        short, best = 0.0, None
        refused: dict[Place, set[tuple[int, ...]]] = {}
        for attempt in range(TRIES):
            draft = self.draft(choice, estimator, over=over)
            if not isinstance(draft, Draft):
                break
            found, short = self._as_it_runs(choice, estimator, draft, refused)
            if short <= 0:
                best = found
                break
            more = 2.0 ** max(0, attempt - TRIES // 2) * short if attempt >= TRIES // 2 else 0.0
            for place, nbytes in estimator.unsaid_bytes(draft.part, found.stages).items():
                if nbytes > 0 or more:
                    over[place] = max(over.get(place, 0.0), nbytes) + more
        if not refused:
            return best
        # what other modes of the same stages need was added to these: they are tried without it too, while they would be faster
        worth_s = math.inf if best is None else best.step_time_s * (1 - 1e-9)
        for _ in range(AGAIN):
            draft = self.draft(choice, estimator, refused=refused, worth_s=worth_s)
            if not isinstance(draft, Draft) or draft.times.step_s >= worth_s:
                break
            found, short = self._as_it_runs(choice, estimator, draft, refused)
            if short <= 0:
                return found
        else:
            self.unsure.add(choice)
        if best is None and short > 0:
            self.note_shortfall(choice, estimator, float(self.memory_limit_bytes + short))
        return best

    def _as_it_runs(
        self, choice: Choice, estimator: Estimator, draft: Draft, refused: dict[Place, set[tuple[int, ...]]]
    ) -> tuple[Candidate, float]:
        """A draft with memory from liveness, and by how much the upper end of its interval does not fit. refused: takes the modes of the
        stages that do not."""
        found = self.known.timed("liveness", functools.partial(candidate_of, estimator, draft.part))
        limit = self.memory_limit_bytes
        for rank, place in enumerate(estimator.places(draft.part)):
            if found.stages[estimator.flow.rank_of.index(rank)].memory.upper_bytes > limit:
                refused.setdefault(place, set()).add(estimator.modes_at(draft.part, place))
        short = max(stage.memory.upper_bytes for stage in found.stages) - limit
        return dataclasses.replace(found, form=choice.form), short

    def _batch_bytes(self, mesh: Mesh) -> int:
        """Bytes of the batch as it is given to a rank."""
        captured = sum(self.program.types[x.value].nbytes for x in self.program.inputs)
        whole = captured * (self.batch_size or 1) // (self.program.batch_size or 1)
        return whole // mesh.over("batch") if self.recipe.local_batches else whole

    @property
    def _pins_cuts(self) -> bool:
        return self.pins.blocks is not None or bool(self.pins.even_stages)

    def pinned_cuts(self, estimator: Estimator) -> tuple[int, ...] | str | None:
        """The first piece of each stage but the first as `Pins.blocks` or `Pins.even_stages` states them, or why the program has no such
        stages."""
        if not self._pins_cuts:
            return None
        segments, trains = estimator.segments, estimator.trains
        places = [k for k in range(len(segments)) if segments[k].block >= 0]
        wanted = self.pins.blocks
        if wanted is None:
            count = estimator.flow.stages
            if len(places) % count or (count > 1 and not places):
                return f"the program's {len(places)} block instances do not make {count} stages alike"
            wanted = (len(places) // count,) * count
        stages = f"stages of {', '.join(map(str, wanted))}"
        if sum(wanted) != len(places):
            return f"the program has {len(places)} block instances between places where it can be cut, which do not make {stages}"
        starts = [*places, places[-1] + 1 if places else len(segments)]
        cuts = tuple(starts[n] for n in accumulate(wanted[:-1]))
        for s, (i, j) in enumerate(pairwise((0, *cuts, len(segments)))):
            if i >= j or (len(wanted) > 1 and not any(trains[k] for k in segments.order[i:j])):
                return f"of {stages}, stage {s} would have nothing to train"
        return cuts

    def note_shortfall(self, choice: Choice, estimator: Estimator, needs: float) -> None:
        """How many bytes the leanest form of a choice lacks. needs: what its fullest rank must have."""
        flow, pieces = estimator.flow, estimator.plain
        state = sum(p.rest_bytes + max(p.gradient_bytes + p.passing_bytes, p.update_bytes) for p in pieces) / flow.ranks
        kept = sum(min(m.kept_bytes for m in p.modes) for p in pieces) / flow.ranks * max(flow.in_flight)
        short = max(1.0, needs - self.memory_limit_bytes)
        limit, form = self.memory_limit_bytes, self.space.formed(choice.form)
        line = (
            f"memory: {choice.words}{form} needs {bytes_text(limit + short)} on its fullest rank at the upper end of its interval (on "
            f"average {bytes_text(state)} of parameters, gradients and optimizer states and {bytes_text(kept)} of activations) of "
            f"{bytes_text(limit)}, {bytes_text(short)} short"
        )
        if (before := self.said.noted.get(choice)) is not None:  # by its pieces, and now as it would run
            self.refused.pop(before, None)
            self.said.short.pop(before, None)
        self.refused[line], self.said.short[line], self.said.noted[choice] = None, short, line
