"""The one place that calls a solver: HiGHS, and CBC through PuLP where HiGHS is missing.

A solve ends in one of three ways, which are never confused: solved (to the gap that was asked for), infeasible (proven:
`Infeasible` is raised), or out of budget (with the best solution and the bound so far, or `OutOfBudget` where there is no solution
yet). Budgets count nodes of the search tree, not seconds, and one thread solves: the same program has the same answer on a busy
machine.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from autopar.errors import Infeasible
from autopar.planner.dive import Relaxed, dive, parted

__all__ = ["INFINITY", "Linear", "OutOfBudget", "Outcome", "Repeated", "Solution", "Starts", "solve"]

RELAXED_STEPS = 0.4  # of the simplex method, for each row and column: the programs of one axis need a third of one
WARM_STEPS = 0.02  # the same, from where another program has ended: where that is near, a few are enough
OTHER_STEPS = 0.2  # the same, at other costs
NODES = 500  # of the search tree of one integer program; those of one axis need none or a few
SMALL = 1_000  # rows and columns, as many as which the smallest program counts for
LARGE = 10_000  # columns, beyond which a few nodes take a minute
MANY = 200  # columns that are to be whole and are not
DIVES = 1_000  # steps of the simplex method that a large program is dived into for
BESIDE = 1e-3  # relative, of what the row that all columns share is worth
INFINITY = float("inf")


class OutOfBudget(Exception):
    """The budget was used up before a first solution was found, which proves nothing but the bound."""

    def __init__(self, message: str, bound: float) -> None:
        super().__init__(message)
        self.bound = bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """objective and bound in the problem's unit: no solution is below bound; gap = (objective - bound) / objective; solver: which one
    answered; variables and constraints: how many."""

    objective: float
    bound: float
    gap: float
    seconds: float
    solver: str
    variables: int
    constraints: int
    status: Literal["solved", "out of budget"] = "solved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """values: of the columns, in their order."""

    outcome: Outcome
    values: tuple[float, ...]


@dataclass(kw_only=True)
class Linear:
    """A program to minimise: columns between bounds, some of them whole numbers, and rows between bounds. constant: of the objective.
    shared: a row that most columns have a part in, without which the program would nearly always have a whole solution."""

    name: str
    constant: float = 0.0
    shared: int | None = None
    names: list[str] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    indices: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)

    def column(self, name: str, cost: float = 0.0, *, upper: float = 1.0, whole: bool = False) -> int:
        """A variable between 0 and upper; its index."""
        self.names.append(name)
        self.costs.append(cost)
        self.uppers.append(upper)
        self.whole.append(whole)
        return len(self.names) - 1

    def row(self, name: str, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """lower <= the sum of weight x column <= upper; no column twice."""
        columns, weights = list[int](), list[float]()
        for index, weight in terms:
            columns.append(index)
            weights.append(weight)
        self.add_row(name, columns, weights, lower, upper)

    def add_row(self, name: str, columns: Sequence[int], weights: Sequence[float], lower: float, upper: float) -> None:
        """The same of columns and their weights, in the same order."""
        self.indices.extend(columns)
        self.weights.extend(weights)
        self.rows.append(name)
        self.starts.append(len(self.indices))
        self.bounds.append((lower, upper))


def solve(problem: Linear, *, gap: float = 1e-3, nodes: int = NODES) -> Solution:
    """Solve to a relative gap, or until so many nodes were looked at. Raises Infeasible if there is no solution, and OutOfBudget if
    none was found that proves that."""
    return Repeated(problem).solve(gap=gap, nodes=nodes)


class Starts:
    """Where HiGHS has ended without the demand for whole numbers, by the number of columns and rows: another program of as many, mostly the
    same one at other prices or of other sizes, begins there and takes a few steps. Wherever it begins, it ends at the least objective."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], Any] = {}

    def begin(self, solver: Any, problem: Linear) -> bool:
        """Put a solver that has run nothing yet where the last program of this size has ended. Whether there was one."""
        if (known := self._ends.get(self._size(problem))) is not None:
            solver.setBasis(known)
        return known is not None

    def end(self, solver: Any, problem: Linear) -> None:
        """Take where a solver has ended."""
        self._ends[self._size(problem)] = solver.getBasis()

    @staticmethod
    def _size(problem: Linear) -> tuple[int, int]:
        return len(problem.names), len(problem.rows)


