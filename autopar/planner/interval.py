"""What the seconds of a step depend on, and how far its prediction may be off by that.

The seconds of the busiest pipeline rank are told apart by the constants that govern them: the class of an operator, the host
that issues it, the links that a collective uses. A stretch that the host issues more slowly than the device runs it is the host's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from autopar.axes import BATCH, LAYERS
from autopar.planner.candidate import Candidate, Draft
from autopar.planner.estimate import Estimator
from cost_models.cluster import Cluster
from cost_models.uncertainty import SPREADS, step_spread

__all__ = ["links_of", "seconds_by_kind", "spread_of", "spread_of_kind"]

LAUNCHES, MEASURED, INSIDE, BETWEEN = "issuing operators", "measured operators", "collectives in nodes", "collectives between nodes"
UPDATE = "optimizer"
_LATENCIES = ("start_simple_s", "start_low_latency_s", "hop_simple_s", "hop_low_latency_s")


def seconds_by_kind(c: Candidate | Draft) -> dict[str, float]:
    """Kind -> seconds of a step, the most first; they add up to the step."""
    estimator, part = c.estimator, c.part
    times = estimator.times(part)
    bounds, seconds = (0, *part.cuts, len(estimator.segments)), estimator.seconds()
    known: dict[tuple[int, int], dict[str, float]] = {}
    of_ranks: dict[int, list[dict[str, float]]] = {}
    for s, (i, j) in enumerate(pairwise(bounds)):
        for k in range(i, j):
            alike = estimator.segments.kind(k, part.modes[k])
            if alike not in known:
                known[alike] = _of_piece(estimator, k, part.modes[k], sum(seconds[k]))
            of_ranks.setdefault(estimator.flow.rank_of[s], []).append(known[alike])
    busiest = max((_sum(pieces) for pieces in of_ranks.values()), key=lambda kinds: sum(kinds.values()))
    micro_batch_s = sum(busiest.values())
    sent_s = estimator.transfers_s(times)
    scale = (times.compute_s + times.bubble_s - sent_s) / micro_batch_s if micro_batch_s else 0.0
    exchanged = [{links_of(estimator, BATCH): times.sync_s}, {links_of(estimator, LAYERS): sent_s}]
    found = _sum([{kind: s * scale for kind, s in busiest.items()}, *exchanged, {UPDATE: times.optimizer_s}])
    return dict(sorted(((kind, s) for kind, s in found.items() if s > 0), key=lambda item: -item[1]))


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for kind, s in part.items():
            total[kind] = total.get(kind, 0.0) + s
    return total


def _of_piece(e: Estimator, k: int, mode: int, seconds: float) -> dict[str, float]:
    """Of one micro-batch: a piece's forward and backward, which take `seconds` with what is gathered for them, and what runs again."""
    ledger, span = e.rank.ledger, e.segments[k].span
    ops, costs = e.rank.program.ops[span.start : span.stop], ledger.costs[span.start : span.stop]
    beside = e.beside(e.read(span))
    exposed_s = seconds - sum(ledger.seconds(range(span.start, span.stop), beside)[:2])
    passes = []
    for way, (moved_s, issued_s) in enumerate(zip(beside[:2], beside[2:], strict=True)):
        kinds: dict[str, float] = {"pointwise": moved_s} if moved_s else {}
        for op, cost in zip(ops, costs, strict=True):
            device_s = (cost.forward_s, cost.backward_s)[way]
            # of both ways together only the sum is known of what is communication
            share = cost.communication_s / (cost.forward_s + cost.backward_s) if cost.communication_s else 0.0
            own = MEASURED if cost.measured else cost.counts.op_class
            kinds = _sum([kinds, {own: device_s * (1 - share)}, {links_of(e, str(op.kwarg("axis"))): device_s * share} if share else {}])
        host_s = issued_s + sum(cost.host_s[way] for cost in costs)
        passes.append({LAUNCHES: host_s} if host_s > sum(kinds.values()) else kinds)
    again_s, forward_s = e.pieces[k].modes[mode].again_s, sum(passes[0].values())
    again = {kind: s * again_s / forward_s for kind, s in passes[0].items()} if again_s and forward_s else {}
    return _sum([*passes, again, {links_of(e, BATCH): exposed_s} if exposed_s > 0 else {}])


def links_of(e: Estimator, axis: str) -> str:
    """The kind of the seconds that collectives over an axis take."""
    return INSIDE if e.pricer.per_node(axis) == e.rank.mesh.sizes()[axis] else BETWEEN


def spread_of(seconds: Mapping[str, float], cluster: Cluster) -> float:
    """The relative standard deviation of a step of these seconds."""
    return step_spread(seconds, {kind: spread_of_kind(kind, cluster) for kind in seconds})


def spread_of_kind(kind: str, cluster: Cluster) -> float:
    """Of the constant that the seconds of a kind depend on; of links the least known."""
    if kind in (INSIDE, BETWEEN):
        link = cluster.intra if kind == INSIDE else cluster.inter
        return max(link.spread(key) for key in ("achievable_fraction", *_LATENCIES))
    if kind == LAUNCHES:
        return cluster.gpu.spread("launch_s")
    if kind == MEASURED:
        return SPREADS["measured"]
    if kind == "view":
        return 0.0
    return cluster.gpu.spread(f"achievable_fraction.{'pointwise' if kind == UPDATE else kind}")
