"""The integer program of one axis finds what trying everything finds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.catalog import needs_transition, strategies_of
from autopar.errors import Infeasible
from autopar.ir import I, Layout, Program, R, S, Strategy, refs
from autopar.measure import Pricer
from autopar.planner import axis
from autopar.planner.axis import AxisModel, AxisProblem, AxisSolution, AxisSolver, objective_of, solve_axis, stated
from autopar.planner.choices import Choices, Group, choices
from autopar.planner.moments import batched_inputs
from autopar.planner.partition import UNSOLVED
from autopar.planner.problems import axis_leaves, axis_problem
from autopar.planner.search import AS_ONE_OF_MANY
from autopar.planner.shard import Assignment, view_of
from autopar.planner.solved import Solved, restricted
from autopar.planner.space import Form, Mesh
from autopar.planner.store import Store
from cost_models.cluster import load_cluster
from tests.planner_programs import Mlp, program_of

pytestmark = pytest.mark.pure

COMBINATIONS = 1000


@pytest.fixture
def cheap_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a group are computed once, so that thousands of combinations take a second."""
    known: dict[tuple[int, str, Strategy], tuple[float, float]] = {}
    changes: dict[tuple[object, ...], float | None] = {}
    whole, change = axis._costs, axis.change_cost

    def costs(problem: AxisProblem, group: Group, s: Strategy) -> tuple[float, float]:
        key = (id(problem), group.key, s)
        if key not in known:
            known[key] = whole(problem, group, s)
        return known[key]

    def change_cost(problem: AxisProblem, have: Layout, want: Layout, t: object, times: int) -> float | None:
        key = (id(problem), have, want, t, times)
        if key not in changes:
            changes[key] = change(problem, have, want, t, times)  # type: ignore[arg-type]
        return changes[key]

    monkeypatch.setattr(axis, "_costs", costs)
    monkeypatch.setattr(axis, "change_cost", change_cost)


def test_gradients_are_priced_as_they_are_sent() -> None:
    """In bfloat16 half as many bytes of a float32 parameter's gradient travel, over the axis itself and over the data axis."""
    program = program_of("stack")
    pricer = Pricer(load_cluster("dgx-a100"), {"pp": 1, "dp": 2, "tp": 2})
    full, none, half = (axis_problem(program, "tp", 2, pricer, "adamw", {}, reduced_itemsize=item) for item in (4, None, 2))
    for key, group in full.choices.groups.items():
        if group.op is not None or key not in full.params:
            continue
        t = group.outs[0]
        for s in group.strategies:
            costs = [axis.group_cost(problem, problem.choices.groups[key], s) for problem in (full, none, half)]
            assert costs[0] == costs[1], "nothing else is said than that they are sent as they rest"
            here = t.nbytes * group.times // (2 if s.outputs[0].is_shard else 1)
            saved = pricer.bucketed_s("all_reduce", 1.0, "dp") * here / 2
            if s.outputs[0] == R:
                whole = t.nbytes * group.times
                saved += pricer.bucketed_s("all_reduce", whole, "tp") - pricer.bucketed_s("all_reduce", whole / 2, "tp")
            assert costs[1] - costs[2] == pytest.approx(saved, rel=1e-6, abs=1e-15)


def test_a_price_of_bytes_is_no_time_of_the_device() -> None:
    """Where the host outlasts the device it does so at any price of memory: a price adds what is kept times it, and hides no launch."""
    free = _problem("attention", "dgx-a100", 2)
    groups = free.choices.groups
    host = sum(axis.group_host(free, g) for g in groups.values())
    for seed in range(20):
        rng = random.Random(seed)
        drawn = {key: rng.choice(g.strategies) for key, g in groups.items()}
        plain = objective_of(free, drawn.__getitem__)
        if plain == math.inf:
            continue
        device = sum(axis.group_cost(free, g, drawn[key]) for key, g in groups.items() if g.op is not None)
        assert host > 1.1 * device, "a toy's launches outlast its kernels"
        priced = [dataclasses.replace(free, memory_price_s_per_byte=price) for price in (1e-9, 1e-7, 1e-5)]
        found = [objective_of(problem, drawn.__getitem__) - plain for problem in priced]
        assert found[0] > 0 and found[1:] == [pytest.approx(100 * found[0]), pytest.approx(10_000 * found[0])]


