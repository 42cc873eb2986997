"""The one place that calls a solver: HiGHS through PuLP, CBC where HiGHS is missing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pulp

from autopar.errors import Infeasible

__all__ = ["Outcome", "solve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """objective and bound in the problem's unit; gap = (objective - bound) / objective; solver: which one answered."""

    objective: float
    bound: float
    gap: float
    seconds: float
    solver: str
    variables: int
    constraints: int


def solve(problem: pulp.LpProblem, *, time_limit_s: float, name: str, gap: float = 1e-3) -> Outcome:
    """Solve in place to a relative gap. Raises Infeasible if there is no solution, or none within the time limit."""
    start = time.perf_counter()
    if int(os.environ.get("AUTOPAR_DEBUG", "0") or 0) >= 3:
        problem.writeLP(f"autopar_{problem.name}.lp")
    highs = pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=gap)
    if highs.available():
        status = problem.solve(highs)
        solver = "HiGHS"
    else:
        status = problem.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, gapRel=gap))
        solver = "CBC"
    objective = pulp.value(problem.objective)
    found = objective is not None and problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if status != pulp.LpStatusOptimal and not found:
        size = f"{problem.numVariables()} variables, {problem.numConstraints()} constraints"
        raise Infeasible(f"{name}: {pulp.LpStatus[status].lower()} ({size})")
    objective = float(objective or 0.0)
    bound = _bound(problem, objective, gap)
    return Outcome(
        objective=objective,
        bound=bound,
        gap=max(0.0, (objective - bound) / abs(objective)) if objective else 0.0,
        seconds=time.perf_counter() - start,
        solver=solver,
        variables=problem.numVariables(),
        constraints=problem.numConstraints(),
    )


def _bound(problem: pulp.LpProblem, objective: float, gap: float) -> float:
    """The proven bound: HiGHS states it; a solver that does not has proven its tolerance if it reports optimality."""
    model = getattr(problem, "solverModel", None)
    info = model.getInfo() if model is not None and hasattr(model, "getInfo") else None
    if info is not None and abs(info.mip_dual_bound) < 1e300 and problem.isMIP():
        constant = float(problem.objective.constant)  # PuLP keeps it to itself
        return float(info.mip_dual_bound) + constant
    if info is not None and not problem.isMIP():
        return objective
    return objective * (1 - gap) if problem.status == pulp.LpStatusOptimal else float("-inf")
