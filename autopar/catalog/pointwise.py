"""Operators that work element by element, with broadcasting: split any dim that is not broadcast in the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopar.catalog.rule import OpView, local_code, over_axes, register, set_args
from autopar.ir import Arg, I, Op, P, R, S, Strategy

__all__ = ["align", "pointwise"]

NONLINEAR = """
abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor bitwise_left_shift
bitwise_right_shift ceil celu clamp clamp_max clamp_min clip cos cosh copysign deg2rad digamma elu eq erf erfc erfinv exp
exp2 expm1 floor floor_divide fmax fmin fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish
hardtanh heaviside hypot isfinite isinf isnan isneginf isposinf le leaky_relu less less_equal lgamma log log10 log1p log2
log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish ne
nan_to_num nextafter not_equal polar pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign
signbit silu sin sinc sinh softplus softshrink softsign special_expit special_erf special_log1p sqrt square tan tanh
tanhshrink threshold trunc xlogy where angle lerp addcmul addcdiv
__and__ __or__ __xor__ __lshift__ __rshift__ masked_fill complex float_power max.other min.other fill zero isin.Tensor_Scalar
"""
LINEAR_UNARY = "neg clone contiguous alias positive conj conj_physical resolve_conj real imag detach to type_as _to_copy lift_fresh_copy"


def align(view: OpView) -> list[tuple[int, ...]]:
    """For every operand, the dim of the result that each of its dims broadcasts into."""
    ndim = len(view.outs[0].shape)
    return [tuple(range(ndim - len(t.shape), ndim)) for t in view.ins]


def pointwise(view: OpView) -> Iterable[Strategy]:
    """Split each result dim; operands that have it at full size are S there, those that broadcast over it R."""
    out = view.outs[0]
    if not view.ins or any(o.shape != out.shape for o in view.outs):
        return
    aligned = align(view)
    for d, size in enumerate(out.shape):
        for g in view.splits(size):
            ins = [S(a.index(d), g) if d in a and t.shape[a.index(d)] == size else R for a, t in zip(aligned, view.ins, strict=True)]
            if any(x.is_shard for x in ins):
                yield view.strategy(ins, [S(d, g)] * len(view.outs))


def linear_unary(view: OpView) -> Iterable[Strategy]:
    yield from pointwise(view)
    if view.outs[0].dtype.is_floating_point == view.ins[0].dtype.is_floating_point:
        yield view.strategy([P] + [R] * (len(view.ins) - 1), [P])


def add(view: OpView) -> Iterable[Strategy]:
    """A sum of tensors passes P when all operands are partial; to a partial one every rank adds its part of a number."""
    yield from pointwise(view)
    if len(view.ins) == 2:
        yield view.strategy([P, P], [P])
    elif view.outs[0].dtype == view.ins[0].dtype and view.ins[0].dtype.is_floating_point and "other" in view.args():
        yield view.strategy([P], [P], local="number_part")


@local_code("number_part")
def _number_part(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    number = view.args()["other"]
    assert isinstance(number, bool | int | float | complex)
    return (set_args(op, other=number / view.n),)


def multiply(view: OpView) -> Iterable[Strategy]:
    """Linear in each factor: a partial factor times a replicated one (or a number) is partial."""
    yield from pointwise(view)
    if len(view.ins) == 1:
        yield view.strategy([P], [P])
    elif len(view.ins) == 2:
        yield view.strategy([P, R], [P])
        yield view.strategy([R, P], [P])


def divide(view: OpView) -> Iterable[Strategy]:
    """Linear in the numerator, unless it rounds. A mean over what counts is one sum by another: of numbers both are brought together at
    once."""
    yield from pointwise(view)
    if view.args().get("rounding_mode") is None and view.outs[0].dtype == view.ins[0].dtype:
        yield view.strategy([P, *[R] * (len(view.ins) - 1)], [P])
    single = view.outs[0].dtype.is_floating_point and all(not t.shape for t in (*view.ins, *view.outs))
    if len(view.ins) == 2 and view.args().get("rounding_mode") is None and single:
        yield view.strategy([P, P], [I], local="quotient_of_sums", collective=True)


@local_code("quotient_of_sums")
def _quotient_of_sums(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    args = view.args()
    operands = (args["self"], args["other"])
    return (dataclasses.replace(op, target="autopar.L.quotient_of_sums", args=operands, kwargs=(("axis", axis),)),)


def quotient_of_sums(view: OpView) -> Iterable[Strategy]:
    """Under a further axis: linear in the numerator."""
    yield view.strategy([P, R], [P])


def complex_view(view: OpView) -> Iterable[Strategy]:
    """view_as_real adds, view_as_complex removes, a last dim of 2, which is not split."""
    shared = min(len(view.ins[0].shape), len(view.outs[0].shape))
    for d in range(shared):
        for g in view.splits(view.outs[0].shape[d]):
            yield view.strategy([S(d, g)], [S(d, g)])
    yield view.strategy([P], [P])


def dropout(view: OpView) -> Iterable[Strategy]:
    """Random numbers that differ on the shards of a dim: local code draws from a stream of the rank's own, over one axis or
    several."""
    for s in pointwise(view):
        yield view.strategy(s.inputs, s.outputs, local="dropout")


@local_code("dropout")
def _dropout(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    kwargs: tuple[tuple[str, Arg], ...] = (("axis", over_axes(op, axis)), ("p", view.args()["p"]))
    return (dataclasses.replace(op, target="autopar.L.dropout", args=op.args[:1], kwargs=kwargs),)


def prelu(view: OpView) -> Iterable[Strategy]:
    x, weight = view.ins
    for d, size in enumerate(x.shape):
        for g in view.splits(size):
            per_channel = d == 1 and weight.numel > 1
            yield view.strategy([S(d, g), S(0, g) if per_channel else R], [S(d, g)])


def copy(view: OpView) -> Iterable[Strategy]:
    """The second operand in the shape and type of the first, which gives nothing else and gets a gradient of zero."""
    yield from pointwise(view)
    if all(t.dtype.is_floating_point for t in view.ins):
        yield view.strategy([R, P], [P])
        yield view.strategy([P, P], [P])


def matches(view: OpView) -> Iterable[Strategy]:
    """where(condition) gives the positions, whose number depends on the data."""
    return ()


def glu(view: OpView) -> Iterable[Strategy]:
    """Halves dim `dim`: split inside each half, or on another dim."""
    dim = view.args()["dim"]
    assert isinstance(dim, int)
    dim %= len(view.ins[0].shape)
    for d, size in enumerate(view.outs[0].shape):
        for g in view.splits(size):
            yield view.strategy([S(d, 2 * g if d == dim else g)], [S(d, g)])


def _expand(names: str) -> str:
    return " ".join(f"aten.{n}" for n in names.split())


register(_expand(NONLINEAR), pointwise)
register(_expand(LINEAR_UNARY), linear_unary)
register("aten.view_as_real aten.view_as_complex", complex_view)
register("aten.add aten.sub aten.subtract", add)
register("aten.mul aten.multiply", multiply)
register("aten.div aten.divide aten.true_divide", divide)
register("autopar.L.quotient_of_sums", quotient_of_sums)
register("aten.copy", copy)
register("aten.where.default", matches)
register("aten.dropout autopar.L.dropout", dropout)
register("aten.prelu", prelu)
register("aten.glu", glu)
