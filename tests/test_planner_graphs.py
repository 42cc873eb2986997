"""Graphs of choices: reduction, bound and solution beside brute force over every choice."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from autopar.errors import Infeasible
from autopar.planner.graphs import Graph, Use, solve_graph
from autopar.planner.graphs import solve as solver_of_graphs
from autopar.planner.graphs.bound import Dual
from autopar.planner.graphs.choice import Choice, decoded
from autopar.planner.graphs.linear import part_of
from autopar.planner.graphs.reduce import reduced
from autopar.planner.solver import OutOfBudget, solve
from benchmarks.iopddl import check, main, read

pytestmark = pytest.mark.pure


def random_graph(seed: int, nodes: int = 6, times: int = 6) -> Graph:
    """Small whole numbers; impossible strategies and pairs, equal costs, nodes without a choice, several spans of memory of one node."""
    random = numpy.random.default_rng(seed)
    sizes = [int(random.choice([1, 2, 3, 4])) for _ in range(nodes)]
    costs = [random.integers(0, 12, k).astype(float) for k in sizes]
    if random.random() < 0.5:
        for cost in costs:
            if len(cost) > 2 and random.random() < 0.3:
                cost[int(random.integers(len(cost)))] = numpy.inf
    uses = []
    for k in sizes:
        spans = []
        for _ in range(int(random.integers(0, 3))):
            start = int(random.integers(times - 1))
            stop = int(random.integers(start + 1, times + 1))
            spans.append(Use(start=start, stop=stop, bytes=random.integers(0, 9, k).astype(float)))
        uses.append(spans)
    edges = {}
    for u, v in itertools.combinations(range(nodes), 2):
        if random.random() < 0.4:
            shape = (sizes[u], sizes[v])
            kind = random.integers(4)
            cost = random.integers(0, 9, shape).astype(float)
            if kind == 0:  # the one follows the other
                cost[:] = numpy.inf
                cost[numpy.arange(sizes[u]), random.integers(0, sizes[v], sizes[u])] = 1.0
            elif kind == 1:
                cost[random.random(shape) < 0.3] = numpy.inf
            elif kind == 2:  # a sum of two
                cost = random.integers(0, 9, sizes[u])[:, None] + random.integers(0, 9, sizes[v]).astype(float)
            edges[u, v] = cost
    room = random.integers(8, 40, times).astype(float)
    return Graph(costs=costs, uses=uses, edges=edges, room=room)


def brute(graph: Graph) -> float:
    """The least cost, by trying everything; infinity where nothing fits."""
    best = float("inf")
    for chosen in itertools.product(*(range(len(c)) for c in graph.costs)):
        taken = numpy.zeros(len(graph.room))
        for v, i in enumerate(chosen):
            for use in graph.uses[v]:
                taken[use.start : use.stop] += use.bytes[i]
        if (taken <= graph.room).all():
            cost = sum(c[i] for c, i in zip(graph.costs, chosen))
            cost += sum(c[chosen[u], chosen[v]] for (u, v), c in graph.edges.items())
            best = min(best, float(cost))
    return best


def problems(count: int) -> list[tuple[int, Graph, float]]:
    return [(seed, graph, brute(graph)) for seed in range(count) for graph in [random_graph(seed)]]


PROBLEMS = problems(80)


def test_the_random_problems_are_of_every_kind() -> None:
    found = [best for _, _, best in PROBLEMS]
    assert sum(best == float("inf") for best in found) > 10
    assert sum(best < float("inf") for best in found) > 40
    tight = [g for _, g, b in PROBLEMS if b < float("inf") and b > brute(Graph(costs=g.costs, uses=[[]] * 6, edges=g.edges, room=g.room))]
    assert len(tight) > 12  # where memory costs something


def test_a_reduction_keeps_the_least_cost_and_leads_back_to_it() -> None:
    smaller = 0
    for seed, graph, best in PROBLEMS:
        try:
            less = reduced(graph)
        except Infeasible:
            assert best == float("inf"), seed
            continue
        assert brute(less.graph) + less.constant == pytest.approx(best), seed
        smaller += len(less.graph.costs) < len(graph.costs)
        for chosen in itertools.islice(itertools.product(*(range(len(c)) for c in less.graph.costs)), 50):
            cost = less.graph.cost(chosen)
            if cost < float("inf") and less.graph.lacking(chosen) <= 0:
                full = less.restored(chosen)
                assert graph.cost(full) == pytest.approx(cost + less.constant), seed
                assert graph.lacking(full) <= 1e-9, seed
    assert smaller > 40


def test_the_bound_holds_for_any_prices_and_messages() -> None:
    random = numpy.random.default_rng(1)
    for seed, graph, best in PROBLEMS[:80]:
        if best == float("inf"):
            continue
        try:
            less = reduced(graph)
        except Infeasible:
            continue
        dual, best = Dual(less.graph), best - less.constant
        if not dual.count:
            continue
        dual.messages[:] = random.normal(0, 3, len(dual.messages))
        dual.prices[:] = random.random(len(dual.prices)) * 5
        assert dual.bound_now(dual.costs()) <= best + 1e-9, seed
        dual.improve(40)
        assert dual.bound <= best + 1e-6, seed


def test_a_solution_fits_costs_what_is_said_and_its_bound_holds() -> None:
    exact = solved = 0
    for seed, graph, best in PROBLEMS:
        try:
            found = solve_graph(graph, rounds=60, programs=6)
        except Infeasible:
            assert best == float("inf"), seed
            continue
        except OutOfBudget:
            continue
        assert graph.lacking(found.chosen) <= 1e-9, seed
        assert graph.cost(found.chosen) == pytest.approx(found.cost), seed
        assert found.cost >= best - 1e-9 and found.bound <= best + 1e-6, seed
        solved += 1
        exact += found.cost <= best + 1e-6
    feasible = sum(best < float("inf") for *_, best in PROBLEMS)
    assert solved >= 0.95 * feasible and exact >= 0.95 * feasible


def test_the_program_of_all_nodes_is_the_graph() -> None:
    for seed, graph, best in PROBLEMS[:60]:
        if best == float("inf"):
            continue
        choice = next(c for c in map(_choice(graph), itertools.product(*(range(len(c)) for c in graph.costs))) if c is not None)
        every = {v: numpy.arange(len(c)) for v, c in enumerate(graph.costs)}
        part = part_of(choice, tuple(every), every, 1.0)
        assert part.now == pytest.approx(choice.cost()), seed
        assert solve(part.linear, gap=0.0).outcome.objective == pytest.approx(best), seed


def _choice(graph: Graph) -> Callable[[tuple[int, ...]], Choice | None]:
    def made(chosen: tuple[int, ...]) -> Choice | None:
        if graph.cost(chosen) == float("inf") or graph.lacking(chosen) > 0:
            return None
        choice = Choice(graph)
        for v, i in enumerate(chosen):
            choice.put(v, i)
        return choice

    return made


def test_a_program_of_some_nodes_leaves_the_others_as_they_are() -> None:
    graph = next(g for _, g, b in PROBLEMS if b < float("inf") and len(g.edges) > 8)
    choice = next(c for c in map(_choice(graph), itertools.product(*(range(len(c)) for c in graph.costs))) if c is not None)
    before = choice.chosen.copy()
    every = {v: numpy.arange(len(c)) for v, c in enumerate(graph.costs)}
    part = part_of(choice, (1, 2, 3), every, 1.0)
    assert (choice.chosen == before).all()
    chosen = part.chosen(solve(part.linear, gap=0.0).values)
    after = [chosen.get(v, int(i)) for v, i in enumerate(before)]
    best = min(
        graph.cost(trial)
        for trial in itertools.product(*(range(len(c)) if v in (1, 2, 3) else [int(before[v])] for v, c in enumerate(graph.costs)))
        if graph.lacking(trial) <= 0
    )
    assert graph.cost(after) == pytest.approx(best) and graph.lacking(after) <= 0


def chain(length: int) -> Graph:
    """Longer than a neighbourhood; every tenth node takes memory, and there is enough for about half of the fast strategies."""
    random = numpy.random.default_rng(7)
    costs = [random.integers(1, 50, 6).astype(float) for _ in range(length)]
    spans = [(v, min(length, v + 40)) if v % 10 == 0 else None for v in range(length)]
    uses = [[Use(start=s[0], stop=s[1], bytes=random.integers(0, 100, 6).astype(float))] if s else [] for s in spans]
    edges = {(v, w): random.integers(0, 40, (6, 6)).astype(float) for v in range(length) for w in (v + 1, v + 3) if w < length}
    return Graph(costs=costs, uses=uses, edges=edges, room=numpy.full(length, 170.0))


def test_neighbourhoods_improve_a_large_graph_and_the_answer_is_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_of_graphs, "OPEN", 16)
    monkeypatch.setattr(solver_of_graphs, "MOST", 16)
    monkeypatch.setattr(solver_of_graphs, "WHOLE", 0)
    graph = chain(150)
    first = solve_graph(graph, rounds=10, programs=0)
    found = solve_graph(graph, rounds=10, programs=6)
    assert graph.lacking(found.chosen) <= 1e-9
    assert found.cost < first.cost and found.bound == pytest.approx(first.bound)
    assert found.programs == 6 and not found.stopped and found.bound < found.cost
    assert solve_graph(graph, rounds=10, programs=6) == found


def test_a_stop_is_said() -> None:
    found = solve_graph(chain(150), rounds=60, stop=lambda _: True)
    assert found.stopped and found.rounds < 60 and found.bound <= found.cost


def test_no_room_is_infeasible_and_says_where() -> None:
    use = Use(start=1, stop=3, bytes=numpy.array([5.0, 7.0]))
    graph = Graph(costs=[numpy.zeros(2)] * 2, uses=[[use], [use]], edges={}, room=numpy.array([9.0, 10.0, 8.0]))
    with pytest.raises(Infeasible, match="at time 2 .* need 2 bytes more"):
        solve_graph(graph)


def test_a_graph_whose_parts_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="edge 0-1: a cost of shape"):
        Graph(costs=[numpy.zeros(2)] * 2, uses=[[], []], edges={(0, 1): numpy.zeros((2, 3))}, room=numpy.zeros(0))
    with pytest.raises(ValueError, match="node 0: a use of memory"):
        Graph(costs=[numpy.zeros(2)], uses=[[Use(start=0, stop=2, bytes=numpy.zeros(2))]], edges={}, room=numpy.zeros(1))


PROBLEM = {
    "name": "toy",
    "usage_limit": 10,
    "nodes": {"intervals": [[0, 3], [1, 4], [2, 2]], "costs": [[5, 1], [4, 2, 9], [3]], "usages": [[2, 8], [1, 6, 0], [100]]},
    "edges": {"nodes": [[0, 1], [1, 0]], "costs": [[0, 1, 2, 3, 1e18, 5], [0, 2, 2, 1, 1, 1]]},
}


def test_the_contest_is_read_solved_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "toy.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"problem": PROBLEM}).encode()))
    graph, problem = read(path)
    assert graph.edges[0, 1].tolist() == [[0, 3, 3], [5, float("inf"), 6]]  # both edges of the pair, the second one turned
    assert solve_graph(graph).chosen == (0, 0, 0) and check(problem, (0, 1, 0)) == 5 + 2 + 3 + 3
    with pytest.raises(ValueError, match="impossible"):
        check(problem, (1, 1, 0))
    problem["usage_limit"] = 7
    with pytest.raises(ValueError, match="at time 1 the choice takes 8"):
        check(problem, (0, 1, 0))
    assert main(["--data", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["problems"][0]
    assert (record["problem"], record["cost"], record["best_known"], record["gap"]) == ("toy", 12.0, None, pytest.approx(0.0, abs=1e-4))


def test_the_benchmark_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path), "--problem", "B"]) == 2
    assert "there is no B" in capsys.readouterr().err


def test_a_decoded_choice_says_whether_it_fits() -> None:
    graph = chain(120)
    for room in (100.0, 170.0, 400.0):
        graph = Graph(costs=graph.costs, uses=graph.uses, edges=graph.edges, room=numpy.full(120, room))
        dual = Dual(graph)
        dual.improve(30)
        for backward in (False, True):
            choice = decoded(dual, backward=backward)
            assert choice.fits == (graph.lacking(choice.chosen.tolist()) <= 1.0)
            assert choice.fits or room < 400.0  # there is enough for all
