"""What is to be decided: a strategy for every node, so that node and edge costs are least and memory suffices at every time.

    minimise    sum_v cost(v, x_v) + sum_(u,v) cost(u, v, x_u, x_v)
    room        sum of bytes(v, x_v) over the nodes v that live at t <= room(t)      for every time t

Numbers are float64 arrays; an impossible strategy or pair costs infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy
from numpy.typing import NDArray

__all__ = ["Array", "Bools", "Graph", "Ints", "Use", "used"]

Array: TypeAlias = NDArray[numpy.float64]
Ints: TypeAlias = NDArray[numpy.int64]
Bools: TypeAlias = NDArray[numpy.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Use:
    """Bytes that a node takes, by its strategy, at the times start <= t < stop."""

    start: int
    stop: int
    bytes: Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Graph:
    """costs: of each node, by strategy. uses: of each node. edges: (u, v) -> cost [strategies of u, strategies of v], u < v. room: bytes
    that there are at each time. ValueError for shapes that do not fit together."""

    costs: Sequence[Array]
    uses: Sequence[Sequence[Use]]
    edges: Mapping[tuple[int, int], Array]
    room: Array

    def __post_init__(self) -> None:
        if len(self.uses) != len(self.costs):
            raise ValueError(f"{len(self.costs)} nodes have costs, but {len(self.uses)} have uses of memory")
        for v, (cost, uses) in enumerate(zip(self.costs, self.uses)):
            if not len(cost):
                raise ValueError(f"node {v} has no strategy")
            for use in uses:
                if len(use.bytes) != len(cost) or not 0 <= use.start < use.stop <= len(self.room):
                    raise ValueError(f"node {v}: a use of memory at [{use.start}, {use.stop}) of {len(use.bytes)} strategies; it has "
                                     f"{len(cost)}, and the times are [0, {len(self.room)})")  # fmt: skip
        for (u, v), cost in self.edges.items():
            if not 0 <= u < v < len(self.costs) or cost.shape != (len(self.costs[u]), len(self.costs[v])):
                raise ValueError(f"edge {u}-{v}: a cost of shape {cost.shape} does not fit its nodes; they are numbered u < v")

    def cost(self, chosen: Sequence[int]) -> float:
        nodes = sum(float(cost[x]) for cost, x in zip(self.costs, chosen, strict=True))
        return nodes + sum(float(cost[chosen[u], chosen[v]]) for (u, v), cost in self.edges.items())

    def lacking(self, chosen: Sequence[int]) -> float:
        """Bytes that are missing at the worst time; at most 0 where the choice fits."""
        taken = used(((use.start, use.stop, float(use.bytes[x])) for uses, x in zip(self.uses, chosen) for use in uses), len(self.room))
        return float((taken - self.room).max(initial=0.0))


def used(parts: Iterable[tuple[int, int, float]], times: int) -> Array:
    """The sum over (start, stop, bytes) at each time."""
    change = numpy.zeros(times + 1)
    for start, stop, nbytes in parts:
        change[start] += nbytes
        change[stop] -= nbytes
    return numpy.cumsum(change)[:-1]
