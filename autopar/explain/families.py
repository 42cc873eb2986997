"""The families of plans that people use, each priced at its best with the same capture, beside what was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.axes import BATCH, LAYERS
from autopar.errors import AutoparError
from autopar.explain.study import Asked, Refused, Study
from autopar.planner.plan import Plan
from autopar.planner.space import divisors
from autopar.report.explanation import Family, in_words

__all__ = ["families_of"]

PARTS = "tp"  # the axis whose matrices Megatron's form cuts


def families_of(study: Study) -> list[Family]:
    """By step time; those that were refused last. Pins of the question stay: a family that contradicts them is left out; so is what the
    user no longer waits for."""
    found = []
    for name, pins in _families(study.asked):
        stated = {k: v for k in study.asked.pins.__struct_fields__ if (v := getattr(study.asked.pins, k)) is not None}
        if any(k in pins and pins[k] != v for k, v in stated.items()):
            continue
        if study.stop():
            break
        found.append(_family(study, study.plan, name, pins))
    return sorted(found, key=lambda family: (family.step_time_s is None, family.step_time_s or 0.0))


def _families(asked: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    gpus = asked.gpus
    if gpus == 1:
        return
    node = max(n for n in divisors(gpus) if n <= asked.cluster.gpus_per_node)
    parts = node if node < gpus else max((n for n in divisors(gpus) if n < gpus), default=1)
    yield "data parallel", {BATCH: gpus, PARTS: 1, LAYERS: 1, "zero": 0}
    yield "data parallel, ZeRO-1", {BATCH: gpus, PARTS: 1, LAYERS: 1, "zero": 1}
    yield "ZeRO-3 (FSDP)", {BATCH: gpus, PARTS: 1, LAYERS: 1, "zero": 3}
    yield "tensor parallel alone", {BATCH: 1, PARTS: gpus, LAYERS: 1}
    yield "pipeline alone", {BATCH: 1, PARTS: 1, LAYERS: gpus}
    if parts > 1:
        zero = {"zero": 1} if parts * (asked.pins.of_axis(LAYERS) or 1) < gpus else {}  # needs a data axis
        yield f"Megatron-style, {PARTS} {parts}", {PARTS: parts, **zero, "sequence_parallel": True}
        yield f"FSDP + {PARTS} {parts}", {PARTS: parts, LAYERS: 1, "zero": 3}


def _family(study: Study, chosen: Plan, name: str, pins: dict[str, Any]) -> Family:
    try:
        answer = study.solve(study.with_pins(**pins))
    except AutoparError as error:  # pins of the question and of the family exclude each other
        return Family(name=name, pins=pins, step_time_s=None, memory_bytes=None, plan="", why=str(error).splitlines()[0])
    if isinstance(answer, Refused):
        return Family(name=name, pins=pins, step_time_s=None, memory_bytes=None, plan="", why=answer.why)
    plan = answer
    same = (plan.mesh, plan.rest, plan.micro_batches, plan.schedule) == (chosen.mesh, chosen.rest, chosen.micro_batches, chosen.schedule)
    return Family(
        name=name, pins=pins, step_time_s=plan.step_time_s, memory_bytes=max(plan.memory_bytes), plan=in_words(plan),
        chosen=same and abs(plan.step_time_s - chosen.step_time_s) <= 1e-6 * chosen.step_time_s,
    )  # fmt: skip
