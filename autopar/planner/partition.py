"""The integer program over the whole model: which segments make a stage, and which of them are recomputed.

    minimise   (m - 1) t + sum_k (f_k + b_k) + sum_{k,s} f_k q[k,s]       (the pipeline's closed form: fill, drain, slowest stage)
    order      u[k,s] >= u[k+1,s],  u[k,s] <= u[k,s+1],  u[k,S-1] = 1      segment k lies in stage s or an earlier one
    part       a[k,s] = u[k,s] - u[k,s-1],  sum_k a[k,s] >= 1               no stage is empty
    again      q[k,s] <= a[k,s],  sum_s q[k,s] = r[k]                       q: segment k is recomputed on stage s
    slowest    t >= sum_k (f_k + b_k) a[k,s] + f_k q[k,s]                   for every stage s
    memory     sum_k state_k a[k,s] + w_s sum_k (kept_k a[k,s] - freed_k q[k,s]) + temporary <= limit      for every stage s

m: micro-batches, w_s: micro-batches in flight on stage s. Seconds in the objective, GiB in the memory rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulp

from autopar.planner.solver import Outcome, solve

__all__ = ["Partition", "Piece", "partition", "peak_bytes"]

GIB = float(2**30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One segment as the program sees it. state_bytes: parameters, gradients and optimizer states of what first appears in
    it. kept_bytes: activations saved by one micro-batch; freed_bytes: how much less if it is recomputed (0: it cannot be).
    temporary_bytes: the most that is alive only while it runs, if it is recomputed."""

    forward_s: float
    backward_s: float
    state_bytes: float
    kept_bytes: float
    freed_bytes: float = 0.0
    temporary_bytes: float = 0.0
    send_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """cuts: the index of the first segment of every stage but the first. recomputed: indices of segments."""

    cuts: tuple[int, ...]
    recomputed: frozenset[int]
    outcome: Outcome


def partition(
    pieces: tuple[Piece, ...],
    *,
    stages: int,
    micro_batches: int,
    in_flight: tuple[int, ...],
    limit_bytes: float,
    recompute: str,
    time_limit_s: float = 10.0,
) -> Partition:
    """The best stages and recomputation. recompute: 'none', 'full' (all that can be) or 'auto'. Raises Infeasible (of the
    solver) when no assignment fits into limit_bytes."""
    problem = pulp.LpProblem("stages", pulp.LpMinimize)
    count, last = len(pieces), stages - 1
    u = [[pulp.LpVariable(f"u_{k}_{s}", cat=pulp.LpBinary) if s < last else 1.0 for s in range(stages)] for k in range(count)]
    a = [[u[k][s] - (u[k][s - 1] if s else 0.0) for s in range(stages)] for k in range(count)]
    can = [k for k, p in enumerate(pieces) if p.freed_bytes > 0 and recompute != "none"]
    r = {k: (1.0 if recompute == "full" else pulp.LpVariable(f"r_{k}", cat=pulp.LpBinary)) for k in can}
    q = {(k, s): pulp.LpVariable(f"q_{k}_{s}", 0, 1) for k in can for s in range(stages)}
    slowest = pulp.LpVariable("slowest", 0)
    again = pulp.lpSum(pieces[k].forward_s * v for (k, _), v in q.items())
    total = sum(p.forward_s + p.backward_s for p in pieces)
    problem.setObjective((micro_batches - 1) * slowest + total + again)
    for s in range(last):
        for k in range(count - 1):
            problem += u[k][s] >= u[k + 1][s], f"order_{k}_{s}"
        for k in range(count if s < last - 1 else 0):
            problem += u[k][s] <= u[k][s + 1], f"nested_{k}_{s}"
    for s in range(stages):
        if stages > 1:
            problem += pulp.lpSum(a[k][s] for k in range(count)) >= 1, f"part_{s}"
        busy = pulp.lpSum((p.forward_s + p.backward_s) * a[k][s] for k, p in enumerate(pieces))
        problem += slowest >= busy + pulp.lpSum(pieces[k].forward_s * q[k, s] for k in can), f"slowest_{s}"
        kept = pulp.lpSum((p.state_bytes + in_flight[s] * p.kept_bytes) / GIB * a[k][s] for k, p in enumerate(pieces))
        freed = pulp.lpSum(in_flight[s] * pieces[k].freed_bytes / GIB * q[k, s] for k in can)
        spare = max((p.temporary_bytes for p in pieces), default=0.0) / GIB
        problem += kept - freed <= limit_bytes / GIB - spare, f"memory_{s}"
    for k in can:
        for s in range(stages):
            problem += q[k, s] <= a[k][s], f"again_{k}_{s}"
        problem += pulp.lpSum(q[k, s] for s in range(stages)) == r[k], f"again_{k}"
    outcome = solve(problem, time_limit_s=time_limit_s, name="stages", gap=1e-4)
    stage_of = [next(s for s in range(stages) if _value(u[k][s]) > 0.5) for k in range(count)]
    return Partition(
        cuts=tuple(stage_of.index(s) for s in range(1, stages)),
        recomputed=frozenset(k for k in can if _value(r[k]) > 0.5),
        outcome=outcome,
    )


def _value(v: pulp.LpVariable | float) -> float:
    return v if isinstance(v, float) else float(v.value() or 0.0)


def peak_bytes(pieces: tuple[Piece, ...], cuts: tuple[int, ...], recomputed: frozenset[int], in_flight: tuple[int, ...]) -> list[float]:
    """Memory of every stage of given cuts, as the rows state it."""
    bounds = (0, *cuts, len(pieces))
    spare = max((p.temporary_bytes for p in pieces), default=0.0)
    return [
        sum(pieces[k].state_bytes + in_flight[s] * (pieces[k].kept_bytes - (pieces[k].freed_bytes if k in recomputed else 0)) for k in range(i, j)) + spare
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
