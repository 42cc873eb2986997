"""What limits a plan, from its own figures: the parts of its step, its memory, its batch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autopar.axes import AXES, BATCH, LAYERS
from autopar.planner.account import BUBBLE, COMPUTE, LAUNCHES, RECOMPUTE, UPDATE, collectives
from autopar.planner.plan import Plan, parse_strategy
from autopar.report.strategies import undivided_words
from autopar.report.words import counted, share_text

__all__ = ["Limit", "idle_axes", "limits_of"]

TELLING = 0.05  # of the step: what takes less limits nothing
FULL = 0.9  # of the memory that a plan may fill


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """kind: compute, network, memory, launches, pipeline, batch, heads, divisibility, optimizer or idle. share: of the step, of the memory,
    or of the GPUs. axis: of what it is about, '' where that is none; between: of a network, whether of the links between nodes."""

    kind: str
    text: str
    share: float
    axis: str = ""
    between: bool = False


def limits_of(plan: Plan) -> list[Limit]:
    """What the step is spent on beside arithmetic, and what cannot be divided, the most first; then memory."""
    if plan.account is None:
        return [Limit(kind="", text=text, share=0.0) for text in plan.limits]
    total = plan.step_time_s or 1.0
    shares = {kind: s / total for kind, s in sorted(plan.account.seconds.items(), key=lambda item: -item[1])}
    found = [_of_time(plan, kind, share) for kind, share in shares.items() if share >= TELLING and kind not in (COMPUTE, RECOMPUTE)]
    batch, memory = _batch(plan, shares), _memory(plan, shares.get(RECOMPUTE, 0.0))
    found = sorted([*found, *_undivided(plan, total), *([batch] if batch is not None else [])], key=lambda limit: -limit.share)
    found += [*([memory] if memory is not None else []), *_same_work(plan)]
    compute = shares.get(COMPUTE, 0.0)
    alone = "; nothing else takes more than 5%" if not found else ""
    if compute < TELLING and found:
        return found
    arithmetic = Limit(kind="compute", text=f"compute: operators run for {share_text(compute)} of the step{alone}", share=compute)
    return [arithmetic, *found] if compute >= 0.5 else [*found, arithmetic]


def _of_time(plan: Plan, kind: str, share: float) -> Limit:
    said = share_text(share)
    assert plan.account is not None
    if kind == LAUNCHES:
        text = f"launches: for {said} of the step the GPUs wait for the host to issue the next operator"
        return Limit(kind="launches", text=text, share=share)
    if kind == BUBBLE:
        flow = f"{counted(plan.micro_batches, 'micro-batch')} over {plan.mesh[LAYERS]} ranks"
        text = f"pipeline: {said} of the step is bubble, with {flow}"
        return Limit(kind="pipeline", text=text, share=share)
    if kind == UPDATE:
        return Limit(kind="optimizer", text=f"optimizer: its update takes {said} of the step", share=share)
    for axis in AXES:
        if kind == collectives(axis):
            between = plan.account.per_node.get(axis, 1) < plan.mesh[axis]
            where = "links between nodes" if between else "links inside the node"
            text = f"network: {said} of the step is communication over {axis} that nothing hides, on {where}"
            return Limit(kind="network", text=text, share=share, axis=axis, between=between)
    return Limit(kind="compute", text=f"{kind}: {said} of the step", share=share)


def _undivided(plan: Plan, total: float) -> Iterator[Limit]:
    """Heavy operators that every rank of an axis runs whole, since what it would divide has too few parts."""
    for x in plan.account.idle if plan.account else ():
        share = x.seconds * plan.micro_batches / total
        if not x.undivided or share < TELLING:
            continue
        kind = x.kind.removeprefix("aten.").partition(".")[0]
        words = undivided_words(x.axis, kind, parse_strategy(x.undivided), x.size)
        text = f"{words} among {x.axis} {plan.mesh[x.axis]}, so that each of its ranks runs {kind} whole, "
        text += f"{share_text(share)} of the step"
        yield Limit(kind="heads" if words.startswith("heads:") else "divisibility", text=text, share=share, axis=x.axis)


def _same_work(plan: Plan) -> Iterator[Limit]:
    """Axes that split nothing: the ranks beyond the first are there for nothing."""
    for axis in idle_axes(plan):
        n = plan.mesh[axis]
        text = f"idle: all ranks of {axis} {n} do the same work; no split of it was found to be faster"
        yield Limit(kind="idle", text=text, share=1 - 1 / n, axis=axis)


def idle_axes(plan: Plan) -> list[str]:
    """Axes over whose ranks every operator does the same work."""
    named = [axis for axis, n in plan.mesh.items() if n > 1 and AXES[axis].divides == "operators"]
    return [axis for axis in named if plan.account is not None and not _divides(plan, axis)]


def _divides(plan: Plan, axis: str) -> bool:
    """Whether an axis splits any operator's work."""
    return axis in plan.axes and any(parse_strategy(text).splits_work for text in plan.axes[axis].ops.values())


def _memory(plan: Plan, recompute: float) -> Limit | None:
    limit = plan.memory_limit_bytes
    fullest = max(range(len(plan.stages)), key=lambda s: plan.stages[s].memory.total_bytes)
    memory = plan.stages[fullest].memory
    used, most_used = (nbytes / limit if limit else 0.0 for nbytes in (memory.total_bytes, memory.upper_bytes))
    if most_used < FULL and not recompute:
        return None
    again = f"; recompute takes {share_text(recompute)} of the step" if recompute else ""
    where = f" on pipeline rank {plan.rank_of[fullest]}" if plan.mesh[LAYERS] > 1 else ""
    text = f"memory: {share_text(used)} is used{where}, {share_text(most_used)} at the upper end, which must fit{again}"
    return Limit(kind="memory", text=text, share=used)


def _batch(plan: Plan, shares: dict[str, float]) -> Limit | None:
    """Where each rank has one sample of a micro-batch and would rather have several micro-batches, or ranks of the data axis."""
    ranks = plan.mesh[BATCH]
    if not plan.global_batch or ranks * plan.micro_batches < plan.global_batch:
        return None
    lost = shares.get(BUBBLE, 0.0) + shares.get(LAUNCHES, 0.0)
    if ranks == plan.gpus and lost < TELLING:
        return None
    over = [counted(n, noun) for n, noun in ((ranks, "data-parallel rank"), (plan.micro_batches, "micro-batch")) if n > 1]
    text = f"batch: {counted(plan.global_batch, 'sample')} over {' and '.join(over)} leave one for each, and nothing more to divide"
    if not over:
        text = "batch: one sample, which nothing can divide"
    return Limit(kind="batch", text=text, share=lost)
