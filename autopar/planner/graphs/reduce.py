"""Graph -> a smaller one with the same least cost, and the way back. Every step is exact, memory included.

    impossible   a strategy that leaves too little memory to the others' leanest ones, or that no strategy of a neighbour can meet
    followed     a node whose strategy is a function of its neighbour's: for each of the neighbour's one is possible, or one is best
                 (where it has no other neighbour and takes no memory that counts). It becomes part of the neighbour
    eliminated   a node of two neighbours that takes no memory that counts: its best strategy for each pair becomes their edge's cost
    separable    an edge whose cost is a sum of two nodes' costs
    dominated    a strategy that another one is never worse than, in cost to any neighbour and in memory at any time that counts

A time counts while the choices that are left could exceed its room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from autopar.errors import Infeasible
from autopar.planner.graphs.graph import Array, Bools, Graph, Ints, Use

__all__ = ["Reduced", "reduced"]

ROUNDS = 4
INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reduced:
    """graph: what is left to decide, its nodes in the order of the given ones; constant: the cost of what is decided. nodes: of each, the
    given node; labels: of each given node, its strategies that are left; follow: (node, what it depends on, its strategy by theirs)."""

    graph: Graph
    constant: float
    nodes: Sequence[int]
    labels: Sequence[Ints]
    follow: Sequence[tuple[int, tuple[int, ...], Ints]]

    def restored(self, chosen: Sequence[int]) -> list[int]:
        """A choice for the given graph from one for the smaller one."""
        found = [0] * len(self.labels)
        for v, x in zip(self.nodes, chosen, strict=True):
            found[v] = int(self.labels[v][x])
        for v, on, table in reversed(self.follow):
            found[v] = int(table[tuple(found[u] for u in on)])
        return found


def reduced(graph: Graph) -> Reduced:
    """Infeasible where the steps prove that there is no choice."""
    work = _Reduction(graph)
    for _ in range(ROUNDS):
        before = work.size()
        work.price_memory()
        work.drop_too_large()
        work.drop_unmatched()
        work.simplify()
        work.price_memory()
        work.drop_dominated()
        if work.size() == before:
            break
    work.price_memory()
    return work.result()


class _Reduction:
    def __init__(self, graph: Graph) -> None:
        self.given = graph
        self.room = graph.room.copy()
        self.cost: dict[int, Array] = {v: c.astype(float) for v, c in enumerate(graph.costs)}
        self.uses: dict[int, list[Use]] = {v: list(u) for v, u in enumerate(graph.uses)}
        self.label: list[Ints] = [numpy.arange(len(c)) for c in graph.costs]
        self.beside: dict[int, dict[int, Array]] = {v: {} for v in self.cost}
        for (u, v), cost in graph.edges.items():
            self.beside[u][v], self.beside[v][u] = cost, cost.T
        self.follow: list[tuple[int, tuple[int, ...], Ints]] = []
        self.constant = 0.0
        self.touched = dict.fromkeys(self.cost)  # nodes that simplify looks at
        self.doubtful = dict.fromkeys(self.cost)  # nodes that drop_dominated looks at

    def size(self) -> tuple[int, int, int]:
        return len(self.cost), sum(map(len, self.cost.values())), sum(map(len, self.beside.values()))

    # ------------------------------------------------------------------------------------------------------------ memory
    def price_memory(self) -> None:
        """Each node's uses as disjoint spans of what its strategies take beyond the leanest one, at the times that count alone."""
        times = len(self.room)
        least, most = numpy.zeros(times + 1), numpy.zeros(times + 1)
        for v, uses in self.uses.items():
            self.uses[v] = uses = _disjoint(uses)
            for k, use in enumerate(uses):
                low = float(use.bytes.min())
                least[use.start] += low
                least[use.stop] -= low
                most[use.start] += float(use.bytes.max()) - low
                most[use.stop] -= float(use.bytes.max()) - low
                if low:
                    uses[k] = Use(start=use.start, stop=use.stop, bytes=use.bytes - low)
        self.room -= numpy.cumsum(least)[:-1]
        if times and self.room.min() < 0:
            t = int(self.room.argmin())
            raise Infeasible(f"memory: at time {t} the leanest strategies of all nodes need {-self.room[t]:.0f} bytes more than there are")
        over = numpy.concatenate([[0], numpy.cumsum(numpy.cumsum(most)[:-1] > self.room)])
        for v, uses in self.uses.items():
            self.uses[v] = [use for use in uses if use.bytes.max() > 0 and over[use.stop] > over[use.start]]
            if len(self.uses[v]) < len(uses):
                self.touched[v] = self.doubtful[v] = None

    def drop_too_large(self) -> None:
        least = _Minimum(self.room)
        for v, uses in self.uses.items():
            if uses:
                ok = numpy.ones(len(self.cost[v]), dtype=bool)
                for use in uses:
                    ok &= use.bytes <= least.of(use.start, use.stop)
                self._keep(v, ok)

    # ------------------------------------------------------------------------------------------------------------- costs
    def drop_unmatched(self) -> None:
        waiting = dict.fromkeys(self.cost)
        while waiting:
            v, _ = waiting.popitem()
            ok = numpy.isfinite(self.cost[v])
            for cost in self.beside[v].values():
                ok &= numpy.isfinite(cost).any(axis=1)
            if self._keep(v, ok):
                waiting.update(dict.fromkeys(self.beside[v]))

    def simplify(self) -> None:
        while self.touched:
            v, _ = self.touched.popitem()
            if v in self.cost:
                self._simplify(v)

    def _simplify(self, v: int) -> None:
        if len(self.cost[v]) == 1:
            self._settle(v)
            return
        for u in list(self.beside[v]):
            cost = self.beside[v].get(u)
            if cost is None:
                continue
            finite = numpy.isfinite(cost)
            if (finite.sum(axis=1) == 1).all():
                self._absorb(v, u, finite.argmax(axis=1))
            elif (finite.sum(axis=0) == 1).all():
                self._absorb(u, v, finite.argmax(axis=0))
                return
            elif finite.all():
                self._separate(v, u, cost)
        if self.uses[v]:
            return
        if not self.beside[v]:
            self._follow(v, (), int(self.cost[v].argmin()))
            self.constant += float(self.cost.pop(v).min())
            del self.beside[v], self.uses[v]
        elif len(self.beside[v]) == 1:
            [(u, cost)] = self.beside[v].items()
            self._absorb(u, v, (cost.T + self.cost[v]).argmin(axis=1))
        elif len(self.beside[v]) == 2:
            self._eliminate(v)

    def _separate(self, v: int, u: int, cost: Array) -> None:
        rows = cost[:, 0]
        columns = cost[0] - cost[0, 0]
        if numpy.abs(cost - rows[:, None] - columns).max() <= 1e-12 * numpy.abs(cost).max():
            self.cost[v] = self.cost[v] + rows
            self.cost[u] = self.cost[u] + columns
            self._cut(u, v)

    def _settle(self, v: int) -> None:
        """A node without a choice."""
        self._follow(v, (), 0)
        self.constant += float(self.cost.pop(v)[0])
        for u, cost in list(self.beside[v].items()):
            self.cost[u] = self.cost[u] + cost[0]
            self._cut(u, v)
        for use in self.uses.pop(v):
            self.room[use.start : use.stop] -= use.bytes[0]
        del self.beside[v]

    def _absorb(self, u: int, v: int, taken: Ints) -> None:
        """v takes the strategy taken[i] where u takes i."""
        table = numpy.full(len(self.given.costs[u]), -1)
        table[self.label[u]] = self.label[v][taken]
        self.follow.append((v, (u,), table))
        cost = self.beside[u][v]
        self.cost[u] = self.cost[u] + self.cost.pop(v)[taken] + cost[numpy.arange(len(taken)), taken]
        self._cut(u, v)
        self.uses[u] += [Use(start=use.start, stop=use.stop, bytes=use.bytes[taken]) for use in self.uses.pop(v)]
        for w, other in list(self.beside[v].items()):
            self._cut(v, w)
            self._join(u, w, other[taken])
        del self.beside[v]

    def _eliminate(self, v: int) -> None:
        (u, to_u), (w, to_w) = self.beside[v].items()
        total = to_u.T[:, None, :] + to_w.T[None, :, :] + self.cost[v]  # [u, w, v]
        table = numpy.full((len(self.given.costs[u]), len(self.given.costs[w])), -1)
        table[numpy.ix_(self.label[u], self.label[w])] = self.label[v][total.argmin(axis=2)]
        self.follow.append((v, (u, w), table))
        self._cut(u, v)
        self._cut(w, v)
        self._join(u, w, total.min(axis=2))
        del self.cost[v], self.beside[v], self.uses[v]

    def drop_dominated(self) -> None:
        doubtful, self.doubtful = self.doubtful, {}
        for v in doubtful:
            if v in self.cost and len(self.cost[v]) > 1:
                self._keep(v, self._undominated(v))

    def _undominated(self, v: int) -> Bools:
        count = len(self.cost[v])
        better = ~numpy.eye(count, dtype=bool)  # [i, j]: j is not worse than i
        for use in self.uses[v]:
            better &= use.bytes[None, :] <= use.bytes[:, None]
        i, j = numpy.nonzero(better)
        excess = self.cost[v][j] - self.cost[v][i]
        for cost in self.beside[v].values():
            if not len(i):
                break
            ours, theirs = cost[i], cost[j]
            with numpy.errstate(invalid="ignore"):
                more = theirs - ours
            more[numpy.isinf(ours)] = -INFINITY
            excess = excess + more.max(axis=1)
            kept = excess <= 0
            i, j, excess = i[kept], j[kept], excess[kept]
        i, j = i[excess <= 0], j[excess <= 0]
        better[:] = False
        better[i, j] = True
        alive = numpy.ones(count, dtype=bool)
        for k in range(count):
            alive[k] = not (better[k] & alive).any()
        return alive

    # ------------------------------------------------------------------------------------------------------------- edits
    def _keep(self, v: int, ok: Bools) -> bool:
        if ok.all():
            return False
        if not ok.any():
            raise Infeasible(f"node {v}: none of its {len(self.given.costs[v])} strategies is possible beside the others'")
        self.cost[v], self.label[v] = self.cost[v][ok], self.label[v][ok]
        self.uses[v] = [Use(start=use.start, stop=use.stop, bytes=use.bytes[ok]) for use in self.uses[v]]
        for u, cost in self.beside[v].items():
            kept = numpy.ascontiguousarray(cost[ok])
            self.beside[v][u], self.beside[u][v] = kept, kept.T
            self.touched[u] = self.doubtful[u] = None
        self.touched[v] = self.doubtful[v] = None
        return True

    def _follow(self, v: int, on: tuple[int, ...], taken: int) -> None:
        self.follow.append((v, on, numpy.array(self.label[v][taken])))

    def _cut(self, u: int, v: int) -> None:
        del self.beside[u][v], self.beside[v][u]
        self.touched[u] = self.touched[v] = self.doubtful[u] = self.doubtful[v] = None

    def _join(self, u: int, v: int, cost: Array) -> None:
        cost = cost + self.beside[u][v] if v in self.beside[u] else cost
        self.beside[u][v], self.beside[v][u] = cost, cost.T
        self.touched[u] = self.touched[v] = self.doubtful[u] = self.doubtful[v] = None

    def result(self) -> Reduced:
        nodes = sorted(self.cost)
        place = {v: k for k, v in enumerate(nodes)}
        graph = Graph(
            costs=[self.cost[v] for v in nodes], uses=[self.uses[v] for v in nodes], room=self.room,
            edges={(place[u], place[v]): numpy.ascontiguousarray(c) for u in nodes for v, c in self.beside[u].items() if u < v},
        )  # fmt: skip
        return Reduced(graph=graph, constant=self.constant, nodes=nodes, labels=self.label, follow=self.follow)