def _problem(name: str, cluster: str, n: int, *, data: bool = False, **prices: float | bool) -> AxisProblem:
    program = program_of(name)
    batched = batched_inputs(program)
    if data:
        leaves: dict[str, tuple[Layout, ...]] = {x.value: (S(0),) if x.value in batched else (R,) for x in program.inputs}
        leaves |= {p.value: (R, I) for p in (*program.params, *program.buffers)}
        made = choices(program, n, leaves, data=True)
    else:
        made = choices(program, n, {x.value: (I,) for x in program.inputs}, batched=batched)
    return AxisProblem(
        axis="tp", n=n, choices=made, pricer=Pricer(load_cluster(cluster), {"pp": 1, "dp": 1, "tp": n}),
        params=frozenset(p.value for p in program.params), fixed=frozenset(b.value for b in program.buffers if b.mutated), **prices,
    )  # fmt: skip


def _restricted(problem: AxisProblem, rng: random.Random) -> AxisProblem:
    """The problem with some strategies of each group, drawn so that there are at most COMBINATIONS of them."""
    groups = dict(problem.choices.groups)
    left = COMBINATIONS
    for key in rng.sample(list(groups), len(groups)):
        ss = groups[key].strategies
        kept = min(len(ss), left, rng.choice((1, 2, 2, 3, 4)))
        left //= kept
        first = ss[:1] if rng.random() < 0.7 else ()
        drawn = dict.fromkeys([*first, *rng.sample(ss, len(ss))])
        groups[key] = dataclasses.replace(groups[key], strategies=tuple(drawn)[:kept])
    return dataclasses.replace(problem, choices=Choices(groups=groups, edges=problem.choices.edges, loss=problem.choices.loss))


def _brute(problem: AxisProblem) -> float:
    groups = problem.choices.groups
    best = math.inf
    for combination in itertools.product(*(g.strategies for g in groups.values())):
        chosen = dict(zip(groups, combination, strict=True))
        best = min(best, objective_of(problem, chosen.__getitem__))
    return best


def _chooser(problem: AxisProblem, solution: AxisSolution) -> Callable[[str], Strategy]:
    def chosen(key: str) -> Strategy:
        member = problem.choices.groups[key].members[0]
        known = solution.assignment.ops.get(member)
        return known if known is not None else Strategy(inputs=(), outputs=(solution.assignment.leaves[member],))

    return chosen


CASES = [
    ("mlp", "dgx-a100", 2, {}),
    ("mlp", "dgx-h100", 4, {"memory_price_s_per_byte": 1e-9, "state_price_s_per_byte": 1e-8}),
    ("mlp", "cpu", 2, {"work_first": True}),
    ("mlp", "dgx-a100", 4, {"data": True, "sync_params": False, "work_first": True}),
    ("wide", "dgx-a100", 3, {"state_price_s_per_byte": 1e-11}),
    ("attention", "dgx-a100", 2, {}),
    ("attention", "pcie-box", 4, {"memory_price_s_per_byte": 1e-8}),
    ("attention", "cpu", 2, {"data": True, "sync_params": False}),
    ("tied", "dgx-a100", 2, {"state_price_s_per_byte": 1e-8}),
    ("tied", "cpu", 4, {"work_first": True}),
    ("stack", "dgx-h100", 2, {"state_price_s_per_byte": 1e-7}),
    ("normed", "dgx-a100", 2, {"memory_price_s_per_byte": 1e-8}),
    ("normed", "dgx-a100", 2, {"data": True, "sync_params": False, "work_first": True}),
]