class Repeated:
    """A program that is solved several times, with columns held at other values each time. HiGHS begins where it has ended before, so that
    what is like the last question takes a few steps. starts: of others like it."""

    def __init__(self, problem: Linear, starts: Starts | None = None) -> None:
        self.problem, self.starts = problem, starts or Starts()
        self._highs: _Highs | None = None

    def least(self) -> float | None:
        """What the program takes without the demand for whole numbers; None where HiGHS is missing, or has no answer soon."""
        try:
            import highspy
        except ImportError:
            return None
        self._highs = self._highs or _Highs(highspy, self.problem, self.starts)
        found = self._highs.without_whole({})
        return None if found is None or found[0] == INFINITY else found[0] + self.problem.constant

    def solve(self, held: Mapping[int, float] | None = None, *, gap: float = 1e-3, nodes: int = NODES) -> Solution:
        """held: column -> its value, of those that are not free this time. Raises as `solve`."""
        problem, start, held = self.problem, time.perf_counter(), held or {}
        try:
            import highspy
        except ImportError:
            status, objective, bound, values = _with_cbc(problem, held, gap, nodes)
            solver = "CBC"
        else:
            self._highs = self._highs or _Highs(highspy, problem, self.starts)
            status, objective, bound, values = self._highs.solve(held, gap, nodes)
            solver = "HiGHS"
        size = f"{len(problem.names)} variables, {len(problem.rows)} constraints"
        if status == "infeasible":
            raise Infeasible(f"{problem.name}: infeasible ({size})")
        if not values and problem.names:
            raise OutOfBudget(f"{problem.name}: no solution within {nodes} nodes ({size})", bound + problem.constant)
        objective, bound = objective + problem.constant, min(bound, objective) + problem.constant
        outcome = Outcome(
            objective=objective, bound=bound, gap=max(0.0, (objective - bound) / abs(objective)) if objective else 0.0,
            seconds=time.perf_counter() - start, solver=solver, variables=len(problem.names), constraints=len(problem.rows),
            status="solved" if status == "solved" else "out of budget",
        )  # fmt: skip
        return Solution(outcome=outcome, values=values)


Answer = tuple[Literal["solved", "infeasible", "out of budget"], float, float, tuple[float, ...]]  # status, objective, bound, values


