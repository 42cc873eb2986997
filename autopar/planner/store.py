"""What was found out about a program: its data axis, its micro-batches, the axes that divide operators, and the priced program of one rank.

Everything is worked out when it is first asked for and kept under everything that it depends on. The program is folded: of many equal
layers three are walked (see `fold`). `whole` is the rank of the program as it is, for the choice that wins.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from autopar.axes import BATCH
from autopar.errors import Infeasible
from autopar.ir import I, Layout, Program, Strategy
from autopar.measure import Live, Pricer
from autopar.planner.axis import AxisModel, AxisProblem, AxisSolution, AxisSolver, objective_of, solve_axis, stated
from autopar.planner.choices import Choices, is_heavy, with_layouts, with_matrices_cut, with_work_split
from autopar.planner.fold import fold, unfold
from autopar.planner.lower import Inner, on_data_axis, on_inner_axes
from autopar.planner.moments import Moments, NotSplittable, by_samples, split_into_moments
from autopar.planner.price import Ledger
from autopar.planner.problems import axis_choices, axis_leaves, axis_problem
from autopar.planner.rank import Rank
from autopar.planner.shard import Assignment, shard
from autopar.planner.solved import Solved, restricted
from autopar.planner.solver import Outcome, Starts
from autopar.planner.space import Form, Mesh
from autopar.planner.stages import legal_cuts
from cost_models.cluster import Cluster
from cost_models.memory import OPTIMIZERS
from cost_models.recipe import AUTOPAR, Recipe

__all__ = ["FASTEST", "Store"]

FASTEST = Form()
Split = tuple[int, int]  # data-parallel ranks, micro-batches
T = TypeVar("T")


@dataclass(kw_only=True)
class Store:
    """reduced_itemsize: of gradients as they are brought together (None: as they rest). folds: whether equal layers are walked once.
    seconds: of the CPU, spent by pass; notes: for the plan; split_notes: if its tensor axis is pinned."""

    program: Program
    cluster: Cluster
    optimizer: str
    reduced_itemsize: int | None = None
    folds: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    split_notes: dict[str, None] = field(default_factory=dict)
    programs: int = 0  # integer programs that were solved
    binaries: int = 0  # the most of one of them
    rows: int = 0
    _folded: Program | None = None
    _pricers: dict[tuple[Mesh, Recipe], Pricer] = field(default_factory=dict)  # they keep what collectives take
    _data: dict[tuple[int, bool], tuple[Program, Assignment | None, tuple[Outcome, ...]] | NotSplittable] = field(default_factory=dict)
    _by_samples: set[Split] = field(default_factory=set)  # splits for which the data axis follows the micro-batches
    _moments: dict[Split, Moments | str] = field(default_factory=dict)
    _like: dict[tuple[int, bool, bool], Split] = field(default_factory=dict)  # the first split of those into micro-batches of one size
    _whole_moments: dict[Split, tuple[Assignment | None, Moments | str]] = field(default_factory=dict)  # of the program as it is
    _rank: dict[tuple[object, ...], Rank | str] = field(default_factory=dict)
    _at: dict[tuple[object, ...], Ledger] = field(default_factory=dict)
    _alike: dict[tuple[object, ...], list[Rank]] = field(default_factory=dict)  # built from one split, by all but the form
    _inner: dict[tuple[object, ...], AxisSolution] = field(default_factory=dict)
    # by an axis and its form, the program's operators, the samples of its batch and the axes that it is laid over already
    _answers: dict[Hashable, list[Solved]] = field(default_factory=dict)  # of other sizes, by what was asked
    _best: dict[tuple[object, ...], tuple[Choices, AxisSolution]] = field(default_factory=dict)  # of a form, whatever it must split
    _starts: Starts = field(default_factory=Starts)
    _models: dict[int, AxisModel] = field(default_factory=dict)  # by the identity of the choices: the first
    _inner_choices: dict[tuple[int, str, int], tuple[Program, Choices]] = field(default_factory=dict)  # by the program's identity

    @property
    def folded(self) -> Program:
        if self._folded is None:
            self._folded = self.timed("fold", lambda: fold(self.program)) if self.folds else self.program
        return self._folded

    def timed(self, name: str, call: Callable[[], T]) -> T:
        start = time.process_time()
        try:
            return call()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start

    def pricer(self, mesh: Mesh, recipe: Recipe = AUTOPAR, live: Live | None = None) -> Pricer:
        if live is not None:
            return Pricer(self.cluster, mesh.sizes(), live, recipe)
        key = (mesh, recipe)
        if key not in self._pricers:
            self._pricers[key] = Pricer(self.cluster, mesh.sizes(), None, recipe)
        return self._pricers[key]

    # ---------------------------------------------------------------------------------------------------- the data axis
    def on_data_axis(self, dp: int, *, samples: bool = False) -> tuple[Program, Assignment | None, tuple[Outcome, ...]]:
        """The program of one data-parallel rank. samples: every operator runs on the rank's samples as it would on a micro-batch,
        without exchange (raises NotSplittable if that is not possible); else it may split other dims, and exchange values."""
        key = (dp, samples)
        if key not in self._data:
            try:
                self._data[key] = self._solve_data(dp, by_samples(self.folded, dp) if samples else {})
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
        program = self.folded
        if dp == 1:
            return program, None, ()
        pricer, leaves = self.pricer(Mesh(**{BATCH: dp})), axis_leaves(program, BATCH, dp)
        problem = self.timed("strategies", lambda: self._problem(program, BATCH, dp, pricer, leaves))
        problem = dataclasses.replace(problem, choices=with_layouts(problem.choices, wanted))
        solution = self._solved(f"{BATCH} axis", problem, 1e-3)
        return self._one_rank(program, solution.assignment), solution.assignment, (solution.outcome,)

    def _problem(
        self, program: Program, axis: str, n: int, pricer: Pricer, leaves: Mapping[str, tuple[Layout, ...]], known: Choices | None = None
    ) -> AxisProblem:
        return axis_problem(program, axis, n, pricer, self.optimizer, leaves, known, self.reduced_itemsize)

    def _one_rank(self, program: Program, data: Assignment) -> Program:
        return self.timed("shard", lambda: on_data_axis(program, data))

    def _solved(self, name: str, problem: AxisProblem, gap: float, body: Program | None = None, asked: Hashable = None) -> AxisSolution:
        """body: of one micro-batch; what was chosen for others where the same was asked is the answer, if nothing is better, and of one of
        as many samples in any case: the two differ in what is made for the whole batch before."""
        alike = self._answers.setdefault(asked, []) if body is not None else []
        for known in alike:
            if body is not None and known.program.batch_size == body.batch_size and (here := restricted(known, body)) is not None:
                return AxisSolution(assignment=here, outcome=known.outcome)
        key = id(problem.choices)  # which the model keeps, so that no others have their identity
        solver = self.timed(name, lambda: AxisSolver(problem, self._models.get(key), self._starts))
        if not problem.work_first and problem.sequence_parallel is None:  # others are asked for at one price alone
            self._models.setdefault(key, solver.model)
        like = (here for known in alike if body is not None and (here := restricted(known, body)) is not None)
        solution = self.timed(name, lambda: solve_axis(problem, gap=gap, solver=solver, like=like))
        if body is not None:
            alike.append(Solved(body, solution.assignment, solution.outcome))
        self.programs += 1
        self.binaries = max(self.binaries, sum(len(g.strategies) for g in problem.choices.groups.values() if len(g.strategies) > 1))
        self.rows = max(self.rows, solution.outcome.constraints)
        return solution

    # ---------------------------------------------------------------------------------------------------- micro-batches
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

    # ------------------------------------------------------------------------------------------------------------ ranks
    def rank(self, mesh: Mesh, count: int, batch: int | None, recipe: Recipe = AUTOPAR, form: Form = FASTEST) -> Rank | str:
        """The priced, folded program of one rank, or why there is none. Splits into micro-batches of one size share it. batch: the
        global one; of another than the program's own only what is priced can be told. form: of the tensor axis."""
        split = self._split_of(mesh, count, batch)
        if isinstance(split, str):
            return split
        ranks = mesh.over("batch")
        size = (batch or 1) // ranks // count
        contended = self.pricer(mesh).contended
        priced_by = (contended, *recipe.of_operators)
        key = (size, ranks > 1, count > 1, mesh.inner, *self._placed(mesh), form, *priced_by)
        if key not in self._rank:
            self._rank[key] = self._build(mesh, split, recipe, form)
        found = self._rank[key]
        if isinstance(found, str):
            return found
        return dataclasses.replace(found, mesh=mesh, micro_batches=count, ledger=self._exchanged(key, found, mesh, recipe))

    def _exchanged(self, key: Hashable, found: Rank, mesh: Mesh, recipe: Recipe) -> Ledger:
        """The rank's prices with those of what the loss brings together over the data axis of this mesh."""
        at = mesh.over("batch"), self.pricer(mesh).per_node(BATCH)
        if not found.ledger.exchanging or at == (found.mesh.over("batch"), self.pricer(found.mesh).per_node(BATCH)):
            return found.ledger
        if (key, at) not in self._at:
            self._at[key, at] = found.ledger.exchanged(self.pricer(mesh, recipe))
        return self._at[key, at]

    def _placed(self, mesh: Mesh) -> tuple[int, ...]:
        """How the axes whose collectives stand in a rank's program lie over nodes."""
        ranks, pricer = mesh.over("batch"), self.pricer(mesh)
        return (*(pricer.per_node(axis) for axis, _ in mesh.inner), ranks if ranks > 1 and self._exchanges else 0)

    @property
    def _exchanges(self) -> bool:
        """Whether the data axis exchanges activations, so that its size counts."""
        return any(b.mutated for b in self.program.buffers)

    def _split_of(self, mesh: Mesh, count: int, batch: int | None) -> Split | str:
        """The (dp, micro-batches) of the program's own batch that stands for this split, or why there is none."""
        own, ranks = self.program.batch_size or 1, mesh.over("batch")
        if (batch or 1) == own:
            return ranks, count
        size = (batch or 1) // ranks // count
        parts = own // size
        dp = parts if count == 1 else min(ranks, 2)
        if parts == 0 or own % size or parts % dp or (count > 1 and parts == dp):
            several = f"{'several ' if count > 1 else ''}micro-batches of {size}"
            return f"micro-batches: the program's batch of {own} does not divide into {several} on {min(ranks, 2)} ranks"
        return dp, parts // dp

    def used_alike(self, mesh: Mesh, count: int, batch: int | None) -> frozenset[str] | None:
        """The parameters that all data-parallel ranks of such a split use for the same work; None if the batch cannot be split so."""
        split = self._split_of(mesh, count, batch)
        if isinstance(split, str):
            return None
        ranks = mesh.over("batch")
        like = self._like.setdefault(((batch or 1) // ranks // count, ranks > 1, count > 1), split)  # as `rank` shares what it finds
        if isinstance(self.moments(*like), str):
            return None
        try:
            return self.alike(self.on_data_axis(split[0], samples=like in self._by_samples)[1])
        except NotSplittable:
            return None

    def alike(self, data: Assignment | None) -> frozenset[str]:
        return frozenset(p.value for p in self.folded.params if data is not None and data.leaves.get(p.value) == I)

    def _build(self, mesh: Mesh, split: Split, recipe: Recipe, form: Form) -> Rank | str:
        moments = self.moments(*split)
        if isinstance(moments, str):
            return moments
        data = self.on_data_axis(split[0], samples=split in self._by_samples)
        inner = self._inner_axes(mesh, moments.body, form)
        if isinstance(inner, str):
            return inner
        return self._assigned(mesh, split, moments, data[1], inner[0], (*data[2], *inner[1]), recipe)

    def _assigned(
        self, mesh: Mesh, split: Split, moments: Moments, data: Assignment | None, inner: Inner, outcomes: tuple[Outcome, ...],
        recipe: Recipe,
    ) -> Rank:  # fmt: skip
        """The priced rank of these assignments; once, since several forms may have one answer."""
        found = self._alike.setdefault((split, mesh.inner, *self._placed(mesh), self.pricer(mesh).contended, *recipe.of_operators), [])
        same = next((rank for rank in found if rank.inner == inner), None)
        if same is None:
            same = self._priced(mesh, split, moments, data, inner, outcomes, recipe)
            found.append(same)
        return same

    def _inner_axes(self, mesh: Mesh, body: Program, form: Form) -> tuple[Inner, tuple[Outcome, ...]] | str:
        """The axes that divide operators, one after the other, or why one cannot."""
        program, found, outcomes = body, list[Assignment](), list[Outcome]()
        for axis, n in mesh.inner:
            own = form.on(axis)
            try:
                solution = self.on_axis(axis, mesh, program, own)
            except Infeasible as e:
                if own.sequence is None:
                    raise
                wanted = f"with the activations between as sequence_parallel={own.sequence} wants them"
                return f"{axis}={n}: not every matrix can be cut {wanted} ({e})"
            found.append(solution.assignment)
            outcomes.append(solution.outcome)
            if len(found) < len(mesh.inner):
                program = shard(program, solution.assignment)
        return tuple(found), tuple(outcomes)

    def _priced(
        self, mesh: Mesh, split: Split, moments: Moments, data: Assignment | None, inner: Inner, outcomes: tuple[Outcome, ...],
        recipe: Recipe,
    ) -> Rank:  # fmt: skip
        program = self.timed("shard", lambda: on_inner_axes(moments.body, inner)[-1])
        ledger = self.timed("price", lambda: Ledger(program, self.pricer(mesh, recipe)))
        return Rank(
            mesh=mesh, moments=moments, program=program, data=data, inner=inner, ledger=ledger, cuts=legal_cuts(program),
            outcomes=outcomes, micro_batches=split[1], made_for=split,
        )  # fmt: skip

    def whole(self, mesh: Mesh, count: int, batch: int | None, recipe: Recipe = AUTOPAR, form: Form = FASTEST) -> Rank | str:
        """The rank of the program as it is: its axes as `rank` has them, unfolded onto every layer. NotAlike if that is not possible."""
        split = self._split_of(mesh, count, batch)
        if isinstance(split, str):
            return split
        moments = self.moments(*split)
        if isinstance(moments, str):
            return moments
        data = self.on_data_axis(split[0], samples=split in self._by_samples)
        solved = self._inner_axes(mesh, moments.body, form)
        if isinstance(solved, str):
            return solved
        inner, outcomes = solved[0], (*data[2], *solved[1])
        if self.folded is self.program:
            return dataclasses.replace(self._priced(mesh, split, moments, data[1], inner, outcomes, recipe), micro_batches=count)
        if split not in self._whole_moments:
            self._whole_moments[split] = self._split_whole(data[1], split[1])
        data_on_all, every = self._whole_moments[split]
        if isinstance(every, str):
            return every
        on_all, all_of = list[Assignment](), every.body
        for folded, assignment in zip(on_inner_axes(moments.body, inner[:-1]), inner, strict=False):
            on_all.append(unfold(assignment, folded, all_of))
            all_of = shard(all_of, on_all[-1]) if len(on_all) < len(inner) else all_of
        like = self._assigned(mesh, split, moments, data[1], inner, outcomes, recipe)
        found = self._priced(mesh, split, every, data_on_all, tuple(on_all), outcomes, recipe)
        return dataclasses.replace(found, micro_batches=count, folded=dataclasses.replace(like, mesh=mesh, micro_batches=count))

    def _split_whole(self, data: Assignment | None, count: int) -> tuple[Assignment | None, Moments | str]:
        """The data axis on every layer, and one micro-batch of what each of its ranks has then."""
        on_all = None if data is None else unfold(data, self.folded, self.program)
        local = self.program if on_all is None else self._one_rank(self.program, on_all)
        try:
            return on_all, self.timed("micro-batches", lambda: split_into_moments(local, count))
        except NotSplittable as e:
            return on_all, f"micro-batches: not split, because {e}"

    # ------------------------------------------------------------------------------------- an axis that divides operators
    def on_axis(self, axis: str, mesh: Mesh, body: Program, form: Form = FASTEST) -> AxisSolution:
        """Such an axis of one micro-batch."""
        names = frozenset(op.name for op in body.ops)
        key = axis, mesh.sizes()[axis], self.pricer(mesh).per_node(axis), form, names, body.batch_size or 0, tuple(body.layouts)
        if key not in self._inner:
            self._inner[key] = self._solve_inner(self.problem(axis, mesh, body, form), form, body)
        return self._inner[key]

    def problem(self, axis: str, mesh: Mesh, body: Program, form: Form) -> AxisProblem:
        """What is to decide on an axis, as it is asked of it."""
        n = mesh.sizes()[axis]
        leaves = axis_leaves(body, axis, n)
        key = (id(body), axis, n)
        if key not in self._inner_choices:  # the body is kept, so that no other one has its identity
            self._inner_choices[key] = body, self.timed("strategies", lambda: axis_choices(body, axis, n, leaves))
        problem = self._problem(body, axis, n, self.pricer(mesh), leaves, self._inner_choices[key][1])
        states = 2 + OPTIMIZERS[self.optimizer]  # of each byte of a parameter: itself, its gradient, the optimizer's
        problem = dataclasses.replace(
            problem, memory_price_s_per_byte=form.byte_s, rest_price_s_per_byte=form.byte_s,
            state_price_s_per_byte=problem.state_price_s_per_byte + states * form.byte_s,
        )  # fmt: skip
        if form.sequence is None:
            return problem
        cut = with_matrices_cut(problem.choices, problem.params)
        return dataclasses.replace(problem, choices=cut, sequence_parallel=form.sequence)

    def _solve_inner(self, problem: AxisProblem, form: Form, body: Program) -> AxisSolution:
        """The best assignment of a form. One that splits, of a model so small that splitting its work costs more than doing it on every
        rank, is the best of those that split every heavy operator that can be."""
        asked = problem.axis, problem.n, problem.pricer.per_node(problem.axis), dataclasses.replace(form, split=False)
        key = (id(problem.choices), *asked)
        if key not in self._best:  # the choices are kept, so that no others have their identity
            self._best[key] = problem.choices, self._solved(f"{problem.axis} axis", problem, 5e-3, body, asked)
        best = self._best[key][1]
        if not form.split:
            return best
        heavy = {key: g for key, g in problem.choices.groups.items() if g.op is not None and is_heavy(g.op.target)}
        chosen = stated(problem, best.assignment)
        idle = [key for key, g in heavy.items() if any(s.splits_work for s in g.strategies) and not chosen(key).splits_work]
        if not idle:
            return best
        work_first = dataclasses.replace(problem, work_first=True)
        most = self._solved(f"{problem.axis} axis", work_first, 0.01, body, (*asked, "most"))
        splitting = stated(problem, most.assignment)
        split = objective_of(problem, splitting)
        if split < objective_of(problem, lambda key: problem.choices.groups[key].strategies[0]):
            return best
        self.split_notes[f"{problem.axis}={problem.n}: splitting this model's work costs more in communication than it saves"] = None
        busy = dataclasses.replace(problem, choices=with_work_split(problem.choices, splitting))
        return self._solved(f"{problem.axis} axis", busy, 5e-3, body, (*asked, "busy"))
