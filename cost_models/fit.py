"""Constants of the hardware from measured times: what makes the predictions of this package come closest to them.

Closeness is the mean absolute logarithm of predicted over measured time, which weighs a short message as much as a long one and
does not follow outliers. The search moves one constant at a time by a factor, coarse to fine, and keeps what lowers it; a constant
that the times say nothing about keeps its value.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cost_models.cluster import Cluster, Gpu, Link
from cost_models.collectives import Kind, collective_time_s
from cost_models.compute import op_time_s

__all__ = [
    "LINK_CONSTANTS", "CollectiveTime", "OperatorTime", "fit_gpu", "fit_link", "gpu_loss", "link_loss", "port_bytes", "rescaled", "search",
    "slower_kinds",
]  # fmt: skip

LINK_CONSTANTS = (
    "achievable_fraction",
    "low_latency_fraction",
    "start_simple_s",
    "start_low_latency_s",
    "hop_simple_s",
    "hop_low_latency_s",
    "in_switch_fraction",
)
LINK_FRACTIONS = (0.02, 0.95)  # bounds
FACTORS = (0.01, 1000.0)  # bounds of how many times longer a kind of collective takes
GPU_FRACTIONS = (1e-3, 1.0)  # what a file may state
STEPS = (1.6, 1.25, 1.1, 1.04, 1.015)  # factors by which a constant is moved, coarse to fine
LEAST_GAIN = 1e-5  # in the loss, for a move to be kept

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """A measured collective. nbytes: the full buffer, as collective_time_s counts it. copies_s: the part of the time that is the
    measuring tool's own, known from elsewhere."""

    kind: Kind
    nbytes: float
    ranks: int
    measured_s: float
    nodes: int = 1
    copies_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """A measured operator; the counts are those of op_time_s."""

    op_class: str
    flops: float
    bytes_moved: float
    dtype: str
    measured_s: float
    written: float = 0.0


def search(point: P, names: Sequence[str], moved: Callable[[P, str, float], P | None], loss: Callable[[P], float]) -> tuple[P, float]:
    """Pattern search from `point`. moved(point, name, factor): the point with one constant multiplied, None where that is not
    allowed. Returns the best point and its loss."""
    best = loss(point)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in names:
                for factor in (step, 1 / step):
                    other = moved(point, name, factor)
                    if other is not None and (value := loss(other)) < best - LEAST_GAIN:
                        point, best, improved = other, value, True
    return point, best


