"""A solve ends solved, infeasible or out of budget, and says which."""

from __future__ import annotations

import itertools
import random
import sys

import pulp
import pytest

from autopar.errors import Infeasible
from autopar.planner.modes import Mode
from autopar.planner.partition import partition
from autopar.planner.solver import INFINITY, Linear, OutOfBudget, Repeated, Starts, solve
from autopar.planner.stage_account import Piece
from cost_models.pipeline import in_flight

pytestmark = pytest.mark.pure


def knapsacks(items: int, rows: int, seed: int) -> Linear:
    """As much value as fits into several knapsacks at once: easy to state, hard to prove."""
    rng = random.Random(seed)
    problem = Linear(name="knapsacks", constant=7.0)
    columns = [problem.column(f"x_{k}", -float(rng.randint(5, 50)), whole=True) for k in range(items)]
    for r in range(rows):
        problem.row(f"fits_{r}", [(c, float(rng.randint(1, 60))) for c in columns if rng.random() < 0.6], -INFINITY, 5.0 * items)
    return problem


def brute(problem: Linear) -> float:
    best = INFINITY
    for values in itertools.product((0, 1), repeat=len(problem.names)):
        sums = [
            sum(problem.weights[p] * values[problem.indices[p]] for p in range(a, b)) for a, b in itertools.pairwise(problem.starts)
        ]
        if all(low <= x <= high for x, (low, high) in zip(sums, problem.bounds, strict=True)):
            best = min(best, problem.constant + sum(c * v for c, v in zip(problem.costs, values, strict=True)))
    return best


@pytest.fixture(params=["HiGHS", "CBC"])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "CBC":
        assert pulp.HiGHS  # which notes when it is imported whether highspy is there
        monkeypatch.setitem(sys.modules, "highspy", None)
    return str(request.param)


@pytest.mark.parametrize("seed", range(3))
def test_solved_is_the_optimum_with_its_proof(solver: str, seed: int) -> None:
    problem = knapsacks(10, 3, seed)
    outcome = solve(problem, gap=0.0).outcome
    assert outcome.status == "solved" and outcome.solver == solver
    assert outcome.objective == pytest.approx(brute(problem)) and outcome.bound == pytest.approx(outcome.objective)


def test_infeasible_is_proven(solver: str) -> None:
    problem = knapsacks(6, 1, 0)
    problem.row("never", [(0, 1.0), (1, 1.0)], 1.5, 1.75)
    with pytest.raises(Infeasible, match="knapsacks: infeasible"):
        solve(problem)


def test_out_of_budget_has_a_best_and_a_bound_and_is_not_infeasible() -> None:
    problem = knapsacks(40, 20, 1)
    known = solve(problem, gap=0.0, nodes=100_000).outcome
    cut = solve(problem, gap=0.0, nodes=2).outcome
    assert known.status == "solved" and cut.status == "out of budget"
    assert cut.bound <= known.objective <= cut.objective and cut.gap > 0


def test_out_of_budget_without_a_solution_is_not_infeasible_either() -> None:
    """Numbers that must come to a sum exactly: there is a way, which the first node does not find."""
    rng = random.Random(4)
    problem = Linear(name="exactly")
    weights = [[float(rng.randint(50, 200)) for _ in range(40)] for _ in range(4)]
    columns = [problem.column(f"x_{k}", float(rng.randint(1, 7)), whole=True) for k in range(40)]
    picked = [rng.random() < 0.5 for _ in columns]
    for r, row in enumerate(weights):
        total = sum(w for w, taken in zip(row, picked, strict=True) if taken)
        problem.row(f"sum_{r}", list(zip(columns, row, strict=True)), total, total)
    with pytest.raises(OutOfBudget, match="no solution within 1 nodes") as raised:
        solve(problem, nodes=1)
    assert 0 <= raised.value.bound <= sum(c for c, taken in zip(problem.costs, picked, strict=True) if taken)


