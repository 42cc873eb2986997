"""Program x Cluster -> Plan: one search over mesh shape, micro-batches, strategies, stages, recompute and resting places.

The space is enumerated where it is small (mesh, micro-batches, schedule, ZeRO) and solved by integer programs where it is
large (`axis`: strategies; `partition`: stages and recompute under the memory limit). A candidate whose lower bound is not
below the incumbent is pruned. The bound of the whole is the least over what was explored and what was pruned.

    step = fill and drain + (m - 1) x slowest stage + exposed gradient reduction + parameter gathers + optimizer
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.capture import program_hash
from autopar.catalog import strategies_of
from autopar.errors import Infeasible
from autopar.ir import I, Layout, Program, R, S, Span, Strategy, refs
from autopar.measure import Pricer
from autopar.measure import count as count_op
from autopar.planner.axis import AxisProblem, AxisSolution, objective_of, solve_axis
from autopar.planner.choices import choices
from autopar.planner.lower import axis_plan, on_tensor_axis
from autopar.planner.moments import Moments, NotSplittable, batched_inputs, split_into_moments
from autopar.planner.partition import Partition, Piece, partition
from autopar.planner.plan import AxisPlan, MemoryPlan, Pins, Plan, StagePlan
from autopar.planner.price import OPTIMIZER_STATES, Ledger, ParamBytes, param_bytes, zero_dims
from autopar.planner.shard import Assignment, shard, view_of
from autopar.planner.solver import Outcome
from autopar.planner.stages import Cuts, Segment, cut_stages, legal_cuts, segments_of
from cost_models.cluster import Cluster
from cost_models.pipeline import in_flight

__all__ = ["Search", "make_plan"]

GIB = float(2**30)
MAX_MICRO_BATCHES = 64  # candidates a step is split into, beyond which nothing is gained but latency
OVERLAP_FRACTION = 0.5  # of backward that gradient reduction hides under; assumed until `autopar profile` measures it


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    pp: int
    dp: int
    tp: int

    def sizes(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The program of one rank and one micro-batch for a (dp, micro-batches, tp), priced."""

    mesh: Mesh
    moments: Moments
    program: Program
    data: Assignment | None
    tensor: Assignment | None
    ledger: Ledger
    cuts: Cuts
    outcomes: tuple[Outcome, ...]
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class Candidate:
    rank: Rank
    mesh: Mesh
    schedule: str
    zero: int
    zero_dims: Mapping[str, int]
    segments: tuple[Segment, ...]
    part: Partition
    stages: tuple[StagePlan, ...]
    step_time_s: float
    compute_s: float
    bubble_s: float
    gradient_sync_s: float
    optimizer_s: float


