"""A choice as far as it was priced: its stages by the account of their pieces (a draft), and as they will run (a candidate)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from autopar.ir import Span
from autopar.planner.estimate import Estimator, Times
from autopar.planner.modes import kept_s
from autopar.planner.partition import Partition
from autopar.planner.plan import MemoryPlan, StagePlan
from autopar.planner.rank import Rank
from autopar.planner.space import Choice, Form, Mesh
from autopar.planner.stages import Pieces
from cost_models.memory import held_gathers, stage_memory
from cost_models.pipeline import Flow
from cost_models.pools import MOMENTS, rows
from cost_models.rests import Rest

__all__ = ["GIB", "Candidate", "Draft", "candidate_of", "held_bytes", "late_of", "most_held_bytes"]

GIB = float(2**30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The stages of a choice by the account of its pieces. bound_s: no other stages of it are faster."""

    choice: Choice
    estimator: Estimator
    part: Partition
    times: Times
    bound_s: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """estimator: what priced it. form: of the tensor axis."""

    estimator: Estimator
    rank: Rank
    mesh: Mesh
    flow: Flow
    rest: Rest
    shard: int
    zero_dims: Mapping[str, int]
    segments: Pieces
    part: Partition
    stages: tuple[StagePlan, ...]
    step_time_s: float
    compute_s: float
    bubble_s: float
    gradient_sync_s: float
    optimizer_s: float
    form: Form | None = None


def candidate_of(e: Estimator, part: Partition) -> Candidate:
    """The stages of a partition, as they will run: costs and memory of each from its own operators. Of a whole program only."""
    rank, program = e.rank, e.rank.program
    assert not any(e.segments.copies), "a folded program has no stages of its own"
    again = [e.again(k, mode) for k, mode in enumerate(part.modes)]
    bounds = (0, *part.cuts, len(e.segments))
    t = e.times(part)
    spans = {s: (e.span(i, j), tuple(x for each in again[i:j] for x in each)) for s, (i, j) in enumerate(pairwise(bounds))}
    late = late_of(e, {s: e.read(span) for s, (span, _) in spans.items()})
    alike = {s: e.alike(i, j, part.modes[i:j]) for s, (i, j) in enumerate(pairwise(bounds))}
    issued = _issued(e, part.modes)
    memory = [_memory(e, r, {s: spans[s] for s in e.flow.on_rank(r).stages}, late, alike) for r in range(e.flow.ranks)]
    stages = []
    for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
        span = spans[s][0]
        own = e.read(span)
        stages.append(
            StagePlan(
                first_op=program.ops[span.start].name,
                blocks=[e.prefix(k) for k in range(i, j) if e.segments[k].block >= 0],
                recomputed=[e.prefix(k) for k in range(i, j) if _again(e, part, k) == "whole"],
                selective=[e.prefix(k) for k in range(i, j) if _again(e, part, k) == "part"],
                forward_s=t.forwards_s[s],
                backward_s=t.backwards_s[s],
                communication_s=rank.ledger.seconds(range(span.start, span.stop))[2],
                issued_s=sum(issued[k] for k in range(i, j)),
                flops=sum(c.counts.flops + c.counts.backward_flops for c in rank.ledger.costs[span.start : span.stop]),
                memory=memory[e.flow.rank_of[s]],
                parameters=sum(e.params[v].numel for v in own),
                micro_batches_in_flight=e.flow.in_flight[s],
            )
        )
    return Candidate(
        estimator=e, rank=rank, mesh=rank.mesh, flow=e.flow, rest=e.rest, shard=e.shard, zero_dims=e.dims,
        segments=e.segments, part=part, stages=tuple(stages), step_time_s=t.step_s, compute_s=t.compute_s,
        bubble_s=t.bubble_s, gradient_sync_s=t.sync_s, optimizer_s=t.optimizer_s,
    )  # fmt: skip


def _issued(e: Estimator, modes: Sequence[int]) -> list[float]:
    """Of each piece in its mode, the host's seconds of one micro-batch; blocks that are alike once."""
    ledger, known, found = e.rank.ledger, dict[tuple[int, int], float](), []
    for k, mode in enumerate(modes):
        alike = e.segments.kind(k, mode)
        if alike not in known:
            span, again = e.segments[k].span, e.again(k, mode)
            beside_s = sum(e.beside(e.read(span))[2:]) + kept_s(ledger, ledger.liveness, again)
            again_s = sum(c.host_s[0] for x in again for c in ledger.costs[x.start : x.stop])
            known[alike] = ledger.issued_s(span) + beside_s + again_s
        found.append(known[alike])
    return found


