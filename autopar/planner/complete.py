"""A plan for a program -> the same plan for what the model computes now.

What a step keeps stays as it was decided: the mesh, how every parameter and buffer lies on each axis, its stage, micro-batches, schedule,
ZeRO, what is recomputed. An operator that was there before keeps its strategy, where its rule still has it; the strategies of the others
are solved on each axis with everything else held, and the stages are cut between the parameters as they rest. The completed plan is
checked against the rules as every plan is, when it is lowered.

A batch that does not divide among the data-parallel ranks is whole on each of them: they all do the same work then. One that does not
divide into the plan's micro-batches has as many as keep them no larger than they were planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from autopar.axes import AXES, BATCH
from autopar.capture import program_hash
from autopar.catalog import needs_transition, strategies_of
from autopar.errors import Infeasible, PlanError
from autopar.ir import Buffer, I, Layout, Op, Param, Program, Strategy, refs
from autopar.measure import Pricer
from autopar.planner.axis import AxisProblem, solve_axis
from autopar.planner.choices import Choices, members_of, with_layouts
from autopar.planner.lower import OnAxes, axis_plan, on_axes, on_data_axis, on_inner_axes, split
from autopar.planner.match import matched
from autopar.planner.moments import NotSplittable, by_samples, derived_from_inputs
from autopar.planner.names import placed
from autopar.planner.plan import BlockMode, Plan
from autopar.planner.problems import axis_problem, given_on
from autopar.planner.shard import Assignment, shard, view_of
from autopar.planner.solver import OutOfBudget
from autopar.planner.space import Mesh
from autopar.planner.stages import cut_stages, legal_cuts, recomputable, used_on
from autopar.run.dtypes import itemsize_named
from autopar.run.manifest import BufferSpec, Manifest, ParamSpec
from cost_models.cluster import Cluster

__all__ = ["complete"]


def complete(plan: Plan, old: Program, new: Program, manifest: Manifest, cluster: Cluster) -> Plan:
    """The plan of `old` for `new`, another program of the same model. manifest: how its parameters and buffers lie. cluster: prices what is
    solved anew. PlanError if the program cannot run with what stays."""
    return _Completion(plan, old, new, manifest, cluster).run()


@dataclass(frozen=True, slots=True)
class _Rest:
    """How the tensors of the model lie, by their names in it."""

    layouts: Mapping[str, Mapping[str, str]]
    stages: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(manifest: Manifest) -> _Rest:
        kept: list[ParamSpec | BufferSpec] = [*manifest.params, *(b for b in manifest.buffers if not b.constant)]
        return _Rest({x.name: x.layouts for x in kept}, {x.name: x.stages for x in kept})

    def on(self, program: Program, axis: str) -> dict[str, Layout]:
        """Value -> its layout on an axis, of all parameters and buffers that rest."""
        return {value: Layout.parse(self.layouts[fqn].get(axis, "I")) for fqn, value in _named(program).items()}


def _named(program: Program) -> dict[str, str]:
    """The name in the model of each parameter and buffer -> its value."""
    leaves: tuple[Param | Buffer, ...] = (*program.params, *(b for b in program.buffers if not b.region))
    return {x.fqn: x.value for x in leaves if x.fqn is not None}


class _Completion:
    def __init__(self, plan: Plan, old: Program, new: Program, manifest: Manifest, cluster: Cluster) -> None:
        self.plan, self.new, self.cluster = plan, new, cluster
        self.rest = _Rest.of(manifest)
        if unknown := [fqn for fqn in _named(new) if fqn not in self.rest.layouts]:
            raise PlanError(f"{unknown[0]} was not in the model when the plan was made")
        written = {x.name for x in manifest.buffers if x.parameter}
        if more := [b.fqn for b in new.buffers if b.parameter and b.fqn not in written]:
            raise PlanError(
                f"this call writes to the frozen parameter {more[0]}, and the one that was planned does not: compile the model with a call "
                f"that does (in training mode)"
            )
        self.old, self.before = old, on_axes(old, plan)

    def run(self) -> Plan:
        over, count = self.over_axes()
        cuts = self.cuts(over.rank)
        stages = [
            msgspec.structs.replace(stage, first_op=over.rank.ops[start].name)
            for stage, start in zip(self.plan.stages, (0, *cuts), strict=True)
        ]
        recompute, modes = self.recomputed(over.rank)
        self.check_stages(over, cuts)
        axes = {} if over.data is None else {over.data.axis: axis_plan(self.new, over.data)}
        for body, x in zip(on_inner_axes(over.moments.body, over.inner), over.inner, strict=False):
            made = axis_plan(body, x)
            axes[x.axis] = msgspec.structs.replace(self.plan.axes[x.axis], ops=made.ops, leaves=made.leaves)
        found = msgspec.structs.replace(
            self.plan, program_hash=program_hash(self.new), global_batch=self.new.batch_size or 0, axes=axes, cuts=list(cuts),
            stages=stages, recompute=recompute, modes=modes, micro_batches=count,
        )  # fmt: skip
        return placed(self.new, found)

    def recomputed(self, rank: Program) -> tuple[list[tuple[int, int, int]], list[BlockMode]]:
        """What runs again: of the same block instances the same operators, or all of them where a block has others now."""
        blocks = self.before.rank.blocks
        again = {blocks[b].prefixes[k]: (self.plan.modes[mode], len(blocks[b].spans[k])) for b, k, mode in self.plan.recompute}
        modes: list[BlockMode] = []
        found = []
        for b, block in enumerate(rank.blocks):
            for k, span in enumerate(block.spans):
                if block.prefixes[k] in again and recomputable(rank, span):
                    mode, length = again[block.prefixes[k]]
                    whole = BlockMode(name="full", block=b, spans=[(0, len(span))])
                    mode = msgspec.structs.replace(mode, block=b) if length == len(span) else whole
                    modes += [mode] if mode not in modes else []
                    found.append((b, k, modes.index(mode)))
        return found, modes

    # ------------------------------------------------------------------------------------------------------- the axes
    def over_axes(self) -> tuple[OnAxes, int]:
        """The program over the axes, and into how many micro-batches it is split."""
        data, count = self.data_axis(), self.count()
        try:
            moments = split(on_data_axis(self.new, data), count)
        except PlanError:
            if data is None:
                raise
            if self.is_undivided():
                count = 1
            else:
                data = self.by_samples()
            moments = split(on_data_axis(self.new, data), count)
        rank, inner = moments.body, list[Assignment]()
        for before, old in zip(self.before.inner, on_inner_axes(self.before.moments.body, self.before.inner), strict=False):
            inner.append(self.assigned(before.axis, old, rank, before))
            rank = shard(rank, inner[-1])
        return OnAxes(data=data, moments=moments, inner=tuple(inner), rank=rank), count

    def data_axis(self) -> Assignment | None:
        if self.before.data is None:
            return None
        return self.undivided() if self.is_undivided() else self.assigned(BATCH, self.old, self.new, self.before.data)

    def is_undivided(self) -> bool:
        """Whether the samples do not divide among the data-parallel ranks."""
        return bool((self.new.batch_size or 0) % self.plan.mesh[BATCH])

    def undivided(self) -> Assignment:
        """Every operator does the same work on every rank."""
        n = self.plan.mesh[BATCH]
        ops = dict[str, Strategy]()
        for op in self.new.ops:
            same = (s for s in strategies_of(view_of(self.new, op, n, frozenset({1}))) if {*s.inputs, *s.outputs} <= {I})
            if (found := next(same, None)) is None:
                raise PlanError(f"{op.target} ({op.name}) cannot do the same work on every rank")
            ops[op.name] = found
        leaves = {x.value: I for x in self.new.leaves} | self.rest.on(self.new, BATCH)
        return Assignment(axis=BATCH, n=n, ops=ops, leaves=leaves)

    def count(self) -> int:
        """Into how many micro-batches a rank's samples are split: as planned; or, where they do not divide so, or are all of the batch, as
        few as have no more samples than were planned."""
        ranks, planned = self.plan.mesh[BATCH], self.plan.micro_batches
        samples = (self.new.batch_size or 0) // (1 if self.is_undivided() else ranks)
        most = (self.old.batch_size or 0) // (ranks * planned)
        if not samples or not most or (samples % planned == 0 and (samples // planned <= most or not self.is_undivided())):
            return planned
        return next(count for count in range(1, samples + 1) if samples % count == 0 and samples // count <= most)

    def by_samples(self) -> Assignment:
        """Every operator on the rank's samples as it would run on a micro-batch, which needs no exchange."""
        n = self.plan.mesh[BATCH]
        try:
            wanted = by_samples(self.new, n)
        except NotSplittable as e:
            raise PlanError(f"the plan splits the step into {self.plan.micro_batches} micro-batches, but {e}") from e
        problem = self.problem(BATCH, self.new, n, self.rest.on(self.new, BATCH))
        return _solved(problem, (with_layouts(problem.choices, wanted), problem.choices))

    def problem(self, axis: str, program: Program, n: int, rest: Mapping[str, Layout]) -> AxisProblem:
        allowed = AXES[axis].leaves
        leaves: dict[str, tuple[Layout, ...]] = {b.value: allowed for b in program.buffers} if allowed is not None else {}
        leaves |= {v: (x,) for v, x in (given_on(program, axis, n) | dict(rest)).items()}
        mesh = Mesh(**{BATCH: n}).sizes() if axis == BATCH else self.plan.mesh
        reduced = itemsize_named(self.plan.reduce_dtype)
        found = axis_problem(program, axis, n, Pricer(self.cluster, mesh), self.plan.optimizer, leaves, reduced_itemsize=reduced)
        return dataclasses.replace(found, sequence_parallel=self.plan.pins.get("sequence_parallel")) if AXES[axis].forms else found

    def assigned(self, axis: str, old: Program, new: Program, before: Assignment) -> Assignment:
        """Each operator as before, where it can be; if not all can, the rest are solved."""
        same = matched(old, new)
        rest = self.rest.on(new, axis)
        kept: dict[str, Strategy] = {}
        for op in new.ops:
            stated = before.ops.get(same.get(op.name, ""))
            own = _own(new, op, stated, before.n) if stated is not None else None
            if own is not None:
                kept[op.name] = own
        leaves = {x.value: I for x in new.leaves} | rest | given_on(new, axis, before.n)
        whole = Assignment(axis=axis, n=before.n, ops=kept, leaves=leaves)
        if _is_complete(new, whole):
            return whole
        asked = self.problem(axis, new, before.n, rest)
        held = _held(asked.choices, kept)
        loose = dataclasses.replace(asked, sequence_parallel=None)
        try:
            return _solved(asked, (held,))
        except PlanError:
            return _solved(loose, (held, asked.choices))

    # -------------------------------------------------------------------------------------------------------- the cuts
    def cuts(self, rank: Program) -> tuple[int, ...]:
        """Where the stages begin: no operator before the stage of what it reads, or after; there as before, if that operator is still
        the same, else where the least is sent."""
        if len(self.plan.stages) == 1:
            return ()
        crossing = legal_cuts(rank).crossing
        same = matched(self.before.rank, rank)
        began = [stage.first_op for stage in self.plan.stages]
        bounds = self.bounds(rank)
        found = [0]
        for s in range(1, len(began)):
            low, high = bounds[s]
            legal = [p for p in crossing if max(low, found[-1] + 1) <= p <= high]
            if not legal:
                begins = rank.ops[min(high, len(rank.ops) - 1)].name
                raise PlanError(
                    f"stage {s} cannot begin anywhere between the last operator that needs what rests before it and {begins}: what crosses "
                    f"a cut must be differentiable"
                )
            sent = {p: sum(rank.types[v].nbytes for v in crossing[p]) for p in legal}
            found.append(min(legal, key=lambda p: (same.get(rank.ops[p].name) != began[s], sent[p], -p)))
        return tuple(found[1:])

    def bounds(self, rank: Program) -> dict[int, tuple[int, int]]:
        """Stage -> the first and the last operator that it may begin with. PlanError if an operator needs what rests on an earlier stage
        than what an operator before it needs."""
        count = len(self.plan.stages)
        names = {value: fqn for fqn, value in _named(rank).items()}
        derived = derived_from_inputs(rank)
        carried: dict[str, frozenset[str]] = {}
        first, last = [len(rank.ops)] * (count + 1), [0] * (count + 1)
        reached = (0, "")  # the latest stage that anything so far needs, and what of it
        for k, op in enumerate(rank.ops):
            reads = frozenset(r for r in refs(op) if r in names).union(*(carried.get(r, ()) for r in refs(op)))
            outputs = [o for o in op.outputs if o is not None]
            if outputs and all(o in derived for o in outputs):  # it runs wherever it is needed
                carried |= dict.fromkeys(outputs, reads)
                continue
            for name in sorted(names[v] for v in reads):
                stages = self.rest.stages[name]
                if stages[-1] < reached[0]:
                    raise PlanError(
                        f"{op.target} ({op.name}) needs {name}, which rests on stage {stages[-1]}, after {reached[1]}, which rests on "
                        f"stage {reached[0]}, was used"
                    )
                reached = max(reached, (stages[0], name))
                for s in range(1, count):
                    if stages[-1] < s:
                        last[s] = max(last[s], k + 1)
                    if stages[0] >= s:
                        first[s] = min(first[s], k)
        return {s: (last[s], first[s]) for s in range(1, count)}

    def check_stages(self, over: OnAxes, cuts: tuple[int, ...]) -> None:
        """Everything is used where it rests."""
        try:
            used = used_on(cut_stages(over.moments, over.rank, cuts, {}))
        except Infeasible as e:
            raise PlanError(f"the plan cuts where {e}") from e
        shared = {p.value for p in self.new.params if p.trainable}
        for fqn, value in _named(self.new).items():
            here, needed = self.rest.stages[fqn], used.get(value, ())
            if not set(needed) <= set(here):
                raise PlanError(f"{fqn} rests on stages {list(here)}, and is needed on stages {list(needed)}")
            if not needed and len(here) > 1 and value in shared:
                raise PlanError(f"{fqn} is shared by the stages {list(here)}, and is not used at all now")


