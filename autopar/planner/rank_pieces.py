"""The pieces of one rank's program with all that lies on the rank: parameters at rest, gradients, collectives, seconds.

Everything here gathers arguments; the arithmetic is that of `cost_models` (pools, compute), which checker and explain use too.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from autopar.axes import BATCH
from autopar.ir import Span, refs
from autopar.measure import Pricer
from autopar.measure.launches import ADDED, CAST, GATHERED
from autopar.planner.activity import Activity
from autopar.planner.exchange import Exchange
from autopar.planner.liveness import KnownPasses
from autopar.planner.pieces import AtRest, PieceMaker
from autopar.planner.plan import MemoryPlan
from autopar.planner.price import Beside, ParamBytes, Params
from autopar.planner.prologue import prologue_bytes
from autopar.planner.rank import Rank
from autopar.planner.stage_account import Piece
from autopar.planner.stages import Pieces, recomputable
from autopar.planner.units import gather_units
from cost_models.cluster import Cluster
from cost_models.compute import kernel_time_s
from cost_models.pipeline import Flow
from cost_models.pools import How, OfRank, gradient_bytes, of_parameters, of_rank
from cost_models.recipe import AUTOPAR, Recipe
from cost_models.rests import Rest
from cost_models.uncertainty import More, least_upper_bytes, more_for, room_bytes

__all__ = ["RankPieces"]


@dataclass(frozen=True, kw_only=True)
class RankPieces:
    """One rank's program under one schedule (flow). rest: how parameters rest; shard: over how many data-parallel ranks. params: value ->
    its bytes; dims: fqn -> the dim it rests sharded on. folded: of the program as it is, the same of the folded one, whose pieces are
    these."""

    rank: Rank
    cluster: Cluster
    optimizer: str
    flow: Flow
    rest: Rest
    shard: int
    dims: Mapping[str, int]
    params: Mapping[str, ParamBytes]
    segments: Pieces
    pricer: Pricer
    batch_bytes: int = 0  # the global batch, as it is given to every rank
    recipe: Recipe = AUTOPAR
    recompute: str = "auto"  # the modes that the pieces may have, as in Pins.recompute
    parts: int = 1  # in which what pieces keep is counted where it lies whole, as in PieceMaker: for bounds alone
    folded: Self | None = None

    # --------------------------------------------------------------------------------------------------------- pieces
    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces as the program over stages sees them: of what must fit, the upper end of an interval, their bytes are the bound from
        below that is nearest (`more`)."""
        return _counted(self.plain, self.more)

    @functools.cached_property
    def lean(self) -> tuple[Piece, ...]:
        """The same, but that a pass needs nothing beside what is kept: below what they are, and found in a fraction of the time."""
        return _counted(self.kept, self.more_kept)

    @functools.cached_property
    def more(self) -> More:
        """For how much what is less certain counts: that of a rank that is full of saved activations, if there are so many, beside the
        temporaries of the piece that needs most of them, in the mode of it that needs fewest."""
        passing = max(min(max(x.temporary for x in m.unsure) for m in p.modes) for p in dict.fromkeys(self.plain))
        return self._more(passing)

    @functools.cached_property
    def more_kept(self) -> More:
        """The same where nothing is known of temporaries."""
        return self._more(0.0)

    def _more(self, temporary: float) -> More:
        flow, gpu = self.flow, self.cluster.gpu
        rests = sum(p.rest_bytes for p in self.kept) / flow.ranks
        kept = sum(p.modes[0].kept_bytes for p in self.kept) / flow.ranks * max(flow.in_flight)
        saved = min(kept, max(0.0, gpu.memory_bytes - gpu.context_bytes - rests - temporary))
        return more_for(saved, rests + saved + temporary, gpu.context_bytes, self.recipe.allocator_slack, temporary)

    @functools.cached_property
    def plain(self) -> tuple[Piece, ...]:
        """The segments in the modes that the pin on recompute leaves, with their bytes as liveness counts them."""
        return self._made(passes=True) if self.folded is None else self.folded.plain

    @functools.cached_property
    def kept(self) -> tuple[Piece, ...]:
        return self._made(passes=False) if self.folded is None else self.folded.kept

    def _made(self, *, passes: bool) -> tuple[Piece, ...]:
        segments, seen = self.segments.segments, set[str]()
        at_rest, reads = [], [self.read(x.span) for x in segments]
        for own in reads:
            at_rest.append(self._at_rest(own - seen))
            seen |= own
        return PieceMaker(
            ledger=self.rank.ledger, cuts=self.rank.cuts, segments=self.segments, seconds=self._seconds, at_rest=at_rest, reads=reads,
            activity=self.activity(Span(0, len(self.rank.program.ops)), (), seen), recompute=self.recompute,
            trains=self.trains, reduced=self._copied(seen), passes=passes, parts=self.parts,
        ).pieces()  # fmt: skip

    @functools.cached_property
    def trains(self) -> list[bool]:
        """Of each segment, whether it reads a trainable parameter."""
        return [any(self.params[v].trainable for v in self.read(x.span)) for x in self.segments.segments]

    @property
    def can_run_again(self) -> bool:
        """Whether a piece keeps less if it is recomputed as a whole."""
        ledger, program = self.rank.ledger, self.rank.program
        spans = [x.span for x in self.segments.segments if x.block >= 0 and recomputable(program, x.span)]
        return any(ledger.kept_bytes(span) > ledger.entering_bytes(span) for span in spans)

    def read(self, span: Span) -> frozenset[str]:
        """The parameters that the operators of a span read."""
        return self.rank.ledger.params_of(span)

    @functools.cached_property
    def _reads(self) -> list[tuple[tuple[str, bool], ...]]:
        """For each segment its parameters, and whether every copy of the segment has one of its own."""
        program = self.rank.program
        spans = [x.span for x in program.repeats]
        inside = {v for s in spans for v in self.read(s)}
        covered = {k for s in spans for k in range(s.start, s.stop)}
        outside = {r for k, op in enumerate(program.ops) if inside and k not in covered for r in refs(op)}
        return [tuple((v, v in inside and v not in outside) for v in sorted(self.read(x.span))) for x in self.segments.segments]

    def own(self, i: int, j: int) -> list[tuple[str, int]]:
        """The parameters of the pieces [i, j): (value, which of its copies)."""
        pieces = self.segments
        found = {(v, pieces.copies[k] * each): None for k in range(i, j) for v, each in self._reads[pieces.order[k]]}
        return list(found)

    @functools.cached_property
    def all_params(self) -> Params:
        """Of the parameters of all pieces, as of `params_of`."""
        pieces = self.segments
        copies: dict[int, dict[int, None]] = {}
        for segment, copy in zip(pieces.order, pieces.copies, strict=True):
            copies.setdefault(segment, {})[copy] = None
        own: dict[str, dict[int, None]] = {}
        for segment, of in copies.items():
            for v, each in self._reads[segment]:
                own.setdefault(v, {}).update(of if each else {0: None})
        found = Counter[ParamBytes]()
        for v, of in own.items():
            found[self.params[v]] += len(of)
        return found

    def params_of(self, own: Iterable[tuple[str, int]]) -> Params:
        """Of the parameters of pieces: (value, which of its copies)."""
        found = Counter[ParamBytes]()
        for v, n in Counter(v for v, _ in own).items():
            found[self.params[v]] += n
        return found

    def _gather_s(self, own: Collection[str], compute_s: float, *, and_scatter: bool = False) -> float:
        """Exposed seconds of gathering parameters where they are used, the next unit while the present one is used;
        and_scatter: and of reduce-scattering their gradients in the same way."""
        gathered = self.gathered([(v, 0) for v in own])
        sent = (self.exchange.unit_s(n, scattered=x if and_scatter else 0.0) for n, x in gathered.values())
        return self.exchange.beside(sum(sent), compute_s)

    def _casts_s(self, params: Params) -> float:
        """Of casting what rests of these parameters to the dtype in which they are used, once."""
        moved = sum(
            n * (p.resting_bytes + p.local_bytes * p.resting_numel / p.numel) for p, n in params.items() if p.is_cast and p.numel
        )
        return self._moved_s(moved)

    def beside(self, own: Collection[str]) -> Beside:
        """Of one micro-batch, what these parameters take beside the operators that read them: casts of what is gathered, and of gradients,
        which backward makes in the dtype of use; and adding gradients to those of earlier micro-batches (two are read, one is written),
        in the mean of all micro-batches, or into buffers after each pass. Of the host also what gathering them keeps it with."""
        params = [self.params[v] for v in own]
        cast, trained = [p for p in params if p.is_cast], [p for p in params if p.trainable]
        gathered_s = self._casts_s(Counter(p for p in params if p.in_parts)) if self.rest.gathered == "use" else 0.0
        moved, added = float(sum(p.local_bytes + p.numel * p.itemsize for p in cast if p.trainable)), 0.0
        if self.recipe.adds_gradients:
            left = [(p, p.resting_numel if p.in_parts and self.rest.reduced == "pass" else p.numel) for p in trained]
            again = 1 - 1 / self.rank.micro_batches
            moved, added = moved + 3 * again * sum(self._gradient(p, numel) for p, numel in left), ADDED * again * len(left)
        launch_s, (ahead, back), (before, behind) = self.pricer.launch_s, CAST, self._gathering(params)
        return Beside(
            gathered_s, gathered_s + self._moved_s(moved) + self._moved_s(self.added_bytes(own)), launch_s * (ahead * len(cast) + before),
            launch_s * (back * sum(p.trainable for p in cast) + added + behind + len(self._added(own))),
        )  # fmt: skip

    def _gathering(self, params: Sequence[ParamBytes]) -> tuple[float, float]:
        """Launches of forward and backward of one micro-batch that those of the parameters which rest in parts keep the host with."""
        if not self.recipe.host_as_timed:
            return 0.0, 0.0
        before, behind = GATHERED[self.rest.gathered]
        number = sum(p.in_parts for p in params) / (1 if self.rest.gathered == "use" else self.rank.micro_batches)
        return number * before, number * behind

    def added_bytes(self, own: Collection[str]) -> float:
        """Of gradients that are added into buffers after each backward pass."""
        return float(sum(2 * self._gradient(p, p.numel) + p.numel * p.itemsize for p in self._added(own)))

    def _added(self, own: Collection[str]) -> list[ParamBytes]:
        """Of these parameters, those whose gradients are added after each pass."""
        return [p for p in (self.params[v] for v in own) if p.trainable] if self.recipe.adds_after_pass else []

    def _casts_of_a_step_s(self, own: Params) -> float:
        """Before the first micro-batch, of what is not gathered where it is used."""
        return self._casts_s({p: n for p, n in own.items() if not (p.in_parts and self.rest.gathered == "use")})

    def _moved_s(self, nbytes: float) -> float:
        return self.pricer.shared * kernel_time_s("pointwise", 0.0, nbytes, "float32", self.cluster.gpu) if nbytes else 0.0

    def _ends_s(self, i: int, j: int) -> float:
        """Exposed seconds of the first gather of a step of the pieces [i, j), and of its last reduce-scatter, which is of the same unit:
        nothing runs then."""
        if not self._units:
            return 0.0
        first = next((min(here) for k in range(i, j) if (here := self.gathered(self.own(k, k + 1)))), None)
        gathered = {} if first is None else self.gathered([(v, n) for v, n in self.own(i, j) if (self._units.get(v), n) == first])
        return 0.0 if first is None else self.exchange.unit_s(gathered[first][0], scattered=gathered[first][1])

    @functools.cached_property
    def exchange(self) -> Exchange:
        return Exchange(
            rest=self.rest, shard=self.shard, micro_batches=self.rank.micro_batches, pricer=self.pricer,
            recipe=self.recipe,
        )  # fmt: skip

    def gathered(self, own: Collection[tuple[str, int]]) -> dict[tuple[int, int], tuple[int, int]]:
        """(unit, which copy of it) -> bytes, of these parameters if they are gathered where they are used, and of their gradients as they
        are reduce-scattered."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for v, copy in own:
            if v in self._units:
                p, key = self.params[v], (self._units[v], copy)
                gathered, sent = found.get(key, (0, 0))
                found[key] = gathered + p.local_bytes, sent + self.exchange.scattered_bytes(p)
        return found

    @functools.cached_property
    def _units(self) -> dict[str, int]:
        parts = {v: p.local_bytes for v, p in self.params.items() if p.in_parts} if self.rest.gathered == "use" else {}
        return gather_units(self.rank.program, parts, self.recipe.unit_bytes) if parts else {}

    @functools.cached_property
    def _partial(self) -> frozenset[str]:
        """The parameters whose gradient, as their use gives it, is a term of a sum over ranks."""
        return frozenset(v for v, p in self.params.items() if p.summed)

    # --------------------------------------------------------------------------------------------------------- memory
    @functools.cached_property
    def how(self) -> How:
        return How(rest=self.rest, recipe=self.recipe, optimizer=self.optimizer)

    def _at_rest(self, own: Collection[str]) -> AtRest:
        """Of these parameters with what belongs to them. Which of them rest in parts differs from parameter to parameter, so the figures
        are of one rank already."""
        params = [self.params[v] for v in own]
        always, passes, update = (float(of_parameters(params, self.how, lives)) for lives in ("always", "passes", "update"))
        return AtRest(rest=always, passing=passes, update=update)

    def _copied(self, own: Collection[str]) -> frozenset[str]:
        """The parameters whose gradients wait in a bucket, copied, when backward ends: all of them, if they do not fill one."""
        reduced = [v for v in own if v in self._partial and self.params[v].trainable and v not in self._units]
        total = sum(self._gradient(self.params[v], self.params[v].numel) for v in reduced)
        return frozenset(reduced if self.recipe.overlaps_reduction and total < self.recipe.bucket_bytes else ())

    def _gradient(self, p: ParamBytes, numel: int) -> int:
        """Bytes of the gradient of so many numbers of a parameter, as backward makes it."""
        return gradient_bytes(numel, p, self.recipe)

    def _sent(self, p: ParamBytes) -> int:
        """Bytes of its gradient as it is reduced, if that is another dtype than it is summed in."""
        item = self.recipe.reduced_itemsize
        return self._gradient(p, p.numel) if item is None else p.numel * item

    def room_bytes(self, limit_bytes: int) -> float:
        """What of a GPU's memory is left for the pieces at most: without what a rank needs whatever lies on it, the allocator's slack, and
        what these two may be off by."""
        return self._room_bytes(limit_bytes, self.more)

    def room_of_lean_bytes(self, limit_bytes: int) -> float:
        """The same for the lean pieces."""
        return self._room_bytes(limit_bytes, self.more_kept)

    def _room_bytes(self, limit_bytes: int, more: More) -> float:
        room = room_bytes(limit_bytes, self.cluster.gpu.context_bytes, self.recipe.allocator_slack, more)
        return room - of_rank(self.of_rank, self.how)

    def upper_bytes(self, pieces_bytes: float) -> float:
        """The inverse of room_bytes."""
        allocated = pieces_bytes + of_rank(self.of_rank, self.how)
        return least_upper_bytes(allocated, self.cluster.gpu.context_bytes, self.recipe.allocator_slack, self.more)

    @property
    def of_rank(self) -> OfRank:
        program = self.rank.program
        buffers = sum(program.types[b.value].nbytes for b in program.buffers) // self.parts
        return OfRank(buffers=buffers, batch=self.batch_bytes, prologue=prologue_bytes(self.rank))

    @functools.cached_property
    def memory_plans(self) -> dict[Hashable, MemoryPlan]:
        """Of stages, once they have been worked out (candidate.py)."""
        return {}

    @functools.cached_property
    def passes(self) -> KnownPasses:
        """What is known of the passes of stages."""
        return KnownPasses()

    def alike(self, i: int, j: int, modes: tuple[int, ...]) -> Hashable:
        """Of a stage of the pieces [i, j) in these modes: stages that have the same, and not None, are of blocks that one instance stands
        for (fold.py). With parameters that are gathered where they are used a pass also depends on their units (Units.alike)."""
        if self.folded is None:
            return None
        return self.folded.segments.order[i:j], modes

    def activity(
        self, span: Span, recomputed: tuple[Span, ...], own: Collection[str], s: int = 0, late: Collection[str] = (),
        alike: Hashable = None,
    ) -> Activity:  # fmt: skip
        """Of stage s with these operators and parameters. late: those that other ranks use too; alike: as of the method, None for a stage
        that is like itself alone."""
        cuts, program = self.rank.cuts.crossing, self.rank.program
        receives = cuts.get(span.start, ())
        sends = cuts[span.stop] if span.stop in cuts and span.stop < len(program.ops) else (program.loss,)
        if alike is None:
            alike = (s, span, recomputed, frozenset(late))
        else:
            alike = (alike, frozenset(late), *(tuple(self.rank.ledger.liveness.crossing(x).values()) for x in (receives, sends)))
        params = {v: self.params[v] for v in own}
        parts = {v for v, p in params.items() if p.in_parts}
        sent = {v for v in parts if params[v].trainable}
        return Activity(
            span=span,
            recomputed=recomputed,
            receives=receives,
            sends=sends,
            in_flight=self.flow.in_flight[s],
            micro_batches=self.rank.micro_batches,
            gradients={v: (self._gradient(p, p.numel), self._gradient(p, p.resting_numel)) for v, p in params.items() if p.trainable},
            reduced=self._partial,
            scattered=sent if self.rest.reduced == "step" and not self.recipe.sums_parts_whole else (),
            at_once=sent if self.rest.reduced == "pass" else (),
            where_used={v: params[v].local_bytes for v in parts} if self.rest.gathered == "use" else {},
            units=self._units,
            bucket_bytes=self.recipe.bucket_bytes if self.recipe.overlaps_reduction else 0,
            accumulates=self.recipe.accumulates,
            late=late,
            cast={v for v, p in params.items() if p.is_cast},
            sent={v: n for v, p in params.items() if p.trainable and (n := self._sent(p)) != self._gradient(p, p.numel)},
            summed=sent if self.shard < self.pricer.mesh.get(BATCH, 1) else (),
            alike=alike,
        )

    # -------------------------------------------------------------------------------------------------------- seconds
    def seconds(self) -> list[tuple[float, float]]:
        """(forward, backward) of every piece and one micro-batch, with what is gathered for it."""
        return [self._seconds[k] for k in self.segments.order] if self.folded is None else self.folded.seconds()

    def operators_s(self) -> float:
        """Of all operators of one micro-batch, forward and backward, on a device that never waits for its host: however parameters
        rest."""
        if self.folded is not None:
            return self.folded.operators_s()
        of = [sum(c.forward_s + c.backward_s for c in self.rank.ledger.costs[x.span.start : x.span.stop]) for x in self.segments.segments]
        return sum(of[k] for k in self.segments.order)

    @functools.cached_property
    def _seconds(self) -> list[tuple[float, float]]:
        """Of every segment; blocks that are alike once."""
        known: dict[int, tuple[float, float]] = {}
        found = []
        for segment in self.segments.segments:
            if segment.block in known:
                found.append(known[segment.block])
                continue
            own = sorted(self.read(segment.span))
            forward, backward, _ = self.rank.ledger.seconds(range(segment.span.start, segment.span.stop), self.beside(own))
            exposed = self._gather_s(own, backward, and_scatter=True) + self.exchange.pass_s(self.params_of((v, 0) for v in own), backward)
            found.append((forward + self._gather_s(own, forward), backward + exposed))
            if segment.block >= 0:
                known[segment.block] = found[-1]
        return found


def _counted(pieces: tuple[Piece, ...], more: More) -> tuple[Piece, ...]:
    counted: dict[Piece, Piece] = {}
    found: dict[int, Piece] = {}  # by identity: most are few objects, many times
    for p in pieces:
        if id(p) not in found:
            if p not in counted:
                counted[p] = p.with_more(more)
            found[id(p)] = counted[p]
    return tuple([found[id(p)] for p in pieces])