@dataclass(kw_only=True)
class Search:
    """The state of one search. Everything it decides is in the Plan that `best` returns."""

    program: Program
    gpus: int
    cluster: Cluster
    memory_limit_bytes: int
    optimizer: str
    precision: str
    pins: Pins
    time_limit_s: float = 45.0
    notes: dict[str, None] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    short_bytes: float = math.inf
    _work_s: float | None = None
    _data: dict[int, tuple[Program, Assignment | None, tuple[Outcome, ...]]] = field(default_factory=dict)
    _moments: dict[tuple[int, int], Moments | str] = field(default_factory=dict)
    _rank: dict[tuple[int, int, int], Rank | str] = field(default_factory=dict)
    _tensor: dict[tuple[int, int], tuple[Assignment, Outcome]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------- the space
    def meshes(self) -> Iterator[Mesh]:
        """Every (pp, dp, tp) of the GPUs that the pins allow, tensor parallel within a node unless pinned."""
        for tp in _divisors(self.gpus):
            if self.pins.tp not in (None, tp) or (self.pins.tp is None and tp > self.cluster.gpus_per_node):
                continue
            for pp in _divisors(self.gpus // tp):
                dp = self.gpus // tp // pp
                if self.pins.pp in (None, pp) and self.pins.dp in (None, dp):
                    yield Mesh(pp=pp, dp=dp, tp=tp)

    def micro_batch_counts(self, mesh: Mesh) -> list[int]:
        batch = self.program.batch_size
        if batch is None or batch % mesh.dp:
            return [] if mesh.dp > 1 else [1]
        local = batch // mesh.dp
        if self.pins.micro_batches is not None:
            return [self.pins.micro_batches] if local % self.pins.micro_batches == 0 else []
        if self.pins.micro_batch is not None:
            return [local // self.pins.micro_batch] if local % self.pins.micro_batch == 0 else []
        return [m for m in _divisors(local) if m <= MAX_MICRO_BATCHES]

    # ------------------------------------------------------------------------------------------------- axis by axis
    def on_data_axis(self, dp: int) -> tuple[Program, Assignment | None, tuple[Outcome, ...]]:
        """The program of one data-parallel rank."""
        if dp not in self._data:
            if dp == 1:
                self._data[dp] = (self.program, None, ())
            else:
                batched = batched_inputs(self.program)
                leaves: dict[str, tuple[Layout, ...]] = {x.value: (S(0),) if x.value in batched else (R,) for x in self.program.inputs}
                leaves |= {p.value: (R, I) for p in self.program.params}
                leaves |= {b.value: (R, I) for b in self.program.buffers}
                problem = AxisProblem(
                    axis="dp",
                    n=dp,
                    choices=choices(self.program, dp, leaves, data=True),
                    pricer=Pricer(self.cluster, {"pp": 1, "dp": dp, "tp": 1}),
                    params=frozenset(p.value for p in self.program.params),
                    fixed=frozenset(b.value for b in self.program.buffers if b.mutated),
                    sync_params=False,
                    work_first=True,
                )
                solution = self.timed("data axis", lambda: solve_axis(problem))
                local = shard(self.program, solution.assignment).replace(batch_size=(self.program.batch_size or 0) // dp or None)
                self._data[dp] = (local, solution.assignment, (solution.outcome,))
        return self._data[dp]

    def moments(self, dp: int, count: int) -> Moments | str:
        key = (dp, count)
        if key not in self._moments:
            try:
                local = self.on_data_axis(dp)[0]
                self._moments[key] = self.timed("micro-batches", lambda: split_into_moments(local, count))
            except NotSplittable as e:
                self._moments[key] = f"micro-batches: not split, because {e}"
                self.notes[f"micro-batches: not split, because {e}"] = None
        return self._moments[key]

    def rank(self, mesh: Mesh, count: int) -> Rank | str:
        key = (mesh.dp, count, mesh.tp)
        if key not in self._rank:
            moments = self.moments(mesh.dp, count)
            self._rank[key] = moments if isinstance(moments, str) else self._build_rank(mesh, count, moments)
        return self._rank[key]

    def _build_rank(self, mesh: Mesh, count: int, moments: Moments) -> Rank:
        pricer = Pricer(self.cluster, mesh.sizes())
        outcomes = self.on_data_axis(mesh.dp)[2]
        tensor: Assignment | None = None
        if mesh.tp > 1:
            tensor, outcome = self.on_tensor_axis(mesh, moments.body)
            outcomes = (*outcomes, outcome)
        program = self.timed("shard", lambda: on_tensor_axis(moments, tensor))
        ledger = self.timed("price", lambda: Ledger(program, pricer))
        return Rank(
            mesh=mesh, moments=moments, program=program, data=self.on_data_axis(mesh.dp)[1], tensor=tensor, ledger=ledger,
            cuts=legal_cuts(program), outcomes=outcomes, micro_batches=count,
        )  # fmt: skip

    def on_tensor_axis(self, mesh: Mesh, body: Program, *, exactly: bool = False) -> tuple[Assignment, Outcome]:
        """The tensor axis of one micro-batch. What was solved for one size of micro-batch is tried for the others, which
        differ in nothing but the batch; `exactly` solves this one (as is done for the plan that wins)."""
        key = (body.batch_size or 0, mesh.tp)
        names = {op.name for op in body.ops}
        if not exactly:
            for known_key, known in self._tensor.items():
                if known_key[1] == mesh.tp and set(known[0].ops) == names and (known_key == key or _fits(known[0], body)):
                    return known
        problem = self._tensor_problem(mesh, body)
        solution = self.timed("tensor axis", lambda: self._solve_tensor(problem))
        self._tensor[key] = (solution.assignment, solution.outcome)
        return self._tensor[key]

    def _tensor_problem(self, mesh: Mesh, body: Program) -> AxisProblem:
        leaves: dict[str, tuple[Layout, ...]] = {x.value: (I,) for x in body.inputs}
        pricer = Pricer(self.cluster, mesh.sizes())
        passes = 3 + 2 * OPTIMIZER_STATES[self.optimizer]
        return AxisProblem(
            axis="tp",
            n=mesh.tp,
            choices=self.timed("strategies", lambda: choices(body, mesh.tp, leaves, batched=batched_inputs(body))),
            pricer=pricer,
            state_price_s_per_byte=passes / self.cluster.gpu.memory_bandwidth_bytes_per_s + pricer.bucketed_s("all_reduce", 1.0, "dp"),
            params=frozenset(p.value for p in body.params),
            fixed=frozenset(b.value for b in body.buffers if b.mutated),
        )

    def _solve_tensor(self, problem: AxisProblem) -> AxisSolution:
        """The fastest assignment. On a model so small that splitting its work costs more than doing it on every rank, the one
        that splits the most work, which is what a pinned axis asks for (an axis that is not pinned is skipped then)."""
        most = solve_axis(dataclasses.replace(problem, work_first=True), gap=0.01)
        split = objective_of(problem, lambda key: _chosen(most, problem, key))
        idle = objective_of(problem, lambda key: problem.choices.groups[key].strategies[0])
        if split < idle:
            return solve_axis(problem, gap=5e-3)
        self.notes[f"tp={problem.n}: splitting this model's work costs more in communication than it saves"] = None
        return most

    # ------------------------------------------------------------------------------------------------- candidates
    def candidates(self) -> Iterator[Candidate]:
        """Priced candidates, the most promising meshes first; infeasible ones leave their reason in `refused`."""
        start = time.perf_counter()
        best = math.inf
        order = sorted(self.meshes(), key=lambda m: (m.tp * m.pp, m.pp, m.tp))
        for mesh in order:
            counts = self.micro_batch_counts(mesh)
            if not counts:
                batch = self.program.batch_size
                self.refused[f"dp={mesh.dp}: a global batch of {batch} does not divide into {mesh.dp} ranks" + self._counts_pin()] = None
            for count in sorted(counts, key=lambda c: (abs(c - 2 * mesh.pp), c)):
                if time.perf_counter() - start > self.time_limit_s and best < math.inf:
                    self.notes["the search was stopped at its time limit; meshes with more tensor and pipeline parallelism are unexplored"] = None
                    return
                if self.least_s(mesh, count) >= best:
                    continue
                for found in self._of_count(mesh, count):
                    best = min(best, found.step_time_s)
                    yield found

    def least_s(self, mesh: Mesh, count: int) -> float:
        """No plan of this mesh is faster: all FLOPs and bytes divided by all GPUs at full rate, and the pipeline's bubble."""
        if self._work_s is None:
            gpu, total = self.cluster.gpu, 0.0
            for op in self.program.ops:
                ins = tuple(self.program.types[r] for r in refs(op))
                outs = tuple(self.program.types[o] for o in op.outputs if o is not None)
                counts = count_op(op, ins, outs)
                dtype = next((str(t.dtype).removeprefix("torch.") for t in (*outs, *ins) if t.dtype.is_floating_point), "float32")
                total += (counts.flops + counts.backward_flops) / gpu.peak_flops_per_s(dtype)
            self._work_s = total
        return self._work_s / self.gpus * (count + mesh.pp - 1) / count

    def _counts_pin(self) -> str:
        if self.pins.micro_batches is not None:
            return f" of {self.pins.micro_batches} micro-batches"
        return f" of micro-batches of {self.pins.micro_batch}" if self.pins.micro_batch is not None else ""

    def _of_count(self, mesh: Mesh, count: int) -> Iterator[Candidate]:
        rank = self.rank(mesh, count)
        if isinstance(rank, str):
            self.refused[rank] = None
            return
        rank = dataclasses.replace(rank, mesh=mesh)
        if len(rank.cuts.crossing) + 1 < mesh.pp:
            self.refused[f"pp={mesh.pp}: the program has only {len(rank.cuts.crossing)} places where it can be cut"] = None
            return
        zeros = [self.pins.zero] if self.pins.zero is not None else [0, 1, 3] if mesh.dp > 1 else [0]
        schedules = [self.pins.schedule] if self.pins.schedule else ["1f1b"]
        for schedule in schedules:
            for zero in zeros:
                if zero and mesh.dp == 1:
                    self.refused[f"zero={zero}: there is no data axis to shard parameters over"] = None
                    continue
                found = self.timed("stages", lambda s=schedule, z=zero: self._candidate(rank, mesh, s, z))
                if found is not None:
                    yield found

    def _candidate(self, rank: Rank, mesh: Mesh, schedule: str, zero: int) -> Candidate | None:
        segments = segments_of(rank.program, rank.cuts, mesh.pp)
        dims = zero_dims(rank.program, mesh.dp, zero)
        params = param_bytes(rank.program, dims, mesh.dp)
        flights = tuple(in_flight(schedule, s, mesh.pp, rank.micro_batches) for s in range(mesh.pp))
        pricer = Pricer(self.cluster, mesh.sizes())
        pieces = self._pieces(rank, segments, params, pricer, zero)
        recompute = self.pins.recompute or "auto"
        if recompute == "full" and not any(p.freed_bytes > 0 for p in pieces):
            self.refused["recompute=full: the program has no repeated block that can be recomputed"] = None
            return None
        overhead = self._fixed_bytes(zero)
        best: Candidate | None = None
        limit = self.memory_limit_bytes - overhead
        for _ in range(4):
            try:
                part = partition(
                    pieces, stages=mesh.pp, micro_batches=rank.micro_batches, in_flight=flights, limit_bytes=limit, recompute=recompute
                )
            except Infeasible:
                self._note_shortfall(rank, mesh, pieces, flights, limit, zero, recompute)
                return best
            best = self._priced(rank, mesh, schedule, zero, dims, params, segments, part, flights, pricer)
            over = max(s.memory.total_bytes for s in best.stages) - self.memory_limit_bytes
            if over <= 0:
                return best
            limit -= over + 1
            best = None
        return best

    def _pieces(self, rank: Rank, segments: tuple[Segment, ...], params: Mapping[str, ParamBytes], pricer: Pricer, zero: int) -> tuple[Piece, ...]:
        ledger, seen, seen_params = rank.ledger, set(), set()
        pieces = []
        for segment in segments:
            indices = range(segment.span.start, segment.span.stop)
            forward, backward, _ = ledger.seconds(indices)
            own = {r for k in indices for r in refs(rank.program.ops[k]) if r in params} - seen_params
            seen_params |= own
            kept = ledger.kept_bytes(segment.span, seen)
            freed = 0.0
            if self._recomputable(rank, segment):
                freed = max(0.0, kept - ledger.entering_bytes(segment.span))
            gathers = self._gather_s(rank, own, params, pricer) if zero == 3 else 0.0
            send = rank.cuts.crossing.get(segment.span.start, ())
            pieces.append(
                Piece(
                    forward_s=forward + gathers,
                    backward_s=backward + 2 * gathers,
                    state_bytes=float(sum(self._state_bytes(params[v], zero) for v in own)),
                    kept_bytes=float(kept),
                    freed_bytes=freed,
                    temporary_bytes=float(ledger.temporary_bytes(indices)),
                    send_s=sum(pricer.cluster.intra.hop_simple_s for _ in send),
                )
            )
        return tuple(pieces)

    def _recomputable(self, rank: Rank, segment: Segment) -> bool:
        if segment.block < 0:
            return False
        mutated = {b.value for b in rank.program.buffers if b.mutated}
        ops = rank.program.ops[segment.span.start : segment.span.stop]
        return not any(r in mutated for op in ops for r in refs(op))

    def _gather_s(self, rank: Rank, own: set[str], params: Mapping[str, ParamBytes], pricer: Pricer) -> float:
        return sum(pricer.collective_s("all_gather", params[v].local_bytes, "dp") for v in own if params[v].resting_bytes < params[v].local_bytes)

    def _state_bytes(self, p: ParamBytes, zero: int) -> int:
        """Parameter, gradient and optimizer states of one parameter at rest on one rank."""
        states = OPTIMIZER_STATES[self.optimizer] if p.trainable else 0
        item = p.local_bytes // max(p.numel, 1)
        optimizer = states * p.resting_numel * item
        if not p.trainable:
            return p.resting_bytes
        if zero == 0 or p.resting_bytes == p.local_bytes:
            return 2 * p.local_bytes + optimizer
        working = p.local_bytes if zero == 1 else 0
        gradients = p.local_bytes + p.resting_bytes if zero == 1 else p.resting_bytes
        return working + p.resting_bytes + gradients + optimizer

    def _fixed_bytes(self, zero: int) -> int:
        return int(self.cluster.gpu.context_bytes) + 2 * 25 * 2**20 * (self.gpus > 1)

    def _note_shortfall(
        self, rank: Rank, mesh: Mesh, pieces: tuple[Piece, ...], flights: tuple[int, ...], limit: float, zero: int, recompute: str
    ) -> None:
        """How many bytes the leanest form of this candidate lacks."""
        state = sum(p.state_bytes for p in pieces) / mesh.pp
        kept = sum(p.kept_bytes - (p.freed_bytes if recompute != "none" else 0) for p in pieces) / mesh.pp * max(flights)
        largest = max(p.state_bytes + p.kept_bytes - p.freed_bytes for p in pieces)
        short = max(state + kept, largest) + max(p.temporary_bytes for p in pieces) - limit
        self.short_bytes = min(self.short_bytes, max(short, 0.0))
        self.refused[
            f"memory: pp={mesh.pp} dp={mesh.dp} tp={mesh.tp} micro-batches={rank.micro_batches} zero={zero} needs about "
            f"{(state + kept) / GIB:.2f} GiB a rank ({state / GIB:.2f} parameters, gradients and optimizer states, {kept / GIB:.2f} activations) "
            f"of {limit / GIB:.2f} GiB, {max(short, 0.0) / GIB:.2f} GiB short"
        ] = None

    def _priced(
        self,
        rank: Rank,
        mesh: Mesh,
        schedule: str,
        zero: int,
        dims: Mapping[str, int],
        params: Mapping[str, ParamBytes],
        segments: tuple[Segment, ...],
        part: Partition,
        flights: tuple[int, ...],
        pricer: Pricer,
    ) -> Candidate:
        """The stages of a partition, as they will run: costs and memory of each from its own operators."""
        bounds = (0, *part.cuts, len(segments))
        pieces = self._pieces(rank, segments, params, pricer, zero)
        stages, sync, optimizer = [], 0.0, 0.0
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
            span = Span(segments[i].span.start, segments[j - 1].span.stop)
            own = {r for k in range(span.start, span.stop) for r in refs(rank.program.ops[k]) if r in params}
            forward = sum(pieces[k].forward_s for k in range(i, j))
            again = sum(pieces[k].forward_s for k in range(i, j) if k in part.recomputed)
            backward = sum(pieces[k].backward_s for k in range(i, j)) + again
            sent = sum(rank.program.types[v].nbytes for v in rank.cuts.crossing.get(span.start, ())) if s else 0
            hop = pricer.collective_s("p2p", sent, "pp") if sent else 0.0
            seen: set[str] = set()
            kept = 0
            for k in range(i, j):
                entire = rank.ledger.kept_bytes(segments[k].span, seen)
                kept += min(entire, rank.ledger.entering_bytes(segments[k].span)) if k in part.recomputed else entire
            temporary = rank.ledger.temporary_bytes(range(span.start, span.stop))
            temporary += int(max((pieces[k].freed_bytes for k in range(i, j) if k in part.recomputed), default=0))
            if zero == 3:
                temporary += max((params[v].local_bytes for v in own), default=0)
            memory = self._memory(own, params, zero, kept * flights[s], temporary)
            communication = rank.ledger.seconds(range(span.start, span.stop))[2]
            whole = [n for k in range(i, j) if segments[k].block >= 0 for n in [self._prefix(rank, segments[k])]]
            again_names = [self._prefix(rank, segments[k]) for k in range(i, j) if k in part.recomputed]
            stages.append(
                StagePlan(
                    first_op=rank.program.ops[span.start].name, blocks=whole, recomputed=again_names, forward_s=forward + hop,
                    backward_s=backward + hop, communication_s=communication, memory=memory,
                    flops=sum(c.counts.flops + c.counts.backward_flops for c in rank.ledger.costs[span.start : span.stop]),
                    parameters=sum(params[v].numel for v in own), micro_batches_in_flight=flights[s],
                )
            )  # fmt: skip
            sync = max(sync, self._sync_s(own, params, pricer, zero, backward))
            optimizer = max(optimizer, self._optimizer_s(own, params))
        slowest = max(s.forward_s + s.backward_s for s in stages)
        through = sum(s.forward_s + s.backward_s for s in stages)
        compute = rank.micro_batches * slowest
        bubble = through - slowest
        return Candidate(
            rank=rank, mesh=mesh, schedule=schedule, zero=zero, zero_dims=dims, segments=segments, part=part, stages=tuple(stages),
            step_time_s=compute + bubble + sync + optimizer, compute_s=compute, bubble_s=bubble, gradient_sync_s=sync, optimizer_s=optimizer,
        )  # fmt: skip

    def _prefix(self, rank: Rank, segment: Segment) -> str:
        return rank.program.blocks[segment.block].prefixes[segment.instance]

    def _memory(self, own: set[str], params: Mapping[str, ParamBytes], zero: int, kept: int, temporary: int) -> MemoryPlan:
        trained = [params[v] for v in own if params[v].trainable]
        working = sum(p.local_bytes for p in trained if zero == 1 and p.resting_bytes < p.local_bytes)
        parameters = sum(params[v].resting_bytes for v in own) + working
        gradients = sum(p.resting_bytes for p in trained) + working
        states = OPTIMIZER_STATES[self.optimizer] * sum(p.resting_bytes for p in trained)
        live = parameters + gradients + states + kept + temporary
        return MemoryPlan(
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_states_bytes=states,
            saved_activations_bytes=kept,
            largest_temporary_bytes=temporary,
            communication_buffers_bytes=2 * 25 * 2**20 if self.gpus > 1 else 0,
            framework_context_bytes=int(self.cluster.gpu.context_bytes),
            allocator_slack_bytes=int(0.03 * live),
        )

    def _sync_s(self, own: set[str], params: Mapping[str, ParamBytes], pricer: Pricer, zero: int, backward_s: float) -> float:
        """Exposed seconds of bringing gradients together (and, for ZeRO-1, parameters) over the data axis."""
        whole = sum(params[v].local_bytes for v in own if params[v].trainable)
        sharded = sum(params[v].local_bytes for v in own if params[v].resting_bytes < params[v].local_bytes)
        reduced = whole - sharded if zero else whole
        seconds = pricer.bucketed_s("all_reduce", reduced, "dp")
        if zero == 1:
            seconds += pricer.bucketed_s("reduce_scatter", sharded, "dp")
        hidden = min(seconds * 0.9, OVERLAP_FRACTION * backward_s)
        gathered = pricer.bucketed_s("all_gather", sharded, "dp") if zero == 1 else 0.0
        return seconds - hidden + gathered

    def _optimizer_s(self, own: set[str], params: Mapping[str, ParamBytes]) -> float:
        passes = 3 + 2 * OPTIMIZER_STATES[self.optimizer]  # read and write the parameter, read the gradient, read and write states
        nbytes = sum(params[v].resting_bytes for v in own if params[v].trainable)
        return passes * nbytes / self.cluster.gpu.memory_bandwidth_bytes_per_s

    def timed(self, name: str, call):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    # ------------------------------------------------------------------------------------------------- the answer
    def best(self) -> Plan:
        """The best plan. Raises Infeasible with the binding constraint, the shortfall and what would fix it."""
        found = sorted(self.candidates(), key=lambda c: c.step_time_s)
        if not found:
            raise Infeasible(self._why_not())
        return self._plan(self._exactly(found))

    def _exactly(self, found: list[Candidate]) -> list[Candidate]:
        """The winner with its tensor axis solved for its own micro-batch, if that was taken over from another size."""
        c = found[0]
        body = c.rank.moments.body
        if c.rank.tensor is None or (body.batch_size or 0, c.mesh.tp) in self._tensor:
            return found
        self.on_tensor_axis(c.mesh, body, exactly=True)
        self._rank.pop((c.mesh.dp, c.rank.micro_batches, c.mesh.tp))
        again = list(self._of_count(c.mesh, c.rank.micro_batches))
        return sorted([*again, *found], key=lambda x: x.step_time_s)

    def _why_not(self) -> str:
        if not any(True for _ in self.meshes()):
            pins = {k: getattr(self.pins, k) for k in ("dp", "tp", "pp") if getattr(self.pins, k) is not None}
            pinned = ", ".join(f"{k}={v}" for k, v in pins.items())
            return f"no mesh of {self.gpus} GPUs has {pinned}: pinned axes must divide and fill the GPUs (pp x dp x tp = {self.gpus})"
        lines = list(self.refused) or ["no candidate satisfies the pins"]
        text = "no plan fits the constraints:\n" + "\n".join(f"  - {line}" for line in lines[:12])
        if self.short_bytes < math.inf:
            text += (
                f"\nThe binding constraint is memory: the leanest candidate is {self.short_bytes / GIB:.2f} GiB short of "
                f"{self.memory_limit_bytes / GIB:.2f} GiB a GPU. More GPUs, a smaller micro-batch, recompute=full or zero=3 would help"
                + (" (a pin forbids some of these)." if any(getattr(self.pins, k) is not None for k in ("zero", "recompute", "micro_batch", "micro_batches")) else ".")
            )
        return text

    def _plan(self, found: list[Candidate]) -> Plan:
        c = found[0]
        program, rank = self.program, c.rank
        positions = [c.segments[k].span.start for k in c.part.cuts]
        recompute = sorted((c.segments[k].block, c.segments[k].instance) for k in c.part.recomputed)
        cut_stages(rank.moments, rank.program, tuple(positions), frozenset(recompute))
        axes: dict[str, AxisPlan] = {}
        if rank.data is not None:
            axes["dp"] = axis_plan(program, rank.data)
        if rank.tensor is not None:
            axes["tp"] = axis_plan(rank.moments.body, rank.tensor)
        gaps = [o.gap for o in (*rank.outcomes, c.part.outcome)]
        gap = 1.0 - math.prod(1.0 - g for g in gaps)
        tokens = _tokens(program)
        return Plan(
            model=program.name,
            program_hash=program_hash(program),
            gpus=self.gpus,
            cluster=self.cluster.name,
            memory_limit_bytes=self.memory_limit_bytes,
            optimizer=self.optimizer,
            precision=self.precision,
            global_batch=program.batch_size or 0,
            samples_unit="tokens" if tokens else "samples",
            mesh=c.mesh.sizes(),
            micro_batches=rank.micro_batches,
            schedule=c.schedule,
            zero=c.zero,
            cuts=positions,
            recompute=recompute,
            stages=list(c.stages),
            axes=axes,
            zero_dims=dict(c.zero_dims),
            step_time_s=c.step_time_s,
            compute_s=c.compute_s,
            bubble_s=c.bubble_s,
            gradient_sync_s=c.gradient_sync_s,
            optimizer_s=c.optimizer_s,
            objective_s=c.step_time_s,
            bound_s=c.step_time_s * (1.0 - gap),
            gap=gap,
            work_per_step=float(tokens or program.batch_size or 0),
            tensor_split_share=_split_share(rank.moments.body, rank.tensor) if rank.tensor is not None else 0.0,
            provenance=f"roofline of {self.cluster.gpu.name}, links of {self.cluster.name} (cost_models)",
            notes=[*program.notes, *self.notes, *self._replicated(rank)],
            limits=self._limits(c),
            alternatives=[_one_line(x) for x in _distinct(found)[1:6]],
            pins={k: v for k, v in _asdict(self.pins).items() if v is not None},
            planning_s={k: round(v, 3) for k, v in self.seconds.items()},
        )

    def _replicated(self, rank: Rank) -> list[str]:
        """Operators that the tensor axis does not split though they compute, by kind."""
        if rank.tensor is None:
            return []
        idle: dict[str, int] = {}
        for op in rank.moments.body.ops:
            if not rank.tensor.ops[op.name].splits_work and refs(op) and any(rank.program.types[r].numel > 1 for r in refs(op) if r in rank.program.types):
                idle[op.target] = idle.get(op.target, 0) + 1
        listed = sorted(idle.items(), key=lambda x: -x[1])[:8]
        return [f"replicated over tp: {', '.join(f'{t} x{n}' for t, n in listed)}"] if listed else []

    def _limits(self, c: Candidate) -> list[str]:
        fullest = max(range(len(c.stages)), key=lambda s: c.stages[s].memory.total_bytes)
        used = c.stages[fullest].memory.total_bytes
        share = {"compute and tensor communication": c.compute_s, "pipeline bubble": c.bubble_s, "gradient reduction": c.gradient_sync_s, "optimizer": c.optimizer_s}
        top = max(share, key=share.__getitem__)
        slow = max(range(len(c.stages)), key=lambda s: c.stages[s].forward_s + c.stages[s].backward_s)
        return [
            f"time: {top} takes {100 * share[top] / c.step_time_s:.0f}% of the step; the slowest stage is {slow}",
            f"memory: stage {fullest} uses {used / GIB:.2f} of {self.memory_limit_bytes / GIB:.2f} GiB",
        ]


def _split_share(body: Program, assignment: Assignment) -> float:
    """The share of the forward FLOPs that an assignment divides among its ranks."""
    whole = split = 0.0
    for op in body.ops:
        flops = count_op(op, tuple(body.types[r] for r in refs(op)), tuple(body.types[o] for o in op.outputs if o is not None)).flops
        whole += flops
        split += flops if assignment.ops[op.name].splits_work else 0.0
    return split / whole if whole else 0.0


def _fits(assignment: Assignment, body: Program) -> bool:
    """Whether every strategy of an assignment is one of this program's own, so that it is sound here too."""
    for op in body.ops:
        s = assignment.ops[op.name]
        groups = frozenset({1, *(x.groups for x in (*s.inputs, *s.outputs) if x.is_shard)})
        if s not in strategies_of(view_of(body, op, assignment.n, groups)):
            return False
    leaves = {x.value for x in (*body.inputs, *body.params, *body.buffers)}
    return leaves == set(assignment.leaves)


def _chosen(solution: AxisSolution, problem: AxisProblem, key: str) -> Strategy:
    member = problem.choices.groups[key].members[0]
    ops, leaves = solution.assignment.ops, solution.assignment.leaves
    return ops[member] if member in ops else Strategy(inputs=(), outputs=(leaves[member],))


def _distinct(found: list[Candidate]) -> list[Candidate]:
    seen: dict[tuple[object, ...], Candidate] = {}
    for c in found:
        seen.setdefault((c.mesh, c.zero), c)
    return list(seen.values())


def _one_line(c: Candidate) -> str:
    peak = max(s.memory.total_bytes for s in c.stages) / GIB
    return (
        f"pp={c.mesh.pp} dp={c.mesh.dp} tp={c.mesh.tp} zero={c.zero} micro-batches={c.rank.micro_batches}: "
        f"{c.step_time_s * 1e3:.2f} ms, {peak:.2f} GiB"
    )


def _asdict(pins: Pins) -> dict[str, object]:
    return {k: getattr(pins, k) for k in pins.__struct_fields__}


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _tokens(program: Program) -> int:
    """Tokens of the global batch: the elements of its integer inputs of two dims (batch, sequence), if there are any."""
    sizes = [program.types[x.value] for x in program.inputs]
    return max((t.numel for t in sizes if len(t.shape) == 2 and not t.dtype.is_floating_point and t.dtype.itemsize >= 4), default=0)


def make_plan(
    program: Program,
    gpus: int,
    cluster: Cluster,
    *,
    memory_limit_bytes: int | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    pins: Pins | None = None,
    time_limit_s: float = 45.0,
) -> Plan:
    """Search and return the best plan found. Raises Infeasible, or ValueError for an unknown optimizer."""
    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZER_STATES)}")
    return Search(
        program=program,
        gpus=gpus,
        cluster=cluster,
        memory_limit_bytes=memory_limit_bytes or int(cluster.gpu.memory_bytes),
        optimizer=optimizer,
        precision=precision,
        pins=pins or Pins(),
        time_limit_s=time_limit_s,
    ).best()
