"""What a candidate costs: seconds and bytes of its pieces, its stages and its step.

Everything here gathers arguments; the arithmetic is that of `cost_models` (memory.stage_memory, step, pipeline), which
checker and explain use too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import R, Span, refs
from autopar.measure import Pricer
from autopar.planner.candidate import Candidate, Rank, Times
from autopar.planner.exchange import Exchange
from autopar.planner.liveness import Activity, Moment
from autopar.planner.partition import Partition, Piece
from autopar.planner.plan import MemoryPlan, StagePlan
from autopar.planner.price import ParamBytes
from autopar.planner.stages import Pieces, Segment, recomputable
from autopar.planner.units import gather_units
from cost_models.cluster import Cluster, Gpu
from cost_models.memory import OPTIMIZERS, MemoryTerms, held_gathers, stage_memory
from cost_models.pipeline import CLOSED_FORMS, step_time_s
from cost_models.recipe import AUTOPAR, Recipe
from cost_models.rests import Rest
from cost_models.step import optimizer_time_s

__all__ = ["Estimator"]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One rank's program under one schedule. rest: how parameters rest; shard: over how many data-parallel ranks. params: value -> its
    bytes; dims: fqn -> the dim it rests sharded on; in_flight: micro-batches whose activations each stage holds."""

    rank: Rank
    cluster: Cluster
    optimizer: str
    schedule: str
    rest: Rest
    shard: int
    dims: Mapping[str, int]
    params: Mapping[str, ParamBytes]
    segments: Pieces
    in_flight: tuple[int, ...]
    pricer: Pricer
    batch_bytes: int = 0  # the global batch, as it is given to every rank
    recipe: Recipe = AUTOPAR

    # --------------------------------------------------------------------------------------------------------- pieces
    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The segments as the program over stages sees them."""
        ledger, seen, seen_params = self.rank.ledger, set[str](), set[str]()
        found = []
        for segment, (forward_s, backward_s) in zip(self.segments.segments, self._seconds, strict=True):
            indices = range(segment.span.start, segment.span.stop)
            own = self._read(segment.span)
            new = own - seen_params
            seen_params |= new
            kept = ledger.kept_bytes(segment.span, seen)
            freed = max(0.0, kept - ledger.entering_bytes(segment.span)) if self._recomputable(segment) else 0.0
            found.append(
                Piece(
                    forward_s=forward_s,
                    backward_s=backward_s,
                    state_bytes=float(self._at_rest(new).allocated_bytes),
                    kept_bytes=float(kept),
                    freed_bytes=freed,
                    temporary_bytes=float(ledger.temporary_bytes(indices)),
                    trains=any(self.params[v].trainable for v in own),
                )
            )
        return tuple(found[k] for k in self.segments.order)

    def _recomputable(self, segment: Segment) -> bool:
        return segment.block >= 0 and recomputable(self.rank.program, segment.span)

    def _read(self, span: Span) -> set[str]:
        """The parameters that the operators of a span read."""
        return {r for k in range(span.start, span.stop) for r in refs(self.rank.program.ops[k]) if r in self.params}

    @functools.cached_property
    def _reads(self) -> list[tuple[tuple[str, bool], ...]]:
        """For each segment its parameters, and whether every copy of the segment has one of its own."""
        program = self.rank.program
        spans = [s for b in program.blocks for s, n in zip(b.spans, b.times, strict=False) if n > 1]
        inside = {v for s in spans for v in self._read(s)}
        covered = {k for s in spans for k in range(s.start, s.stop)}
        outside = {r for k, op in enumerate(program.ops) if inside and k not in covered for r in refs(op)}
        return [tuple((v, v in inside and v not in outside) for v in sorted(self._read(x.span))) for x in self.segments.segments]

    def _own(self, i: int, j: int) -> list[tuple[str, int]]:
        """The parameters of the pieces [i, j): (value, which of its copies)."""
        pieces = self.segments
        found = {(v, pieces.copies[k] * each): None for k in range(i, j) for v, each in self._reads[pieces.order[k]]}
        return list(found)

    def _params(self, own: Collection[tuple[str, int]]) -> list[ParamBytes]:
        return [self.params[v] for v, _ in own]

    def _gather_s(self, own: Collection[str], compute_s: float, *, and_scatter: bool = False) -> float:
        """Exposed seconds of gathering parameters where they are used, the next unit while the present one is used;
        and_scatter: and of reduce-scattering their gradients in the same way."""
        gathered = self._gathered([(v, 0) for v in own])
        return max(0.0, sum(self._exchange.unit_s(n, and_scatter=and_scatter) for n in gathered.values()) - compute_s)

    def _ends_s(self, i: int, j: int) -> float:
        """Exposed seconds of the first gather of a step of the pieces [i, j), and of its last reduce-scatter, which is of the same unit:
        nothing runs then."""
        if not self._units:
            return 0.0
        gathered = self._gathered(self._own(i, j))
        first = next((min(here) for k in range(i, j) if (here := self._gathered(self._own(k, k + 1)))), None)
        return 0.0 if first is None else self._exchange.unit_s(gathered[first], and_scatter=True)

    @functools.cached_property
    def _exchange(self) -> Exchange:
        return Exchange(
            rest=self.rest, shard=self.shard, dp=self.rank.mesh.dp, micro_batches=self.rank.micro_batches, pricer=self.pricer,
            recipe=self.recipe,
        )  # fmt: skip

    def _gathered(self, own: Collection[tuple[str, int]]) -> dict[tuple[int, int], int]:
        """(unit, which copy of it) -> bytes, of these parameters if they are gathered where they are used."""
        found: dict[tuple[int, int], int] = {}
        for v, copy in own:
            if v in self._units:
                key = self._units[v], copy
                found[key] = found.get(key, 0) + self.params[v].local_bytes
        return found

    @functools.cached_property
    def _units(self) -> dict[str, int]:
        parts = {v: p.local_bytes for v, p in self.params.items() if p.in_parts} if self.rest.gathered == "use" else {}
        return gather_units(self.rank.program, parts, self.recipe.unit_bytes) if parts else {}

    @functools.cached_property
    def _partial(self) -> frozenset[str]:
        """The parameters whose gradient, as their use gives it, is a term of a sum over ranks."""
        mesh = self.rank.mesh
        axes = [axis for axis, n in (("dp", mesh.dp), ("tp", mesh.tp)) if n > 1]
        return frozenset(p.value for p in self.rank.program.params if any(dict(p.layouts).get(axis) == R for axis in axes))

    # --------------------------------------------------------------------------------------------------------- memory
    def _at_rest(self, own: Collection[str], **activations: float) -> MemoryTerms:
        """Memory with these parameters, their gradients and optimizer states. Which of them rest in parts differs from parameter
        to parameter, so the figures are of one rank already."""
        trained = [self.params[v] for v in own if self.params[v].trainable]
        whole = sum(p.local_bytes for p in trained if p.in_parts)
        at_rest = sum(p.resting_bytes for p in trained)
        given: dict[str, float] = {"activation_bytes_per_micro_batch": 0.0, **activations}
        return stage_memory(
            param_bytes=sum(self.params[v].resting_bytes for v in own) + (whole if self.rest.gathered == "step" else 0),
            trainable_params=sum(p.resting_numel for p in trained),
            gradient_bytes=self._accumulators(trained)
            if self.recipe.accumulates
            else at_rest + (whole if self.rest.reduced == "step" else 0),
            optimizer_state_bytes=self._states(trained),
            optimizer=self.optimizer,
            **given,  # type: ignore[arg-type]
        )

    def _gradient(self, p: ParamBytes, numel: int) -> int:
        """Bytes of the gradient of so many numbers of a parameter."""
        own = self.recipe.gradient_itemsize is None or self.recipe.accumulates  # what is accumulated elsewhere is made as the parameter is
        return numel * (p.itemsize if own else self.recipe.gradient_itemsize or p.itemsize)

    def _accumulators(self, trained: Collection[ParamBytes]) -> int:
        item = self.recipe.gradient_itemsize
        copies = self.recipe.gradient_copies
        return sum(((item or p.itemsize) + copies * p.itemsize) * (p.resting_numel if self.rest.gradients else p.numel) for p in trained)

    def _states(self, trained: Collection[ParamBytes]) -> int:
        """Bytes of the optimizer's states, its own copy of the parameters included."""
        kept, own = OPTIMIZERS[self.optimizer], self.recipe.master_itemsize
        return sum((kept * (self.recipe.state_itemsize or p.itemsize) + own) * p.resting_numel for p in trained) if kept or own else 0

    def room_bytes(self, limit_bytes: int) -> float:
        """What of a GPU's memory is left for the pieces: without what a rank needs whatever lies on it, and the allocator's slack."""
        return (limit_bytes - self.cluster.gpu.context_bytes) / (1 + self.recipe.allocator_slack) - self._bucket_bytes()

    def _bucket_bytes(self) -> int:
        if not self.recipe.overlaps_reduction:
            return 0  # what is reduced as a whole is reduced where it lies
        every = [self.params[v] for v, _ in self._own(0, len(self.segments)) if v in self._partial]
        reduced = sum(self._gradient(p, p.numel) for p in every if p.trainable)
        return min(2 * self.recipe.bucket_bytes, reduced)

    def _memory(self, s: int, span: Span, recomputed: tuple[Span, ...], own: set[str]) -> MemoryPlan:
        """At the moment of the step at which most is alive: in forward and backward (gradients that are not there yet then are not
        counted), or in the optimizer's update."""
        program, cuts = self.rank.program, self.rank.cuts.crossing
        params = {v: self.params[v] for v in own}
        trained = {v: p for v, p in params.items() if p.trainable}
        parts = {v for v, p in params.items() if p.in_parts}
        moment = self.rank.ledger.liveness.peak(
            Activity(
                span=span,
                recomputed=recomputed,
                receives=cuts[span.start] if s else (),
                sends=cuts[span.stop] if span.stop in cuts and span.stop < len(program.ops) else (program.loss,),
                in_flight=self.in_flight[s],
                micro_batches=self.rank.micro_batches,
                gradients={v: (self._gradient(p, p.numel), self._gradient(p, p.resting_numel)) for v, p in trained.items()},
                reduced=self._partial,
                scattered=parts if self.rest.reduced == "step" else (),
                at_once=parts if self.rest.reduced == "pass" else (),
                where_used={v: params[v].local_bytes for v in parts} if self.rest.gathered == "use" else {},
                units=self._units,
                bucket_bytes=self.recipe.bucket_bytes if self.recipe.overlaps_reduction else 0, accumulates=self.recipe.accumulates,
            )
        )
        at_rest = sum(self._gradient(p, p.resting_numel) for p in trained.values())
        gathered = sum(params[v].local_bytes for v in parts) if self.rest.gathered == "step" else 0
        copied = sum(params[v].resting_bytes for v in parts) if gathered and self.recipe.master_itemsize else 0  # the shard is the copy
        foreach = OPTIMIZERS[self.optimizer] > 1 and self.recipe.optimizer_passes > 1
        update = Moment(gradients=at_rest, temporary=at_rest if foreach else 0)
        updating = update.total > moment.total + gathered
        moment = update if updating else moment
        terms = stage_memory(
            param_bytes=sum(p.resting_bytes for p in params.values()) + (0 if updating and not copied else gathered - copied),
            trainable_params=sum(p.resting_numel for p in trained.values()),
            gradient_bytes=self._accumulators(trained.values()) if self.recipe.accumulates else moment.gradients,
            optimizer_state_bytes=self._states(trained.values()),
            optimizer=self.optimizer,
            buffer_bytes=sum(program.types[b.value].nbytes for b in program.buffers) + self.batch_bytes,
            activation_bytes_per_micro_batch=moment.saved,
            largest_temporary_bytes=moment.temporary,
            bucket_bytes=moment.communication,
            framework_context_bytes=self.cluster.gpu.context_bytes,
            allocator_slack_fraction=self.recipe.allocator_slack,
            held_bytes=self._held_bytes(span, self.in_flight[s]),
        )
        return MemoryPlan(**{f"{name}_bytes": getattr(terms, name) for name in terms.__dataclass_fields__})

    def _held_bytes(self, span: Span, in_flight: int) -> float:
        share, program = self.recipe.held_gathers, self.rank.program
        if not share:
            return 0.0
        made = {o for op in program.ops[span.start : span.stop] for o in op.outputs}
        total = sum(program.types[v].nbytes for v in self.rank.ledger.gathered if v in made)
        return held_gathers(share, total, in_flight, self.rank.micro_batches)

    # ----------------------------------------------------------------------------------------------------------- time
    def candidate(self, part: Partition) -> Candidate:
        """The stages of a partition, as they will run: costs and memory of each from its own operators. Of a whole program only."""
        rank, program = self.rank, self.rank.program
        assert not any(self.segments.copies), "a folded program has no stages of its own"
        bounds = (0, *part.cuts, len(self.segments))
        t = self.times(part, self.seconds())
        stages = []
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
            span = self._span(i, j)
            own = self._read(span)
            stages.append(
                StagePlan(
                    first_op=program.ops[span.start].name,
                    blocks=[self._prefix(k) for k in range(i, j) if self.segments[k].block >= 0],
                    recomputed=[self._prefix(k) for k in range(i, j) if k in part.recomputed],
                    forward_s=t.forwards_s[s],
                    backward_s=t.backwards_s[s],
                    communication_s=rank.ledger.seconds(range(span.start, span.stop))[2],
                    flops=sum(c.counts.flops + c.counts.backward_flops for c in rank.ledger.costs[span.start : span.stop]),
                    memory=self._memory(s, span, tuple(self.segments[k].span for k in range(i, j) if k in part.recomputed), own),
                    parameters=sum(self.params[v].numel for v in own),
                    micro_batches_in_flight=self.in_flight[s],
                )
            )
        return Candidate(
            estimator=self, rank=rank, mesh=rank.mesh, schedule=self.schedule, rest=self.rest, shard=self.shard, zero_dims=self.dims,
            segments=self.segments, part=part, stages=tuple(stages), step_time_s=t.step_s, compute_s=t.compute_s,
            bubble_s=t.bubble_s, gradient_sync_s=t.sync_s, optimizer_s=t.optimizer_s,
        )  # fmt: skip

    def times(self, part: Partition, seconds: Sequence[tuple[float, float]]) -> Times:
        """The times of a step of these stages. seconds: (forward, backward) of each piece and micro-batch."""
        rank = self.rank
        bounds = (0, *part.cuts, len(self.segments))
        forwards, backwards, sync, optimizer, hop = [], [], 0.0, 0.0, 0.0
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
            own = self._own(i, j)
            forwards.append(sum(seconds[k][0] for k in range(i, j)))
            backwards.append(sum(seconds[k][1] + (seconds[k][0] if k in part.recomputed else 0.0) for k in range(i, j)))
            sent = sum(rank.program.types[v].nbytes for v in rank.cuts.crossing.get(self.segments[i].span.start, ())) if s else 0
            hop = max(hop, self.pricer.collective_s("p2p", sent, "pp") if sent else 0.0)
            sync = max(sync, self._exchange.step_s(self._params(own), forwards[-1], backwards[-1]) + self._ends_s(i, j))
            optimizer = max(optimizer, self._optimizer_s(own))
        pipeline = step_time_s(self.schedule, forwards, backwards, rank.micro_batches, hop)
        compute = rank.micro_batches * max(f + b for f, b in zip(forwards, backwards, strict=True))
        return Times(
            forwards_s=tuple(forwards), backwards_s=tuple(backwards), compute_s=compute, sync_s=sync, optimizer_s=optimizer,
            bubble_s=max(0.0, pipeline - compute) if len(forwards) > 1 else 0.0, step_s=pipeline + sync + optimizer,
        )  # fmt: skip

    def least_s(self) -> float:
        """No cuts and no recompute of these pieces make a faster step: the pieces spread evenly, and what nothing hides."""
        stages, m = len(self.in_flight), self.rank.micro_batches
        work_s = sum(f + b for f, b in self.seconds())
        return work_s * (m + stages - 1) / stages + self.least_ends_s

    @functools.cached_property
    def least_ends_s(self) -> float:
        """What the stages' program leaves out, at its least: the update; the transfers between stages, at the cheapest cut; and, if there
        is one stage, the reduction of all gradients beside a backward pass in which everything runs again."""
        update_s, stages, n = self.least_update_s(), len(self.in_flight), len(self.segments)
        if stages > 1:
            if self.schedule not in CLOSED_FORMS:
                return update_s
            types, crossing = self.rank.program.types, self.rank.cuts.crossing
            starts = {x.span.start for x in self.segments.segments}
            sent = min((sum(types[v].nbytes for v in values) for at, values in crossing.items() if at in starts), default=0)
            hop_s = self.pricer.collective_s("p2p", sent, "pp")
            return update_s + step_time_s(self.schedule, [0.0] * stages, [0.0] * stages, self.rank.micro_batches, hop_s)
        seconds = self.seconds()
        forward_s, backward_s = sum(f for f, _ in seconds), sum(f + b for f, b in seconds)
        return update_s + self._exchange.step_s(self._params(self._own(0, n)), forward_s, backward_s) + self._ends_s(0, n)

    def least_update_s(self) -> float:
        """No stage updates less than its share of all parameters, at the rate of the narrowest of them and without launches."""
        trained = [self.params[v] for v, _ in self._own(0, len(self.segments)) if self.params[v].trainable]
        if not trained:
            return 0.0
        item = min(p.itemsize for p in trained)
        gpu = dataclasses.replace(self.cluster.gpu, launch_s=0.0)
        return self._update_s(sum(p.resting_numel for p in trained), item, 1, gpu) / len(self.in_flight)

    def _span(self, i: int, j: int) -> Span:
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
            own = self._read(segment.span)
            exposed = self._gather_s(own, backward, and_scatter=True) + self._exchange.pass_s([self.params[v] for v in own], backward)
            found.append((forward + self._gather_s(own, forward), backward + exposed))
            if segment.block >= 0:
                known[segment.block] = found[-1]
        return found

    def _prefix(self, k: int) -> str:
        return self.rank.program.blocks[self.segments[k].block].prefixes[self.segments[k].instance]

    def _optimizer_s(self, own: Collection[tuple[str, int]]) -> float:
        """Seconds of the update of what rests on this rank."""
        trained = [self.params[v] for v, _ in own if self.params[v].trainable]
        numel = sum(p.resting_numel for p in trained)
        item = round(sum(p.resting_bytes for p in trained) / numel) if numel else 0
        return self._update_s(numel, item, max(1, len(trained)), self.cluster.gpu)

    def _update_s(self, numel: int, item: int, tensors: int, gpu: Gpu) -> float:
        return self.pricer.shared * optimizer_time_s(
            trainable_params=numel, gpu=gpu, optimizer=self.optimizer, param_itemsize=item,
            grad_itemsize=self.recipe.gradient_itemsize or item, state_itemsize=self.recipe.state_itemsize or item,
            master_itemsize=self.recipe.master_itemsize, tensors=tensors,
            passes=self.recipe.optimizer_passes if OPTIMIZERS[self.optimizer] else 1.0,
        )  # fmt: skip