def test_the_same_program_has_the_same_answer() -> None:
    found = {solve(knapsacks(40, 10, 3), gap=0.0, nodes=20).values for _ in range(3)}
    assert len(found) == 1


def test_stages_that_run_out_of_rounds_keep_their_best_and_a_bound_that_holds() -> None:
    rng = random.Random(0)
    pieces = tuple(
        Piece(
            forward_s=rng.random(), backward_s=2 * rng.random(), rest_bytes=rng.random(),
            modes=(Mode(name="none", kept_bytes=2.0), Mode(name="full", again_s=rng.random(), kept_bytes=rng.random())),
        )
        for _ in range(24)
    )  # fmt: skip
    given = {"stages": 4, "micro_batches": 8, "in_flight": tuple(in_flight("1f1b", s, 4, 8) for s in range(4)), "recompute": "auto"}
    whole = partition(pieces, limit_bytes=24.0, **given)  # type: ignore[arg-type]
    cut = partition(pieces, limit_bytes=24.0, rounds=1, **given)  # type: ignore[arg-type]
    assert whole is not None and cut is not None and whole.recomputed
    assert (whole.outcome.status, cut.outcome.status) == ("solved", "out of budget")
    assert cut.outcome.bound <= whole.outcome.objective <= cut.outcome.objective
    assert partition(pieces, limit_bytes=24.0, rounds=1, worth_s=cut.outcome.bound * 0.99, **given) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_columns_that_are_whole_without_demand_may_stay_if_the_gap_allows(seed: int) -> None:
    """Within the gap of the optimum, with a bound that holds, whatever was left as it was."""
    for items, rows, gap in ((8, 1, 0.2), (9, 2, 0.05), (10, 3, 1e-3)):
        problem = knapsacks(items, rows, seed)
        best, found = brute(problem), solve(problem, gap=gap)
        assert found.outcome.status == "solved" and found.outcome.bound <= best + 1e-6
        values = [round(v) for v in found.values]
        assert found.outcome.objective == pytest.approx(problem.constant + sum(c * v for c, v in zip(problem.costs, values, strict=True)))
        assert best - 1e-6 <= found.outcome.objective <= best + gap * abs(found.outcome.objective - problem.constant) + 1e-6


def assignment(size: int, seed: int) -> Linear:
    """As many jobs as workers, one each: a program whose solution is whole without that demand."""
    rng = random.Random(seed)
    problem = Linear(name="assignment")
    columns = [[problem.column(f"x_{i}_{j}", rng.uniform(1.0, 9.0), whole=True) for j in range(size)] for i in range(size)]
    for kind, lines in (("row", columns), ("column", list(zip(*columns, strict=True)))):
        for k, line in enumerate(lines):
            problem.row(f"{kind}_{k}", [(x, 1.0) for x in line], 1.0, 1.0)
    return problem


def test_a_program_begins_where_one_of_its_size_has_ended() -> None:
    def steps(repeated: Repeated) -> int:
        assert repeated._highs is not None
        return int(repeated._highs.relaxed.getInfo().simplex_iteration_count)

    starts = Starts()
    first, dearer = assignment(12, 0), assignment(12, 0)
    dearer.costs = [1.5 * c if k % 11 == 0 else c for k, c in enumerate(dearer.costs)]
    Repeated(first, starts).solve(gap=0.0)
    later, alone = Repeated(dearer, starts), Repeated(dearer)
    assert later.solve(gap=0.0).outcome.objective == pytest.approx(alone.solve(gap=0.0).outcome.objective)
    assert 2 * steps(later) < steps(alone)
    other = Repeated(assignment(7, 1), starts)  # of another size: as if nothing had been solved
    assert other.solve(gap=0.0).outcome.objective == pytest.approx(brute_assignment(assignment(7, 1), 7))


def brute_assignment(problem: Linear, size: int) -> float:
    return min(sum(problem.costs[i * size + j] for i, j in enumerate(order)) for order in itertools.permutations(range(size)))
