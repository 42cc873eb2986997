"""A choice for a graph that fits, made node after node and improved one node at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy

from autopar.planner.graphs.bound import Dual
from autopar.planner.graphs.graph import Array, Bools, Graph, Ints

__all__ = ["Choice", "decoded"]

SWEEPS = 5


class Choice:
    """chosen: a strategy of each node, -1 where it is open; left: bytes that are left at each time."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.chosen: Ints = numpy.full(len(graph.costs), -1)
        self.left = graph.room.copy()
        self.beside: list[list[tuple[int, Array]]] = [[] for _ in graph.costs]  # of each node: the others, and costs by their strategy
        for (u, v), cost in graph.edges.items():
            self.beside[u].append((v, cost.T))
            self.beside[v].append((u, cost))

    @property
    def fits(self) -> bool:
        """Up to a byte."""
        return bool((self.chosen >= 0).all()) and float(self.left.min(initial=0.0)) > -1.0

    def cost(self) -> float:
        return self.graph.cost(self.chosen.tolist())

    def put(self, v: int, strategy: int) -> None:
        self.chosen[v] = strategy
        for use in self.graph.uses[v]:
            self.left[use.start : use.stop] -= use.bytes[strategy]

    def lift(self, v: int) -> None:
        for use in self.graph.uses[v]:
            self.left[use.start : use.stop] += use.bytes[self.chosen[v]]
        self.chosen[v] = -1

    def possible(self, v: int) -> Bools:
        """The strategies of an open node that fit beside the others' choices."""
        ok = numpy.isfinite(self.graph.costs[v])
        for use in self.graph.uses[v]:
            ok &= use.bytes <= self.left[use.start : use.stop].min() + 0.5
        return ok

    def costs(self, v: int, among: Iterable[int] = ()) -> Array:
        """Of each strategy, beside the neighbours' choices; those that are open, or among the given ones, are left out."""
        total = self.graph.costs[v].copy()
        for u, cost in self.beside[v]:
            if self.chosen[u] >= 0 and u not in among:
                total += cost[self.chosen[u]]
        return total

    def descend(self) -> None:
        """Each node takes its best strategy beside the others' until none gains."""
        for _ in range(SWEEPS):
            changed = False
            for v in range(len(self.chosen)):
                costs, now = self.costs(v), int(self.chosen[v])
                if costs.min() >= costs[now]:
                    continue
                self.lift(v)
                ok = self.possible(v)
                ok[now] = True
                best = int(numpy.where(ok, costs, numpy.inf).argmin())
                self.put(v, best)
                changed |= best != now
            if not changed:
                return


def decoded(dual: Dual, *, backward: bool = False) -> Choice:
    """Each node in order takes the best of what fits, by the choices of those before it and the messages of those after it; then all
    descend. It need not fit: where nothing did, the node took what is best without memory."""
    choice = Choice(dual.graph)
    priced = dual.costs()
    slots: list[list[tuple[int, int]]] = [[] for _ in choice.chosen]  # of each node: a neighbour, and where its message to it begins
    for e, (u, v) in enumerate(zip(dual.u.tolist(), dual.v.tolist())):
        slots[u].append((v, int(dual.to_u[e])))
        slots[v].append((u, int(dual.to_v[e])))
    order = range(len(choice.chosen))
    for v in reversed(order) if backward else order:
        size = len(dual.graph.costs[v])
        costs = choice.costs(v) - dual.graph.costs[v] + priced[dual.first[v] : dual.first[v + 1]]
        for u, slot in slots[v]:
            if choice.chosen[u] < 0:
                costs = costs + dual.messages[slot : slot + size]
        ok = choice.possible(v)
        choice.put(v, int(numpy.where(ok, costs, numpy.inf).argmin() if ok.any() else costs.argmin()))
    choice.descend()
    return choice