def _own(program: Program, op: Op, stated: Strategy, n: int) -> Strategy | None:
    """The rule's own strategy for the same layouts, whose code may be another (batch norm needs no exchange in evaluation)."""
    groups = frozenset({1, *(x.groups for x in (*stated.inputs, *stated.outputs) if x.is_shard)})
    alike = [s for s in strategies_of(view_of(program, op, n, groups)) if (s.inputs, s.outputs) == (stated.inputs, stated.outputs)]
    return next((s for s in alike if s == stated), alike[0] if alike else None)


def _is_complete(program: Program, found: Assignment) -> bool:
    """Whether every operator has a strategy, those of a block the same, and buffers that change lie as their readers take them."""
    member_of = members_of(program)
    if any(op.name not in found.ops or found.ops[op.name] != found.ops.get(member_of[op.name]) for op in program.ops):
        return False
    changed = {b.value for b in program.buffers if b.mutated}
    reads = ((r, want) for op in program.ops if changed for r, want in zip(refs(op), found.ops[op.name].inputs, strict=True))
    return not any(r in changed and needs_transition(found.leaves[r], want, program.types[r]) for r, want in reads)


def _held(found: Choices, kept: Mapping[str, Strategy]) -> Choices:
    """The choices whose operators do as before, wherever one of their strategies is one of those."""
    groups = dict(found.groups)
    for key, group in found.groups.items():
        wanted = {kept[name] for name in group.members if name in kept}
        if group.op is not None and (exact := tuple(s for s in group.strategies if s in wanted)):
            groups[key] = dataclasses.replace(group, strategies=exact)
    return with_layouts(dataclasses.replace(found, groups=groups), kept)


def _solved(problem: AxisProblem, tried: tuple[Choices, ...]) -> Assignment:
    """The best assignment of the first of these choices that have one."""
    for choices in tried:
        try:
            return solve_axis(dataclasses.replace(problem, choices=choices)).assignment
        except (Infeasible, OutOfBudget) as e:
            why = e
    raise PlanError(f"its operators have no strategies on {problem.axis} of {problem.n} ranks with the parameters as they lie ({why})")
