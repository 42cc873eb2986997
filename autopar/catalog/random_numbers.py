"""Operators that draw random numbers: where a dim is split, every shard draws from a stream of its own.

On replicas (R, I) the operator itself draws the same on all ranks, whose generators are equal. Over moments a value that is the
same for all of them must not be drawn anew in each: the prologue draws it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from autopar.catalog.pointwise import pointwise
from autopar.catalog.rule import OpView, draws, local_code, over_axes, register
from autopar.catalog.schema import bind
from autopar.ir import Op, S, Strategy

__all__: list[str] = []

DRAW = "autopar.L.draw"
ELEMENTWISE = (
    "rand_like randn_like randint_like bernoulli normal normal_functional uniform exponential cauchy geometric log_normal random poisson "
    "binomial alpha_dropout native_dropout rrelu _standard_gamma"
)


def elementwise(view: OpView) -> Iterable[Strategy]:
    """Every element has a number of its own."""
    yield from _drawn(view, pointwise(view))


def by_rows(view: OpView) -> Iterable[Strategy]:
    """multinomial: each row is a distribution of its own."""
    (t,) = view.ins
    rows = view.splits(t.shape[0]) if len(t.shape) == 2 else ()
    yield from _drawn(view, (view.strategy([S(0, g)], [S(0, g)]) for g in rows))


def by_channels(view: OpView) -> Iterable[Strategy]:
    """feature_dropout and its kin draw one number for each channel of each sample."""
    shape = view.ins[0].shape
    yield from _drawn(view, (view.strategy([S(d, g)], [S(d, g)]) for d, size in enumerate(shape[:2]) for g in view.splits(size)))


def _drawn(view: OpView, stated: Iterable[Strategy]) -> Iterable[Strategy]:
    for s in stated:
        yield dataclasses.replace(s, local="draw") if draws(view.op) else s


@local_code("draw")
def _draw(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    """The same operator, drawing from the stream of the shard over this axis and those before."""
    name, args = (op.args[0], op.args[1:]) if op.target == DRAW else (op.target, op.args)
    kwargs = tuple((k, v) for k, v in op.kwargs if k != "axis")
    return (dataclasses.replace(op, target=DRAW, args=(name, *args), kwargs=(("axis", over_axes(op, axis)), *kwargs)),)


def _again(view: OpView) -> Iterable[Strategy]:
    """What draws for the shards of one axis, under a further one: by the rule of its operator."""
    name = view.op.args[0]
    assert isinstance(name, str)
    family = name.split(".")[1]
    rule: Callable[[OpView], Iterable[Strategy]] = by_rows if family == "multinomial" else elementwise
    yield from (by_channels if family.startswith("feature_") else rule)(view)


def feature_dropout(view: OpView) -> Iterable[Strategy]:
    """Drops whole channels; where nothing is dropped, it is a copy."""
    args = bind(view.op)
    yield from by_channels(view) if args["train"] and args["p"] else pointwise(view)


register(" ".join(f"aten.{name}" for name in ELEMENTWISE.split()), elementwise)
register("aten.multinomial", by_rows)
register("aten.feature_dropout aten.feature_alpha_dropout", feature_dropout)
register("aten.randperm", lambda view: ())
register(DRAW, _again)