@pytest.mark.parametrize("name,cluster,n,prices", CASES)
def test_the_optimum_is_that_of_trying_everything(name: str, cluster: str, n: int, prices: dict, cheap_costs: None) -> None:
    whole = _problem(name, cluster, n, **prices)
    for seed in range(3):
        problem = _restricted(whole, random.Random(f"{name} {cluster} {n} {seed}"))
        best = _brute(problem)
        if best == math.inf:
            with pytest.raises(Infeasible):
                solve_axis(problem, gap=0.0)
            continue
        solution = solve_axis(problem, gap=0.0)
        assert solution.outcome.objective == pytest.approx(best, rel=1e-6)
        assert objective_of(problem, _chooser(problem, solution)) == pytest.approx(best, rel=1e-6)
        assert solution.outcome.bound <= best * (1 + 1e-6)


@pytest.mark.parametrize("name,cluster,n,prices", CASES[::2])
def test_the_objective_is_that_of_the_answer(name: str, cluster: str, n: int, prices: dict, cheap_costs: None) -> None:
    """On the unrestricted space: what the solver reports is what its choices cost, and no worse than doing all work on all ranks."""
    problem = _problem(name, cluster, n, **prices)
    solution = solve_axis(problem, gap=1e-4)
    mine = objective_of(problem, _chooser(problem, solution))
    assert solution.outcome.objective == pytest.approx(mine, rel=1e-6)
    assert solution.outcome.bound <= mine * (1 + 1e-6) and 0 <= solution.outcome.gap <= 1e-3
    rng = random.Random(0)
    groups = problem.choices.groups
    for _ in range(200):
        drawn = {key: rng.choice(g.strategies) for key, g in groups.items()}
        assert objective_of(problem, drawn.__getitem__) >= mine * (1 - 2e-4)


@pytest.mark.parametrize("name,cluster,n,prices", CASES)
def test_at_other_prices_the_program_is_the_one_that_is_built_anew(name: str, cluster: str, n: int, prices: dict) -> None:
    first = _problem(name, cluster, n, **prices)
    model = AxisModel(first)
    for memory, state, sync in ((1e-9, 3e-9, 0.0), (0.0, 0.0, 0.0), (2e-7, 1e-10, 5e-9)):
        problem = dataclasses.replace(
            first, memory_price_s_per_byte=memory, state_price_s_per_byte=state, sync_price_s_per_byte=sync
        )  # fmt: skip
        solver, anew = AxisSolver(problem, model), AxisModel(problem)
        assert solver.model.linear == anew.linear
        assert (solver.model.x, solver.model.ahead) == (anew.x, anew.ahead)
        assert solver.linear.indices is model.linear.indices, "its rows are those of the first"


@pytest.mark.parametrize(
    "change", [{"n": 4}, {"sequence_parallel": False}, {"work_first": True}, {"sync_params": False}, {"fixed": frozenset({"x"})}], ids=str
)
def test_a_problem_that_differs_in_more_than_prices_is_built_anew(change: dict) -> None:
    first = _problem("attention", "dgx-a100", 2)
    problem = dataclasses.replace(first, memory_price_s_per_byte=1e-9, **change)
    assert AxisSolver(problem, AxisModel(first)).linear == AxisModel(problem).linear


def test_a_fixed_value_never_changes_its_layout() -> None:
    """Running statistics are written where they rest: whatever reads them takes them as they lie."""
    problem = _problem("normed", "dgx-a100", 2)
    assert problem.fixed
    solution = solve_axis(problem)
    program = program_of("normed")
    for op in program.ops:
        for r, want in zip(refs(op), solution.assignment.ops[op.name].inputs, strict=True):
            assert r not in problem.fixed or not needs_transition(solution.assignment.leaves[r], want, program.types[r])


