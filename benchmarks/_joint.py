"""Random small planning problems, and an enumerator of every plan of one of them.

The enumerator shares with the planner what a pinned plan costs (`Estimator.candidate`: its time, and its memory from liveness) and which
strategies operators have. It shares no bound, no order, no account of pieces and no program: it tries every mesh, split into
micro-batches, rest of parameters, assignment of the tensor axis (of the few that a problem allows), cut and mode of each piece.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import Infeasible
from autopar.ir import Layout, Program, Strategy
from autopar.planner.axis import AxisProblem, objective_of
from autopar.planner.candidate import candidate_of
from autopar.planner.choices import Choices, Group
from autopar.planner.estimate import Estimator
from autopar.planner.partition import UNSOLVED, Partition
from autopar.planner.plan import Pins
from autopar.planner.rank import Rank
from autopar.planner.search import Search
from autopar.planner.shard import Assignment
from autopar.planner.space import Choice, Form, Mesh
from autopar.planner.store import Store
from cost_models.cluster import Cluster, load_cluster
from cost_models.recipe import AUTOPAR

__all__ = ["AMPLE", "Answer", "Problem", "Restricted", "TooMany", "draw", "enumerated", "planned"]

STEPS = ("linear", "wide", "relu", "gelu", "softmax", "norm", "scale", "add")
AMPLE = 2**50  # bytes
PLANS = 4000  # of one rank's program; more are not tried, and the problem is drawn again


class Layer(nn.Module):
    """A few operators one after the other, around which there may be a residual connection."""

    def __init__(self, steps: tuple[str, ...], width: int, residual: bool) -> None:
        super().__init__()
        self.steps, self.residual = steps, residual
        self.of = nn.ModuleList()
        now = width
        for step in steps:
            then = {"linear": width, "wide": 2 * width}.get(step, now)
            matrix = then != now or step == "linear"
            self.of.append(nn.Linear(now, then) if matrix else nn.LayerNorm(now) if step == "norm" else nn.Identity())
            now = then
        self.last = nn.Linear(now, width) if now != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for step, of in zip(self.steps, self.of, strict=True):
            match step:
                case "linear" | "wide" | "norm":
                    y = of(y)
                case "relu":
                    y = torch.relu(y)
                case "gelu":
                    y = F.gelu(y)
                case "softmax":
                    y = y.softmax(-1)
                case "scale":
                    y = y * 0.5
                case "add":
                    y = y + y.tanh()
        y = self.last(y)
        return x + y if self.residual else y


class Net(nn.Module):
    """Equal layers, or unlike ones, between two matrices."""

    def __init__(self, layers: list[tuple[tuple[str, ...], bool]], width: int, ends: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(ends, width), nn.Linear(width, ends)
        self.layers = nn.ModuleList(Layer(steps, width, residual) for steps, residual in layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """tightness: memory as a share of what the fastest plan takes."""

    seed: int
    program: Program
    gpus: int
    cluster: Cluster
    optimizer: str
    tightness: float
    strategies: int

    def store(self, *, folds: bool = True) -> Restricted:
        return Restricted(
            program=self.program, cluster=self.cluster, optimizer=self.optimizer, seed=self.seed, left=self.strategies, folds=folds
        )

    def search(self, store: Store, limit_bytes: int, **pins: Any) -> Search:
        return Search(
            program=self.program, gpus=self.gpus, cluster=self.cluster, memory_limit_bytes=limit_bytes, optimizer=self.optimizer,
            precision="fp32", pins=Pins(**pins), store=store,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The best step time, None if nothing fits; what it is; and the planner's bound. The planner's is that of the fastest plan that it
    found, its objective: what it takes may be a simpler one that ties with it (planner.ties)."""

    step_s: float | None
    what: str = ""
    bound_s: float = 0.0


