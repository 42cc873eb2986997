"""Graph -> a choice with its cost, a proven bound and the gap between them.

    reduce     exactly, to a smaller graph                                          reduce.py
    bound      prices of memory and messages between neighbours                     bound.py
    decode     a first choice from prices and messages                              choice.py
    improve    integer programs of neighbourhoods, the whole graph where it is small linear.py

Budgets are rounds and programs; the same graph has the same answer on a busy machine. `stop` is for people in a hurry: it is told how
many seconds the next step may take, as the longest one did, and what it cuts off is said.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from autopar.errors import Infeasible
from autopar.planner.graphs.bound import Dual
from autopar.planner.graphs.choice import Choice, decoded
from autopar.planner.graphs.graph import Array, Graph, Ints
from autopar.planner.graphs.linear import Part, part_of
from autopar.planner.graphs.reduce import reduced
from autopar.planner.solver import OutOfBudget, solve

__all__ = ["Found", "solve_graph"]

ROUNDS = 300  # of messages and prices
STRETCH = 50  # rounds between two looks at what they decode to
PROGRAMS = 60  # of neighbourhoods
NODES = 5  # of the search tree of one of them
OPEN, LEAST, MOST = 60, 20, 800  # nodes that a neighbourhood decides: at first; after a program that was not solved half as many, else more
MORE = 1.5
ALLOWED = 4  # strategies of each: the best by prices and messages
WHOLE = 600  # strategies of a graph that is solved at once
WHOLE_NODES = 200  # of its search tree
UNIT = 1e6  # of costs in a program: the whole choice's
MARGIN = 1e-6  # of a room: the solver's tolerance
GAP = 1e-4  # proven, at which it is done


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """chosen: a strategy of each node; cost, bound: of the given graph, gap = (cost - bound) / cost. nodes: what the reduction left.
    stopped: whether `stop` ended it before its budgets did."""

    chosen: tuple[int, ...]
    cost: float
    bound: float
    gap: float
    nodes: int
    strategies: int
    rounds: int
    programs: int
    stopped: bool


def solve_graph(
    graph: Graph, *, gap: float = GAP, rounds: int = ROUNDS, programs: int = PROGRAMS, stop: Callable[[float], bool] = lambda _: False
) -> Found:
    """A choice that fits, and a bound. Infeasible where there is proven to be none, OutOfBudget where none was found."""
    less = reduced(graph)
    work = _Work(less.graph, less.constant, gap, stop)
    work.relax(rounds)
    if work.small and not work.done:
        work.whole()
    work.neighbourhoods(programs)
    if work.best is None:
        raise OutOfBudget(f"no choice was found that fits the memory ({len(less.graph.costs)} nodes)", work.bound)
    chosen = tuple(less.restored(work.best.tolist()))
    cost = graph.cost(chosen)
    bound = min(work.bound, cost)
    return Found(
        chosen=chosen, cost=cost, bound=bound, gap=(cost - bound) / abs(cost) if cost else 0.0, nodes=len(less.graph.costs),
        strategies=sum(map(len, less.graph.costs)), rounds=work.dual.rounds, programs=work.programs, stopped=work.stopped,
    )  # fmt: skip


class _Work:
    """The search: the best choice so far, and the bound."""

    def __init__(self, graph: Graph, constant: float, gap: float, stop: Callable[[float], bool]) -> None:
        self.graph, self.constant, self.gap, self.stop = graph, constant, gap, stop
        self.dual = Dual(graph)
        self.best: Ints | None = None
        self.cost = numpy.inf
        self.bound = -numpy.inf
        self.programs = 0
        self.open = OPEN
        self.stopped = False
        self._step_s, self._at_s = 0.0, time.perf_counter()

    @property
    def small(self) -> bool:
        return sum(map(len, self.graph.costs)) <= WHOLE

    @property
    def done(self) -> bool:
        if self.best is not None and self.cost - self.bound <= self.gap * abs(self.cost):
            return True
        now_s = time.perf_counter()
        self._step_s, self._at_s = max(self._step_s, now_s - self._at_s), now_s
        self.stopped = self.stopped or self.stop(self._step_s)
        return self.stopped

    def take(self, choice: Choice) -> bool:
        cost = choice.cost() + self.constant
        if not choice.fits or cost >= self.cost:
            return False
        self.best, self.cost = choice.chosen.copy(), cost
        return True

    def relax(self, rounds: int) -> None:
        while self.dual.rounds < rounds:
            self.dual.improve(min(STRETCH, rounds - self.dual.rounds))
            self.bound = max(self.bound, self.dual.bound + self.constant)
            if self.best is None or 2 * self.dual.rounds >= rounds:
                for backward in (False, True):
                    self.take(decoded(self.dual, backward=backward))
            if self.done:
                return

    # --------------------------------------------------------------------------------------------------------- programs
    def now(self) -> Choice:
        choice = Choice(self.graph)
        assert self.best is not None
        for v, i in enumerate(self.best.tolist()):
            choice.put(v, i)
        return choice

    def whole(self) -> None:
        """The graph at once, which proves what messages cannot."""
        if self.best is None:
            return
        every = {v: numpy.arange(len(c)) for v, c in enumerate(self.graph.costs)}
        choice = self.now()
        unit = max(1e-300, abs(self.cost)) / UNIT
        part = part_of(choice, tuple(every), every, unit)
        found = self._solved(choice, part, gap=self.gap, nodes=WHOLE_NODES)
        if found is not None:
            self.bound = max(self.bound, min(found * unit + self.constant, self.cost))

    def _solved(self, choice: Choice, part: Part, *, gap: float, nodes: int) -> float | None:
        """Takes the program's answer if that is better; its bound, in its unit."""
        self.programs += 1
        try:
            solution = solve(part.linear, gap=gap, nodes=nodes)
        except (Infeasible, OutOfBudget):
            self.open = max(LEAST, self.open // 2)
            return None
        solved = solution.outcome.status == "solved"
        self.open = min(MOST, int(MORE * self.open)) if solved else max(LEAST, self.open // 2)
        for v, i in part.chosen(solution.values).items():
            choice.lift(v)
            choice.put(v, i)
        self.take(choice)
        return solution.outcome.bound

    def neighbourhoods(self, programs: int) -> None:
        """Programs of nodes that the bound says are dearer than they need be, and of those around them."""
        if self.best is None or not len(self.graph.costs):
            return
        excess = self.dual.excess()
        of_node = [excess[a:b] for a, b in zip(self.dual.first, self.dual.first[1:])]
        allowed = {v: numpy.argsort(e, kind="stable")[:ALLOWED] for v, e in enumerate(of_node)}
        random = numpy.random.default_rng(0)
        ways = (self._around, self._between, self._dearest)
        for k in range(programs):
            if self.done:
                return
            choice = self.now()
            dear = numpy.array([max(0.0, float(e[i])) for e, i in zip(of_node, self.best.tolist())])
            if not dear.any():
                return
            nodes = ways[k % len(ways)](choice, dear / dear.sum(), random)
            unit = max(1e-300, abs(self.cost)) / UNIT
            part = part_of(choice, nodes, allowed, unit, margin=MARGIN)
            self._solved(choice, part, gap=min(0.01, self.gap / 10 * UNIT / max(1.0, abs(part.now))), nodes=NODES)

    def _around(self, choice: Choice, dear: Array, random: numpy.random.Generator) -> list[int]:
        """Those nearest to a dear one."""
        first = int(random.choice(len(dear), p=dear))
        found, queue = {first}, deque([first])
        while queue and len(found) < self.open:
            for u, _ in choice.beside[queue.popleft()]:
                if u not in found:
                    found.add(u)
                    queue.append(u)
        return sorted(found)

    def _between(self, choice: Choice, dear: Array, random: numpy.random.Generator) -> list[int]:
        """Those next in order around a dear stretch, which share times."""
        first = int(random.choice(len(dear), p=dear))
        start = max(0, min(first - self.open // 2, len(dear) - self.open))
        return list(range(start, min(len(dear), start + self.open)))

    def _dearest(self, choice: Choice, dear: Array, random: numpy.random.Generator) -> list[int]:
        """Dear ones anywhere, each with its neighbours."""
        order = numpy.argsort(-dear * random.random(len(dear)), kind="stable")[: self.open // 6].tolist()
        found = dict.fromkeys(v for v in order if dear[v] > 0)
        for v in list(found):
            found |= dict.fromkeys(u for u, _ in choice.beside[v])
        return sorted(list(found)[: self.open])
