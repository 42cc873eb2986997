"""What would relieve a plan of its limits: each change is planned before it is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from autopar.errors import AutoparError
from autopar.explain.study import Asked, Refused, Study
from autopar.planner.plan import Pins
from autopar.planner.space import divisors
from autopar.report.explanation import Limit, Relief, in_words
from autopar.report.limits import limits_of
from autopar.report.units import in_own_unit
from autopar.report.words import counted
from cost_models.cluster import Link

__all__ = ["reliefs_of"]

MOSTLY = 0.3  # of the step is arithmetic, where more GPUs could help


def reliefs_of(study: Study) -> list[Relief]:
    """Of each limit of the plan what is the usual remedy, the most useful first."""
    limits = limits_of(study.plan)
    changes = dict(change for limit in limits for change in _changes(study, limit))
    found = [_tried(study, text, asked) for text, asked in changes.items() if not study.stop()]
    return sorted(found, key=lambda x: -(x.speedup or 0.0))


def _changes(study: Study, limit: Limit) -> Iterator[tuple[str, Asked]]:
    asked = study.asked
    cluster = asked.cluster
    if limit.kind == "memory":
        twice = 2 * asked.limit_bytes
        yield f"twice the memory ({' '.join(in_own_unit(twice))})", dataclasses.replace(asked, memory_limit_bytes=twice)
    if limit.kind == "network":
        inter, intra = (_twice(cluster.inter), cluster.intra) if limit.between else (cluster.inter, _twice(cluster.intra))
        faster = dataclasses.replace(cluster, inter=inter, intra=intra)
        yield f"links {'between nodes' if limit.between else 'inside the node'} twice as fast", dataclasses.replace(asked, cluster=faster)
    if limit.kind in ("launches", "pipeline", "batch", "optimizer", "network") and asked.batch:
        yield f"twice the batch ({2 * asked.batch})", dataclasses.replace(asked, batch=2 * asked.batch)
    if limit.kind == "idle":
        fewer = asked.gpus // study.plan.mesh[limit.axis]
        yield f"{counted(fewer, 'GPU')} in place of {asked.gpus}", dataclasses.replace(asked, gpus=fewer)
    if limit.kind in ("heads", "divisibility"):
        yield from _fewer(study, limit)
    if limit.kind == "compute" and limit.share >= MOSTLY and (cluster.gpu_count is None or cluster.gpu_count >= 2 * asked.gpus):
        yield f"twice the GPUs ({2 * asked.gpus})", dataclasses.replace(asked, gpus=2 * asked.gpus)


def _fewer(study: Study, limit: Limit) -> Iterator[tuple[str, Asked]]:
    """An axis of as many ranks as what it divides has parts for."""
    for x in study.plan.account.idle if study.plan.account else ():
        n = study.plan.mesh[x.axis]
        fits = [k for k in divisors(n) if x.size and x.size % k == 0 and 1 < k < n]
        if fits and x.axis == limit.axis and x.axis in Pins.__struct_fields__:
            yield f"{x.axis} {fits[-1]} instead of {n}", study.with_pins(**{x.axis: fits[-1]})


def _twice(link: Link) -> Link:
    return dataclasses.replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s)


def _tried(study: Study, change: str, asked: Asked) -> Relief:
    try:
        answer = study.solve(asked)
    except AutoparError as error:
        return Relief(change=change, step_time_s=None, speedup=None, plan="", why=str(error).splitlines()[0])
    if isinstance(answer, Refused):
        return Relief(change=change, step_time_s=None, speedup=None, plan="", why=answer.why)
    before, after = study.plan.tokens_or_samples_per_s, answer.tokens_or_samples_per_s
    per = f" a {answer.samples_unit.removesuffix('s')}" if answer.global_batch != study.plan.global_batch else ""
    return Relief(
        change=change, step_time_s=answer.step_time_s, speedup=after / before if before else None, plan=in_words(answer), per=per,
    )  # fmt: skip