def draw(seed: int) -> Problem:
    rng = random.Random(seed)
    width, ends, length = rng.choice((16, 32, 64)), rng.choice((8, 64, 256)), rng.choice((4, 16, 64))
    kinds = [(tuple(rng.choice(STEPS) for _ in range(rng.randint(1, 4))), rng.random() < 0.5) for _ in range(rng.choice((1, 1, 1, 2)))]
    layers = [kinds[k * len(kinds) // n] for n in [rng.randint(1, 4)] for k in range(n)]
    torch.manual_seed(seed)
    batch = rng.choice((4, 8, 12))
    inputs = {"x": torch.zeros(batch, length, ends), "y": torch.zeros(batch, length, ends)}
    program = capture(Net(layers, width, ends), inputs, check=False).program
    known = load_cluster(rng.choice(("dgx-a100", "dgx-h100", "pcie-box")))
    slower = rng.choice((1.0, 1e3, 1e4))  # so that small tensors take as long as large ones do
    gpu = dataclasses.replace(
        known.gpu, context_bytes=0, launch_s=rng.choice((0.0, known.gpu.launch_s)),
        memory_bandwidth_bytes_per_s=known.gpu.memory_bandwidth_bytes_per_s / slower,
        rates=tuple((name, rate / slower / rng.choice((1.0, 10.0))) for name, rate in known.gpu.rates),
    )  # fmt: skip
    return Problem(
        seed=seed, program=program, gpus=rng.choice((1, 1, 2, 2, 2, 3, 4, 4, 6, 8)), cluster=dataclasses.replace(known, gpu=gpu),
        optimizer=rng.choice(("adamw", "adamw", "sgd")), tightness=rng.uniform(0.45, 1.05), strategies=rng.choice((1, 4, 8)),
    )  # fmt: skip


@dataclass(kw_only=True)
class Restricted(Store):
    """What is known of a program whose operators have a few strategies on the tensor axis, drawn at random: `left` ways in all."""

    seed: int
    left: int

    def problem(self, axis: str, mesh: Mesh, body: Program, form: Form) -> AxisProblem:
        problem = super().problem(axis, mesh, body, Form(byte_s=form.byte_s))
        few = restricted(problem.choices, random.Random(f"{self.seed} {mesh.tp}"), self.left)
        if form.sequence is not None:
            raise Infeasible("the forms of transformers are not asked of these")
        return dataclasses.replace(problem, choices=few)


def restricted(found: Choices, rng: random.Random, left: int) -> Choices:
    groups: dict[str, Group] = dict(found.groups)
    for key in sorted(groups, key=lambda _: rng.random()):
        ss = groups[key].strategies
        kept = min(len(ss), left, rng.choice((1, 2, 2, 3)))
        left //= kept
        drawn = dict.fromkeys([ss[0], *sorted(ss[1:], key=lambda _: rng.random())])  # the first is whole on every rank, which always fits
        groups[key] = dataclasses.replace(groups[key], strategies=tuple(drawn)[:kept])
    return dataclasses.replace(found, groups=groups)


# ------------------------------------------------------------------------------------------------------------- the planner
def planned(problem: Problem, store: Store, limit_bytes: int, **pins: Any) -> Answer:
    search = problem.search(store, limit_bytes, **pins)
    try:
        plan = search.best()
    except Infeasible:
        return Answer(step_s=None)
    modes = [plan.modes[m].name for *_, m in plan.recompute]
    what = f"{plan.mesh} m={plan.micro_batches} rest={plan.rest} shard={plan.shard} cuts={plan.cuts} modes={modes}"
    return Answer(step_s=plan.objective_s, what=what, bound_s=plan.bound_s)


# ---------------------------------------------------------------------------------------------------------- the enumerator
def enumerated(problem: Problem, store: Restricted, limit_bytes: int) -> Answer:
    """The fastest of all plans that fit."""
    best_s, what = math.inf, ""
    search = problem.search(store, limit_bytes)
    batch = problem.program.batch_size or 1
    for pp, dp, tp in _meshes(problem.gpus, problem.cluster.gpus_per_node):
        for m in [m for m in range(1, batch // dp + 1) if batch // dp % m == 0] if batch % dp == 0 else []:
            mesh = Mesh(pp=pp, dp=dp, tp=tp)
            for name, rank in _ranks(store, mesh, m):
                points = itertools.product(search.space.schedules(mesh, m), search.space.rests(mesh))
                for (schedule, chunks), (rest, shard) in points:
                    choice = Choice(mesh=mesh, micro_batches=m, schedule=schedule, rest=rest, shard=shard, chunks=chunks)
                    estimator = search.estimator(rank, choice)
                    if isinstance(estimator, str):
                        continue
                    if m * sum(p.forward_s + p.backward_s for p in estimator.pieces) / pp >= best_s:
                        continue  # the busiest rank alone takes as long
                    for step_s, part in _parts(estimator):
                        if step_s >= best_s:
                            break
                        if max(s.memory.upper_bytes for s in candidate_of(estimator, part).stages) <= limit_bytes:
                            best_s = step_s
                            at = f"{mesh.sizes()} m={m} {choice.schedule} stages={choice.chunks} rest={rest.name} shard={shard}"
                            what = f"{at} cuts={part.cuts} modes={part.modes} {name}"
                            break
    return Answer(step_s=best_s if what else None, what=what)


def _meshes(gpus: int, per_node: int) -> Iterator[tuple[int, int, int]]:
    for pp, dp, tp in itertools.product(range(1, gpus + 1), repeat=3):
        if pp * dp * tp == gpus and tp <= per_node:
            yield pp, dp, tp


def _ranks(store: Restricted, mesh: Mesh, m: int) -> Iterator[tuple[str, Rank]]:
    """The program of a rank, for every assignment of the tensor axis."""
    known = store.whole(Mesh(pp=mesh.pp, dp=mesh.dp), m, store.program.batch_size)  # made for this split, not shared with others
    if isinstance(known, str):
        return
    if mesh.tp == 1:
        yield "", dataclasses.replace(known, mesh=mesh)
        return
    problem = store.problem("tp", mesh, known.moments.body, Form())
    groups = problem.choices.groups
    for combination in itertools.product(*(g.strategies for g in groups.values())):
        chosen = dict(zip(groups, combination, strict=True))
        if objective_of(problem, chosen.__getitem__) == math.inf:
            continue
        assignment = _assignment(problem, chosen)
        rank = store._priced(mesh, (mesh.dp, m), known.moments, known.data, (assignment,), known.outcomes, AUTOPAR)
        yield f"{sum(s.splits_work for s in combination)} operators split", rank


def _assignment(problem: AxisProblem, chosen: dict[str, Strategy]) -> Assignment:
    ops: dict[str, Strategy] = {}
    leaves: dict[str, Layout] = {}
    for key, group in problem.choices.groups.items():
        for member in group.members:
            if group.op is None:
                leaves[member] = chosen[key].outputs[0]
            else:
                ops[member] = chosen[key]
    return Assignment(axis="tp", n=problem.n, ops=ops, leaves=leaves)


def _parts(estimator: Estimator) -> list[tuple[float, Partition]]:
    """Every cut and every mode of each piece, the fastest first."""
    pieces, stages = estimator.pieces, estimator.flow.stages
    ways = math.comb(len(pieces) - 1, stages - 1) * math.prod(len(p.modes) for p in pieces)
    if ways > PLANS:
        raise TooMany(f"{ways} plans of one rank's program")
    found = []
    for cuts in itertools.combinations(range(1, len(pieces)), stages - 1):
        spans = itertools.pairwise((0, *cuts, len(pieces)))
        if stages > 1 and any(not any(p.trains for p in pieces[i:j]) for i, j in spans):
            continue
        for modes in itertools.product(*(range(len(p.modes)) for p in pieces)):
            part = Partition(cuts=cuts, modes=modes, outcome=UNSOLVED)
            found.append((estimator.times(part).step_s, part))
    return sorted(found, key=lambda x: x[0])


class TooMany(Exception):
    """More plans than are tried."""
