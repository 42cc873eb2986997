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
from itertools import accumulate, pairwise

from autopar.catalog import strategies_of
from autopar.errors import Infeasible
from autopar.ir import I, Layout, Program, R, S, Strategy, refs
from autopar.measure import Live, Pricer
from autopar.measure import count as count_op
from autopar.planner.answer import plan_of, why_not
from autopar.planner.axis import AxisProblem, AxisSolution, objective_of, solve_axis
from autopar.planner.candidate import Candidate, Mesh, Rank, gib
from autopar.planner.choices import choices, with_layouts, with_matrices_cut, with_work_split
from autopar.planner.estimate import Estimator
from autopar.planner.lower import on_tensor_axis
from autopar.planner.moments import Moments, NotSplittable, batched_inputs, by_samples, split_into_moments
from autopar.planner.partition import Piece, least_bytes, partition
from autopar.planner.plan import Pins, Plan
from autopar.planner.price import Ledger, param_bytes, zero_dims
from autopar.planner.resources import check_measure, live_on, usable_bytes
from autopar.planner.shard import Assignment, shard, view_of
from autopar.planner.solver import Outcome
from autopar.planner.stages import Segment, legal_cuts, segments_of
from cost_models.cluster import Cluster
from cost_models.memory import OPTIMIZERS
from cost_models.pipeline import in_flight
from cost_models.recipe import AUTOPAR, Recipe

__all__ = ["Search", "make_plan"]

MAX_MICRO_BATCHES = 64  # candidates a step is split into, beyond which nothing is gained but latency
MEASURED_CANDIDATES = 8  # the front-runners whose operators are measured, where times are measured at all