def test_strategies_of_one_size_fit_another_only_where_it_divides() -> None:
    """Every operator of 8 samples cut into 4 parts: of 16 samples too, of 6 not."""

    def of(samples: int) -> Program:
        return capture(Mlp(), {"x": torch.ones(samples, 8), "y": torch.zeros(samples, 8)}).program

    ops: dict[str, Strategy] = {}
    for op in of(8).ops:
        stated = strategies_of(view_of(of(8), op, 4))
        ops[op.name] = next(s for s in stated if s.inputs[0] == S(0) and s.splits_work)
    assignment = Assignment(axis="tp", n=4, ops=ops, leaves={x.value: I for x in of(8).leaves})
    known = Solved(of(8), assignment, UNSOLVED)
    assert [restricted(known, of(samples)) for samples in (8, 16, 6)] == [assignment, assignment, None]


class Tokens(nn.Module):
    """A layer over the tokens of all samples, as one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x.reshape(-1, 8))).reshape(x.shape).sum()


@pytest.mark.parametrize("samples", [8, 16, 6, 2])
def test_tokens_that_are_cut_in_each_sample_are_so_of_any_number_of_samples(samples: int) -> None:
    """6 tokens of each of 8 samples in 2 parts: cut in 8 segments where they are one dim, in as many as there are samples elsewhere."""

    def of(samples: int) -> Program:
        return capture(Tokens(), {"x": torch.ones(samples, 6, 8)}).program

    def cut(program: Program) -> Assignment:
        lies: dict[str, Layout] = {program.inputs[0].value: S(1)}
        ops: dict[str, Strategy] = {}
        for op in program.ops:
            stated = strategies_of(view_of(program, op, 2, frozenset({1, program.batch_size or 1})))
            ops[op.name] = next(s for s in stated if s.splits_work and s.inputs[0] == lies[refs(op)[0]])
            lies[op.name] = ops[op.name].outputs[0]
        leaves = {x.value: lies.get(x.value, R) for x in program.leaves}
        return Assignment(axis="tp", n=2, ops=ops, leaves=leaves)

    known = cut(of(8))
    assert S(0, 8) in {x for s in known.ops.values() for x in s.outputs}
    assert restricted(Solved(of(8), known, UNSOLVED), of(samples)) == cut(of(samples))
    other_width = capture(Tokens(), {"x": torch.ones(samples, 5, 8)}).program
    assert restricted(Solved(of(8), known, UNSOLVED), other_width) is None, "5 tokens are not cut in two"


def test_a_micro_batch_takes_the_assignment_of_a_whole_batch() -> None:
    """What the whole batch makes of its inputs alone is given to a micro-batch: as a leaf, which lies as it may. The rest stays, every
    change of layout can be made, and what is found so is as good as what is solved."""
    mesh, form = Mesh(pp=1, dp=1, tp=2), Form()

    def store() -> Store:
        return Store(program=program_of("masked"), cluster=load_cluster("dgx-a100"), optimizer="adamw")

    def body(of: Store, count: int) -> Program:
        moments = of.moments(1, count)
        assert not isinstance(moments, str)
        return moments.body

    shared, alone = store(), store()
    whole, part = body(shared, 1), body(shared, 2)
    made = {x.value for x in part.leaves} - {x.value for x in whole.leaves}
    assert made and {op.name for op in part.ops} < {op.name for op in whole.ops}
    of_whole = shared.on_axis("tp", mesh, whole, form).assignment
    of_part = shared.on_axis("tp", mesh, part, form).assignment
    assert of_part.ops == {op.name: of_whole.ops[op.name] for op in part.ops}
    assert set(of_part.leaves) == {x.value for x in part.leaves} and all(of_part.leaves[v] == I for v in made)
    taken, may = restricted(Solved(whole, of_whole, UNSOLVED), part), axis_leaves(part, "tp", mesh.tp)
    assert taken is not None and all(taken.leaves[v] in may.get(v, (I,)) for v in taken.leaves)
    problem = alone.problem("tp", mesh, body(alone, 2), form)
    own = alone.on_axis("tp", mesh, body(alone, 2), form).assignment
    assert objective_of(problem, stated(problem, of_part)) == pytest.approx(objective_of(problem, stated(problem, own)), rel=0.01)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_micro_batch_whose_loss_is_another_operator_takes_the_rest(dp: int) -> None:
    """The mean over a micro-batch is one of a part, divided: both take what they read as it lies."""
    mesh = Mesh(pp=1, dp=dp, tp=2)
    store = Store(program=program_of("mlp"), cluster=load_cluster("dgx-a100"), optimizer="adamw")
    bodies = []
    for count in (1, 2):
        moments = store.moments(dp, count)
        assert not isinstance(moments, str)
        bodies.append(moments.body)
    whole, part = bodies
    named = {op.name: op.target for op in whole.ops}
    others = [op for op in part.ops if named.get(op.name) != op.target]
    assert others and all(not part.types[op.outputs[0] or ""].shape for op in others)
    of_whole = store.on_axis("tp", mesh, whole, Form()).assignment
    of_part = store.on_axis("tp", mesh, part, Form()).assignment
    lie = dict(of_part.leaves)
    for op in part.ops:
        s = of_part.ops[op.name]
        if op in others:
            pairs = zip(refs(op), s.inputs, strict=True)
            assert not any(needs_transition(lie[r], want, part.types[r]) for r, want in pairs)
        else:
            assert s == of_whole.ops[op.name]
        lie |= zip((o for o in op.outputs if o is not None), s.outputs, strict=True)


SIZES = {"stack": (1, 2, 4, 8), "deep": (1, 2, 3, 4, 6, 12), "masked": (1, 2, 4, 8), "wide": (1, 2, 4, 12, 48)}


@pytest.mark.parametrize("cluster", ["dgx-a100", "pcie-box", "cpu"])
@pytest.mark.parametrize("name", SIZES)
def test_every_size_of_micro_batch_has_an_assignment_that_is_the_best_for_it(name: str, cluster: str) -> None:
    """Asked after others, whose assignments are tried first, within the gap of what it is asked alone; and no sample is cheaper in a
    smaller one, in which choices are compared before they are priced."""
    mesh, shared = Mesh(pp=1, dp=1, tp=2), Store(program=program_of(name), cluster=load_cluster(cluster), optimizer="adamw")
    costs: dict[int, float] = {}
    for count in SIZES[name]:
        moments = shared.moments(1, count)
        if isinstance(moments, str):
            continue
        problem = shared.problem("tp", mesh, moments.body, Form())
        found = shared.on_axis("tp", mesh, moments.body)
        alone = solve_axis(problem, gap=1e-4).outcome
        size = moments.body.batch_size or 1
        costs[size] = objective_of(problem, stated(problem, found.assignment))
        assert costs[size] <= alone.objective * (1 + 5e-3) and found.outcome.bound <= alone.objective * (1 + 1e-6)
    assert len(costs) > 1
    for (small, cost), (large, other) in itertools.pairwise(sorted(costs.items())):
        assert cost / small >= AS_ONE_OF_MANY * other / large


def test_each_form_of_the_tensor_axis_has_an_assignment_of_its_own() -> None:
    """Asked one after the other, they are what each is by itself."""
    mesh = Mesh(pp=1, dp=1, tp=2)

    def store() -> Store:
        return Store(program=program_of("stack"), cluster=load_cluster("dgx-a100"), optimizer="adamw")

    def assigned(where: Store, sequence: bool | None) -> Assignment:
        moments = where.moments(1, 1)
        assert not isinstance(moments, str)
        return where.on_axis("tp", mesh, moments.body, Form(sequence=sequence)).assignment

    shared = store()
    found = {sequence: assigned(shared, sequence) for sequence in (None, True, False)}
    assert found == {sequence: assigned(store(), sequence) for sequence in found} and found[True] != found[False]
