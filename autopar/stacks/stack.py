"""One training software: what it can run, how it carries a plan out, and its own configuration, written and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.planner.plan import Pins
from autopar.stacks.configuration import Configuration
from cost_models.recipe import Recipe

__all__ = ["Limits", "Stack", "StackError", "beyond", "pins_within"]


class StackError(AutoparError, ValueError):
    """A configuration of another training software that cannot be read, written or priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """zeros: stages of ZeRO; staged_zeros: of them, those that go with pipeline stages. plain_alone: without ZeRO there is data parallelism
    alone. sequence: whether activations between the matrices that tp cuts are whole (False), cut (True), or either; none: no tensor
    parallelism. schedules: of the pipeline; none: no pipeline. even: each stage has as many layers. groups: parts of a parameter may lie
    over fewer ranks than there are (hybrid sharding). recomputes: of all blocks alike; some: of so many of each stage."""

    zeros: tuple[int, ...]
    staged_zeros: tuple[int, ...] = ()
    plain_alone: bool = False
    sequence: tuple[bool, ...] = ()
    schedules: tuple[str, ...] = ()
    even: bool = True
    groups: bool = False
    recomputes: tuple[str, ...] = ("none", "full")
    some: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """suffixes: of its files. recipe: how it carries out a plan whose parameters have so many bytes each. write: the text of its
    configuration, with what it cannot express (given) said in it. is_one: whether a parsed file is one of its. read: a parsed file (a
    mapping; of Megatron a list of words) as a configuration; raises StackError."""

    name: str
    title: str
    suffixes: tuple[str, ...]
    limits: Limits
    recipe: Callable[[int], Recipe]
    write: Callable[[Configuration, tuple[str, ...]], str]
    is_one: Callable[[Any], bool]
    read: Callable[[Any], Configuration]
    source: str

    def text(self, configuration: Configuration) -> str:
        return self.write(configuration, beyond(configuration, self))


def beyond(c: Configuration, stack: Stack) -> tuple[str, ...]:
    """What of a configuration this software cannot express, in words."""
    limits, found = stack.limits, list(c.said)
    if c.tp > 1 and not limits.sequence:
        found.append(f"tensor parallelism over {c.tp} ranks")
    elif c.tp > 1 and c.sequence_parallel is not None and c.sequence_parallel not in limits.sequence:
        found.append(f"sequence_parallel={str(c.sequence_parallel).lower()}: it is always {str(limits.sequence[0]).lower()}")
    if c.pp > 1 and not limits.schedules:
        found.append(f"pipeline stages on {c.pp} ranks")
    elif c.pp > 1:
        if c.schedule not in limits.schedules:
            found.append(f"schedule={c.schedule}; it has {', '.join(limits.schedules)}")
        if limits.even and not c.even:
            found.append(f"stages of {', '.join(map(str, c.blocks or ()))} layers: it makes stages alike")
    if (c.dp or 1) > 1:
        if c.zero not in limits.zeros:
            found.append(f"ZeRO-{c.zero} over the data-parallel ranks; it has {_stages(limits.zeros)}")
        elif c.pp > 1 and limits.schedules and c.zero not in limits.staged_zeros:
            found.append(f"ZeRO-{c.zero} with pipeline stages; it has {_stages(limits.staged_zeros)} there")
        elif c.zero == 0 and limits.plain_alone and c.tp * c.pp > 1:
            found.append("data parallelism without ZeRO beside tensor or pipeline parallelism")
        if c.copies > 1 and not limits.groups:
            found.append(f"parts over {c.shard} of {c.dp} data-parallel ranks (hybrid sharding)")
    if c.recompute not in limits.recomputes:
        found.append(f"recompute={c.recompute} as autopar chooses it; it has {', '.join(limits.recomputes)}")
    elif c.recomputed is not None and not limits.some:
        found.append(f"recompute of {c.recomputed} layers of a stage alone: it recomputes all or none")
    return tuple(dict.fromkeys(found))


def _stages(zeros: tuple[int, ...]) -> str:
    return " and ".join(f"ZeRO-{z}" if z else "none" for z in zeros) or "none"


def pins_within(stack: Stack, pins: Pins) -> Iterator[Pins]:
    """Pins whose plans together are those that this software can run, among the plans that the user's pins leave. StackError if these leave
    none."""
    limits = stack.limits
    own = {name: getattr(pins, name) for name in pins.__struct_fields__ if getattr(pins, name) is not None}
    reasons: dict[str, None] = {}
    some = False
    for further in _variants(limits):
        clash = next((name for name, value in further.items() if name in own and own[name] != value), None)
        if clash is not None:
            reasons[f"{clash}={own[clash]}"] = None
            continue
        if limits.schedules and pins.schedule is not None and pins.schedule not in limits.schedules:
            reasons[f"schedule={pins.schedule}"] = None
            continue
        if not limits.groups and pins.shard is not None:
            reasons[f"shard={pins.shard}"] = None
            continue
        if limits.even and pins.blocks is not None and len(set(pins.blocks)) > 1:
            reasons[f"blocks={','.join(map(str, pins.blocks))}"] = None
            continue
        some = True
        even: Mapping[str, Any] = {"even_stages": True} if limits.even and limits.schedules and pins.blocks is None else {}
        yield Pins(**{**own, **further, **even})
    if not some:
        raise StackError(f"{stack.title} cannot run a plan with the pins {', '.join(reasons)}: it has {_can(limits)}")


def _variants(limits: Limits) -> Iterator[dict[str, Any]]:
    for zero in limits.zeros:
        for recompute in limits.recomputes:
            for sequence in limits.sequence or (None,):
                found: dict[str, Any] = {"zero": zero, "recompute": recompute}
                if sequence is None:
                    found["tp"] = 1
                else:
                    found["sequence_parallel"] = sequence
                if not limits.schedules or (zero not in limits.staged_zeros) or (zero == 0 and limits.plain_alone):
                    found["pp"] = 1
                if zero == 0 and limits.plain_alone:
                    found["tp"] = 1
                    if sequence not in (None, limits.sequence[0]):
                        continue
                yield found


def _can(limits: Limits) -> str:
    tp = f"tensor parallelism with sequence_parallel={' or '.join(str(s).lower() for s in limits.sequence)}"
    pp = f"pipelines ({', '.join(limits.schedules)}{', stages alike' if limits.even else ''})"
    return ", ".join(
        [
            f"ZeRO stages {', '.join(map(str, limits.zeros))}", tp if limits.sequence else "no tensor parallelism",
            pp if limits.schedules else "no pipelines", f"recompute {', '.join(limits.recomputes)}",
        ]
    )  # fmt: skip
