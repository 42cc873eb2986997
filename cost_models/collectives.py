"""Time of one collective: latency-bandwidth models of several algorithms over a two-level topology; the cheapest is taken.

A group has `ranks` ranks, `ranks_per_node` of them on each node it touches. Each algorithm is a function of ALGORITHMS that
returns the steps and the bytes of one collective, or None where it does not exist. Time is

    start + sum over levels of steps * hop + bytes through the narrowest level / (bandwidth * achievable fraction)

for each of the two protocols (see Link), so that small messages switch to the one with the low latency. Counts follow Thakur,
Rabenseifner, Gropp (2005), "Optimization of collective communication operations in MPICH", section 2-3, and for the double tree
Sanders, Speck, Traeff (2009), "Two-tree algorithms for full bandwidth broadcast, reduction and scan". Bandwidth between nodes
is the group's share of the node's: ranks_per_node / gpus_per_node, because the groups beside it communicate at the same time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from cost_models.cluster import Cluster

__all__ = [
    "ALGORITHMS", "KINDS", "PROTOCOLS", "Group", "Kind", "Priced", "Protocol", "Traffic", "collective_time_s", "price_collective",
    "summed_by_gathering",
]  # fmt: skip

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]
Protocol = Literal["low_latency", "simple"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
GATHERED_BYTES = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks of one collective: `ranks` in all on `nodes` nodes, up to `per_node` on each."""

    ranks: int
    per_node: int
    nodes: int
    cluster: Cluster

    @property
    def rings(self) -> float:
        """Directed rings through the ranks of one node, for point-to-point wires. A count that the cluster does not list is
        taken as the smaller of its neighbours in the list."""
        table = self.cluster.rings_by_ranks
        below = [rings for k, rings in table if k <= self.per_node][-1:]
        above = [rings for k, rings in table if k >= self.per_node][:1]
        return min(below + above, default=float(self.cluster.links_per_gpu))

    @property
    def intra_bytes_per_s(self) -> float:
        """Signalling rate out of one rank inside its node."""
        if self.cluster.intra.switched:
            return self.cluster.gpu_bandwidth_bytes_per_s
        return self.cluster.intra.bandwidth_bytes_per_s * self.rings

    @property
    def inter_bytes_per_s(self) -> float:
        """Signalling rate out of one node that this group may use."""
        return self.cluster.node_bandwidth_bytes_per_s * min(1.0, self.per_node / self.cluster.gpus_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What an algorithm does. Bytes: inside a node, out of one rank; between nodes, out of one node.

    pipelined: both levels work at the same time, else one after the other. peers: transfers that one rank issues besides.
    intra_share: what the algorithm uses of the rate inside a node. in_switch: the switch reduces.
    """

    intra_steps: float = 0.0
    inter_steps: float = 0.0
    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    pipelined: bool = True
    peers: int = 0
    intra_share: float = 1.0
    in_switch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """The cheapest way to run a collective and its time."""

    algorithm: str
    protocol: Protocol
    time_s: float


Algorithm = Callable[[Kind, float, Group], Traffic | None]


def _log2(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0


def double_ring(kind: Kind, nbytes: float, group: Group) -> Traffic | None:
    """Bidirectional: rings in both directions of each wire carry half of the data each; n-1 steps, 2(n-1) for all-reduce."""
    n, m = group.ranks, group.nodes
    if kind == "broadcast":
        passes, moved = 1, nbytes
    elif kind in ("all_reduce", "all_gather", "reduce_scatter"):
        passes = 2 if kind == "all_reduce" else 1
        moved = passes * (n - 1) / n * nbytes
    else:
        return None
    return Traffic(
        intra_steps=passes * (n - m),
        inter_steps=passes * (m - 1),
        intra_bytes=moved if group.per_node > 1 else 0.0,
        inter_bytes=moved if m > 1 else 0.0,
    )


def ring(kind: Kind, nbytes: float, group: Group) -> Traffic | None:
    """One direction only: behind a switch a port is full already; of point-to-point wires half lie idle (two ranks: none)."""
    traffic = double_ring(kind, nbytes, group)
    if traffic is None or group.cluster.intra.switched or group.per_node <= 2:
        return traffic
    return Traffic(
        intra_steps=traffic.intra_steps,
        inter_steps=traffic.inter_steps,
        intra_bytes=traffic.intra_bytes,
        inter_bytes=traffic.inter_bytes,
        intra_share=0.5,
    )


def double_tree(kind: Kind, nbytes: float, group: Group) -> Traffic | None:
    """Two binary trees, each rank inner in one and leaf in the other; inside a node of several the tree is a chain."""
    if kind not in ("all_reduce", "broadcast"):
        return None
    passes = 2 if kind == "all_reduce" else 1
    r, m = group.per_node, group.nodes
    # up and down to two halves: a rank sends the buffer twice, except that of two ranks each is root of one tree
    through = [nbytes * (1 if kind == "broadcast" or count == 2 else 2) if count > 1 else 0.0 for count in (r, m)]
    return Traffic(
        intra_steps=passes * (_log2(r) if m == 1 else r - 1),
        inter_steps=passes * _log2(m),
        intra_bytes=through[0],
        inter_bytes=through[1],
    )


def fully_connected(kind: Kind, nbytes: float, group: Group) -> Traffic | None:
    """Each rank exchanges with each other at once: one step, but nothing is shared by the ranks of a node.

    All-to-all is always done so. The other collectives are where every pair has a wire of its own: behind switches the
    libraries (NCCL, gloo) keep to rings and trees.
    """
    n, r, m = group.ranks, group.per_node, group.nodes
    if kind != "all_to_all" and (m > 1 or group.cluster.intra.switched or group.rings < r - 1):
        return None
    phases = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}.get(kind)
    if phases is None:
        return None
    shard = nbytes / n / n if kind == "all_to_all" else nbytes / n  # what one rank sends to one peer
    return Traffic(
        intra_steps=phases * (1 if r > 1 else 0),
        inter_steps=phases * (1 if m > 1 else 0),
        intra_bytes=phases * (r - 1) * shard,
        inter_bytes=phases * r * (n - r) * shard,
        peers=phases * (n - 1),
    )


def hierarchical(kind: Kind, nbytes: float, group: Group) -> Traffic | None:
    """Two levels, one after the other; between nodes each rank speaks with its counterparts only."""
    n, r, m = group.ranks, group.per_node, group.nodes
    if r == 1 or m == 1:
        return None
    if kind == "all_to_all":
        local = nbytes / n
        return Traffic(
            intra_steps=1,
            inter_steps=1,
            intra_bytes=local * (r - 1) / r,
            inter_bytes=r * local * (m - 1) / m,
            pipelined=False,
            peers=r - 1 + m - 1,
        )
    if kind == "broadcast":
        return Traffic(intra_steps=_log2(r), inter_steps=_log2(m), intra_bytes=nbytes, inter_bytes=nbytes, pipelined=False)
    if kind in ("all_reduce", "all_gather", "reduce_scatter"):
        passes = 2 if kind == "all_reduce" else 1
        return Traffic(
            intra_steps=passes * (r - 1),
            inter_steps=passes * (m - 1),
            intra_bytes=passes * (r - 1) / r * nbytes,
            inter_bytes=passes * (m - 1) / m * nbytes,
            pipelined=False,
        )
    return None


def in_switch(kind: Kind, nbytes: float, group: Group) -> Traffic | None:
    """The switch adds (NVLS): each rank sends its buffer once and receives the sum once; between nodes a double tree."""
    if kind != "all_reduce" or group.per_node < 2 or not group.cluster.intra.in_switch_fraction:
        return None
    m = group.nodes
    return Traffic(
        intra_steps=2,
        inter_steps=2 * _log2(m),
        intra_bytes=nbytes,
        inter_bytes=0.0 if m == 1 else nbytes if m == 2 else 2 * nbytes,
        in_switch=True,
    )


def direct(kind: Kind, nbytes: float, group: Group) -> Traffic | None:
    """Point to point: one sender, one receiver."""
    if kind != "p2p":
        return None
    across = group.nodes > 1
    return Traffic(intra_steps=not across, inter_steps=across, intra_bytes=nbytes * (not across), inter_bytes=nbytes * across)


ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "double_ring": double_ring,
    "double_tree": double_tree,
    "fully_connected": fully_connected,
    "hierarchical": hierarchical,
    "in_switch": in_switch,
    "direct": direct,
}


def _times_s(traffic: Traffic, protocol: Protocol, group: Group) -> tuple[float, float]:
    """Of its latencies, and of its bytes."""
    intra, inter = group.cluster.intra, group.cluster.inter
    simple = protocol == "simple"
    outer = inter if group.nodes > 1 else intra
    start_s = outer.start_simple_s if simple else outer.start_low_latency_s
    latency_s = traffic.intra_steps * (intra.hop_simple_s if simple else intra.hop_low_latency_s)
    latency_s += traffic.inter_steps * (inter.hop_simple_s if simple else inter.hop_low_latency_s)
    latency_s += traffic.peers * outer.peer_s
    intra_fraction = intra.in_switch_fraction if traffic.in_switch else intra.achievable_fraction * traffic.intra_share
    intra_s = traffic.intra_bytes / (group.intra_bytes_per_s * intra_fraction * (1 if simple else intra.low_latency_fraction))
    inter_fraction = inter.achievable_fraction * (1 if simple else inter.low_latency_fraction)
    inter_s = traffic.inter_bytes / (group.inter_bytes_per_s * inter_fraction)
    return start_s + latency_s, max(intra_s, inter_s) if traffic.pipelined else intra_s + inter_s


def price_collective(kind: Kind, nbytes: float, ranks: int, cluster: Cluster, *, ranks_per_node: int) -> Priced:
    """The cheapest algorithm and protocol of a collective, with its time in seconds.

    nbytes: the full (gathered, unsharded) buffer in bytes. all_gather: what each rank has afterwards; reduce_scatter: what each
    rank has before; all_reduce, broadcast: the buffer; all_to_all: the whole tensor, of which each rank holds nbytes / ranks
    before and after; p2p: the message. ranks_per_node: how many ranks of the group share a node (1: all on different nodes,
    `ranks`: one node); it need not divide `ranks`. One rank costs nothing.
    Raises ValueError on an unknown kind or counts that the cluster cannot hold.
    """
    if kind not in KINDS:
        raise ValueError(f"collective {kind!r} is not one of {', '.join(KINDS)}")
    if ranks < 1 or ranks_per_node < 1 or nbytes < 0:
        raise ValueError(f"{kind}: ranks, ranks_per_node must be positive and nbytes not negative: {ranks}, {ranks_per_node}, {nbytes}")
    per_node = min(ranks_per_node, ranks)
    if per_node > cluster.gpus_per_node:
        raise ValueError(f"{kind}: {per_node} ranks on one node of {cluster.name}, which has {cluster.gpus_per_node} GPUs")
    if ranks == 1:
        return Priced(algorithm="none", protocol="simple", time_s=0.0)
    group = Group(ranks=ranks, per_node=per_node, nodes=math.ceil(ranks / per_node), cluster=cluster)
    if cluster.nodes is not None and group.nodes > cluster.nodes:
        raise ValueError(f"{kind}: {ranks} ranks, {per_node} a node, need {group.nodes} nodes; {cluster.name} has {cluster.nodes}")
    best: Priced | None = None
    bytes_s = 0.0
    protocol: Protocol
    for name, algorithm in ALGORITHMS.items():
        if (traffic := algorithm(kind, float(nbytes), group)) is None:
            continue
        for protocol in PROTOCOLS if not traffic.in_switch else ("simple",):  # the switch adds whole packets, without flags
            latency_s, moving_s = _times_s(traffic, protocol, group)
            if best is None or latency_s + moving_s < best.time_s:
                best, bytes_s = Priced(algorithm=name, protocol=protocol, time_s=latency_s + moving_s), moving_s
    assert best is not None, f"no algorithm for {kind}"
    link = cluster.inter if group.nodes > 1 else cluster.intra
    if not link.slower:
        return best
    slower = dict(link.slower).get(kind, 1.0)
    of_bytes = dict(link.slower_bytes).get(kind, slower)
    return dataclasses.replace(best, time_s=slower * (best.time_s - bytes_s) + of_bytes * bytes_s)


def collective_time_s(kind: Kind, nbytes: float, ranks: int, cluster: Cluster, *, ranks_per_node: int) -> float:
    """Seconds of a collective by the cheapest algorithm; arguments and errors as price_collective's (nbytes: the full buffer)."""
    return price_collective(kind, nbytes, ranks, cluster, ranks_per_node=ranks_per_node).time_s


def summed_by_gathering(nbytes: float, ranks: int) -> bool:
    """Whether processes without GPUs bring so few bytes together by gathering all terms, which each of them then adds up: gloo's
    all-reduce goes round the ranks twice, its all-gather once, and so few bytes take no time beside that."""
    return ranks * nbytes <= GATHERED_BYTES
