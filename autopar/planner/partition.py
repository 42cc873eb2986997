"""The integer program over the whole model: which segments make a stage, and which of them are recomputed.

    minimise   (m - 1) t + sum_k (f_k + b_k) + sum_{k,s} f_k q[k,s]       (the pipeline's closed form: fill, drain, slowest stage)
    order      u[k,s] >= u[k+1,s],  u[k,s] <= u[k,s+1],  u[k,S-1] = 1      segment k lies in stage s or an earlier one
    part       a[k,s] = u[k,s] - u[k,s-1],  sum_{k trains} a[k,s] >= 1      every stage has something to train
    again      q[k,s] <= a[k,s],  sum_s q[k,s] = r[k]                       q: segment k is recomputed on stage s
    slowest    t >= sum_k (f_k + b_k) a[k,s] + f_k q[k,s]                   for every stage s
    memory     sum_k state_k a[k,s] + w_s sum_k (kept_k a[k,s] - freed_k q[k,s]) + temporary <= limit      for every stage s

m: micro-batches, w_s: micro-batches in flight on stage s. Times in thousandths of what one micro-batch takes in all (solvers
have absolute tolerances, and a step may take microseconds or minutes), GiB in the memory rows.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import pulp

from autopar.errors import Infeasible
from autopar.planner.solver import Outcome, solve

__all__ = ["Partition", "Piece", "least_bytes", "partition", "peak_bytes"]

GIB = float(2**30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One segment as the program sees it. state_bytes: parameters, gradients and optimizer states of what first appears in
    it. kept_bytes: activations saved by one micro-batch; freed_bytes: how much less if it is recomputed (0: it cannot be).
    temporary_bytes: the most that is alive only while it runs. trains: it reads a trainable parameter."""

    forward_s: float
    backward_s: float
    state_bytes: float
    kept_bytes: float
    freed_bytes: float = 0.0
    temporary_bytes: float = 0.0
    trains: bool = True


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
    worth_s: float = float("inf"),
    cuts: tuple[int, ...] | None = None,
) -> Partition | None:
    """The best stages and recomputation. recompute: 'none', 'full' (all that can be) or 'auto'. worth_s: an objective that is
    not below it is of no use; None if there is no other. cuts: where they are decided already. Raises Infeasible when no assignment
    fits into limit_bytes.

    Where nothing is left to decide but the cuts, a dynamic program finds them, exactly. Recomputing only adds time: the best
    cuts without it and without a memory limit bound the rest from below, and are the answer if they fit."""
    can = [k for k, p in enumerate(pieces) if p.freed_bytes > 0 and recompute != "none"]
    fixed = frozenset(can) if recompute == "full" else frozenset()
    fitting = _best_cuts(pieces, fixed, stages, micro_batches, in_flight, limit_bytes, cuts)
    if not can or recompute == "full":
        if fitting is None:
            raise Infeasible(f"stages: no cuts of {len(pieces)} segments into {stages} stages fit into {limit_bytes / GIB:.2f} GiB")
        return fitting if fitting.outcome.objective < worth_s else None
    free = _best_cuts(pieces, fixed, stages, micro_batches, in_flight, float("inf"), cuts)
    if free is None:
        raise Infeasible(f"stages: {len(pieces)} segments cannot be cut into {stages} stages that each have something to train")
    if free.outcome.objective >= worth_s:
        return None
    if fitting is not None and fitting.outcome.objective <= free.outcome.objective * (1 + 1e-9):
        return fitting
    problem = pulp.LpProblem("stages", pulp.LpMinimize)
    count, last = len(pieces), stages - 1
    u = [[pulp.LpVariable(f"u_{k}_{s}", cat=pulp.LpBinary) if s < last else 1.0 for s in range(stages)] for k in range(count)]
    a = [[u[k][s] - (u[k][s - 1] if s else 0.0) for s in range(stages)] for k in range(count)]
    r = {k: pulp.LpVariable(f"r_{k}", cat=pulp.LpBinary) for k in can}
    q = {(k, s): pulp.LpVariable(f"q_{k}_{s}", 0, 1) for k in can for s in range(stages)}
    slowest = pulp.LpVariable("slowest", 0)
    unit = sum(p.forward_s + p.backward_s for p in pieces) / 1e3 or 1.0
    forward = [p.forward_s / unit for p in pieces]
    both = [(p.forward_s + p.backward_s) / unit for p in pieces]
    again = pulp.lpSum(forward[k] * v for (k, _), v in q.items())
    total = sum(both)
    problem.setObjective((micro_batches - 1) * slowest + total + again)
    for s in range(last):
        for k in range(count - 1):
            problem += u[k][s] >= u[k + 1][s], f"order_{k}_{s}"
        for k in range(count if s < last - 1 else 0):
            problem += u[k][s] <= u[k][s + 1], f"nested_{k}_{s}"
        for k in range(count if cuts is not None else 0):
            problem += u[k][s] == (1 if cuts is not None and k < cuts[s] else 0), f"pinned_{k}_{s}"
    for s in range(stages):
        if stages > 1:
            problem += pulp.lpSum(a[k][s] for k in range(count) if pieces[k].trains) >= 1, f"part_{s}"
        busy = pulp.lpSum(both[k] * a[k][s] for k in range(count))
        problem += slowest >= busy + pulp.lpSum(forward[k] * q[k, s] for k in can), f"slowest_{s}"
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
        outcome=dataclasses.replace(outcome, objective=outcome.objective * unit, bound=outcome.bound * unit),
    )


