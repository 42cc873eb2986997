"""The memory of each pipeline rank over a step, from the liveness that its peak is from: `MemoryPlan` is the highest point of the curve."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise

from autopar.ir import Span
from autopar.planner.candidate import Candidate, held_bytes, late_of
from autopar.planner.liveness import Passes
from autopar.planner.memory_curve import RankCurve, StageCurve
from cost_models.pools import rows

__all__ = ["curves_of"]


def curves_of(c: Candidate) -> list[RankCurve]:
    """Of each pipeline rank."""
    e = c.estimator
    bounds = (0, *c.part.cuts, len(e.segments))
    again = [e.again(k, mode) for k, mode in enumerate(c.part.modes)]
    spans = {s: (e.span(i, j), tuple(x for each in again[i:j] for x in each)) for s, (i, j) in enumerate(pairwise(bounds))}
    late = late_of(e, {s: e.read(span) for s, (span, _) in spans.items()})
    alike = {s: e.alike(i, j, c.part.modes[i:j]) for s, (i, j) in enumerate(pairwise(bounds))}
    return [_of_rank(c, r, {s: spans[s] for s in e.flow.on_rank(r).stages}, late, alike) for r in range(e.flow.ranks)]


def _of_rank(
    c: Candidate, rank: int, spans: Mapping[int, tuple[Span, tuple[Span, ...]]], late: frozenset[str], alike: Mapping[int, Hashable]
) -> RankCurve:
    e = c.estimator
    reads = {s: e.read(span) for s, (span, _) in spans.items()}
    params = [e.params[v] for v in sorted(set[str]().union(*reads.values()))]
    activities = [e.activity(span, again, reads[s], s, late=late & reads[s], alike=alike[s]) for s, (span, again) in spans.items()]
    liveness, on_rank = e.rank.ledger.liveness, e.flow.on_rank(rank)
    several = len(spans) > 1
    units = liveness.units(*activities, follows=on_rank.follows) if several else liveness.units(*activities)
    resting, update = (sum(n for _, n in rows(params, e.of_rank, e.how, lives)) for lives in ("passes", "update"))
    waiting, adds = 0, several or not e.recipe.accumulates
    stages = []
    for activity, (f, b) in zip(activities, on_rank.waiting, strict=True):
        received, sent = (sum(liveness.crossing(x).values()) for x in (activity.receives, activity.sends))
        waiting += f * received + b * sent if several else 0
        arrived = sum(e.rank.program.types[v].nbytes for v in activity.sends) if several else 0
        m = e.flow.micro_batches
        first, later, last = (False, m == 1), (adds, False), (adds, True)  # whether there are gradients, and whether it is the last one
        passes = Passes(liveness, activity, e.passes)
        backward = {
            (some, final): [n + arrived for n in passes.backward(units, accumulated=some, final=final).curve]
            for some, final in dict.fromkeys((first, later, last)[: 1 if m == 1 else 3])
        }
        stages.append(
            StageCurve(
                kept_bytes=passes.held_bytes, gradient_bytes=activity.gradient_bytes, left_bytes=activity.left_bytes,
                forward=passes.forward(units).curve, first=backward[first],
                later=backward.get(later, backward[first]), last=backward.get(last, backward[first]),  # of one pass there is one curve
            )
        )  # fmt: skip
    return RankCurve(
        rest_bytes=resting, update_bytes=update, waiting_bytes=waiting,
        ends_bytes=max((x.counted(accumulates=e.recipe.accumulates) for x in liveness.ends(*activities)), default=0),
        context_bytes=int(e.cluster.gpu.context_bytes),
        held_bytes=float(sum(held_bytes(e, span, e.flow.in_flight[s]) for s, (span, _) in spans.items())),
        slack_share=float(e.recipe.allocator_slack), stages=stages,
    )  # fmt: skip
