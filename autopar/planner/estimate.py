"""What a choice costs: seconds and bytes of its pieces, its stages and its step.

Everything here gathers arguments; the arithmetic is that of `cost_models` (memory.stage_memory, step, pipeline), which
checker and explain use too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.axes import BATCH, LAYERS
from autopar.ir import Span, refs
from autopar.measure import Pricer
from autopar.planner.activity import Activity
from autopar.planner.exchange import Exchange, LeastOnce, Once
from autopar.planner.interleave import least_of_ranks, partition_of_ranks, place_of, rank_bytes
from autopar.planner.partition import UNSOLVED, Over, Partition, Refused, least_bytes, partition
from autopar.planner.pieces import AtRest, PieceMaker
from autopar.planner.plan import MemoryPlan, StagePlan
from autopar.planner.price import ParamBytes
from autopar.planner.prologue import prologue_bytes, prologue_s
from autopar.planner.rank import Rank
from autopar.planner.relaxed import Ends, least_of_stages
from autopar.planner.stage_account import Piece, stage_bytes
from autopar.planner.stages import Pieces, recomputable
from autopar.planner.units import gather_units
from cost_models.cluster import Cluster, Gpu
from cost_models.compute import kernel_time_s
from cost_models.memory import OPTIMIZERS
from cost_models.pipeline import SCHEDULES, Flow
from cost_models.pools import How, OfRank, gradient_bytes, of_parameters, of_rank
from cost_models.recipe import AUTOPAR, Recipe
from cost_models.rests import Rest
from cost_models.step import optimizer_time_s
from cost_models.uncertainty import More, least_upper_bytes, more_for, room_bytes

__all__ = ["Estimator", "Times"]

MANY = 3  # pieces for each stage
MUCH = 16.0  # times the price of a byte, at which an assignment is worth its while only where nothing else fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a step: of each stage's forward and backward of one micro-batch, and of the terms that make up the step. transfer_s:
    of the slowest transfer between stages; before_s: of what runs before the micro-batches."""

    forwards_s: tuple[float, ...]
    backwards_s: tuple[float, ...]
    compute_s: float
    bubble_s: float
    sync_s: float
    optimizer_s: float
    step_s: float
    transfer_s: float = 0.0
    before_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfStep:
    """What the parameters of a rank cost once a step, whatever runs again: collectives, those that nothing hides at both ends of a step,
    the update, and casts before the first micro-batch."""

    once: Once
    ends_s: float
    optimizer_s: float
    casts_s: float


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One rank's program under one schedule (flow). rest: how parameters rest; shard: over how many data-parallel ranks. params: value ->
    its bytes; dims: fqn -> the dim it rests sharded on."""

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

    # --------------------------------------------------------------------------------------------------------- pieces
    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces as the program over stages sees them: of what must fit, the upper end of an interval, their bytes are the bound from
        below that is nearest (`more`)."""
        counted = {p: p.with_more(self.more.saved) for p in dict.fromkeys(self.plain)}
        return tuple(counted[p] for p in self.plain)

    @functools.cached_property
    def more(self) -> More:
        """For how much what is saved counts: that of a rank that is full of it, if there is so much."""
        flow, gpu = self.flow, self.cluster.gpu
        rests = sum(p.rest_bytes for p in self.plain) / flow.ranks
        kept = sum(p.modes[0].kept_bytes for p in self.plain) / flow.ranks * max(flow.in_flight)
        saved = min(kept, max(0.0, gpu.memory_bytes - gpu.context_bytes - rests))
        return more_for(saved, rests + saved, gpu.context_bytes, self.recipe.allocator_slack)

    @functools.cached_property
    def plain(self) -> tuple[Piece, ...]:
        """The segments in the modes that the pin on recompute leaves, with their bytes as liveness counts them."""
        segments, seen = self.segments.segments, set[str]()
        at_rest, reads = [], [self.read(x.span) for x in segments]
        for own in reads:
            at_rest.append(self._at_rest(own - seen))
            seen |= own
        return PieceMaker(
            ledger=self.rank.ledger, cuts=self.rank.cuts, segments=self.segments, seconds=self._seconds, at_rest=at_rest, reads=reads,
            activity=self.activity(Span(0, len(self.rank.program.ops)), (), seen), recompute=self.recompute,
            trains=self.trains, reduced=self._copied(seen),
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

    def read(self, span: Span) -> set[str]:
        """The parameters that the operators of a span read."""
        return {r for k in range(span.start, span.stop) for r in refs(self.rank.program.ops[k]) if r in self.params}

    @functools.cached_property
    def _reads(self) -> list[tuple[tuple[str, bool], ...]]:
        """For each segment its parameters, and whether every copy of the segment has one of its own."""
        program = self.rank.program
        spans = [s for b in program.blocks for s, n in zip(b.spans, b.times, strict=False) if n > 1]
        inside = {v for s in spans for v in self.read(s)}
        covered = {k for s in spans for k in range(s.start, s.stop)}
        outside = {r for k, op in enumerate(program.ops) if inside and k not in covered for r in refs(op)}
        return [tuple((v, v in inside and v not in outside) for v in sorted(self.read(x.span))) for x in self.segments.segments]

    def own(self, i: int, j: int) -> list[tuple[str, int]]:
        """The parameters of the pieces [i, j): (value, which of its copies)."""
        pieces = self.segments
        found = {(v, pieces.copies[k] * each): None for k in range(i, j) for v, each in self._reads[pieces.order[k]]}
        return list(found)

    def params_of(self, own: Collection[tuple[str, int]]) -> list[ParamBytes]:
        return [self.params[v] for v, _ in own]

    def _gather_s(self, own: Collection[str], compute_s: float, *, and_scatter: bool = False) -> float:
        """Exposed seconds of gathering parameters where they are used, the next unit while the present one is used;
        and_scatter: and of reduce-scattering their gradients in the same way."""
        gathered = self.gathered([(v, 0) for v in own])
        sent = (self.exchange.unit_s(n, scattered=x if and_scatter else 0.0) for n, x in gathered.values())
        return self.exchange.beside(sum(sent), compute_s)

    def _casts_s(self, params: Collection[ParamBytes]) -> float:
        """Of casting what rests of these parameters to the dtype in which they are used, once."""
        moved = sum(p.resting_bytes + p.local_bytes * p.resting_numel / p.numel for p in params if p.is_cast and p.numel)
        return self._moved_s(moved)

    def _casts_of_a_pass_s(self, own: Collection[str]) -> tuple[float, float]:
        """In forward and backward of one micro-batch: of what is gathered, and of gradients, which backward makes in the dtype of use."""
        params = [self.params[v] for v in own]
        gathered_s = self._casts_s([p for p in params if p.in_parts]) if self.rest.gathered == "use" else 0.0
        made = sum(p.local_bytes + p.numel * p.itemsize for p in params if p.is_cast and p.trainable)
        return gathered_s, gathered_s + self._moved_s(made)

    def _casts_of_a_step_s(self, own: Collection[ParamBytes]) -> float:
        """Before the first micro-batch, of what is not gathered where it is used."""
        return self._casts_s([p for p in own if not (p.in_parts and self.rest.gathered == "use")])

    def _moved_s(self, nbytes: float) -> float:
        return self.pricer.shared * kernel_time_s("pointwise", 0.0, nbytes, "float32", self.cluster.gpu) if nbytes else 0.0

    def _ends_s(self, i: int, j: int) -> float:
        """Exposed seconds of the first gather of a step of the pieces [i, j), and of its last reduce-scatter, which is of the same unit:
        nothing runs then."""
        if not self._units:
            return 0.0
        gathered = self.gathered(self.own(i, j))
        first = next((min(here) for k in range(i, j) if (here := self.gathered(self.own(k, k + 1)))), None)
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
        room = room_bytes(limit_bytes, self.cluster.gpu.context_bytes, self.recipe.allocator_slack, self.more)
        return room - of_rank(self.of_rank, self.how)

    def upper_bytes(self, pieces_bytes: float) -> float:
        """The inverse of room_bytes."""
        allocated = pieces_bytes + of_rank(self.of_rank, self.how)
        return least_upper_bytes(allocated, self.cluster.gpu.context_bytes, self.recipe.allocator_slack, self.more)

    @property
    def of_rank(self) -> OfRank:
        program = self.rank.program
        buffers = sum(program.types[b.value].nbytes for b in program.buffers)
        return OfRank(buffers=buffers, batch=self.batch_bytes, prologue=prologue_bytes(self.rank))

    @functools.cached_property
    def memory_plans(self) -> dict[Hashable, MemoryPlan]:
        """Of stages, once they have been worked out (candidate.py)."""
        return {}

    def activity(
        self, span: Span, recomputed: tuple[Span, ...], own: Collection[str], s: int = 0, late: Collection[str] = ()
    ) -> Activity:  # fmt: skip
        """Of stage s with these operators and parameters. late: those that other ranks use too."""
        cuts, program = self.rank.cuts.crossing, self.rank.program
        params = {v: self.params[v] for v in own}
        parts = {v for v, p in params.items() if p.in_parts}
        return Activity(
            span=span,
            recomputed=recomputed,
            receives=cuts.get(span.start, ()),
            sends=cuts[span.stop] if span.stop in cuts and span.stop < len(program.ops) else (program.loss,),
            in_flight=self.flow.in_flight[s],
            micro_batches=self.rank.micro_batches,
            gradients={v: (self._gradient(p, p.numel), self._gradient(p, p.resting_numel)) for v, p in params.items() if p.trainable},
            reduced=self._partial,
            scattered=parts if self.rest.reduced == "step" else (),
            at_once=parts if self.rest.reduced == "pass" else (),
            where_used={v: params[v].local_bytes for v in parts} if self.rest.gathered == "use" else {},
            units=self._units,
            bucket_bytes=self.recipe.bucket_bytes if self.recipe.overlaps_reduction else 0,
            accumulates=self.recipe.accumulates,
            late=late,
            cast={v for v, p in params.items() if p.is_cast},
            sent={v: n for v, p in params.items() if p.trainable and (n := self._sent(p)) != self._gradient(p, p.numel)},
            summed=parts if self.shard < self.pricer.mesh.get(BATCH, 1) else (),
        )

    # ----------------------------------------------------------------------------------------------------------- time
    @property
    def prices(self) -> tuple[float, ...]:
        """Of a byte that a micro-batch keeps, in seconds: what running the pieces again costs for each byte less (running all again, where
        nothing can), and much more. Rounded to powers of two, so that choices that differ little have the same."""
        pairs = [(p.modes[-1].again_s, p.modes[0].kept_bytes - p.modes[-1].kept_bytes) for p in self.plain]
        seconds, nbytes = (sum(x) for x in zip(*pairs, strict=True))
        if not seconds or not nbytes:
            seconds, nbytes = sum(p.forward_s for p in self.plain), sum(p.modes[0].kept_bytes for p in self.plain)
        if not seconds or not nbytes:
            return ()
        price = 2.0 ** round(math.log2(seconds / nbytes))
        return price, MUCH * price

    def partition(
        self, *, limit_bytes: float, cuts: tuple[int, ...] | None = None, worth_s: float = math.inf, over: Over | None = None,
        refused: Refused | None = None,
    ) -> Partition | None:  # fmt: skip
        """Stages and modes, as of `partition`. worth_s: of a step."""
        objective_s = worth_s - self.least_ends_s
        if self.flow.chunks > 1:
            return partition_of_ranks(
                self.pieces, flow=self.flow, limit_bytes=limit_bytes, recompute=self.recompute, step_s=self.step_s,
                least_ends_s=self.least_ends_s, worth_s=objective_s, cuts=cuts, over=over, refused=refused,
            )  # fmt: skip
        return partition(
            self.pieces, stages=self.flow.stages, micro_batches=self.rank.micro_batches, in_flight=self.flow.in_flight,
            limit_bytes=limit_bytes, recompute=self.recompute, cuts=cuts, worth_s=objective_s, over=over, refused=refused,
            step_s=self.step_s, least_ends_s=self.least_ends_s,
        )  # fmt: skip

    @property
    def relaxes(self) -> bool:
        """Whether `least_of_stages_s` can say more than `least_s`, in less time than it takes to cut the stages. With few pieces on a stage
        what counts is that they are whole."""
        flow = self.flow
        return flow.ranks > 1 and (not flow.closed_form or len(self.segments) >= MANY * flow.stages)

    def least_of_stages_s(self, limit_bytes: float, worth_s: float = math.inf) -> float:
        """No stages and modes that fit make a faster step, by a bound that knows of memory; infinite where none fit. worth_s: that it is
        above this is enough to know."""
        pieces, ends_s = self.pieces, self.least_ends_s
        return ends_s + least_of_stages(pieces, self.flow, limit_bytes, self.recompute, self._least_once, worth_s - ends_s)

    @functools.cached_property
    def _least_once(self) -> Ends:
        """Of the parameters of each piece, where it is the first one that has them."""
        seen, known = set[tuple[str, int]](), dict[tuple[str, ...], LeastOnce]()
        found = []
        for k in range(len(self.segments)):
            own = [x for x in self.own(k, k + 1) if x not in seen]
            seen.update(own)
            key = tuple(v for v, _ in own)
            if key not in known:
                known[key] = self.exchange.least_once(self.params_of(own))
            found.append(known[key])
        overlaps = self.recipe.overlaps_reduction, self.recipe.overlaps_gathers
        return Ends(of_piece=found, taken=self.exchange.taken, overlaps_reduction=overlaps[0], overlaps_gathers=overlaps[1])

    @functools.cached_property
    def least_bytes(self) -> float:
        """What the fullest rank needs at least; where a rank holds several stages, with the cuts that are tried first."""
        if self.flow.chunks == 1:
            return least_bytes(self.pieces, self.flow.stages, self.flow.in_flight, self.rank.micro_batches, self.recompute)
        return least_of_ranks(self.pieces, self.flow, self.recompute)[1]

    def places(self, part: Partition) -> list[tuple[int, ...]]:
        """Of each rank: the first piece and the first piece behind of each of its stages, and its number."""
        bounds = (0, *part.cuts, len(self.segments))
        return [place_of(bounds, self.flow, r) for r in range(self.flow.ranks)]

    def modes_at(self, part: Partition, place: tuple[int, ...]) -> tuple[int, ...]:
        """The modes of the pieces of such a place."""
        return tuple(m for i, j in zip(place[:-1:2], place[1:-1:2], strict=True) for m in part.modes[i:j])

    def unsaid_bytes(self, part: Partition, stages: Sequence[StagePlan]) -> dict[tuple[int, ...], float]:
        """Of each place: the bytes beyond what its pieces say, as far as its memory's interval reaches."""
        found = {}
        for rank, place in enumerate(self.places(part)):
            held = self.flow.on_rank(rank)
            spans = list(zip(place[:-1:2], place[1:-1:2], strict=True))
            if len(spans) == 1:
                i, j = spans[0]
                said = stage_bytes(self.pieces[i:j], part.modes[i:j], self.flow.in_flight[held.stages[0]], self.rank.micro_batches)
            else:
                said = rank_bytes([self.pieces[i:j] for i, j in spans], [part.modes[i:j] for i, j in spans], held)
            found[place] = self.room_bytes(stages[held.stages[0]].memory.upper_bytes) - said
        return found

    def step_s(self, cuts: tuple[int, ...], modes: tuple[int, ...]) -> float:
        """Of these stages and modes."""
        return self.times(Partition(cuts=cuts, modes=modes, outcome=UNSOLVED)).step_s

    def again(self, k: int, mode: int) -> tuple[Span, ...]:
        """The operators of piece k that run again in a mode."""
        start = self.segments[k].span.start
        return tuple(Span(start + x.start, start + x.stop) for x in self.pieces[k].modes[mode].spans)

    def times(self, part: Partition) -> Times:
        """The times of a step of these stages."""
        rank, seconds = self.rank, self.seconds()
        bounds = (0, *part.cuts, len(self.segments))
        forwards, backwards, sync, optimizer, hop = [], [], 0.0, 0.0, 0.0
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
            forwards.append(sum(seconds[k][0] for k in range(i, j)))
            backwards.append(sum(seconds[k][1] + self.pieces[k].modes[part.modes[k]].again_s for k in range(i, j)))
            sent = sum(rank.program.types[v].nbytes for v in rank.cuts.crossing.get(self.segments[i].span.start, ())) if s else 0
            hop = max(hop, self.pricer.collective_s("p2p", sent, LAYERS) if sent else 0.0)
        busiest, casts = 0.0, 0.0
        for r in range(self.flow.ranks):
            held = [s for s, of in enumerate(self.flow.rank_of) if of == r]
            of_step = self._of_step(tuple((bounds[s], bounds[s + 1]) for s in held))
            forward_s, backward_s = (sum(each[s] for s in held) for each in (forwards, backwards))
            busiest = max(busiest, forward_s + backward_s)
            sync = max(sync, of_step.once.exposed_s(forward_s, backward_s) + of_step.ends_s)
            optimizer, casts = max(optimizer, of_step.optimizer_s), max(casts, of_step.casts_s)
        pipeline = self.flow.step_time_s(forwards, backwards, hop)
        before = self._prologue_s + casts
        compute = before + rank.micro_batches * busiest
        return Times(
            forwards_s=tuple(forwards), backwards_s=tuple(backwards), compute_s=compute, sync_s=sync, optimizer_s=optimizer,
            bubble_s=max(0.0, before + pipeline - compute) if len(forwards) > 1 else 0.0, step_s=before + pipeline + sync + optimizer,
            transfer_s=hop, before_s=before,
        )  # fmt: skip

    def _of_step(self, spans: tuple[tuple[int, int], ...]) -> _OfStep:
        """Of a rank that holds the pieces [i, j) of each of these."""
        if spans not in self._steps:
            own = list(dict.fromkeys(x for i, j in spans for x in self.own(i, j)))
            params = self.params_of(own)
            self._steps[spans] = _OfStep(
                once=self.exchange.once(params), ends_s=self._ends_s(*spans[0]), optimizer_s=self._optimizer_s(own),
                casts_s=self._casts_of_a_step_s(params),
            )  # fmt: skip
        return self._steps[spans]

    @functools.cached_property
    def _steps(self) -> dict[tuple[tuple[int, int], ...], _OfStep]:
        return {}

    def least_s(self) -> float:
        """No cuts and no recompute of these pieces make a faster step: the pieces spread evenly, and what nothing hides."""
        return self.flow.least_s(sum(f + b for f, b in self.seconds())) + self.least_ends_s

    @functools.cached_property
    def least_ends_s(self) -> float:
        """What the stages' program leaves out, at its least: the update; the transfers between stages, at the cheapest cut; and, if there
        is one stage, the reduction of all gradients beside a backward pass in which everything runs again."""
        update_s, ranks, n = self.least_update_s() + self._prologue_s, self.flow.ranks, len(self.segments)
        if ranks > 1:
            if SCHEDULES[self.flow.schedule].closed_form is None:
                return update_s
            types, crossing = self.rank.program.types, self.rank.cuts.crossing
            starts = {x.span.start for x in self.segments.segments}
            sent = min((sum(types[v].nbytes for v in values) for at, values in crossing.items() if at in starts), default=0)
            hop_s = self.pricer.collective_s("p2p", sent, LAYERS)
            return update_s + self.flow.step_time_s([0.0] * ranks, [0.0] * ranks, hop_s)
        seconds = self.seconds()
        forward_s, backward_s = sum(f for f, _ in seconds), sum(f + b for f, b in seconds)
        params = self.params_of(self.own(0, n))
        ends_s = self.exchange.step_s(params, forward_s, backward_s) + self._ends_s(0, n)
        return update_s + self._casts_of_a_step_s(params) + ends_s

    @functools.cached_property
    def _prologue_s(self) -> float:
        return prologue_s(self.rank, self.pricer)

    def least_update_s(self) -> float:
        """No stage updates less than its share of all parameters, at the rate of the narrowest of them and without launches."""
        trained = [self.params[v] for v, _ in self.own(0, len(self.segments)) if self.params[v].trainable]
        if not trained:
            return 0.0
        item = min(p.itemsize for p in trained)
        gpu = dataclasses.replace(self.cluster.gpu, launch_s=0.0)
        return self._update_s(sum(p.resting_numel for p in trained), item, 1, gpu) / self.flow.ranks + self.recipe.once_s

    def span(self, i: int, j: int) -> Span:
        return Span(self.segments[i].span.start, self.segments[j - 1].span.stop)

    def seconds(self) -> list[tuple[float, float]]:
        """(forward, backward) of every piece and one micro-batch, with what is gathered for it."""
        return [self._seconds[k] for k in self.segments.order]

    @functools.cached_property
    def _seconds(self) -> list[tuple[float, float]]:
        """Of every segment; blocks that are alike once."""
        known: dict[int, tuple[float, float]] = {}
        found = []
        for segment in self.segments.segments:
            if segment.block in known:
                found.append(known[segment.block])
                continue
            forward, backward, _ = self.rank.ledger.seconds(range(segment.span.start, segment.span.stop))
            own = self.read(segment.span)
            exposed = self._gather_s(own, backward, and_scatter=True) + self.exchange.pass_s([self.params[v] for v in own], backward)
            casts_s = self._casts_of_a_pass_s(own)
            found.append((forward + self._gather_s(own, forward) + casts_s[0], backward + exposed + casts_s[1]))
            if segment.block >= 0:
                known[segment.block] = found[-1]
        return found

    def prefix(self, k: int) -> str:
        return self.rank.program.blocks[self.segments[k].block].prefixes[self.segments[k].instance]

    def _optimizer_s(self, own: Collection[tuple[str, int]]) -> float:
        """Seconds of the update of what rests on this rank, with what its software does once a step."""
        trained = [self.params[v] for v, _ in own if self.params[v].trainable]
        numel = sum(p.resting_numel for p in trained)
        item = round(sum(p.resting_bytes for p in trained) / numel) if numel else 0
        return self._update_s(numel, item, max(1, len(trained)), self.cluster.gpu) + self.recipe.once_s

    def _update_s(self, numel: int, item: int, tensors: int, gpu: Gpu) -> float:
        return self.pricer.shared * optimizer_time_s(
            trainable_params=numel, gpu=gpu, optimizer=self.optimizer, param_itemsize=item,
            grad_itemsize=self.recipe.gradient_itemsize or item, state_itemsize=self.recipe.state_itemsize or item,
            master_itemsize=self.recipe.master_itemsize, tensors=tensors,
            passes=self.recipe.optimizer_passes if OPTIMIZERS[self.optimizer] else 1.0,
        )  # fmt: skip