class _Highs:
    """The program of an axis is so tight that without the demand for whole numbers it mostly has a whole solution: that is the answer,
    and its own bound, and takes a fifth of the time. Where few columns are not whole, those that are mostly need not change: what comes of
    that, if it is within the gap of the same bound, is the answer. Else the two whole solutions are looked at that it is a mixture of
    (`_unmixed`), and one column after the other is held at a whole number (`dive`). If that finds nothing within the gap soon, the demand
    is made of all of them; of a large program the best that was found is the answer."""

    def __init__(self, highspy: Any, problem: Linear, starts: Starts) -> None:
        self.highspy, self.problem, self.starts = highspy, problem, starts
        self.whole = numpy.array(problem.whole, dtype=bool)
        self.lower, self.upper = numpy.zeros(len(problem.names)), numpy.array(problem.uppers, dtype=float)
        self.costs = numpy.array(problem.costs, dtype=float)
        bounds = numpy.array(problem.bounds, dtype=float).reshape(-1, 2)
        self.rows = numpy.ascontiguousarray(bounds[:, 0]), numpy.ascontiguousarray(bounds[:, 1])
        begins, indices = numpy.array(problem.starts, dtype=numpy.int32), numpy.array(problem.indices, dtype=numpy.int32)
        self.matrix = begins, indices, numpy.array(problem.weights, dtype=float)
        self.relaxed: Any = None
        self.parted = 0  # columns that are to be whole, and are not without that demand
        self.tough = False  # whether the simplex method takes too long
        self.steps = 0  # of the simplex method, without the demand for whole numbers
        self.worth = 0.0  # of the row that all columns share, in the last of these solutions
        if int(os.environ.get("AUTOPAR_DEBUG", "0") or 0) >= 3:
            self._write()

    def solve(self, held: Mapping[int, float], gap: float, nodes: int) -> Answer:
        highspy = self.highspy
        lower, upper = self._bounds(held)
        if self.whole.any() and (known := self._relaxed_first(held, lower, upper, gap, nodes)) is not None:
            objective, bound, values = known
            return "solved" if objective - bound <= gap * abs(objective) else "out of budget", objective, bound, tuple(values.tolist())
        if len(self.whole) > LARGE and (self.tough or self.parted > MANY):  # whose first node takes minutes
            return "out of budget", INFINITY, -INFINITY, ()
        solver = self._run(lower, upper, mip_rel_gap=gap, mip_max_nodes=nodes)
        status, info, known = solver.getModelStatus(), solver.getInfo(), highspy.HighsModelStatus
        if status in (known.kInfeasible, known.kUnboundedOrInfeasible):  # no column is unbounded where it could pay
            return "infeasible", INFINITY, INFINITY, ()
        if status == known.kModelEmpty:
            return "solved", 0.0, 0.0, ()
        whole = bool(self.whole.any())
        if status == known.kOptimal:
            objective = info.objective_function_value
            return "solved", objective, info.mip_dual_bound if whole else objective, tuple(solver.getSolution().col_value)
        if status not in (known.kSolutionLimit, known.kIterationLimit, known.kTimeLimit, known.kInterrupt):
            raise RuntimeError(f"HiGHS could not solve {self.problem.name}: {solver.modelStatusToString(status)}")
        bound = info.mip_dual_bound if whole and abs(info.mip_dual_bound) < 1e300 else -INFINITY
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return "out of budget", INFINITY, bound, ()
        return "out of budget", info.objective_function_value, bound, tuple(solver.getSolution().col_value)

    def _bounds(self, held: Mapping[int, float]) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        lower, upper, columns = self.lower.copy(), self.upper.copy(), list(held)
        lower[columns] = upper[columns] = list(held.values())
        return lower, upper

    def _relaxed_first(
        self, held: Mapping[int, float], lower: NDArray[numpy.float64], upper: NDArray[numpy.float64], gap: float, nodes: int
    ) -> tuple[float, float, NDArray[numpy.float64]] | None:
        """The objective, the bound and the columns of a solution within the gap that is near to one without the demand for whole numbers,
        of a large program the best that was found; None if none was."""
        first = self.without_whole(held)
        if first is None or first[0] == INFINITY:
            return None
        least, values = first
        apart = parted(self.whole, values)
        self.parted = len(apart)
        if not self.parted:
            return least, least, values
        settled, rounded = self.whole.copy(), values.round()
        settled[apart] = False
        rest = self._run(
            numpy.where(settled, rounded, lower), numpy.where(settled, rounded, upper), mip_rel_gap=gap / 10, mip_max_nodes=nodes,
            objective_bound=least + gap / (1 - gap) * abs(least),  # a solution beyond which is not asked for
        )  # fmt: skip
        known = list[Relaxed]()
        if rest.getModelStatus() == self.highspy.HighsModelStatus.kOptimal:
            known.append((rest.getInfo().objective_function_value, numpy.array(rest.getSolution().col_value)))
            if known[0][0] - least <= gap * abs(known[0][0]):
                return known[0][0], least, known[0][1]
        if (self.upper[self.whole] > 1).any():
            return None
        large, begun = len(self.whole) > LARGE, self.steps
        if large and self.tough and known:
            return known[0][0], least, known[0][1]
        best = min([*known, *self._unmixed(held)], key=lambda x: x[0], default=None)

        def go_on() -> bool:
            return not large or self.steps < begun + DIVES

        found = dive(lambda more: self.without_whole({**held, **more}), first, self.whole, self.costs, gap, best, go_on)
        return found if found is None or large or found[0] - found[1] <= gap * abs(found[0]) else None

    def _unmixed(self, held: Mapping[int, float]) -> list[Relaxed]:
        """The two whole solutions of which that without the demand for whole numbers, found last, is a mixture: the row that all share
        costs a little less, or more, than it is worth there, and binds no more."""
        row, solver, known = self.problem.shared, self.relaxed, self.highspy
        if row is None or not self.worth:
            return []
        begins, columns = solver.getBasis(), numpy.array(list(held), dtype=numpy.int32)
        values = numpy.array(list(held.values()), dtype=float)
        every, part = numpy.arange(len(self.costs), dtype=numpy.int32), slice(*self.matrix[0][row : row + 2])
        found, (lower, upper) = list[Relaxed](), self._bounds(held)
        solver.changeColsBounds(len(columns), columns, values, values)
        solver.changeRowBounds(row, -INFINITY, INFINITY)
        for factor in (1 - BESIDE, 1 + BESIDE):
            costs = self.costs.copy()
            costs[self.matrix[1][part]] -= factor * self.worth * self.matrix[2][part]
            solver.changeColsCost(len(every), every, costs)
            solver.setBasis(begins)
            self._ran(OTHER_STEPS)
            if solver.getModelStatus() == known.HighsModelStatus.kOptimal:
                there = numpy.array(solver.getSolution().col_value)
                if len(parted(self.whole, there)):
                    continue
                ended = self._run(*(numpy.where(self.whole, there.round(), x) for x in (lower, upper)))
                if ended.getModelStatus() == known.HighsModelStatus.kOptimal:
                    found.append((ended.getInfo().objective_function_value, numpy.array(ended.getSolution().col_value)))
        solver.changeRowBounds(row, *self.problem.bounds[row])
        solver.changeColsCost(len(every), every, self.costs)
        solver.changeColsBounds(len(columns), columns, self.lower[columns], self.upper[columns])
        solver.setBasis(begins)
        return found

    def without_whole(self, held: Mapping[int, float]) -> Relaxed | None:
        """The objective and the solution without the demand for whole numbers, from the last basis on; None if it took too many steps."""
        columns, values = numpy.array(list(held), dtype=numpy.int32), numpy.array(list(held.values()), dtype=float)
        begins = self.relaxed is None
        if self.relaxed is None:
            none, options = numpy.zeros_like(self.whole), {"presolve": "off", "simplex_scale_strategy": 0}
            self.relaxed = self._given(self.lower, self.upper, none, **options)
        solver, known = self.relaxed, self.highspy.HighsModelStatus
        solver.changeColsBounds(len(columns), columns, values, values)
        if not (begins and self.starts.begin(solver, self.problem) and self._ran(WARM_STEPS)):
            if begins:
                solver.clearSolver()
            if not self._ran(RELAXED_STEPS) and begins:  # of a few programs steps from one solution to the next lead nowhere
                self.tough = True
                self._with(solver="ipm", presolve="on").run()
                self._with(solver="choose", presolve="off")
        found: Relaxed | None = None
        if solver.getModelStatus() == known.kOptimal:
            solution = solver.getSolution()
            found = solver.getInfo().objective_function_value, numpy.array(solution.col_value)
            self.worth = 0.0 if self.problem.shared is None else solution.row_dual[self.problem.shared]
            if not held:
                self.starts.end(solver, self.problem)
        elif solver.getModelStatus() == known.kInfeasible:
            found = INFINITY, numpy.array([])
        solver.changeColsBounds(len(columns), columns, self.lower[columns], self.upper[columns])
        return found

    def _with(self, **options: object) -> Any:
        for option, value in options.items():
            self.relaxed.setOptionValue(option, value)
        return self.relaxed

    def _ran(self, steps: float) -> bool:
        """Solve without the demand for whole numbers in so many steps for each row and column. Whether that was enough."""
        self._with(simplex_iteration_limit=int(steps * (len(self.problem.names) + len(self.problem.rows) + SMALL))).run()
        self.steps += max(0, self.relaxed.getInfo().simplex_iteration_count)
        return bool(self.relaxed.getModelStatus() != self.highspy.HighsModelStatus.kIterationLimit)

    def _run(self, lower: NDArray[numpy.float64], upper: NDArray[numpy.float64], **options: object) -> Any:
        """The program with whole numbers and these bounds, after it was solved."""
        solver = self._given(lower, upper, self.whole, **options)
        solver.run()
        return solver

    def _given(
        self, lower: NDArray[numpy.float64], upper: NDArray[numpy.float64], whole: NDArray[numpy.bool_], **options: object
    ) -> Any:
        """HiGHS with the program, before it has run: as arrays, which it copies at once."""
        solver, problem, known = self.highspy.Highs(), self.problem, self.highspy
        for option, value in {"output_flag": False, "parallel": "off", **options}.items():
            solver.setOptionValue(option, value)
        sizes = len(problem.names), len(problem.rows), len(problem.indices)
        form = int(known.MatrixFormat.kRowwise), int(known.ObjSense.kMinimize), 0.0
        solver.passModel(*sizes, *form, self.costs, lower, upper, *self.rows, *self.matrix, whole.astype(numpy.int32))
        return solver

    def _write(self) -> None:
        """The integer program as a file."""
        writer = self._given(self.lower, self.upper, self.whole)
        lp = writer.getLp()
        lp.col_names_, lp.row_names_ = self.problem.names, self.problem.rows
        writer.passModel(lp)
        writer.writeModel(f"autopar_{self.problem.name}.lp".replace(" ", "_"))


