"""Whole solutions from programs without the demand for whole numbers: as good as is claimed, by brute force, and with nothing left out of
the bound."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy
import pytest

from autopar.planner import dive as under_test
from autopar.planner import solver
from autopar.planner.dive import Relaxed, dive
from autopar.planner.solver import Linear, OutOfBudget, Starts, _Highs

highspy = pytest.importorskip("highspy")
pytestmark = pytest.mark.pure
INFINITY = float("inf")


class Choices:
    """Groups of choices, each with a cost and a weight; what the weights lack to a least sum costs `late` for each unit: as where a host
    launches what a device runs. One of each group is taken."""

    def __init__(self, seed: int, groups: int = 5, choices: int = 3) -> None:
        random = numpy.random.default_rng(seed)
        self.costs = random.integers(5, 60, (groups, choices)).astype(float)
        self.weights = random.integers(0, 40, (groups, choices)).astype(float)
        self.least = 0.6 * self.weights.max(1).sum()
        self.late = 3.0
        self.solved = 0

    @property
    def whole(self) -> numpy.ndarray:
        return numpy.array([True] * self.costs.size + [False])

    def objective(self, taken: tuple[int, ...]) -> float:
        cost = sum(self.costs[g, k] for g, k in enumerate(taken))
        return float(cost + self.late * max(0.0, self.least - sum(self.weights[g, k] for g, k in enumerate(taken))))

    def best(self) -> float:
        return min(map(self.objective, itertools.product(range(self.costs.shape[1]), repeat=self.costs.shape[0])))

    def relaxed(self, held: Mapping[int, float]) -> Relaxed | None:
        """Where choices can be mixed."""
        self.solved += 1
        groups, choices = self.costs.shape
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        xs = [highs.addVariable(held.get(k, 0.0), held.get(k, 1.0), c) for k, c in enumerate(self.costs.ravel())]
        late = highs.addVariable(0.0, INFINITY, self.late)
        for g in range(groups):
            highs.addConstr(sum(xs[g * choices : (g + 1) * choices]) == 1)
        highs.addConstr(sum(w * x for w, x in zip(self.weights.ravel(), xs, strict=True)) + late >= self.least)
        highs.run()
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return INFINITY, numpy.array([])
        return highs.getInfo().objective_function_value, numpy.array(highs.getSolution().col_value)


def dived(problem: Choices, gap: float, solve: object = None, **more: object) -> tuple[float, float, numpy.ndarray] | None:
    first = problem.relaxed({})
    assert first is not None
    costs = numpy.append(problem.costs.ravel(), problem.late)
    return dive(solve or problem.relaxed, first, problem.whole, costs, gap, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("gap", [0.0, 0.005, 0.05])
@pytest.mark.parametrize("seed", range(12))
def test_the_answer_is_whole_and_as_near_to_the_best_as_its_bound_says(seed: int, gap: float) -> None:
    problem = Choices(seed)
    found = dived(problem, gap)
    assert found is not None
    objective, bound, values = found
    taken = values[:-1].reshape(problem.costs.shape)
    assert numpy.allclose(taken, taken.round(), atol=1e-6)
    assert problem.objective(tuple(taken.argmax(1))) == pytest.approx(objective)
    assert bound <= problem.best() + 1e-6 and problem.best() <= objective + 1e-6
    assert objective - bound <= gap * objective + 1e-9


def test_a_wide_gap_takes_fewer_programs() -> None:
    problems = [(Choices(seed), Choices(seed)) for seed in range(12)]
    for exact, near in problems:
        dived(exact, 0.0)
        dived(near, 0.05)
    assert sum(near.solved for _, near in problems) < sum(exact.solved for exact, _ in problems)


def test_what_was_not_solved_is_in_the_bound() -> None:
    """Where every program with the best choice of the first group is given up, what is found beside it proves nothing about these."""
    problem = Choices(1)
    first = problem.relaxed({})
    assert first is not None and len(under_test.parted(problem.whole, first[1]))
    lost = dived(problem, 0.0, lambda held: None)
    assert lost is None

    def half(held: Mapping[int, float]) -> Relaxed | None:
        return None if any(held.values()) else problem.relaxed(held)

    found = dived(problem, 0.0, half)
    assert found is None or found[1] <= problem.best() + 1e-6


def test_a_program_in_need_of_many_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "STEPS", 2)
    found = dived(Choices(1), 0.0)
    assert found is not None and found[1] < Choices(1).best() <= found[0]  # the best of these, with a bound that is below the best
    monkeypatch.setattr(under_test, "STEPS", 1)
    assert dived(Choices(1), 0.0) is None


def test_what_is_known_before_is_the_answer_unless_something_better_is_found() -> None:
    problem = Choices(1)
    first = problem.relaxed({})
    assert first is not None
    worst = (problem.best() * 2, first[1])
    found = dived(problem, 0.0, best=worst, go_on=lambda: False)
    assert found is not None and found[0] == worst[0] and found[1] == first[0]
    better = dived(problem, 0.0, best=worst)
    assert better is not None and better[0] == pytest.approx(problem.best())


def test_integer_programs_of_several_units_are_not_dived_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """To hold a column at either of two whole numbers leaves none out only if there are no others."""
    monkeypatch.setattr(solver, "dive", lambda *_: pytest.fail("dived"))
    problem = solver.Linear(name="units")
    x, y = (problem.column(name, cost, upper=9.0, whole=True) for name, cost in (("x", 2.0), ("y", 3.1)))
    problem.row("enough", [(x, 3.0), (y, 5.0)], 11.0, INFINITY)
    assert solver.solve(problem, gap=0.0).outcome.objective == pytest.approx(2 * 2.0 + 3.1)


def test_one_row_that_binds_all_needs_no_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole search tree of a solver is not begun where a few columns held are enough."""
    runs: list[int] = []
    run = _Highs._run

    def counted(self: _Highs, lower: numpy.ndarray, upper: numpy.ndarray, **options: object) -> object:
        runs.extend([1] * bool((self.whole & (lower < upper)).any()))  # where none is free there is nothing to search
        return run(self, lower, upper, **options)

    monkeypatch.setattr(_Highs, "_run", counted)
    for seed in range(12):
        choices = Choices(seed)
        problem = _late(choices)
        runs.clear()
        assert solver.solve(problem, gap=0.0).outcome.objective == pytest.approx(choices.best())
        assert len(runs) <= 1, "of what was not whole at first alone"


