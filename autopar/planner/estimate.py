"""What a candidate costs: seconds and bytes of its pieces, its stages and its step.

Everything here gathers arguments; the arithmetic is that of `cost_models` (memory.stage_memory, step, pipeline), which
checker and explain use too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.ir import Span, refs
from autopar.measure import Pricer
from autopar.measure.costs import BUCKET_BYTES
from autopar.planner.candidate import Candidate, Rank
from autopar.planner.liveness import Activity, Moment
from autopar.planner.partition import Partition, Piece
from autopar.planner.plan import MemoryPlan, StagePlan
from autopar.planner.price import ParamBytes
from autopar.planner.stages import Segment
from cost_models.cluster import Cluster
from cost_models.memory import OPTIMIZERS, MemoryTerms, stage_memory
from cost_models.pipeline import step_time_s
from cost_models.step import exposed_gather_s, exposed_reduction_s, optimizer_time_s

__all__ = ["Estimator"]

FOREACH_PASSES = 3.0  # torch.optim's default on a GPU writes its intermediates to memory (cost_models.step.optimizer_time_s)
ALLOCATOR_SLACK = 0.03  # of what is allocated; assumed until `autopar profile` measures it


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One rank's program under one schedule and ZeRO stage. params: value -> its bytes; dims: fqn -> the dim it rests sharded on;
    in_flight: micro-batches whose activations each stage holds."""

    rank: Rank
    cluster: Cluster
    optimizer: str
    schedule: str
    zero: int
    dims: Mapping[str, int]
    params: Mapping[str, ParamBytes]
    segments: tuple[Segment, ...]
    in_flight: tuple[int, ...]
    pricer: Pricer
    batch_bytes: int = 0  # the global batch, as it is given to every rank

    # --------------------------------------------------------------------------------------------------------- pieces
    def pieces(self) -> tuple[Piece, ...]:
        """The segments as the integer program over stages sees them."""
        ledger, seen, seen_params = self.rank.ledger, set[str](), set[str]()
        pieces = []
        for segment in self.segments:
            indices = range(segment.span.start, segment.span.stop)
            forward, backward, _ = ledger.seconds(indices)
            own = self._read(segment.span)
            new = own - seen_params
            seen_params |= new
            kept = ledger.kept_bytes(segment.span, seen)
            freed = max(0.0, kept - ledger.entering_bytes(segment.span)) if self._recomputable(segment) else 0.0
            pieces.append(
                Piece(
                    forward_s=forward + self._gather_s(own, forward),
                    backward_s=backward + self._gather_s(own, backward, and_scatter=True),
                    state_bytes=float(self._at_rest(new).allocated_bytes),
                    kept_bytes=float(kept),
                    freed_bytes=freed,
                    temporary_bytes=float(ledger.temporary_bytes(indices)),
                    trains=any(self.params[v].trainable for v in own),
                )
            )
        return tuple(pieces)

    def _recomputable(self, segment: Segment) -> bool:
        if segment.block < 0:
            return False
        mutated = {b.value for b in self.rank.program.buffers if b.mutated}
        ops = self.rank.program.ops[segment.span.start : segment.span.stop]
        return not any(r in mutated for op in ops for r in refs(op))

    def _read(self, span: Span) -> set[str]:
        """The parameters that the operators of a span read."""
        return {r for k in range(span.start, span.stop) for r in refs(self.rank.program.ops[k]) if r in self.params}

    def _gather_s(self, own: Collection[str], compute_s: float, *, and_scatter: bool = False) -> float:
        """Exposed seconds of gathering parameters where they are used (ZeRO-3), the next one while the present one is used;
        and_scatter: and of reduce-scattering their gradients in the same way."""
        sharded = [self.params[v].local_bytes for v in sorted(own) if self._rests_in_parts(v)] if self.zero == 3 else []
        gathers = [self.pricer.collective_s("all_gather", n, "dp") for n in sharded]
        if and_scatter:
            gathers = [g + self.pricer.collective_s("reduce_scatter", n, "dp") for g, n in zip(gathers, sharded, strict=True)]
        return exposed_gather_s(gathers, [compute_s / len(gathers)] * len(gathers)) if gathers else 0.0

    def _rests_in_parts(self, value: str) -> bool:
        return self.params[value].resting_bytes < self.params[value].local_bytes

    # --------------------------------------------------------------------------------------------------------- memory
    def _at_rest(self, own: Collection[str], **activations: float) -> MemoryTerms:
        """Memory with these parameters, their gradients and optimizer states. Which of them rest in parts differs from parameter
        to parameter, so the figures are of one rank already."""
        trained = [self.params[v] for v in own if self.params[v].trainable]
        working = sum(p.local_bytes for p in trained if self.zero == 1 and p.resting_bytes < p.local_bytes)
        at_rest = sum(p.resting_bytes for p in trained)
        given: dict[str, float] = {"activation_bytes_per_micro_batch": 0.0, **activations}
        return stage_memory(
            param_bytes=sum(self.params[v].resting_bytes for v in own) + working,
            trainable_params=sum(p.resting_numel for p in trained),
            gradient_bytes=at_rest + working,
            optimizer_state_bytes=OPTIMIZERS[self.optimizer] * at_rest,
            optimizer=self.optimizer,
            **given,  # type: ignore[arg-type]
        )

    def room_bytes(self, limit_bytes: int) -> float:
        """What of a GPU's memory is left for the pieces: without what a rank needs whatever lies on it, and the allocator's slack."""
        return (limit_bytes - self.cluster.gpu.context_bytes) / (1 + ALLOCATOR_SLACK) - self._bucket_bytes()

    def _bucket_bytes(self) -> int:
        return 2 * BUCKET_BYTES if self.rank.mesh.dp * self.rank.mesh.tp * self.rank.mesh.pp > 1 else 0

    def _memory(self, s: int, span: Span, recomputed: tuple[Span, ...], own: set[str]) -> MemoryPlan:
        """At the moment of the step at which most is alive: in forward and backward (gradients that are not there yet then are not
        counted), or in the optimizer's update."""
        program, cuts = self.rank.program, self.rank.cuts.crossing
        params = {v: self.params[v] for v in own}
        trained = {v: p for v, p in params.items() if p.trainable}
        parts = {v for v in own if self._rests_in_parts(v)}
        moment = self.rank.ledger.liveness.peak(
            Activity(
                span=span,
                recomputed=recomputed,
                receives=cuts[span.start] if s else (),
                sends=cuts[span.stop] if span.stop in cuts and span.stop < len(program.ops) else (program.loss,),
                in_flight=self.in_flight[s],
                micro_batches=self.rank.micro_batches,
                gradients={v: (p.local_bytes, p.resting_bytes) for v, p in trained.items()},
                scattered=parts if self.zero == 1 else (),
                where_used={v: params[v].local_bytes for v in parts} if self.zero == 3 else {},
                bucket_bytes=BUCKET_BYTES,
            )
        )
        at_rest = sum(p.resting_bytes for p in trained.values())
        gathered = sum(params[v].local_bytes for v in parts) if self.zero == 1 else 0
        update = Moment(gradients=at_rest, temporary=at_rest if OPTIMIZERS[self.optimizer] > 1 else 0)
        updating = update.total > moment.total + gathered
        moment = update if updating else moment
        terms = stage_memory(
            param_bytes=sum(p.resting_bytes for p in params.values()) + (0 if updating else gathered),
            trainable_params=sum(p.resting_numel for p in trained.values()),
            gradient_bytes=moment.gradients,
            optimizer_state_bytes=OPTIMIZERS[self.optimizer] * at_rest,
            optimizer=self.optimizer,
            buffer_bytes=sum(program.types[b.value].nbytes for b in program.buffers) + self.batch_bytes,
            activation_bytes_per_micro_batch=moment.saved,
            largest_temporary_bytes=moment.temporary,
            bucket_bytes=moment.communication,
            framework_context_bytes=self.cluster.gpu.context_bytes,
            allocator_slack_fraction=ALLOCATOR_SLACK,
        )
        return MemoryPlan(**{f"{name}_bytes": getattr(terms, name) for name in terms.__dataclass_fields__})

    # ----------------------------------------------------------------------------------------------------------- time
    def candidate(self, part: Partition, pieces: tuple[Piece, ...]) -> Candidate:
        """The stages of a partition, as they will run: costs and memory of each from its own operators."""
        rank, program = self.rank, self.rank.program
        bounds = (0, *part.cuts, len(self.segments))
        stages, sync, optimizer, hop = [], 0.0, 0.0, 0.0
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
            span = Span(self.segments[i].span.start, self.segments[j - 1].span.stop)
            own = self._read(span)
            forward = sum(pieces[k].forward_s for k in range(i, j))
            backward = sum(pieces[k].backward_s + (pieces[k].forward_s if k in part.recomputed else 0.0) for k in range(i, j))
            sent = sum(program.types[v].nbytes for v in rank.cuts.crossing.get(span.start, ())) if s else 0
            hop = max(hop, self.pricer.collective_s("p2p", sent, "pp") if sent else 0.0)
            stages.append(
                StagePlan(
                    first_op=program.ops[span.start].name,
                    blocks=[self._prefix(k) for k in range(i, j) if self.segments[k].block >= 0],
                    recomputed=[self._prefix(k) for k in range(i, j) if k in part.recomputed],
                    forward_s=forward,
                    backward_s=backward,
                    communication_s=rank.ledger.seconds(range(span.start, span.stop))[2],
                    flops=sum(c.counts.flops + c.counts.backward_flops for c in rank.ledger.costs[span.start : span.stop]),
                    memory=self._memory(s, span, tuple(self.segments[k].span for k in range(i, j) if k in part.recomputed), own),
                    parameters=sum(self.params[v].numel for v in own),
                    micro_batches_in_flight=self.in_flight[s],
                )
            )
            sync = max(sync, self._sync_s(own, forward, backward))
            optimizer = max(optimizer, self._optimizer_s(own))
        forwards, backwards = [s.forward_s for s in stages], [s.backward_s for s in stages]
        pipeline = step_time_s(self.schedule, forwards, backwards, rank.micro_batches, hop)
        compute = rank.micro_batches * max(f + b for f, b in zip(forwards, backwards, strict=True))
        return Candidate(
            rank=rank, mesh=rank.mesh, schedule=self.schedule, zero=self.zero, zero_dims=self.dims, segments=self.segments, part=part,
            stages=tuple(stages), step_time_s=pipeline + sync + optimizer, compute_s=compute,
            bubble_s=max(0.0, pipeline - compute) if len(stages) > 1 else 0.0, gradient_sync_s=sync, optimizer_s=optimizer,
        )  # fmt: skip

    def _prefix(self, k: int) -> str:
        return self.rank.program.blocks[self.segments[k].block].prefixes[self.segments[k].instance]

    def _sync_s(self, own: Collection[str], forward_s: float, backward_s: float) -> float:
        """Exposed seconds of bringing gradients together over the data axis while the last micro-batch's backward runs, and, for
        ZeRO-1, of gathering parameters while the first one's forward runs."""
        whole = sum(self.params[v].local_bytes for v in own if self.params[v].trainable)
        sharded = sum(self.params[v].local_bytes for v in own if self.params[v].trainable and self._rests_in_parts(v))
        reduced = self._buckets_s("all_reduce", whole - sharded)
        gathers: list[float] = []
        if self.zero == 1:
            reduced += self._buckets_s("reduce_scatter", sharded)
            gathers = self._buckets_s("all_gather", sharded)
        exposed = exposed_reduction_s(reduced, backward_s) if reduced else 0.0
        if gathers:  # all are issued at the start of the step
            exposed += exposed_gather_s(gathers, [forward_s / len(gathers)] * len(gathers), prefetch=len(gathers))
        return exposed

    def _buckets_s(self, kind: str, nbytes: float) -> list[float]:
        """Seconds of each bucket's collective."""
        full, rest = divmod(nbytes, BUCKET_BYTES)
        sizes = [float(BUCKET_BYTES)] * int(full) + ([rest] if rest else [])
        return [self.pricer.collective_s(kind, n, "dp") for n in sizes]

    def _optimizer_s(self, own: Collection[str]) -> float:
        """Seconds of the update of what rests on this rank."""
        trained = [self.params[v] for v in own if self.params[v].trainable]
        numel = sum(p.resting_numel for p in trained)
        item = round(sum(p.resting_bytes for p in trained) / numel) if numel else 0
        return self.pricer.shared * optimizer_time_s(
            trainable_params=numel, gpu=self.cluster.gpu, optimizer=self.optimizer, param_itemsize=item, grad_itemsize=item,
            state_itemsize=item, tensors=max(1, len(trained)), passes=FOREACH_PASSES if OPTIMIZERS[self.optimizer] else 1.0,
        )  # fmt: skip