def _with_cbc(problem: Linear, held: Mapping[int, float], gap: float, nodes: int) -> Answer:
    """CBC states no bound: where it is done, its tolerance is proven; else nothing is."""
    import pulp

    model = pulp.LpProblem(problem.name.replace(" ", "_"), pulp.LpMinimize)
    kinds = (pulp.LpContinuous, pulp.LpInteger)
    uppers = [None if upper == INFINITY else upper for upper in problem.uppers]
    columns = [pulp.LpVariable(f"c{k}", held.get(k, 0), held.get(k, upper), kinds[problem.whole[k]]) for k, upper in enumerate(uppers)]
    model.setObjective(pulp.LpAffineExpression(zip(columns, problem.costs, strict=True)))
    for k, (low, high) in enumerate(problem.bounds):
        places = range(problem.starts[k], problem.starts[k + 1])
        terms = pulp.LpAffineExpression([(columns[problem.indices[p]], problem.weights[p]) for p in places])
        if low > -INFINITY:
            model.addConstraint(terms >= low)
        if high < INFINITY:
            model.addConstraint(terms <= high)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 names it otherwise; the package is held below 4
        status = model.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=gap, maxNodes=nodes, threads=1))
    if pulp.LpStatusInfeasible == status or model.sol_status == pulp.LpSolutionInfeasible:
        return "infeasible", INFINITY, INFINITY, ()
    if model.sol_status == pulp.LpSolutionNoSolutionFound:
        return "out of budget", INFINITY, -INFINITY, ()
    objective = float(pulp.value(model.objective) or 0.0)
    values = tuple(float(c.value() or 0.0) for c in columns)
    done = status == pulp.LpStatusOptimal and model.sol_status == pulp.LpSolutionOptimal
    return ("solved", objective, objective - gap * abs(objective), values) if done else ("out of budget", objective, -INFINITY, values)