# ----------------------------------------------------------------------------------------------------------------- links
def link_loss(measured: Sequence[tuple[Cluster, Sequence[CollectiveTime]]], name: str) -> Callable[[Link], float]:
    """Link -> mean |log(predicted / measured)| of the times, with that link in the clusters in place of the one called `name`."""

    def replaced(cluster: Cluster, link: Link) -> Cluster:
        return dataclasses.replace(
            cluster,
            intra=link if cluster.intra.name == name else cluster.intra,
            inter=link if cluster.inter.name == name else cluster.inter,
        )

    def loss(link: Link) -> float:
        logs = []
        for original, times in measured:
            cluster = replaced(original, link)
            for t in times:
                time_s = collective_time_s(t.kind, t.nbytes, t.ranks, cluster, ranks_per_node=-(-t.ranks // t.nodes))
                logs.append(abs(math.log((time_s + t.copies_s) / t.measured_s)))
        return statistics.fmean(logs)

    return loss


def fit_link(link: Link, loss: Callable[[Link], float], names: Sequence[str] = LINK_CONSTANTS) -> tuple[Link, float]:
    """The link with the named constants fitted, from its own as a start, and the loss."""
    return search(link, names, _moved_link, loss)


def _moved_link(link: Link, name: str, factor: float) -> Link | None:
    """None where a fraction leaves its bounds, a constant is zero, or the protocols would be inverted."""
    value = getattr(link, name) * factor
    if not value or (name.endswith("_fraction") and not LINK_FRACTIONS[0] <= value <= LINK_FRACTIONS[1]):
        return None
    other = dataclasses.replace(link, **{name: value})
    ordered = other.start_low_latency_s <= other.start_simple_s and other.hop_low_latency_s <= other.hop_simple_s
    return other if ordered else None


def slower_kinds(link: Link, cluster: Cluster, times: Sequence[CollectiveTime]) -> Link:
    """The link, which is in the cluster's nodes, with how many times longer each kind takes: its latencies, by the sizes of which they are
    the greater part, and its bytes, which make up the rest."""
    slower, of_bytes = dict[str, float](), dict[str, float]()
    for kind in dict.fromkeys(t.kind for t in times):
        of_kind = [t for t in times if t.kind == kind]

        def split(t: CollectiveTime, kind: str = kind) -> tuple[float, float]:
            """Seconds of latencies and of bytes, as if neither were slower."""
            links = (dataclasses.replace(link, slower=((kind, 1.0),), slower_bytes=((kind, share),)) for share in (1.0, 0.0))
            clusters = (dataclasses.replace(cluster, intra=x) for x in links)
            whole_s, latency_s = (collective_time_s(t.kind, t.nbytes, t.ranks, c, ranks_per_node=t.ranks) for c in clusters)
            return latency_s, whole_s - latency_s

        parts = [(t.measured_s, *split(t)) for t in of_kind]
        every = statistics.median(measured_s / (latency_s + moved_s) for measured_s, latency_s, moved_s in parts)
        (slower[kind], of_bytes[kind]), _ = search((every, every), ("latency", "bytes"), _moved_pair, functools.partial(_pair_loss, parts))
    return dataclasses.replace(link, slower=tuple(slower.items()), slower_bytes=tuple(of_bytes.items()))


Pair = tuple[float, float]


def _moved_pair(pair: Pair, name: str, factor: float) -> Pair | None:
    slower, of_bytes = (x * factor if name == part else x for x, part in zip(pair, ("latency", "bytes"), strict=True))
    return (slower, of_bytes) if FACTORS[0] <= min(slower, of_bytes) and max(slower, of_bytes) <= FACTORS[1] else None


def _pair_loss(parts: Sequence[tuple[float, float, float]], pair: Pair) -> float:
    """parts: seconds that were measured, of latencies and of bytes."""
    slower, of_bytes = pair
    ratios = ((slower * latency_s + of_bytes * moved_s) / measured_s for measured_s, latency_s, moved_s in parts)
    return statistics.fmean(abs(math.log(ratio)) for ratio in ratios)


def rescaled(link: Link, factor: float) -> Link:
    """The link with all its latencies multiplied: a start for the search on a machine that is faster or slower throughout."""
    names = [f.name for f in dataclasses.fields(link) if f.name.startswith(("start_", "hop_")) or f.name == "peer_s"]
    return dataclasses.replace(link, **{name: getattr(link, name) * factor for name in names})


def port_bytes(kind: Kind, nbytes: float, ranks: int) -> float:
    """The bytes that at least one rank must send, whatever the algorithm, where only ranks add: what the rate out of a rank is
    measured by (the bus bandwidth of nccl-tests, doc/PERFORMANCE.md)."""
    if kind == "all_to_all":
        return nbytes * (ranks - 1) / ranks**2
    return nbytes * {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "p2p": 1.0}.get(kind, (ranks - 1) / ranks)


# ----------------------------------------------------------------------------------------------------------------- GPUs
def gpu_loss(times: Sequence[OperatorTime]) -> Callable[[Gpu], float]:
    """Gpu -> mean |log(predicted / measured)| of the times."""

    def loss(gpu: Gpu) -> float:
        return statistics.fmean(
            abs(math.log(op_time_s(t.op_class, t.flops, t.bytes_moved, t.dtype, gpu, t.written) / t.measured_s)) for t in times
        )

    return loss


def fit_gpu(gpu: Gpu, times: Sequence[OperatorTime]) -> tuple[Gpu, float]:
    """The GPU with the achievable fractions of the classes that were measured fitted, under its peak rates and launch time as they
    are, and the loss."""
    return search(gpu, tuple(dict.fromkeys(t.op_class for t in times)), _moved_gpu, gpu_loss(times))


def _moved_gpu(gpu: Gpu, name: str, factor: float) -> Gpu | None:
    """name: an operator class. A fraction stops at its bounds."""
    least, most = GPU_FRACTIONS
    fractions = tuple((c, min(most, max(least, value * factor)) if c == name else value) for c, value in gpu.fractions)
    return dataclasses.replace(gpu, fractions=fractions) if fractions != gpu.fractions else None
