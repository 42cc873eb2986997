"""What limits a plan, from its own figures: the parts of its step, its memory, its batch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autopar.axes import AXES, BATCH, LAYERS
from autopar.planner.account import BUBBLE, COMPUTE, LAUNCHES, RECOMPUTE, UPDATE, collectives
from autopar.planner.plan import Plan, parse_strategy
from autopar.report.strategies import words_of
from autopar.report.units import bytes_text
from autopar.report.words import MEMORY_TERMS, counted, share_text

__all__ = ["Limit", "limits_of"]

TELLING = 0.05  # of the step: what takes less limits nothing
FULL = 0.9  # of the memory that a plan may fill


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """kind: compute, network, memory, launches, pipeline, batch, heads, divisibility or optimizer. share: of the step, or of the memory."""

    kind: str
    text: str
    share: float


def limits_of(plan: Plan) -> list[Limit]:
    """What the step is spent on beside arithmetic, the most first; then memory, and the batch where it has no more to divide."""
    if plan.account is None:
        return [Limit(kind="", text=text, share=0.0) for text in plan.limits]
    total = plan.step_time_s or 1.0
    shares = {kind: s / total for kind, s in sorted(plan.account.seconds.items(), key=lambda item: -item[1])}
    found = [_of_time(plan, kind, share) for kind, share in shares.items() if share >= TELLING and kind not in (COMPUTE, RECOMPUTE)]
    found += _undivided(plan, total)
    memory = _memory(plan, shares.get(RECOMPUTE, 0.0))
    found += [memory] if memory is not None else []
    batch = _batch(plan, shares)
    found += [batch] if batch is not None else []
    compute = shares.get(COMPUTE, 0.0)
    alone = "; nothing else takes more than 5%" if not found else ""
    arithmetic = Limit(kind="compute", text=f"compute: operators run for {share_text(compute)} of the step{alone}", share=compute)
    return [arithmetic, *found] if compute >= 0.5 else [*found, arithmetic]


def _of_time(plan: Plan, kind: str, share: float) -> Limit:
    said = share_text(share)
    assert plan.account is not None
    if kind == LAUNCHES:
        text = f"launches: for {said} of the step the GPUs wait for the host, which issues kernels more slowly than they run"
        return Limit(kind="launches", text=text, share=share)
    if kind == BUBBLE:
        flow = f"{counted(plan.micro_batches, 'micro-batch')} over {plan.mesh[LAYERS]} ranks"
        text = f"pipeline: {said} of the step is bubble and transfers, {flow}"
        return Limit(kind="pipeline", text=text, share=share)
    if kind == UPDATE:
        return Limit(kind="optimizer", text=f"optimizer: its update takes {said} of the step", share=share)
    for axis in AXES:
        if kind == collectives(axis):
            within = plan.account.per_node.get(axis, 1) >= plan.mesh[axis]
            where = "links inside the node" if within else "links between nodes"
            text = f"network: communication over {axis} that nothing hides takes {said} of the step, on the {where}"
            return Limit(kind="network", text=text, share=share)
    return Limit(kind="compute", text=f"{kind}: {said} of the step", share=share)


def _undivided(plan: Plan, total: float) -> Iterator[Limit]:
    """Heavy operators that every rank of an axis runs whole, since what it would divide has too few parts."""
    for x in plan.account.idle if plan.account else ():
        share = x.seconds * plan.micro_batches / total
        if not x.undivided or share < TELLING:
            continue
        kind = x.kind.removeprefix("aten.").partition(".")[0]
        words = words_of(x.axis, kind, parse_strategy(x.undivided))
        text = f"{words}: {x.size} do not divide among {plan.mesh[x.axis]} ranks of {x.axis}, so that each runs {kind} whole, "
        text += f"{share_text(share)} of the step"
        yield Limit(kind="heads" if words == "heads" else "divisibility", text=text, share=share)


def _memory(plan: Plan, recompute: float) -> Limit | None:
    limit = plan.memory_limit_bytes
    fullest = max(range(len(plan.stages)), key=lambda s: plan.stages[s].memory.total_bytes)
    memory = plan.stages[fullest].memory
    used, most_used = (nbytes / limit if limit else 0.0 for nbytes in (memory.total_bytes, memory.upper_bytes))
    if most_used < FULL and not recompute:
        return None
    terms = sorted(MEMORY_TERMS, key=lambda term: -int(getattr(memory, f"{term}_bytes")))
    most = ", ".join(f"{bytes_text(getattr(memory, f'{term}_bytes'))} {MEMORY_TERMS[term]}" for term in terms[:2])
    again = f"; what is run again to save memory takes {share_text(recompute)} of the step" if recompute else ""
    text = (
        f"memory: {share_text(used)} of {bytes_text(limit)} on pipeline rank {plan.rank_of[fullest]} ({most}); "
        f"{share_text(most_used)} at the upper end of its interval, which must fit{again}"
    )
    return Limit(kind="memory", text=text, share=used)


def _batch(plan: Plan, shares: dict[str, float]) -> Limit | None:
    """Where each rank has one sample of a micro-batch and would rather have several micro-batches, or ranks of the data axis."""
    ranks = plan.mesh[BATCH]
    if not plan.global_batch or ranks * plan.micro_batches < plan.global_batch:
        return None
    lost = shares.get(BUBBLE, 0.0) + shares.get(LAUNCHES, 0.0)
    if ranks == plan.gpus and lost < TELLING:
        return None
    split = f"{ranks} data-parallel ranks" + (f" and {counted(plan.micro_batches, 'micro-batch')}" if plan.micro_batches > 1 else "")
    text = f"batch: {counted(plan.global_batch, 'sample')} over {split} leave one for each, so that no more can be divided"
    return Limit(kind="batch", text=text, share=lost)
