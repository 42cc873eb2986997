"""What the user asks for, checked before a model is captured: names with near matches, pins with their types."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from autopar.catalog.rule import rule_of
from autopar.errors import PlanError
from autopar.ir import I, Op, Program, R, refs
from autopar.planner.account import generic
from autopar.planner.lower import lower
from autopar.planner.plan import Pins, Plan
from autopar.planner.plan_account import UnruledAccount
from autopar.run.dtypes import PRECISIONS
from autopar.run.inputs import Arguments, arguments_of
from autopar.targets import did_you_mean
from cost_models.cluster import MOST_GPUS

__all__ = [
    "PRECISIONS", "WishError", "as_pins", "check_gpus", "check_inputs", "check_name", "for_loss_outside", "itemsize_of", "with_notes",
]  # fmt: skip


class WishError(PlanError, ValueError):
    """An argument whose value makes no sense."""


def check_gpus(gpus: object) -> None:
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise WishError(f"gpus must be a positive number of GPUs, not {gpus!r}")
    if gpus > MOST_GPUS:
        raise WishError(f"plans are made for at most {MOST_GPUS:,} GPUs, not for {gpus:,}")


def check_name(what: str, name: object, known: Iterable[str]) -> None:
    """WishError with near matches unless the name is known."""
    if name not in list(known):
        raise WishError(f"there is no {what} {name!r}{did_you_mean(str(name), known)}")


def as_pins(pins: Pins | Mapping[str, Any] | None) -> Pins | None:
    """Pins, given as such or as a mapping; None if nothing is pinned. WishError for unknown names, PlanError for bad values."""
    if pins is None or isinstance(pins, Pins):
        return None if pins == Pins() else pins
    if not isinstance(pins, Mapping):
        raise WishError(f"pins must be autopar.Pins or a mapping such as {{'tp': 2}}, not {pins!r}")
    for name in pins:
        check_name("pin", name, Pins.__struct_fields__)
    return Pins(**dict(pins)) if pins else None


FOR_LOSS_OUTSIDE = "gpipe"  # the schedule in which backward begins when all micro-batches have gone forward


def for_loss_outside(program: Program, pins: Pins | None) -> Pins | None:
    """The pins, and what follows if the user makes the loss of the program's outputs: backward begins when all micro-batches have gone
    forward. Without stages that is one micro-batch, for nothing is gained by more. WishError for pins that do not go with it."""
    if program.own_loss:
        return pins
    pins = pins or Pins()
    if pins.schedule not in (None, FOR_LOSS_OUTSIDE) or (pins.virtual_stages or 1) > 1:
        asked = f"virtual_stages={pins.virtual_stages}" if pins.schedule in (None, FOR_LOSS_OUTSIDE) else f"schedule={pins.schedule}"
        raise WishError(
            f"{asked}: {program.name} returns no loss, so backward cannot begin before all micro-batches have gone "
            f"forward. Pin schedule=gpipe, or give loss=fn"
        )
    several = pins.micro_batch is not None or (pins.micro_batches or 1) > 1
    if several and pins.pp in (None, 1):
        raise WishError(f"micro-batches without stages save no memory where the model returns no loss ({program.name}): give loss=fn")
    count = pins.micro_batches if several or pins.micro_batches else 1
    return msgspec.structs.replace(pins, schedule=FOR_LOSS_OUTSIDE, micro_batches=None if pins.micro_batch is not None else count)


def itemsize_of(program: Program) -> int:
    """Bytes of one number of the trainable parameters, of most of them."""
    sizes = Counter[int]()
    for p in program.params:
        sizes[program.types[p.value].dtype.itemsize] += program.types[p.value].numel if p.trainable else 0
    return sizes.most_common(1)[0][0] if sizes else 4


def check_inputs(model: nn.Module, inputs: object) -> None:
    """WishError unless the example inputs are a tuple or a mapping that the model's forward can be called with."""
    name = type(model).__name__
    if not isinstance(inputs, tuple | list | Mapping | Arguments):
        found = type(inputs).__name__
        raise WishError(f"example_inputs must be a tuple of positional or a dict of keyword inputs, not {found}; for one input: (x,)")
    signature = inspect.signature(model.forward)
    args, kwargs = arguments_of(inputs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        given = ", ".join([*([f"{len(args)} by position"] if args or not kwargs else []), *map(str, kwargs)])
        raise WishError(f"the inputs ({given}) do not fit {name}.forward{signature}: {e}") from e


def with_notes(plan: Plan, program: Program, further: tuple[str, ...] = ()) -> Plan:
    """The plan with further notes, and with those on what is not as one may think: operators without a rule, and a precision that is not
    the model's
    (nothing is cast then)."""
    notes = [*further]
    unruled = [op for op in program.ops if refs(op) and rule_of(op.target) is None]
    split = _split(plan, program, unruled)
    found: list[UnruledAccount] = []
    for ops, how, probed in (
        ([op for op in unruled if op.name in split], "split over dim 0 as probed", True),
        ([op for op in unruled if op.name not in split], "so replicated where an axis is split", False),
    ):
        if ops:
            kinds = Counter(op.target for op in ops).most_common()
            listed = ", ".join(f"{target} x{n}" for target, n in kinds)
            notes.append(f"without a rule, {how}, and priced as read and written bytes: {listed}")
            for target, n in kinds:
                modules = list(dict.fromkeys(generic(op.module) for op in ops if op.target == target and op.module))
                found.append(UnruledAccount(kind=target, count=n, modules=modules[:8], probed=probed))
    if found and plan.account is not None:
        plan = msgspec.structs.replace(plan, account=msgspec.structs.replace(plan.account, unruled=found))
    own = plan.precision
    dtypes = list(dict.fromkeys(str(p.rests or program.types[p.value].dtype).removeprefix("torch.") for p in program.params))
    if dtypes and _only_cast(program, PRECISIONS[plan.precision]):
        notes.append(f"float32 parameters rest as they are, and are cast to {PRECISIONS[plan.precision]} where they are used")
    elif dtypes and dtypes != [PRECISIONS[plan.precision]]:
        notes.append(f"the parameters are {', '.join(dtypes)}, and nothing is cast: all figures are for that, not for {plan.precision}")
        own = next((name for name, dtype in PRECISIONS.items() if dtypes == [dtype]), plan.precision)
    if plan.reduce_dtype is not None:
        notes.append(f"gradients are brought together over ranks in {PRECISIONS[plan.reduce_dtype]}")
    return msgspec.structs.replace(plan, precision=own, notes=[*notes, *plan.notes]) if notes else plan


def _only_cast(program: Program, dtype: str) -> bool:
    """Whether parameters that rest in float32 are used in this lower dtype, but for those of norms with running statistics."""
    return any(p.rests == torch.float32 and str(program.types[p.value].dtype) == f"torch.{dtype}" for p in program.params)


def _split(plan: Plan, program: Program, ops: Sequence[Op]) -> frozenset[str]:
    """Those of these operators without a rule, by name, that the plan splits over an axis or over the micro-batches. What has no
    rule makes a shard or terms of a sum only if it is split."""
    if not ops or (plan.gpus == plan.micro_batches == 1):
        return frozenset()
    layouts = lower(program, plan).program.layouts.values()
    return frozenset(op.name for op in ops if any(x.get(op.name, I).kind not in (I.kind, R.kind) for x in layouts))