def late_of(e: Estimator, reads: Mapping[int, Iterable[str]]) -> frozenset[str]:
    """The parameters that several pipeline ranks use. reads: those of each stage."""
    ranks_of: dict[str, set[int]] = {}
    for s, own in reads.items():
        for v in own:
            ranks_of.setdefault(v, set()).add(e.flow.rank_of[s])
    return frozenset(v for v, ranks in ranks_of.items() if len(ranks) > 1)


def _again(e: Estimator, part: Partition, k: int) -> str:
    """How much of piece k runs again."""
    spans = e.pieces[k].modes[part.modes[k]].spans
    return "whole" if spans == (Span(0, len(e.segments[k].span)),) else "part" if spans else "nothing"


def _memory(
    e: Estimator, rank: int, spans: Mapping[int, tuple[Span, tuple[Span, ...]]], late: frozenset[str], alike: Mapping[int, Hashable]
) -> MemoryPlan:
    """Of a rank, at the moment of the step at which most is alive: in forward and backward (gradients that are not there yet then are
    not counted), or in the optimizer's update; and how much further the interval of another moment reaches. spans: of each of its stages,
    and what runs again in it; late: parameters that several ranks use; alike: of each stage, as of Estimator.alike."""
    key = rank, *spans.items(), late
    if key not in e.memory_plans:
        e.memory_plans[key] = _memory_of(e, rank, spans, late, alike)
    return e.memory_plans[key]


def _memory_of(
    e: Estimator, rank: int, spans: Mapping[int, tuple[Span, tuple[Span, ...]]], late: frozenset[str], alike: Mapping[int, Hashable]
) -> MemoryPlan:
    reads = {s: e.read(span) for s, (span, _) in spans.items()}
    params = [e.params[v] for v in sorted(set[str]().union(*reads.values()))]
    activities = [e.activity(span, again, reads[s], s, late=late & reads[s], alike=alike[s]) for s, (span, again) in spans.items()]
    live, known = e.rank.ledger.liveness, e.passes
    moments = live.peaks(activities[0], known) if len(spans) == 1 else live.peaks_of_rank(activities, e.flow.on_rank(rank), known)
    passes, update = (_by_row(rows(params, e.of_rank, e.how, lives)) for lives in ("passes", "update"))
    held = sum(held_bytes(e, span, e.flow.in_flight[s]) for s, (span, _) in spans.items())
    found = []
    for moment in (*moments, None):
        at = Counter(update if moment is None else passes)
        for kind, row in MOMENTS.items() if moment is not None else ():
            if kind != "gradients" or not e.recipe.accumulates:  # what is added to others at once is counted there
                at[row] += getattr(moment, kind)
        found.append(_memory_plan(e, at, held))
    fullest = max(found, key=lambda x: x.total_bytes)
    return msgspec.structs.replace(fullest, beyond_bytes=max(x.upper_bytes for x in found) - fullest.upper_bytes)


def _memory_plan(e: Estimator, at: Mapping[str, int], held: float) -> MemoryPlan:
    """Of a moment. at: row -> bytes; held: what the allocator holds besides."""
    terms = stage_memory(
        param_bytes=at["parameters"],
        trainable_params=0,
        gradient_bytes=at["gradients"],
        optimizer_state_bytes=at["optimizer_states"],
        optimizer=e.optimizer,
        activation_bytes_per_micro_batch=at["saved_activations"],
        batch_bytes=at["batch"],
        largest_temporary_bytes=at["largest_temporary"],
        bucket_bytes=at["communication_buffers"],
        framework_context_bytes=e.cluster.gpu.context_bytes,
        allocator_slack_fraction=e.recipe.allocator_slack,
        held_bytes=held,
    )
    return MemoryPlan(**{f"{name}_bytes": getattr(terms, name) for name in terms.__dataclass_fields__})


def _by_row(found: Iterable[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row, nbytes in found:
        total[row] += nbytes
    return total


def held_bytes(e: Estimator, span: Span, in_flight: int) -> float:
    """What the allocator holds of gathered activations (cost_models.memory.held_gathers)."""
    if not e.recipe.held_gathers:
        return 0.0
    costs = e.rank.ledger.costs[span.start : span.stop]
    ahead = sum(sum(c.host_s) for c in costs) < sum(c.forward_s + c.backward_s for c in costs)
    return held_gathers(e.recipe.held_gathers, _gathered_bytes(e, span), in_flight, e.rank.micro_batches, ahead)


def most_held_bytes(e: Estimator, span: Span, in_flight: int) -> float:
    """What it would hold of all of them, if the host were ahead; nothing by a recipe that holds none."""
    return held_gathers(1.0, _gathered_bytes(e, span), in_flight, e.rank.micro_batches) if e.recipe.held_gathers else 0.0


def _gathered_bytes(e: Estimator, span: Span) -> float:
    program = e.rank.program
    made = {o for op in program.ops[span.start : span.stop] for o in op.outputs}
    return sum(program.types[v].nbytes for v in e.rank.ledger.gathered if v in made)
