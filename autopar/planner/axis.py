"""The integer program of one mesh axis: a strategy for every operator, a layout for every leaf, transitions between.

    minimise   sum_{g,s} cost(g,s) x[g,s]  +  sum_{v,a,b} change(v,a,b) z[v,a,b]  +  late
    one        sum_s x[g,s] = 1                              for every group g                                   add_groups
    made       sum_b w[v,r,a,b] = sum_{s makes v as a} x     for every value v, reader r, layout a               _add_edge
    read       sum_a w[v,r,a,b] = sum_{s reads v as b} x     for every value v, reader r, layout b               _add_edge
    once       z[v,a,b] >= w[v,r,a,b]                        for every value v, reader r, layouts a, b           _add_edge
    launched   late >= launches - the seconds of operators and of changes                                       add_host

x is binary; w and z are continuous, in [0, 1], and integral wherever x is: rows and columns of w sum to the operators' own variables, the
tight linearisation of their product. A value is brought into a layout once, however many operators read it so: the readers share z. (With
one reader, w is z.) cost is seconds of forward and backward, plus `memory_price` (seconds for each byte) times the bytes that the choice
keeps. late is by how much the host, which launches every operator and every change of layout, outlasts the device: where kernels are short,
fewer operators are faster than shorter ones. What a training software gathers again in backward, and what its products hide
(Recipe.regathers, beside_products), is in the price of a whole plan alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from autopar.catalog import needs_transition, transition
from autopar.catalog.attention import BY_ROWS, of_last_rows
from autopar.ir import Kind, L, Layout, Strategy, TensorType
from autopar.measure import Pricer, count
from autopar.measure.costs import dtype_of
from autopar.planner.choices import Choices, Edge, Group, Source
from autopar.planner.shard import Assignment
from autopar.planner.solver import INFINITY, Linear, Outcome, OutOfBudget, Repeated, Starts

__all__ = [
    "AxisModel", "AxisProblem", "AxisSolution", "AxisSolver", "can_change", "changes_of", "exchange_s", "local_bytes", "objective_of",
    "solve_axis", "stated",
]  # fmt: skip

IN_PLACE_PREFERRED = 1.1  # a parameter is rather used as it rests than changed at every use, where the price is the same
Var: TypeAlias = int | float  # a column, or the constant 1.0 where there is no choice

LATE = 0.98  # of a second by which the host outlasts the device, so that of equal launches the faster kernels are taken
WORK_FIRST = 1000.0  # how many times its time without latencies an operator costs under `work_first`


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisProblem:
    """What to decide on axis `axis` of n ranks. memory_price_s_per_byte: of activations kept for backward; state_price_s_per_byte: of
    each byte of a parameter at rest with its gradient and optimizer states; rest_price_s_per_byte: of other leaves (buffers);
    sync_price_s_per_byte: of a parameter's byte, what bringing the gradient together costs; wider: how many times more bytes those have
    than the parameter as it is used, where that is cast; sent: the same of the gradient as it is sent, where that is another dtype than
    it rests in. fixed: values that may not change their layout after they are made (mutated buffers). sync_params: price the reduction of
    gradients of parameters that are used as R (on a data axis it is a cost that every plan has). work_first: split as much work as can be
    split, and only then save communication: what a data axis is for, and what a pinned axis asks for on a model so small that leaving it
    idle would be faster. sequence_parallel: False: no activation is cut, what is sharded comes from sharded parameters; True: none is
    made whole for the same work, sums of terms are scattered and gathered where they are used."""

    axis: str
    n: int
    choices: Choices
    pricer: Pricer
    params: frozenset[str]
    wider: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    sync_params: bool = True
    work_first: bool = False
    sequence_parallel: bool | None = None
    memory_price_s_per_byte: float = 0.0
    state_price_s_per_byte: float = 0.0
    rest_price_s_per_byte: float = 0.0
    sync_price_s_per_byte: float = 0.0

    @property
    def launched(self) -> bool:
        """Whether a host launches what a device runs, and its time counts."""
        return not (self.work_first or self.pricer.cluster.gpu.host)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSolution:
    assignment: Assignment
    outcome: Outcome


def solve_axis(
    problem: AxisProblem, *, gap: float = 1e-3, solver: AxisSolver | None = None, like: Iterable[Assignment] = ()
) -> AxisSolution:  # fmt: skip
    """The best assignment, with its objective, bound and gap. Infeasible is raised only where leaves are restricted to layouts that no
    operator can read, or strategies to some that do not meet; else all-I is always a choice. Where the budget ends before the solver has
    a solution, it is the answer, with the bound so far. solver: of the problem, where there is one that has solved nothing yet. like:
    assignments that may be the best; one that is, to the gap, is the answer."""
    solver = solver or AxisSolver(problem)
    near = solver.best_of(like)
    if near is not None and near.outcome.gap <= gap / 5:
        return near
    try:
        found = solver.solve(gap=gap)
        if near is None or found.outcome.objective <= near.outcome.objective:
            return found
        bound = max(found.outcome.bound, near.outcome.bound)
        better = dataclasses.replace(near.outcome, bound=bound, gap=max(0.0, 1.0 - bound / near.outcome.objective))
        return AxisSolution(assignment=near.assignment, outcome=better)
    except OutOfBudget as e:
        chosen = {g: group.strategies[0] for g, group in problem.choices.groups.items()}
        objective = objective_of(problem, chosen.__getitem__)
        if objective == INFINITY:
            raise
        bound = max(0.0, e.bound)
        outcome = Outcome(
            objective=objective, bound=bound, gap=(objective - bound) / objective if objective else 0.0, seconds=0.0,
            solver="none", variables=len(solver.linear.names), constraints=len(solver.linear.rows), status="out of budget",
        )  # fmt: skip
        return AxisSolution(assignment=_assigned(problem, chosen), outcome=outcome)


class AxisSolver:
    """The program of an axis, which is built once and solved as often as is asked, each time with other strategies given. like: of another
    problem, whose columns and rows are taken if the two differ in prices of bytes alone. starts: of other programs."""

    def __init__(self, problem: AxisProblem, like: AxisModel | None = None, starts: Starts | None = None) -> None:
        self.problem = problem
        same = like is not None and without_prices(like.given) == without_prices(problem)
        self.model = AxisModel(problem, like if same else None)
        self._repeated = Repeated(self.linear, starts)

    @property
    def linear(self) -> Linear:
        return self.model.linear

    def solve(
        self, *, gap: float = 1e-3, given: tuple[str, Strategy] | None = None, never: Mapping[str, Set[Strategy]] | None = None
    ) -> AxisSolution:
        """given: a group and the strategy that it has; never: group -> strategies that it has not. Infeasible, OutOfBudget."""
        held: dict[int, float] = {}
        for key, without in (never or {}).items():
            held |= {x: 0.0 for x, s in self._columns(key) if s in without}
        if given is not None:
            held |= {x: float(s == given[1]) for x, s in self._columns(given[0])}
        solution = self._repeated.solve(held, gap=gap)
        chosen = {key: self.model.chosen(key, solution.values) for key in self.problem.choices.groups}
        return AxisSolution(assignment=_assigned(self.problem, chosen), outcome=solution.outcome)

    def best_of(self, assignments: Iterable[Assignment]) -> AxisSolution | None:
        """The best of these, with a bound from the program without the demand for whole numbers; None if none is one of the problem's."""
        start, best = time.perf_counter(), None
        for assignment in assignments:
            chosen = stated(self.problem, assignment)
            if all(chosen(key) in group.strategies for key, group in self.problem.choices.groups.items()):
                objective = objective_of(self.problem, chosen)
                if objective < (INFINITY if best is None else best[0]):
                    best = objective, assignment
        least = None if best is None else self._repeated.least()
        if best is None or least is None:
            return None
        objective, assignment = best
        outcome = Outcome(
            objective=objective, bound=min(least, objective), gap=max(0.0, (objective - least) / objective) if objective else 0.0,
            seconds=time.perf_counter() - start, solver="HiGHS", variables=len(self.linear.names), constraints=len(self.linear.rows),
        )  # fmt: skip
        return AxisSolution(assignment=assignment, outcome=outcome)

    def _columns(self, key: str) -> Iterator[tuple[int, Strategy]]:
        """Those that stand for the strategies of a group, if it has several."""
        for x, s in zip(self.model.x[key], self.problem.choices.groups[key].strategies, strict=True):
            if isinstance(x, int):
                yield x, s


