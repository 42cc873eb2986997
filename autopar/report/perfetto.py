"""The predicted step as a trace (the trace event format, JSON), which ui.perfetto.dev opens: a process for each pipeline rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from autopar.planner.plan import Plan
from autopar.report.timeline import REDUCTION, RankTimeline, StepTimeline, ranks_text, timeline_of

__all__ = ["perfetto_trace", "trace_events"]

COMPUTE, COMMUNICATION = 1, 2  # threads of a process
US = 1e6


def perfetto_trace(plan: Plan) -> bytes:
    """The whole file."""
    made = timeline_of(plan)
    other = {"model": plan.model, "gpus": plan.gpus, "cluster": plan.cluster, "step_time_s": plan.step_time_s, "figures": plan.provenance}
    return msgspec.json.encode({"traceEvents": list(trace_events(made)), "displayTimeUnit": "ms", "otherData": other})


def trace_events(made: StepTimeline) -> Iterator[dict[str, Any]]:
    for rank in made.ranks:
        yield from _of_rank(rank)
    for number, (sender, sent_s, receiver, used_s, stage, micro_batch, gradient) in enumerate(made.transfers):
        name = f"{'gradients' if gradient else 'activations'} of micro-batch {micro_batch}"
        same = {"cat": "transfer", "name": name, "id": number}
        yield {"ph": "s", "pid": sender, "tid": COMPUTE, "ts": _before(sent_s), **same, "args": {"stage": stage}}
        yield {"ph": "f", "bp": "e", "pid": receiver, "tid": COMPUTE, "ts": used_s * US, **same}


def _before(end_s: float) -> float:
    """Just inside of the bar that ends then: an arrow begins at a bar that contains its time."""
    return max(0.0, end_s * US - 1e-3)


def _of_rank(rank: RankTimeline) -> Iterator[dict[str, Any]]:
    stages = ", ".join(map(str, rank.stages))
    own = {"pid": rank.rank}
    named = f"pipeline rank {rank.rank} ({ranks_text(rank.ranks)}; stage {stages})"
    yield {"ph": "M", "name": "process_name", **own, "args": {"name": named}}
    yield {"ph": "M", "name": "process_sort_index", **own, "args": {"sort_index": rank.rank}}
    for tid, name in ((COMPUTE, "compute"), (COMMUNICATION, "communication")):
        yield {"ph": "M", "name": "thread_name", **own, "tid": tid, "args": {"name": name}}
    for bar in rank.bars:
        of = f" {bar.micro_batch}" if bar.micro_batch >= 0 else ""
        on = f" of stage {bar.stage}" if bar.stage >= 0 and len(rank.stages) > 1 else ""
        args = {"stage": bar.stage, "micro_batch": bar.micro_batch} if bar.micro_batch >= 0 else {}
        yield {
            "ph": "X", "cat": bar.kind, "name": f"{bar.kind}{of}{on}", **own, "tid": COMMUNICATION if bar.kind == REDUCTION else COMPUTE,
            "ts": bar.start_s * US, "dur": (bar.end_s - bar.start_s) * US, "args": args,
        }  # fmt: skip
    for level in rank.memory:
        yield {"ph": "C", "name": "memory", **own, "ts": level.at_s * US, "args": {"GiB": level.nbytes / 2**30}}
