"""Losses: one line each for the loss of every sample; what is summed over samples is partial where they are split.

A mean over all samples is the mean of the shards' means; one that counts (ignored labels, class weights) is not, and is
left whole here: capture writes it as a sum and a count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import IntEnum

import torch

from autopar.catalog.dims import Dims, parse_terms
from autopar.catalog.pointwise import pointwise
from autopar.catalog.rule import OpView, Rule, local_code, register
from autopar.ir import I, Op, P, R, S, Strategy, TensorType

__all__: list[str] = []


class Reduction(IntEnum):
    """aten's numbers for `reduction=`."""

    NONE = 0
    MEAN = 1
    SUM = 2


def _reduction(view: OpView) -> Reduction:
    reduction = view.args()["reduction"]
    assert isinstance(reduction, int)
    return Reduction(reduction)


def _reduced(view: OpView, rule: Rule, unreduced: tuple[int, ...]) -> Iterable[Strategy]:
    """The strategies that `rule` states for the loss of this shape before its reduction, for the reduced one."""
    reduction = _reduction(view)
    if reduction is Reduction.NONE:
        yield from rule(view)
        return
    one_each = dataclasses.replace(view, outs=(TensorType(unreduced, view.outs[0].dtype),))
    for s in rule(one_each):
        if s.outputs[0].is_shard:
            yield view.strategy(s.inputs, [P], local="mean_part" if reduction is Reduction.MEAN else None)


def elementwise(view: OpView) -> Iterable[Strategy]:
    """A loss of each element, weights broadcast. The functions of torch.nn.functional broadcast the first two themselves; called
    without that, aten's gradient of a mean is not that of its value, and not a thing to preserve."""
    if view.ins[0].shape == view.ins[1].shape:
        yield from _reduced(view, pointwise, tuple(torch.broadcast_shapes(*(t.shape for t in view.ins))))


def per_sample(line: str) -> Rule:
    """A loss described by a line of named dims; the dims of its result are the dims that come first in the operands."""
    rule = Dims(line)
    (result,) = parse_terms(line.partition("->")[2])
    (first, *_) = parse_terms(line.partition("->")[0])

    def reduced(view: OpView) -> Iterable[Strategy]:
        names = first.bind(len(view.ins[0].shape))
        if names is None:
            return  # one sample without a batch
        sizes = dict(zip(names, view.ins[0].shape, strict=True))
        kept = [name for name in names if name in result.names or name.partition(".")[0] in result.names]
        yield from _reduced(view, rule, tuple(sizes[name] for name in kept))

    return reduced


_BY_CLASS = per_sample("n c! d*, n d*, c! -> n d*")
_BY_PROBABILITY = per_sample("n c! d*, n c! d*, c! -> n d*")


def nll_loss(view: OpView) -> Iterable[Strategy]:
    """Samples and positions, not classes; the mean divides by the weights of the labels that are counted."""
    if _reduction(view) is not Reduction.MEAN:
        yield from _BY_CLASS(view)


def cross_entropy(view: OpView) -> Iterable[Strategy]:
    """Labels are classes (integers) or probabilities of classes; a sum over classes may be vocabulary parallel."""
    args, reduction = view.args(), _reduction(view)
    if view.ins[1].dtype.is_floating_point:
        yield from _BY_PROBABILITY(view)
        return
    if reduction is Reduction.MEAN:
        return
    yield from _BY_CLASS(view)
    plain = args["weight"] is None and args["label_smoothing"] == 0 and len(view.ins[0].shape) == 2 and len(view.ins[1].shape) == 1
    if plain and reduction is Reduction.SUM:
        yield view.strategy([S(1), R], [I], local="cross_entropy_sum_vocab", collective=True)


@local_code("cross_entropy_sum_vocab")
def _cross_entropy_sum_vocab(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    """Every rank has the whole loss (I) and the gradient of its own classes; labels have no gradient, so R and I are one."""
    args = view.args()
    call = Op(
        target="autopar.L.cross_entropy_sum_vocab",
        args=(args["self"], args["target"]),
        kwargs=(("axis", axis), ("ignore_index", args["ignore_index"])),
        outputs=op.outputs,
        no_grad=op.no_grad,
        module=op.module,
        source=op.source,
    )
    return (call,)


def cross_entropy_sum_vocab(view: OpView) -> Iterable[Strategy]:
    """A vocabulary-parallel loss under a further axis: a sum over samples."""
    for g in view.splits(view.ins[0].shape[0]):
        yield view.strategy([S(0, g), S(0, g)], [P])


register("aten.cross_entropy_loss", cross_entropy)
register("aten.nll_loss aten.nll_loss_nd aten.nll_loss2d", nll_loss)
register("autopar.L.cross_entropy_sum_vocab", cross_entropy_sum_vocab)
register(
    "aten.mse_loss aten.l1_loss aten.smooth_l1_loss aten.huber_loss aten.binary_cross_entropy aten.binary_cross_entropy_with_logits "
    "aten.kl_div aten.soft_margin_loss aten.poisson_nll_loss aten.margin_ranking_loss aten.hinge_embedding_loss",
    elementwise,
)
register("aten.cosine_embedding_loss", per_sample("n d!, n d!, n -> n"))
register("aten.triplet_margin_loss", per_sample("n d!, n d!, n d! -> n"))
register("aten.multi_margin_loss", per_sample("n c!, n, c! -> n"))
register("aten.multilabel_margin_loss", per_sample("n c!, n c! -> n"))
register("autopar_operators.ctc_loss", Dims("t! n c!, n s!, n, n -> n"))