def _best_cuts(
    pieces: tuple[Piece, ...],
    recomputed: frozenset[int],
    stages: int,
    micro_batches: int,
    in_flight: tuple[int, ...],
    limit_bytes: float,
    pinned: tuple[int, ...] | None,
) -> Partition | None:
    """The cuts with the least slowest stage that fit, by dynamic programming over (segments, stages); None if none fit. pinned: the
    only ones that may be."""
    start = time.perf_counter()
    count = len(pieces)
    busy, state, kept, trained = [0.0], [0.0], [0.0], [0]
    for k, p in enumerate(pieces):
        busy.append(busy[-1] + p.forward_s + p.backward_s + (p.forward_s if k in recomputed else 0.0))
        state.append(state[-1] + p.state_bytes)
        kept.append(kept[-1] + p.kept_bytes - (p.freed_bytes if k in recomputed else 0.0))
        trained.append(trained[-1] + p.trains)
    spare = max((p.temporary_bytes for p in pieces), default=0.0)

    def fits(i: int, j: int, s: int) -> bool:
        return (stages == 1 or trained[j] > trained[i]) and state[j] - state[i] + in_flight[s] * (kept[j] - kept[i]) + spare <= limit_bytes

    reach: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # after s stages: segments placed -> (slowest stage, where the last began)
    for s in range(stages):
        ends: dict[int, tuple[float, int]] = {}
        for j in [count] if s == stages - 1 else range(s + 1, count) if pinned is None else [pinned[s]]:
            options = [(max(slow, busy[j] - busy[i]), i) for i, (slow, _) in reach[-1].items() if i < j and fits(i, j, s)]
            if options:
                ends[j] = min(options)
        reach.append(ends)
    if count not in reach[-1]:
        return None
    cuts, end = [], count
    for s in range(stages, 1, -1):
        end = reach[s][end][1]
        cuts.append(end)
    objective = (micro_batches - 1) * reach[-1][count][0] + busy[-1]
    seconds = time.perf_counter() - start
    outcome = Outcome(objective=objective, bound=objective, gap=0.0, seconds=seconds, solver="dynamic program", variables=0, constraints=0)
    return Partition(cuts=tuple(reversed(cuts)), recomputed=recomputed, outcome=outcome)


def _value(v: pulp.LpVariable | float) -> float:
    return v if isinstance(v, float) else float(v.value() or 0.0)


def least_bytes(pieces: tuple[Piece, ...], stages: int, in_flight: tuple[int, ...], recompute: str) -> float:
    """The memory below which there are no cuts: that of the fullest stage of the leanest ones, with all recomputed that can be."""
    freed = [0.0 if recompute == "none" else p.freed_bytes for p in pieces]
    leanest: dict[int, float] = {0: 0.0}  # segments placed -> the fullest of the stages so far
    for s in range(stages):
        need = [p.state_bytes + in_flight[s] * (p.kept_bytes - f) for p, f in zip(pieces, freed, strict=True)]
        total = [sum(need[:k]) for k in range(len(need) + 1)]
        leanest = {j: min(max(x, total[j] - total[i]) for i, x in leanest.items() if i < j) for j in range(s + 1, len(pieces) + 1)}
    return leanest[len(pieces)] + max(p.temporary_bytes for p in pieces)


def peak_bytes(pieces: tuple[Piece, ...], cuts: tuple[int, ...], recomputed: frozenset[int], in_flight: tuple[int, ...]) -> list[float]:
    """Memory of every stage of given cuts, as the rows state it."""
    bounds = (0, *cuts, len(pieces))
    spare = max((p.temporary_bytes for p in pieces), default=0.0)
    kept = [p.kept_bytes - (p.freed_bytes if k in recomputed else 0) for k, p in enumerate(pieces)]
    return [
        sum(pieces[k].state_bytes + in_flight[s] * kept[k] for k in range(i, j)) + spare
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