def without_prices(problem: AxisProblem) -> AxisProblem:
    """The problem in which bytes cost nothing."""
    return dataclasses.replace(
        problem, memory_price_s_per_byte=0.0, state_price_s_per_byte=0.0, rest_price_s_per_byte=0.0, sync_price_s_per_byte=0.0
    )


def _assigned(problem: AxisProblem, chosen: Mapping[str, Strategy]) -> Assignment:
    """What is chosen for groups, for each of their members."""
    ops: dict[str, Strategy] = {}
    leaves: dict[str, Layout] = {}
    for key, group in problem.choices.groups.items():
        for member in group.members:
            if group.op is None:
                leaves[member] = chosen[key].outputs[0]
            else:
                ops[member] = chosen[key]
    return Assignment(axis=problem.axis, n=problem.n, ops=ops, leaves=leaves)


def group_cost(problem: AxisProblem, group: Group, s: Strategy) -> float:
    """Seconds of all members under this strategy, with the priced bytes."""
    return sum(_costs(problem, group, s))


def _costs(problem: AxisProblem, group: Group, s: Strategy) -> tuple[float, float]:
    """Seconds of the device, and what else the strategy costs: priced bytes, and what parameters take once a step."""
    return _priced(problem, group, s, _work(problem, group, s))


def _priced(problem: AxisProblem, group: Group, s: Strategy, work: tuple[float, int]) -> tuple[float, float]:
    """The costs of a strategy of this work."""
    if group.op is None:
        return 0.0, _leaf_cost(problem, group, s)
    seconds, saved = work
    return seconds, group.times * problem.memory_price_s_per_byte * saved