class _Minimum:
    """The least of an array over any span, from its least over spans of powers of two."""

    def __init__(self, values: Array) -> None:
        self._levels = [values]
        half = 1
        while 2 * half <= len(values):
            last = self._levels[-1]
            self._levels.append(numpy.minimum(last[:-half], last[half:]))
            half *= 2

    def of(self, start: int, stop: int) -> float:
        k = (stop - start).bit_length() - 1
        return float(min(self._levels[k][start], self._levels[k][stop - (1 << k)]))


def _disjoint(uses: list[Use]) -> list[Use]:
    """The same bytes at every time, as spans one after the other."""
    if len(uses) < 2 or all(a.stop <= b.start and (a.stop < b.start or (a.bytes != b.bytes).any()) for a, b in zip(uses, uses[1:])):
        return uses
    times = sorted({t for use in uses for t in (use.start, use.stop)})
    place = {t: k for k, t in enumerate(times)}
    change = numpy.zeros((len(times), len(uses[0].bytes)))
    for use in uses:
        change[place[use.start]] += use.bytes
        change[place[use.stop]] -= use.bytes
    taken = numpy.cumsum(change, axis=0)
    found: list[Use] = []
    for start, stop, nbytes in zip(times, times[1:], taken):
        if found and found[-1].stop == start and (found[-1].bytes == nbytes).all():
            found[-1] = Use(start=found[-1].start, stop=stop, bytes=nbytes)
        elif nbytes.any():
            found.append(Use(start=start, stop=stop, bytes=nbytes))
    return found