@dataclass(kw_only=True)
class Search:
    """The state of one search. Everything it decides is in the Plan that `best` returns. measure: 'live' measures the operators of
    the best candidates on this machine, and the best of these is the plan. recipe: of the training software. batch_size: the global
    batch, by default that of the program; with another one the search prices candidates (`candidates`) but makes no plan."""

    program: Program
    gpus: int
    cluster: Cluster
    memory_limit_bytes: int
    optimizer: str
    precision: str
    pins: Pins
    time_limit_s: float = 45.0
    measure: str = "roofline"
    recipe: Recipe = AUTOPAR
    batch_size: int | None = None
    notes: dict[str, None] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    short_bytes: float = math.inf
    best_s: float = math.inf
    _work_s: float | None = None  # of the program's own batch
    _data: dict[tuple[int, bool], tuple[Program, Assignment | None, tuple[Outcome, ...]] | NotSplittable] = field(default_factory=dict)
    _by_samples: set[tuple[int, int]] = field(default_factory=set)  # splits for which the data axis follows the micro-batches
    _moments: dict[tuple[int, int], Moments | str] = field(default_factory=dict)
    _rank: dict[tuple[object, ...], Rank | str] = field(default_factory=dict)
    _tensor: dict[tuple[object, ...], tuple[Assignment, Outcome]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch_size = self.batch_size or self.program.batch_size

    def other(self, *, gpus: int, pins: Pins, batch_size: int | None, recipe: Recipe, memory_limit_bytes: int) -> Search:
        """A search of the same program on the same cluster that shares what this one has found out about ranks."""
        return dataclasses.replace(
            self, gpus=gpus, pins=pins, batch_size=batch_size, recipe=recipe, memory_limit_bytes=memory_limit_bytes,
            notes={}, refused={}, seconds={}, short_bytes=math.inf, best_s=math.inf,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- the space
    def meshes(self) -> Iterator[Mesh]:
        """Every (pp, dp, tp) of the GPUs that the pins allow, tensor parallel within a node unless pinned."""
        stages = len(self.pins.blocks) if self.pins.blocks is not None else self.pins.pp
        for tp in _divisors(self.gpus):
            if self.pins.tp not in (None, tp) or (self.pins.tp is None and tp > self.cluster.gpus_per_node):
                continue
            for pp in _divisors(self.gpus // tp):
                dp = self.gpus // tp // pp
                if stages in (None, pp) and self.pins.dp in (None, dp):
                    yield Mesh(pp=pp, dp=dp, tp=tp)

    def micro_batch_counts(self, mesh: Mesh) -> list[int]:
        batch = self.batch_size
        if batch is None:
            whole = mesh.dp == 1 and self.pins.micro_batches in (None, 1) and self.pins.micro_batch is None
            return [1] if whole else []
        if batch % mesh.dp:
            return []
        local = batch // mesh.dp
        if self.pins.micro_batches is not None:
            return [self.pins.micro_batches] if local % self.pins.micro_batches == 0 else []
        if self.pins.micro_batch is not None:
            return [local // self.pins.micro_batch] if local % self.pins.micro_batch == 0 else []
        return [m for m in _divisors(local) if m <= MAX_MICRO_BATCHES]

    # ------------------------------------------------------------------------------------------------- axis by axis
    def on_data_axis(self, dp: int, *, samples: bool = False) -> tuple[Program, Assignment | None, tuple[Outcome, ...]]:
        """The program of one data-parallel rank. samples: every operator runs on the rank's samples as it would on a micro-batch,
        without exchange (raises NotSplittable if that is not possible); else it may split other dims, and exchange values."""
        key = (dp, samples)
        if key not in self._data:
            try:
                self._data[key] = self._solve_data(dp, by_samples(self.program, dp) if samples else {})
            except NotSplittable as e:
                self._data[key] = e
            except Infeasible as e:
                if not samples:
                    raise
                self._data[key] = NotSplittable(str(e))
        found = self._data[key]
        if isinstance(found, NotSplittable):
            raise found
        return found

    def _solve_data(self, dp: int, wanted: Mapping[str, Strategy]) -> tuple[Program, Assignment | None, tuple[Outcome, ...]]:
        """wanted: operator -> what it takes and gives, if it can."""
        if dp == 1:
            return self.program, None, ()
        batched = batched_inputs(self.program)
        leaves: dict[str, tuple[Layout, ...]] = {x.value: (S(0),) if x.value in batched else (R,) for x in self.program.inputs}
        leaves |= {p.value: (R, I) for p in self.program.params}
        leaves |= {b.value: (R, I) for b in self.program.buffers}
        problem = AxisProblem(
            axis="dp",
            n=dp,
            choices=with_layouts(choices(self.program, dp, leaves, data=True), wanted),
            pricer=Pricer(self.cluster, {"pp": 1, "dp": dp, "tp": 1}),
            params=frozenset(p.value for p in self.program.params),
            fixed=frozenset(b.value for b in self.program.buffers if b.mutated),
            sync_params=False,
            work_first=True,
        )
        solution = self.timed("data axis", lambda: solve_axis(problem))
        local = shard(self.program, solution.assignment).replace(batch_size=(self.program.batch_size or 0) // dp or None)
        return local, solution.assignment, (solution.outcome,)

    def moments(self, dp: int, count: int) -> Moments | str:
        key = (dp, count)
        if key not in self._moments:
            self._moments[key] = found = self._split(dp, count, samples=False)
            if isinstance(found, str) and dp > 1 and not isinstance(again := self._split(dp, count, samples=True), str):
                self._by_samples.add(key)
                self._moments[key] = again
        return self._moments[key]

    def _split(self, dp: int, count: int, *, samples: bool) -> Moments | str:
        try:
            local = self.on_data_axis(dp, samples=samples)[0]
            return self.timed("micro-batches", lambda: split_into_moments(local, count))
        except NotSplittable as e:
            return f"micro-batches: not split, because {e}"

    def unsplit(self, dp: int) -> list[str]:
        """Why the batch of one of dp ranks was not split into micro-batches, if it was tried and was not."""
        return list(dict.fromkeys(why for (ranks, _), why in self._moments.items() if ranks == dp and isinstance(why, str)))

    def rank(self, mesh: Mesh, count: int, *, exactly: bool = False) -> Rank | str:
        """The priced program of one rank, or why there is none. Splits into micro-batches of one size share it, unless `exactly`."""
        batch = self.batch_size or 1
        size = batch // mesh.dp // count
        contended = self._pricer(mesh).contended
        priced_by = (contended, self.recipe.regathers, self.recipe.fuses, self.recipe.attention_speed)
        alike = (size, mesh.dp > 1, count > 1, mesh.tp, self.pins.sequence_parallel, *priced_by)
        own = (mesh.dp, count) if batch == (self.program.batch_size or 1) else self._stand_in(mesh, count, size)
        if isinstance(own, str):
            return own
        key = (*alike, own) if exactly else alike
        if key not in self._rank:
            moments = self.moments(*own)
            self._rank[key] = moments if isinstance(moments, str) else self._build_rank(mesh, own, moments, exactly)
        found = self._rank[key]
        return found if isinstance(found, str) else dataclasses.replace(found, mesh=mesh, micro_batches=count)

    def _stand_in(self, mesh: Mesh, count: int, size: int) -> tuple[int, int] | str:
        """The (dp, micro-batches) of the program's own batch that stands for all splits of another one into micro-batches of that size,
        or why there is none."""
        own = self.program.batch_size or 1
        parts = own // size
        dp = parts if count == 1 else min(mesh.dp, 2)
        if parts == 0 or own % size or parts % dp or (count > 1 and parts == dp):
            several = f"{'several ' if count > 1 else ''}micro-batches of {size}"
            return f"micro-batches: the program's batch of {own} does not divide into {several} on {min(mesh.dp, 2)} ranks"
        return dp, parts // dp

    def _pricer(self, mesh: Mesh, live: Live | None = None) -> Pricer:
        return Pricer(self.cluster, mesh.sizes(), live, self.recipe)

    def _build_rank(self, mesh: Mesh, made_for: tuple[int, int], moments: Moments, exactly: bool) -> Rank | str:
        pricer = self._pricer(mesh)
        data = self.on_data_axis(made_for[0], samples=made_for in self._by_samples)
        outcomes = data[2]
        tensor: Assignment | None = None
        if mesh.tp > 1:
            try:
                tensor, outcome = self.on_tensor_axis(mesh, moments.body, exactly=exactly)
            except Infeasible as e:
                pin = self.pins.sequence_parallel
                if pin is None:
                    raise
                return f"tp={mesh.tp}: not every matrix can be cut with the activations between as sequence_parallel={pin} wants them ({e})"
            outcomes = (*outcomes, outcome)
        program = self.timed("shard", lambda: on_tensor_axis(moments, tensor))
        ledger = self.timed("price", lambda: Ledger(program, pricer))
        return Rank(
            mesh=mesh, moments=moments, program=program, data=data[1], tensor=tensor, ledger=ledger, cuts=legal_cuts(program),
            outcomes=outcomes, micro_batches=made_for[1], made_for=made_for,
        )  # fmt: skip

    def on_tensor_axis(self, mesh: Mesh, body: Program, *, exactly: bool = False) -> tuple[Assignment, Outcome]:
        """The tensor axis of one micro-batch. What was solved for one size of micro-batch is tried for the others, which
        differ in nothing but the batch; `exactly` solves this one (as is done for the plan that wins)."""
        key = self._tensor_key(mesh, body)
        if key in self._tensor:
            return self._tensor[key]
        if not exactly and self.pins.micro_batches is None and self.pins.micro_batch is None:
            for known_key, known in self._tensor.items():
                if known_key[1:] == key[1:] and _fits(known[0], body):
                    return known
        problem = self._tensor_problem(mesh, body)
        solution = self.timed("tensor axis", lambda: self._solve_tensor(problem))
        self._tensor[key] = (solution.assignment, solution.outcome)
        return self._tensor[key]

    def _tensor_key(self, mesh: Mesh, body: Program) -> tuple[object, ...]:
        return body.batch_size or 0, mesh.tp, self.pins.sequence_parallel, frozenset(op.name for op in body.ops)

    def _tensor_problem(self, mesh: Mesh, body: Program) -> AxisProblem:
        leaves: dict[str, tuple[Layout, ...]] = {x.value: (I,) for x in body.inputs}
        pricer = self._pricer(mesh)
        passes = 3 + 2 * OPTIMIZERS[self.optimizer]
        found = self.timed("strategies", lambda: choices(body, mesh.tp, leaves, batched=batched_inputs(body)))
        if self.pins.sequence_parallel is not None:
            found = with_matrices_cut(found, frozenset(p.value for p in body.params))
        return AxisProblem(
            axis="tp",
            n=mesh.tp,
            choices=found,
            pricer=pricer,
            state_price_s_per_byte=passes / self.cluster.gpu.memory_bandwidth_bytes_per_s + pricer.bucketed_s("all_reduce", 1.0, "dp"),
            params=frozenset(p.value for p in body.params),
            fixed=frozenset(b.value for b in body.buffers if b.mutated),
            sequence_parallel=self.pins.sequence_parallel,
        )

    def _solve_tensor(self, problem: AxisProblem) -> AxisSolution:
        """The fastest assignment. On a model so small that splitting its work costs more than doing it on every rank, the fastest
        of those that split every heavy operator that can be, which is what a pinned axis asks for (one that is not is skipped then)."""
        if problem.sequence_parallel is not None:
            return solve_axis(problem, gap=5e-3)
        most = solve_axis(dataclasses.replace(problem, work_first=True), gap=0.01)
        split = objective_of(problem, lambda key: _chosen(most, problem, key))
        idle = objective_of(problem, lambda key: problem.choices.groups[key].strategies[0])
        if split < idle:
            return solve_axis(problem, gap=5e-3)
        self.notes[f"tp={problem.n}: splitting this model's work costs more in communication than it saves"] = None
        heavy = with_work_split(problem.choices, lambda key: _chosen(most, problem, key))
        return solve_axis(dataclasses.replace(problem, choices=heavy), gap=5e-3)

    # ------------------------------------------------------------------------------------------------- candidates
    def candidates(self) -> Iterator[Candidate]:
        """Priced candidates, the most promising meshes first; infeasible ones leave their reason in `refused`."""
        self.best_s = math.inf
        order = sorted(self.meshes(), key=lambda m: (m.tp * m.pp, m.pp, m.tp))
        for mesh in order:
            counts = self.micro_batch_counts(mesh)
            if not counts:
                batch = self.batch_size
                divides = f"a global batch of {batch} does not divide into {mesh.dp} ranks" + self._counts_pin()
                self.refused[f"dp={mesh.dp}: {divides if batch is not None else 'no input has a dim that could be the batch'}"] = None
            for count in sorted(counts, key=lambda c: (abs(c - 2 * mesh.pp), c)):
                if self.least_s(mesh, count) >= self.best_s:
                    continue
                for found in self._of_rank(self.rank(mesh, count), mesh):
                    self.best_s = min(self.best_s, found.step_time_s)
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
        work_s = self._work_s * (self.batch_size or 1) / (self.program.batch_size or 1)
        return work_s / self.gpus * (count + mesh.pp - 1) / count

    def _counts_pin(self) -> str:
        if self.pins.micro_batches is not None:
            return f" of {self.pins.micro_batches} micro-batches"
        return f" of micro-batches of {self.pins.micro_batch}" if self.pins.micro_batch is not None else ""

    def _of_rank(self, rank: Rank | str, mesh: Mesh) -> Iterator[Candidate]:
        if isinstance(rank, str):
            self.refused[rank] = None
            return
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

    def _candidate(self, rank: Rank, mesh: Mesh, schedule: str, zero: int, live: Live | None = None) -> Candidate | None:
        segments = segments_of(rank.program, rank.cuts, 1 if self.pins.blocks is not None else mesh.pp)
        dims = zero_dims(rank.program, mesh.dp, zero)
        params = param_bytes(rank.program, dims, mesh.dp)
        flights = tuple(in_flight(schedule, s, mesh.pp, rank.micro_batches) for s in range(mesh.pp))
        estimator = Estimator(
            rank=rank, cluster=self.cluster, optimizer=self.optimizer, schedule=schedule, zero=zero, dims=dims, params=params,
            segments=segments, in_flight=flights, pricer=self._pricer(mesh, live),
            batch_bytes=self._batch_bytes(mesh), recipe=self.recipe,
        )  # fmt: skip
        pieces = estimator.pieces()
        recompute = self.pins.recompute or "auto"
        if recompute == "full" and not any(p.freed_bytes > 0 for p in pieces):
            self.refused["recompute=full: the program has no repeated block that can be recomputed"] = None
            return None
        if mesh.pp > 1 and (trained := sum(p.trains for p in pieces)) < mesh.pp:
            why = f"only {trained} of the pieces between cuts have parameters to train, and every stage needs one"
            self.refused[f"pp={mesh.pp}: {why}"] = None
            return None
        cuts = self._pinned_cuts(segments, pieces) if self.pins.blocks is not None else None
        if isinstance(cuts, str):
            self.refused[f"blocks: {cuts}"] = None
            return None
        limit = room = estimator.room_bytes(self.memory_limit_bytes)
        over = 0
        for _ in range(4):
            try:
                part = partition(
                    pieces, stages=mesh.pp, micro_batches=rank.micro_batches, in_flight=flights, limit_bytes=limit,
                    recompute=recompute, worth_s=self.best_s, cuts=cuts,
                )  # fmt: skip
            except Infeasible:
                break
            if part is None:
                return None
            best = estimator.candidate(part, pieces)
            over = max(s.memory.total_bytes for s in best.stages) - self.memory_limit_bytes
            if over <= 0:
                return best
            limit -= over + 1
        self._note_shortfall(rank, mesh, pieces, flights, room, zero, recompute, over)
        return None

    def _batch_bytes(self, mesh: Mesh) -> int:
        """Bytes of the batch as it is given to a rank."""
        captured = sum(self.program.types[x.value].nbytes for x in self.program.inputs)
        whole = captured * (self.batch_size or 1) // (self.program.batch_size or 1)
        return whole // mesh.dp if self.recipe.local_batches else whole

    def _pinned_cuts(self, segments: tuple[Segment, ...], pieces: tuple[Piece, ...]) -> tuple[int, ...] | str:
        """The first segment of each stage but the first as `Pins.blocks` states them, or why the program has no such stages."""
        wanted = self.pins.blocks or ()
        places = [k for k, s in enumerate(segments) if s.block >= 0]
        stages = f"stages of {', '.join(map(str, wanted))}"
        if sum(wanted) != len(places):
            return f"the program has {len(places)} block instances between places where it can be cut, which do not make {stages}"
        starts = [*places, places[-1] + 1 if places else len(segments)]
        cuts = tuple(starts[n] for n in accumulate(wanted[:-1]))
        for s, (i, j) in enumerate(pairwise((0, *cuts, len(segments)))):
            if i >= j or (len(wanted) > 1 and not any(p.trains for p in pieces[i:j])):
                return f"of {stages}, stage {s} would have nothing to train"
        return cuts

    def _note_shortfall(
        self, rank: Rank, mesh: Mesh, pieces: tuple[Piece, ...], flights: tuple[int, ...], room: float, zero: int, recompute: str, over: int
    ) -> None:
        """How many bytes the leanest form of this candidate lacks; over: where its pieces would fit, how many too many it needs as a
        whole."""
        state = sum(p.state_bytes for p in pieces) / mesh.pp
        kept = sum(p.kept_bytes - (p.freed_bytes if recompute != "none" else 0) for p in pieces) / mesh.pp * max(flights)
        least = least_bytes(pieces, mesh.pp, flights, recompute)
        short = least - room if least > room else float(over)
        self.short_bytes = min(self.short_bytes, short)
        self.refused[
            f"memory: pp={mesh.pp} dp={mesh.dp} tp={mesh.tp} micro-batches={rank.micro_batches} zero={zero} needs "
            f"{gib(room + short)} on its fullest rank (on average {gib(state)} of parameters, gradients and optimizer states and "
            f"{gib(kept)} of activations) of {gib(max(room, 0.0))}, {gib(short)} short"
        ] = None

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
            raise Infeasible(why_not(self))
        found = self._exactly(found)
        return plan_of(self, self._measured(found) if self.measure == "live" else found)

    def _measured(self, found: list[Candidate]) -> list[Candidate]:
        """The front-runners, their operators measured on this machine and their stages decided again from these times."""
        live = live_on(self.cluster, self.gpus)
        self.best_s = math.inf
        ledgers: dict[tuple[int, int, int], Ledger] = {}
        again: list[Candidate] = []
        for c in found[:MEASURED_CANDIDATES]:
            rank = self.rank(c.mesh, c.rank.micro_batches, exactly=True)
            if isinstance(rank, str):
                continue
            key, program, pricer = (c.mesh.dp, c.rank.micro_batches, c.mesh.tp), rank.program, self._pricer(c.mesh, live)
            if key not in ledgers:
                ledgers[key] = self.timed("measure", lambda program=program, pricer=pricer: Ledger(program, pricer))
            if again and live.skipped:  # the budget is spent: what is estimated in part is not compared with what was measured
                break
            priced = self._candidate(dataclasses.replace(rank, ledger=ledgers[key]), c.mesh, c.schedule, c.zero, live)
            again += [priced] if priced is not None else []
        self.notes |= dict.fromkeys(live.notes())
        self.notes[f"the search went by estimates; the operators of its best {len(again)} candidates were then measured"] = None
        return sorted(again, key=lambda c: c.step_time_s) or found

    def _exactly(self, found: list[Candidate]) -> list[Candidate]:
        """The candidates with the winner made for its own split of the batch, its tensor axis solved for its own micro-batch."""
        while found:
            c = found[0]
            own = (c.mesh.dp, c.rank.micro_batches)
            solved = c.rank.tensor is None or self._tensor_key(c.mesh, c.rank.moments.body) in self._tensor
            if c.rank.made_for == own and solved:
                return found
            self.best_s = math.inf
            rest = [x for x in found if (x.mesh, x.rank.micro_batches) != (c.mesh, c.rank.micro_batches)]
            again = self._of_rank(self.rank(c.mesh, own[1], exactly=True), c.mesh)
            found = sorted([*again, *rest], key=lambda x: x.step_time_s)
        raise Infeasible(why_not(self))


def _fits(assignment: Assignment, body: Program) -> bool:
    """Whether every strategy of an assignment is one of this program's own, so that it is sound here too."""
    for op in body.ops:
        s = assignment.ops[op.name]
        groups = frozenset({1, *(x.groups for x in (*s.inputs, *s.outputs) if x.is_shard)})
        if s not in strategies_of(view_of(body, op, assignment.n, groups)):
            return False
    leaves = {x.value for x in body.leaves}
    return leaves == set(assignment.leaves)


def _chosen(solution: AxisSolution, problem: AxisProblem, key: str) -> Strategy:
    member = problem.choices.groups[key].members[0]
    ops, leaves = solution.assignment.ops, solution.assignment.leaves
    return ops[member] if member in ops else Strategy(inputs=(), outputs=(leaves[member],))


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


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
    measure: str = "roofline",
) -> Plan:
    """Search and return the best plan found. measure: 'roofline' for times estimated from the cluster's description, 'live' for
    times of operators measured on this machine. Raises Infeasible, ValueError for an unknown optimizer or way to measure, and
    PlanError where this machine is not one of the cluster's."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
    check_measure(measure, cluster)
    return Search(
        program=program,
        gpus=gpus,
        cluster=cluster,
        memory_limit_bytes=memory_limit_bytes or usable_bytes(cluster.gpu),
        optimizer=optimizer,
        precision=precision,
        pins=pins or Pins(),
        time_limit_s=time_limit_s,
        measure=measure,
    ).best()