def _work(problem: AxisProblem, group: Group, s: Strategy) -> tuple[float, int]:
    """Seconds of the device, of all members, and bytes that one of them keeps for backward: what no price of bytes changes."""
    if group.op is None:
        return 0.0, 0
    counts = group.counts or count(group.op, group.ins, group.outs)
    n = problem.n
    local_in = [local_bytes(t, x, n) for t, x in zip(group.ins, s.inputs, strict=True)]
    local_out = [local_bytes(t, x, n) for t, x in zip(group.outs, s.outputs, strict=True)]
    parts: float = n if s.splits_work else 1
    rows_alone = counts.op_class == "gather" and problem.pricer.cluster.gpu.host  # are read, as many as are written
    moved = problem.pricer.traffic_of(counts, local_out if rows_alone else local_in, local_out, parts)
    saved_other = int(counts.saved_other_bytes // parts)
    if s.local == BY_ROWS:
        counts, parts = dataclasses.replace(counts, causal_keys=0), n / of_last_rows(n)
    forward, backward = problem.pricer.counted_s(counts, dtype_of(group.outs, group.ins), parts=parts, traffic=moved)
    if problem.work_first:
        gpu = problem.pricer.cluster.gpu
        work = (counts.flops + counts.backward_flops) / parts / gpu.peak_flops_per_s(dtype_of(group.outs, group.ins))
        forward, backward = WORK_FIRST * (work + (moved.forward + moved.backward) / gpu.memory_bandwidth_bytes_per_s), 0.0
        forward = 0.0 if counts.op_class == "view" else forward
    if not any(t.grad for t in group.outs):
        backward = 0.0
    exchange = exchange_s(problem, group, s)
    forward, backward = forward + exchange[0], backward + exchange[1]
    saved = sum(local_in[k] for k in counts.saved_inputs) + sum(local_out[k] for k in counts.saved_outputs)
    return group.times * (forward + backward), saved + saved_other


def exchange_s(problem: AxisProblem, group: Group, s: Strategy) -> tuple[float, float]:
    """Seconds of the collectives inside of one member's local code, forward and backward."""
    if not s.collective:
        return 0.0, 0.0
    forward, backward = problem.pricer.exchanges_s(f"autopar.L.{s.local}", group.ins, problem.axis)
    return forward, backward if any(t.grad for t in group.outs) else 0.0


def _leaf_cost(problem: AxisProblem, group: Group, s: Strategy) -> float:
    layout, t = s.outputs[0], group.outs[0]
    if group.key not in problem.params:
        return problem.rest_price_s_per_byte * local_bytes(t, layout, problem.n) * group.times
    wider = problem.wider.get(group.key, 1.0)
    resting = local_bytes(t, layout, problem.n) * wider * group.times
    sent = problem.sent.get(group.key, wider)
    cost = problem.state_price_s_per_byte * resting * (WORK_FIRST if problem.work_first else 1.0)
    if sent != wider:
        cost += problem.sync_price_s_per_byte * resting * (sent / wider - 1)
    if layout.kind is Kind.REPLICATE and t.grad and problem.sync_params:
        cost += problem.pricer.bucketed_s("all_reduce", t.nbytes * sent * group.times, problem.axis)
    return cost


def can_change(have: Layout, want: Layout, t: TensorType, n: int) -> bool:
    """Whether a change of layout that takes a transition can be made."""
    return L not in (have, want) and want.divides(t.shape, n) and have.divides(t.shape, n)


def change_cost(problem: AxisProblem, have: Layout, want: Layout, t: TensorType, times: int) -> float | None:
    """Seconds of a change of layout, forward and backward; None if it cannot be made."""
    if not needs_transition(have, want, t):
        return 0.0
    if not can_change(have, want, t, problem.n):
        return None
    change = transition(have, want)
    whole = t.nbytes
    seconds = problem.pricer.collective_s(change.forward, whole, problem.axis)
    if t.grad:
        seconds += problem.pricer.collective_s(change.backward, whole, problem.axis)
    moves = change.function not in ("copy_to", "own", "keep_one")
    touched = 2 * t.nbytes / problem.pricer.cluster.gpu.memory_bandwidth_bytes_per_s if moves else 0.0
    return times * (seconds + touched + 1e-9)


def group_host(problem: AxisProblem, group: Group) -> float:
    """Seconds that the host needs to launch all members, forward and backward, whatever the strategy."""
    if group.op is None or not problem.launched:
        return 0.0
    return group.times * sum(problem.pricer.launches_s(group.op, group.ins, group.outs))


def change_host(problem: AxisProblem, have: Layout, want: Layout, t: TensorType, times: int) -> float:
    """Seconds that the host needs for a change of layout, forward and backward."""
    if not problem.launched or not needs_transition(have, want, t):
        return 0.0
    ahead_s, back_s = problem.pricer.host_s(transition(have, want), problem.axis)
    return times * (ahead_s + (back_s if t.grad else 0.0))


class _Change(NamedTuple):
    """A change of layout: microseconds of it, and by how much the device's time is more than the host's."""

    cost: float
    ahead: float


class AxisModel:
    """The columns and rows of a problem. work: of each group, that of its strategies."""

    def __init__(self, problem: AxisProblem, like: AxisModel | None = None) -> None:
        """like: the model of the problem at other prices of bytes."""
        self.given = problem
        self.linear = Linear(name=f"axis {problem.axis}")
        self.x: dict[str, list[Var]] = {}
        self.ahead: list[tuple[Var, float]] = []  # the device's time less the host's
        self.changes: dict[tuple[object, ...], dict[tuple[Layout, Layout], _Change | None]] = {}  # by all but the layouts
        self.work: dict[str, list[tuple[float, int]]] = {} if like is None else like.work
        self.add_groups()
        if like is None:
            self.add_values()
            self.add_host()
        else:  # whose values and host cost the same
            costs = [*self.linear.costs, *like.linear.costs[len(self.linear.costs) :]]
            self.linear, self.ahead = dataclasses.replace(like.linear, constant=self.linear.constant, costs=costs), like.ahead

    def add_groups(self) -> None:
        alike: dict[tuple[object, ...], dict[Strategy, tuple[float, int]]] = {}  # by all that work depends on
        for index, (key, group) in enumerate(self.given.choices.groups.items()):
            if key not in self.work:
                known = alike.setdefault((id(group.counts), group.ins, group.outs, group.times), {}) if group.counts else {}
                for s in group.strategies:
                    if s not in known:
                        known[s] = _work(self.given, group, s)
                self.work[key] = [known[s] for s in group.strategies]
            pairs = [_priced(self.given, group, s, work) for s, work in zip(group.strategies, self.work[key], strict=True)]
            device, costs = [seconds * 1e6 for seconds, _ in pairs], [sum(pair) * 1e6 for pair in pairs]  # microseconds
            host = group_host(self.given, group) * 1e6
            if len(costs) == 1:
                self.x[key] = [1.0]
                self.linear.constant += costs[0]
                self.ahead.append((1.0, device[0] - host))
                continue
            xs = [self.linear.column(f"x_{index}_{k}", cost, whole=True) for k, cost in enumerate(costs)]
            self.x[key] = list(xs)
            self.ahead += [*zip(xs, device, strict=True), (1.0, -host)] if group.op is not None else []
            self.linear.row(f"one_{index}", [(x, 1.0) for x in xs], 1.0, 1.0)

    def add_values(self) -> None:
        readers: dict[Source, list[Edge]] = defaultdict(list)
        for e in self.given.choices.edges:
            readers[e.source].append(e)
        for index, source in enumerate(dict.fromkeys([*readers, self.given.choices.loss])):
            self._add_value(index, source, readers[source])

    def _add_value(self, index: int, source: Source, edges: list[Edge]) -> None:
        group = self.given.choices.groups[source.group]
        t = group.outs[source.output]
        makers: dict[Layout, list[Var]] = defaultdict(list)
        for x, s in zip(self.x[source.group], group.strategies, strict=True):
            makers[s.outputs[source.output]].append(x)
        readers: list[dict[Layout, list[Var]]] = []
        for e in edges:
            wants: dict[Layout, list[Var]] = defaultdict(list)
            for x, s in zip(self.x[e.consumer], self.given.choices.groups[e.consumer].strategies, strict=True):
                wants[s.inputs[e.operand]].append(x)
            readers.append(wants)
        if source == self.given.choices.loss:
            readers.append({Layout(Kind.INVARIANT): [1.0]})
        times = max((e.count for e in edges), default=1)
        wanted = {want: k for k, want in enumerate(dict.fromkeys(w for r in readers for w in r))}
        known = self.changes.setdefault((t, times, source.group in self.given.fixed, source.group in self.given.params), {})
        for pair in itertools.product(makers, wanted):
            if pair not in known:
                known[pair] = self._change(source, *pair, t, times)
        changes = [[known[have, want] for want in wanted] for have in makers]
        shared: list[list[int | None]] = [[None] * len(wanted) for _ in makers]
        if len(readers) > 1:
            for i, j in itertools.product(range(len(makers)), range(len(wanted))):
                change = changes[i][j]
                if change is not None and change.cost:
                    shared[i][j] = self._flow(f"z_{index}_{i * len(wanted) + j}", change)
        for j, wants in enumerate(readers):
            self._add_edge(f"{index}_{j}", makers, wants, [wanted[want] for want in wants], changes, shared)

    def _flow(self, name: str, change: _Change) -> int:
        """A variable that pays for a change of layout."""
        flow = self.linear.column(name, change.cost)
        if self.given.launched:
            self.ahead.append((flow, change.ahead))
        return flow

    def add_host(self) -> None:
        """late - sum of ahead >= 0, where a term's variable may be the constant 1."""
        if not self.given.launched:
            return
        weights = {self.linear.column("late", LATE, upper=INFINITY): 1.0}
        constant = 0.0
        for v, c in self.ahead:
            if isinstance(v, float):
                constant += c
            else:
                weights[v] = weights.get(v, 0.0) + c
        self.linear.shared = len(self.linear.rows)
        self.linear.row("launched", [(v, c) for v, c in weights.items() if c], -constant, INFINITY)

    def _change(self, source: Source, have: Layout, want: Layout, t: TensorType, times: int) -> _Change | None:
        if source.group in self.given.fixed and needs_transition(have, want, t):
            return None
        if _forbidden(self.given, source, have, want, t):
            return None
        cost = change_cost(self.given, have, want, t, times)
        if cost is None:
            return None
        cost *= IN_PLACE_PREFERRED if source.group in self.given.params else 1.0
        return _Change(cost * 1e6, (cost - change_host(self.given, have, want, t, times)) * 1e6)

    def _add_edge(
        self,
        name: str,
        makers: Mapping[Layout, list[Var]],
        wants: Mapping[Layout, list[Var]],
        places: Sequence[int],
        changes: Sequence[Sequence[_Change | None]],
        shared: Sequence[Sequence[int | None]],
    ) -> None:
        """One reader: what flows from the layouts that are made to those that it wants is one unit. changes, shared: by the layout that is
        made and the place of the one that is wanted; places: of those that this reader wants."""
        read: list[list[int]] = [[] for _ in wants]
        made: list[list[int]] = [[] for _ in makers]
        for i, (of, pay) in enumerate(zip(changes, shared, strict=True)):
            for j, place in enumerate(places):
                change = of[place]
                if change is None:
                    continue
                label = f"{name}_{i}_{j}"
                pays = pay[place]
                if pays is not None:
                    flow = self.linear.column(f"w_{label}")
                    self.linear.add_row(f"once_{label}", (pays, flow), (1.0, -1.0), 0.0, INFINITY)
                else:
                    flow = self._flow(f"w_{label}", change) if change.cost else self.linear.column(f"w_{label}")
                made[i].append(flow)
                read[j].append(flow)
        for i, (xs, flows) in enumerate(zip(makers.values(), made, strict=True)):
            self._balance(f"made_{name}_{i}", xs, flows)
        for j, (xs, flows) in enumerate(zip(wants.values(), read, strict=True)):
            self._balance(f"read_{name}_{j}", xs, flows)

    def _balance(self, name: str, xs: list[Var], flows: list[int]) -> None:
        """The flows come to as much as the strategies that make them, or read them, of which one without a choice is the constant 1."""
        columns = [x for x in xs if isinstance(x, int)]
        whole = float(len(xs) - len(columns))
        self.linear.add_row(name, [*columns, *flows], [-1.0] * len(columns) + [1.0] * len(flows), whole, whole)

    def chosen(self, key: str, values: Sequence[float]) -> Strategy:
        strategies = self.given.choices.groups[key].strategies
        if len(strategies) == 1:
            return strategies[0]
        taken = [values[x] for x in self.x[key] if isinstance(x, int)]
        return strategies[max(range(len(taken)), key=taken.__getitem__)]


def objective_of(problem: AxisProblem, chosen: Callable[[str], Strategy]) -> float:
    """The objective of given choices, in microseconds, computed without the integer program (for brute force and checks)."""
    groups: Mapping[str, Group] = problem.choices.groups
    costs = [_costs(problem, g, chosen(k)) for k, g in groups.items()]
    total = sum(map(sum, costs))
    device = sum(seconds for seconds, _ in costs)
    host = sum(group_host(problem, g) for g in groups.values())
    for source, have, want, t, times in changes_of(problem, chosen):
        cost = change_cost(problem, have, want, t, times)
        if cost and source.group in problem.params:
            cost *= IN_PLACE_PREFERRED
        if _forbidden(problem, source, have, want, t):
            return float("inf")
        if cost is None or (source.group in problem.fixed and needs_transition(have, want, t)):
            return float("inf")
        total, device = total + cost, device + cost
        host += change_host(problem, have, want, t, times)
    return (total + LATE * max(0.0, host - device)) * 1e6


def stated(problem: AxisProblem, assignment: Assignment) -> Callable[[str], Strategy]:
    """What an assignment has chosen for a group, by its key."""

    def chosen(key: str) -> Strategy:
        member = problem.choices.groups[key].members[0]
        if member in assignment.ops:
            return assignment.ops[member]
        return Strategy(inputs=(), outputs=(assignment.leaves[member],))

    return chosen


def changes_of(
    problem: AxisProblem, chosen: Callable[[str], Strategy]
) -> Iterator[tuple[Source, Layout, Layout, TensorType, int]]:  # fmt: skip
    """Of each value and each layout in which it is read: what it is made as, what it is read as, its type, and how many there are."""
    wanted: dict[Source, dict[Layout, None]] = defaultdict(dict)
    times: dict[Source, int] = defaultdict(lambda: 1)
    for e in problem.choices.edges:
        wanted[e.source][chosen(e.consumer).inputs[e.operand]] = None
        times[e.source] = max(times[e.source], e.count)
    wanted[problem.choices.loss][Layout(Kind.INVARIANT)] = None
    for source, layouts in wanted.items():
        have = chosen(source.group).outputs[source.output]
        t = problem.choices.groups[source.group].outs[source.output]
        for want in layouts:
            yield source, have, want, t, times[source]


def _forbidden(problem: AxisProblem, source: Source, have: Layout, want: Layout, t: TensorType) -> bool:
    """Whether `sequence_parallel` forbids a change of layout of an activation: to cut what is whole or a sum of terms (False); to make
    whole, for the same work on every rank, what could be cut, or to cut channels between the matrices (True); and in both to gather a
    matrix where it is used."""
    if problem.sequence_parallel is None or not t.grad:
        return False
    if source.group in problem.params:
        return len(t.shape) > 1 and have.is_shard and have != want
    if not problem.sequence_parallel:
        return want.is_shard and not have.is_shard
    last = len(t.shape) - 1
    if last < 1 or t.shape[-2] % problem.n:
        return False
    if (have.kind, want.kind) in _SUMMED:
        return True
    # Of two dims (tokens of all sequences, as a matrix product may be written) no more can be asked. Else the sequence is what is cut.
    scattered = have.kind is Kind.PARTIAL and want.is_shard and want.dim == last
    gathered = have.is_shard and not want.is_shard and (have.dim == last or want.kind is Kind.INVARIANT)
    return last > 1 and (scattered or gathered)


_SUMMED = {(Kind.PARTIAL, Kind.INVARIANT), (Kind.PARTIAL, Kind.REPLICATE)}


def local_bytes(t: TensorType, layout: Layout, n: int) -> int:
    """Of a value on one of n ranks."""
    return t.nbytes // n if layout.is_shard else t.nbytes
