"""All changes of layout: which function of `autopar.run.collectives` makes them, and what they communicate.

The bytes of a collective are those of the whole (gathered) tensor, as in cost_models.collectives. Each transition is
linear, so it is also an operator that a second mesh axis can be laid over (`rule`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from autopar.catalog.rule import OpView, register
from autopar.errors import PlanError
from autopar.ir import Arg, Kind, L, Layout, Op, P, Ref, S, Strategy, TensorType

__all__ = ["TRANSITIONS", "Transition", "needs_transition", "transition", "transition_op"]


@dataclass(frozen=True, slots=True)
class Transition:
    """function: its name in autopar.run.collectives. forward, backward: the collective that each makes, or None."""

    function: str
    forward: str | None = None
    backward: str | None = None


_S, _R, _I, _P = Kind.SHARD, Kind.REPLICATE, Kind.INVARIANT, Kind.PARTIAL

TRANSITIONS: dict[tuple[Kind, Kind], Transition] = {
    (_I, _R): Transition("copy_to", None, "all_reduce"),
    (_I, _S): Transition("split", None, "all_gather"),
    (_R, _S): Transition("narrow"),
    (_S, _R): Transition("all_gather", "all_gather", "reduce_scatter"),
    (_S, _I): Transition("gather", "all_gather", None),
    (_P, _I): Transition("all_reduce", "all_reduce", None),
    (_P, _R): Transition("all_reduce_shared", "all_reduce", "all_reduce"),
    (_P, _S): Transition("reduce_scatter", "reduce_scatter", "all_gather"),
    (_S, _P): Transition("pad"),
    (_I, _P): Transition("keep_one"),
    (_R, _P): Transition("mask_one"),
    (_R, _I): Transition("own"),
}
SUMMING = ("copy_to", "all_gather")  # what is no activation may be read so by ranks that do different work
ALL_TO_ALL = Transition("all_to_all", "all_to_all", "all_to_all")
REGROUP = Transition("regroup", "all_to_all", "all_to_all")


def needs_transition(have: Layout, want: Layout, t: TensorType) -> bool:
    """R and I differ in their gradients alone: they are one layout for a value that has none."""
    if have is want or have == want:
        return False
    return t.grad or {have.kind, want.kind} != {_R, _I}


def transition(have: Layout, want: Layout) -> Transition:
    """Raises PlanError if there is none: rows in the order of a rank (L) stay so."""
    if L in (have, want):
        raise PlanError(f"no change of layout leads from {have} to {want}")
    if have.is_shard and want.is_shard:
        return REGROUP if have.dim == want.dim else ALL_TO_ALL
    return TRANSITIONS[have.kind, want.kind]


def transition_op(value: str, have: Layout, want: Layout, axis: str, name: str, sums: torch.dtype | None = None) -> Op:
    """The operator 'autopar.C.<function>' that takes a value from one layout to another on an axis. sums: the dtype in which its gradients
    are summed over the ranks, where that is not its own: of a parameter that is used in a lower dtype than it rests in."""
    kwargs: list[tuple[str, Arg]] = [("axis", axis)]
    if have.is_shard and want.is_shard:
        kwargs += [("dim", have.dim), ("groups", have.groups)]
        kwargs += [("to_groups", want.groups)] if have.dim == want.dim else [("to_dim", want.dim), ("to_groups", want.groups)]
    else:
        shard = have if have.is_shard else want
        if shard.is_shard:
            kwargs.append(("dim", shard.dim))
            if shard.groups != 1:
                kwargs.append(("groups", shard.groups))
    made = transition(have, want)
    if sums is not None and made.function in SUMMING:
        kwargs.append(("sums", sums))
    return Op(target=f"autopar.C.{made.function}", args=(Ref(value),), kwargs=tuple(kwargs), outputs=(name,))


def rule(view: OpView) -> Iterable[Strategy]:
    """A transition of one axis as an operator on another: dims that it does not touch may be split, and P passes."""
    kwargs = dict(view.op.kwargs)
    touched = {kwargs.get("dim"), kwargs.get("to_dim")}
    for d, size in enumerate(view.outs[0].shape):
        for g in view.splits(size) if d not in touched else ():
            yield view.strategy([S(d, g)], [S(d, g)])
    yield view.strategy([P], [P])


for _name in sorted({t.function for t in TRANSITIONS.values()} | {"all_to_all", "regroup"}):
    register(f"autopar.C.{_name}", rule)