def _late(choices: Choices, **more: object) -> Linear:
    """The same as a program with one row that all choices share."""
    problem = Linear(name="late", **more)  # type: ignore[arg-type]
    columns = [problem.column(f"x_{k}", float(c), whole=True) for k, c in enumerate(choices.costs.ravel())]
    late, n = problem.column("late", choices.late, upper=INFINITY), choices.costs.shape[1]
    for g in range(choices.costs.shape[0]):
        problem.row(f"one_{g}", [(c, 1.0) for c in columns[g * n : (g + 1) * n]], 1.0, 1.0)
    weights = [(c, float(w)) for c, w in zip(columns, choices.weights.ravel(), strict=True) if w]
    problem.shared = len(problem.rows)
    problem.row("launched", [*weights, (late, 1.0)], float(choices.least), INFINITY)
    return problem


def test_a_large_program_is_answered_by_whole_solutions_of_which_the_first_is_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "LARGE", 0)
    monkeypatch.setattr(solver, "DIVES", 0)
    unmixed, short = 0, 0
    for seed in range(30):
        choices = Choices(seed)
        found = _Highs(highspy, _late(choices), Starts())
        first = found.without_whole({})
        assert first is not None
        if len(under_test.parted(found.whole, first[1])):
            for objective, values in found._unmixed({}):
                taken = values[:-1].reshape(choices.costs.shape)
                assert objective == pytest.approx(choices.objective(tuple(taken.argmax(1)))) and objective >= choices.best() - 1e-6
                unmixed += 1
        outcome = solver.solve(_late(choices), gap=0.0).outcome
        assert outcome.bound <= choices.best() + 1e-6 and choices.best() <= outcome.objective + 1e-6
        assert (outcome.status == "solved") == (outcome.gap <= 1e-9)
        short += outcome.status == "out of budget"
    assert unmixed > 10 and short > 3


def test_where_steps_lead_nowhere_another_method_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "RELAXED_STEPS", 0.0)
    for seed in range(12):
        choices = Choices(seed)
        program = _Highs(highspy, _late(choices), Starts())
        found, wanted = program.without_whole({}), choices.relaxed({})
        assert program.tough and found is not None and wanted is not None and found[0] == pytest.approx(wanted[0])
        assert solver.solve(_late(choices), gap=0.0).outcome.bound <= choices.best() + 1e-6


def test_a_start_that_is_far_away_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the same size that begins where another has ended has its own answer, however many steps that takes."""
    for steps in (0.0, 10.0):
        monkeypatch.setattr(solver, "WARM_STEPS", steps)
        starts = Starts()
        for seed in range(12):
            choices = Choices(seed)
            found, wanted = _Highs(highspy, _late(choices), starts).without_whole({}), choices.relaxed({})
            assert found is not None and wanted is not None and found[0] == pytest.approx(wanted[0])


def test_a_large_program_without_a_whole_solution_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an answer nor infeasible: what its first node would take is not begun."""
    for name, value in (("LARGE", 0), ("MANY", -1)):
        monkeypatch.setattr(solver, name, value)
    monkeypatch.setattr(_Highs, "_relaxed_first", lambda *_: None)
    with pytest.raises(OutOfBudget):
        solver.solve(_late(Choices(1)))
