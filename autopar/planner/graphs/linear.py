"""The integer program of some nodes of a graph, the others keeping their choices.

    minimise   sum_{v,i} cost(v,i) x[v,i]  +  sum_{(u,v),a,b} cost(u,v,a,b) w[u,v,a,b]
    one        sum_i x[v,i] = 1                                  for every node v that is open
    left       sum_b w[u,v,a,b] = sum of x[u,i] over i in a      for every edge between two of them, every class a of u's strategies
    right      sum_a w[u,v,a,b] = sum of x[v,j] over j in b      and every class b of v's
    room       sum of bytes(v,i) x[v,i] <= what is left          for every set of open nodes that live at once and could exceed it

x is binary, w is continuous and integral wherever x is: the tight linearisation, as in the program of a mesh axis (axis.py). Strategies
between which an edge's cost differs by a constant alone are one class: they share its flows, and the constant is theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy

from autopar.planner.graphs.choice import Choice
from autopar.planner.graphs.graph import Array, Ints
from autopar.planner.solver import INFINITY, Linear

__all__ = ["Part", "part_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """linear: the program, its costs in units of `unit`; columns: of each open node, of each strategy that it may take; now: its value of
    the choices as they are."""

    linear: Linear
    columns: Mapping[int, Mapping[int, int]]
    now: float

    def chosen(self, values: tuple[float, ...]) -> dict[int, int]:
        return {v: max(of_node, key=lambda i: values[of_node[i]]) for v, of_node in self.columns.items()}


def part_of(choice: Choice, nodes: Collection[int], allowed: Mapping[int, Ints], unit: float, *, margin: float = 0.0) -> Part:
    """The program of the given nodes. allowed: of each, strategies that it may take beside its own one, those that do not fit are left out.
    margin: of each room that is not given away, so that an answer within the solver's tolerance fits."""
    own = {v: int(choice.chosen[v]) for v in nodes}
    for v in nodes:
        choice.lift(v)
    linear = Linear(name="part of a graph")
    columns: dict[int, dict[int, int]] = {}
    for v in nodes:
        ok = choice.possible(v)
        costs = choice.costs(v) / unit
        taken = sorted({own[v], *(i for i in allowed[v].tolist() if ok[i] and costs[i] < INFINITY)})
        columns[v] = {i: linear.column(f"x_{v}_{i}", float(costs[i]), whole=True) for i in taken}
        linear.row(f"one_{v}", [(x, 1.0) for x in columns[v].values()], 1.0, 1.0)
    now = sum(linear.costs[columns[v][i]] for v, i in own.items())
    for v in nodes:
        for u, cost in choice.beside[v]:
            if v < u and u in columns:
                _add_edge(linear, f"{v}_{u}", columns[v], columns[u], cost.T / unit)
                now += float(cost[own[u], own[v]]) / unit
    _add_room(linear, choice, columns, margin)
    for v, i in own.items():
        choice.put(v, i)
    return Part(linear=linear, columns=columns, now=now)


def _add_edge(linear: Linear, name: str, left: Mapping[int, int], right: Mapping[int, int], whole: Array) -> None:
    cost = whole[numpy.ix_(list(left), list(right))]
    a, b = _classes(cost), _classes(cost.T)
    firsts, seconds = _first(a), _first(b)
    flows = {
        (i, j): linear.column(f"w_{name}_{i}_{j}", float(cost[row, column]))
        for i, row in enumerate(firsts)
        for j, column in enumerate(seconds)
        if cost[row, column] < INFINITY
    }
    # what a strategy costs beyond the first of its class, whatever the other takes
    for label, kind, first, other in ((left, a, firsts, cost), (right, b, seconds, cost.T)):
        for k, x in enumerate(label.values()):
            finite = numpy.isfinite(other[k])
            place = int(finite.argmax())
            linear.costs[x] += float(other[k, place] - other[first[kind[k]], place]) if finite.any() else 0.0
    for side, label, kind in ((0, left, a), (1, right, b)):
        for c in range(int(kind.max()) + 1):
            terms = [(flow, 1.0) for pair, flow in flows.items() if pair[side] == c]
            terms += [(x, -1.0) for k, x in enumerate(label.values()) if kind[k] == c]
            linear.row(f"{'right' if side else 'left'}_{name}_{c}", terms, 0.0, 0.0)


def _classes(cost: Array) -> Ints:
    """The rows that differ by a constant, numbered in the order of the first of each."""
    least = cost.min(axis=1, initial=INFINITY, keepdims=True)
    shape = cost - numpy.where(numpy.isfinite(least), least, 0.0)
    found: dict[bytes, int] = {}
    return numpy.array([found.setdefault(row.tobytes(), len(found)) for row in shape])


def _first(kind: Ints) -> list[int]:
    return [int((kind == c).argmax()) for c in range(int(kind.max()) + 1)]


def _add_room(linear: Linear, choice: Choice, columns: Mapping[int, Mapping[int, int]], margin: float) -> None:
    """A row for each set of open nodes that live at once, unless a neighbouring one implies it."""
    uses = [(use, v) for v in columns for use in choice.graph.uses[v] if max(use.bytes[i] for i in columns[v]) > 0]
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for k, (use, _) in enumerate(uses):
        starts.setdefault(use.start, []).append(k)
        stops.setdefault(use.stop, []).append(k)
    times = sorted({*starts, *stops})
    most = [max(float(use.bytes[i]) for i in columns[v]) for use, v in uses]
    alive: set[int] = set()
    rows: list[tuple[frozenset[int], float]] = []
    total = 0.0
    for begin, end in zip(times, times[1:]):
        for k in stops.get(begin, ()):
            alive.discard(k)
            total -= most[k]
        for k in starts.get(begin, ()):
            alive.add(k)
            total += most[k]
        room = float(choice.left[begin:end].min())
        if total <= room:
            continue
        row = frozenset(alive), room
        if rows and row[0] <= rows[-1][0] and row[1] >= rows[-1][1]:
            continue
        while rows and rows[-1][0] <= row[0] and rows[-1][1] >= row[1]:
            rows.pop()
        rows.append(row)
    for number, (members, room) in enumerate(rows):
        terms: dict[int, float] = {}
        scale = max(room, max(most[k] for k in members))
        for k in sorted(members):
            use, v = uses[k]
            for i, x in columns[v].items():
                if use.bytes[i]:
                    terms[x] = terms.get(x, 0.0) + float(use.bytes[i]) / scale
        linear.row(f"room_{number}", terms.items(), -INFINITY, room / scale - margin)
