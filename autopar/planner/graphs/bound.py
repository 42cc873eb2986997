"""A proven lower bound: memory has a price at every time, and messages between neighbours share the costs of edges out among nodes.

    bound(prices, messages) = sum of the least of each node's and each edge's own part  -  sum_t price(t) x room(t)

holds for any prices >= 0 and any messages, as no choice that fits can be cheaper than the parts' least sum (Lagrangian relaxation of the
rows of memory, and of the linear program over pairs). Messages are improved by sequential tree-reweighted message passing (Kolmogorov 2006,
section 4), prices by exponentiated gradient: a time at which too much is taken becomes dearer by a factor. Nodes of one level of the
order, which are no neighbours, are worked on together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from autopar.planner.graphs.graph import Array, Graph, Ints

__all__ = ["Dual"]

STEP = 0.3  # of the logarithm of a price, for a time at which twice the room is taken
DECAY = 50  # rounds after which the step is half as long
KEPT = 0.8  # of the average of what is taken, from one round to the next
START = 1e-2  # of the cost: the prices' sum at the beginning


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Level:
    """Nodes whose messages to later ones are made together, as indices. labels: of the nodes; incoming, at: the messages to them and the
    position of each in labels; share: of a node's cost that each later neighbour is told; source, back: of each edge's near side the
    position and the message from the far side; entries, rows: of the edges' costs, column by column; columns: where each begins; out:
    the messages made; edges, edge_of: where the messages of an edge begin, and the edge of each."""

    labels: Ints
    incoming: Ints
    at: Ints
    share: Array
    source: Ints
    back: Ints
    entries: Ints
    rows: Ints
    columns: Ints
    out: Ints
    edges: Ints
    edge_of: Ints


class Dual:
    """messages and prices, and the best bound that they gave. The graph is a reduced one: each strategy can meet some of each neighbour."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sizes = numpy.array([len(c) for c in graph.costs], dtype=numpy.int64)
        self.first = _starts(self.sizes)
        self.count = int(self.first[-1])
        self.node_of = numpy.repeat(numpy.arange(len(self.sizes)), self.sizes)
        self.own = numpy.concatenate([*graph.costs, numpy.zeros(0)])
        self.rounds = 0
        self.bound = -numpy.inf
        self._add_edges()
        self._add_rows()

    def _add_edges(self) -> None:
        pairs = sorted(self.graph.edges)
        self.u, self.v = (numpy.array([p[k] for p in pairs], dtype=numpy.int64) for k in (0, 1))
        rows, columns = self.sizes[self.u], self.sizes[self.v]
        self.pairs = numpy.concatenate([*(self.graph.edges[p].ravel() for p in pairs), numpy.zeros(0)])
        self.begin = _starts(rows * columns)
        self.to_u = _starts(rows)
        self.to_v = self.to_u[-1] + _starts(columns)
        self.messages = numpy.zeros(int(self.to_v[-1]))
        self.slot_label = numpy.concatenate([_spans(self.first[self.u], rows), _spans(self.first[self.v], columns)])
        each = numpy.repeat(numpy.arange(len(pairs)), rows * columns)
        place = numpy.arange(len(self.pairs)) - self.begin[each]
        self.row = self.to_u[each] + place // columns[each]
        self.column = self.to_v[each] + place % columns[each]
        nodes = len(self.sizes)
        later, earlier = numpy.bincount(self.u, minlength=nodes), numpy.bincount(self.v, minlength=nodes)
        self.share = 1.0 / numpy.maximum(1, numpy.maximum(later, earlier))
        self.rest = 1.0 - (earlier * self.share)[self.node_of]
        self._edges_of: list[list[int]] = [[] for _ in range(nodes)]
        for e, (u, v) in enumerate(pairs):
            self._edges_of[u].append(e)
            self._edges_of[v].append(e)
        self._forward, self._backward = self._levels(pairs, True), self._levels(pairs, False)

    def _levels(self, pairs: list[tuple[int, int]], forward: bool) -> list[_Level]:
        depth = [0] * len(self.sizes)
        for u, v in pairs if forward else sorted(pairs, key=lambda p: -p[1]):
            near, far = (u, v) if forward else (v, u)
            depth[far] = max(depth[far], depth[near] + 1)
        edges: dict[int, list[int]] = {}
        for e, (u, v) in enumerate(pairs):
            edges.setdefault(depth[u if forward else v], []).append(e)
        return [self._level(numpy.array(edges[level]), forward) for level in sorted(edges)]

    def _level(self, edges: Ints, forward: bool) -> _Level:
        near, far = (self.u, self.v) if forward else (self.v, self.u)
        to_near, to_far = (self.to_u, self.to_v) if forward else (self.to_v, self.to_u)
        nodes = numpy.unique(near[edges])
        position = numpy.zeros(len(self.sizes), dtype=numpy.int64)
        position[nodes] = _starts(self.sizes[nodes])[:-1]
        around = [(v, e) for v in nodes.tolist() for e in self._edges_of[v]]
        at_node = numpy.array([v for v, _ in around])
        slots = numpy.array([self.to_u[e] if self.u[e] == v else self.to_v[e] for v, e in around])
        rows, columns = self.sizes[near[edges]], self.sizes[far[edges]]
        # the entries of an edge, column by column: of column j the i-th is begin + i x columns + j, or begin + j x rows + i if turned
        each = numpy.repeat(numpy.arange(len(edges)), columns)
        j = _spans(numpy.zeros(len(edges), dtype=numpy.int64), columns)
        length = rows[each]
        i = _spans(numpy.zeros(len(length), dtype=numpy.int64), length)
        step, start = (columns[each], j) if forward else (numpy.ones_like(j), j * length)
        return _Level(
            labels=_spans(self.first[nodes], self.sizes[nodes]), incoming=_spans(slots, self.sizes[at_node]),
            at=_spans(position[at_node], self.sizes[at_node]), share=numpy.repeat(self.share[nodes], self.sizes[nodes]),
            source=_spans(position[near[edges]], rows), back=_spans(to_near[edges], rows),
            entries=numpy.repeat(self.begin[edges][each] + start, length) + i * numpy.repeat(step, length),
            rows=numpy.repeat(_starts(rows)[:-1][each], length) + i, columns=_starts(length)[:-1], out=_spans(to_far[edges], columns),
            edges=_starts(columns)[:-1], edge_of=each,
        )  # fmt: skip

    def _add_rows(self) -> None:
        """A row for each span of times between two changes at which the choices could exceed the room."""
        uses = [(v, use) for v, of_node in enumerate(self.graph.uses) for use in of_node]
        times = sorted({t for _, use in uses for t in (use.start, use.stop)})
        place = {t: k for k, t in enumerate(times)}
        most = numpy.zeros(len(times) + 1)
        for _, use in uses:
            most[place[use.start]] += use.bytes.max()
            most[place[use.stop]] -= use.bytes.max()
        room = numpy.array([self.graph.room[a:b].min() for a, b in zip(times, times[1:])])
        counts = numpy.cumsum(most)[: len(room)] > room
        index = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int64)
        self.room = numpy.maximum(room[counts], 1.0)
        kept = [(v, use, index[place[use.start]], index[place[use.stop]]) for v, use in uses]
        kept = [x for x in kept if x[2] < x[3]]
        lengths = numpy.array([len(use.bytes) for _, use, _, _ in kept], dtype=numpy.int64)
        self._bytes = numpy.concatenate([*(use.bytes for _, use, _, _ in kept), numpy.zeros(0)])
        self._label = _spans(numpy.array([self.first[v] for v, *_ in kept], dtype=numpy.int64), lengths)
        self._start, self._stop = (numpy.repeat(numpy.array([x[k] for x in kept], dtype=numpy.int64), lengths) for k in (2, 3))
        self.prices = numpy.zeros(len(self.room))  # of the whole room
        self._taken = numpy.ones(len(self.room))

    # ------------------------------------------------------------------------------------------------------------ values
    def costs(self) -> Array:
        """Of each strategy of each node, with the price of its memory."""
        total = numpy.concatenate([[0.0], numpy.cumsum(self.prices / self.room)])
        return self.own + numpy.bincount(self._label, self._bytes * (total[self._stop] - total[self._start]), minlength=self.count)

    def told(self, costs: Array) -> Array:
        """Costs with all messages to the node."""
        return costs + numpy.bincount(self.slot_label, self.messages, minlength=self.count)

    def excess(self) -> Array:
        """Of each strategy, by how much it is dearer than the best of its node."""
        told = self.told(self.costs())
        return told - self._least(told)[self.node_of]

    def _least(self, values: Array) -> Array:
        return numpy.minimum.reduceat(values, self.first[:-1])

    def bound_now(self, costs: Array) -> float:
        told = self.told(costs)
        total = float(self._least(self.rest * told).sum()) if self.count else 0.0
        if len(self.pairs):
            own = self.pairs - self.messages[self.row] - self.messages[self.column]
            own += (self.share[self.node_of] * told)[self.slot_label[self.column]]
            total += float(numpy.minimum.reduceat(own, self.begin[:-1]).sum())
        return total - float(self.prices.sum())

    # ------------------------------------------------------------------------------------------------------------ rounds
    def improve(self, rounds: int) -> None:
        """Rounds of messages forward and backward; between them the prices follow what the nodes' best strategies take."""
        if not self.count:
            self.bound = 0.0
            return
        for _ in range(rounds):
            costs = self.costs()
            for level in self._forward:
                self._pass(level, costs)
            for level in self._backward:
                self._pass(level, costs)
            self.rounds += 1
            if len(self.room):
                self._reprice(costs)
        self.bound = max(self.bound, self.bound_now(self.costs()))

    def _pass(self, level: _Level, costs: Array) -> None:
        told = costs[level.labels] + numpy.bincount(level.at, self.messages[level.incoming], minlength=len(level.labels))
        near = (level.share * told)[level.source] - self.messages[level.back]
        made = numpy.minimum.reduceat(self.pairs[level.entries] + near[level.rows], level.columns)
        made -= numpy.minimum.reduceat(made, level.edges)[level.edge_of]
        self.messages[level.out] = made

    def _reprice(self, costs: Array) -> None:
        if not self.prices.any():
            if self.rounds < 10:  # a first idea of what costs are
                return
            self.prices[:] = START * max(1.0, abs(self.bound_now(costs))) / len(self.prices)
        told = self.told(costs)
        best = (told == self._least(told)[self.node_of]).astype(float)
        best /= numpy.add.reduceat(best, self.first[:-1])[self.node_of]
        nbytes = self._bytes * best[self._label]
        rows = len(self.room) + 1
        change = numpy.bincount(self._start, nbytes, minlength=rows) - numpy.bincount(self._stop, nbytes, minlength=rows)
        self._taken = KEPT * self._taken + (1 - KEPT) * numpy.cumsum(change)[:-1] / self.room
        step = STEP / (1 + self.rounds / DECAY)
        self.prices *= numpy.exp(step * numpy.clip(self._taken - 1, -1, 2))


def _starts(lengths: Ints) -> Ints:
    """Where each of consecutive pieces begins, and the end of the last."""
    return numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int64)


def _spans(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, ... of each piece, one piece after the other."""
    begins = _starts(lengths)
    return numpy.arange(begins[-1]) + numpy.repeat(starts - begins[:-1], lengths)
