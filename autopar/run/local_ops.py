"""Code that stands in for an operator on one rank, where the operator itself on local tensors would be wrong.

Layouts are over `axis`; every function is exact, also where the axis has size 1.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.run import collectives, comm
from autopar.run.mesh import Axis
from autopar.run.random_numbers import seeded
from autopar.run.region import region
from autopar.run.saved import keeps_graphs

__all__ = [
    "attention", "causal_rows", "cross_entropy_sum_vocab", "draw", "dropout", "grouped_rows", "masked_embedding", "quotient_of_sums",
    "region", "sync_batch_norm",
]  # fmt: skip


def masked_embedding(indices: Tensor, weight: Tensor, axis: Axis, padding_idx: int | None = None) -> Tensor:
    """F.embedding with the vocabulary split: indices R [*], weight S(0) [vocab/n, d] -> P [*, d].

    A rank looks up the rows that it holds and gives zeros for the others. padding_idx (global, may be negative as in
    F.embedding): this row gets no gradient. An index outside of the whole vocabulary is an error of the caller that
    F.embedding would report and this does not: it gives zeros.
    """
    rows = weight.shape[0]
    local = indices - axis.rank * rows
    outside = (local < 0) | (local >= rows)
    local = local.masked_fill(outside, 0)
    if padding_idx is not None:
        padding_idx %= rows * axis.size
        frozen = outside | (indices == padding_idx)
        looked_up = F.embedding(local, weight)
        looked_up = torch.where(frozen.unsqueeze(-1), looked_up.detach(), looked_up)
    else:
        looked_up = F.embedding(local, weight)
    return looked_up.masked_fill(outside.unsqueeze(-1), 0)


class _CrossEntropySumVocab(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, ignore_index: int) -> Tensor:
        shifted = _below_the_largest(logits, axis)
        exponentials = shifted.exp()
        total = comm.all_reduce(exponentials.sum(dim=1), axis)
        counted, here, local = _labels_here(labels, logits.shape[1], axis, ignore_index)
        target = shifted.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
        target = comm.all_reduce(target, axis)
        probabilities = exponentials.div_(total.unsqueeze(1))
        ctx.save_for_backward(probabilities, local, here, counted)
        return (total.log() - target).masked_fill(~counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, here, counted = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient.scatter_add_(1, local.unsqueeze(1), -here.to(gradient.dtype).unsqueeze(1))
        return gradient.mul_(counted.unsqueeze(1)).mul_(grad), None, None, None


def _below_the_largest(logits: Tensor, axis: Axis) -> Tensor:
    """The local logits [N, classes/n], less the largest of each row of the whole."""
    peak = logits.detach().amax(dim=1)
    comm.all_reduce_(peak, axis, torch.distributed.ReduceOp.MAX)
    return logits - peak.unsqueeze(1)


def _labels_here(labels: Tensor, classes: int, axis: Axis, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each label: whether it counts, whether this rank holds its class, and which of the `classes` here that is (0 if it is none)."""
    counted, local = labels != ignore_index, labels - axis.rank * classes
    here = counted & (local >= 0) & (local < classes)
    return counted, here, local.masked_fill(~here, 0)


def cross_entropy_sum_vocab(logits: Tensor, labels: Tensor, axis: Axis, ignore_index: int = -100) -> Tensor:
    """F.cross_entropy(..., reduction='sum') with the classes split: logits S(1) [N, classes/n], labels I [N] (global
    classes) -> I scalar.

    The maximum, the sum of exponentials and the target's logit are reduced over the axis, N values each; the gradient of
    the local logits is exact and needs no communication.
    """
    if logits.dim() != 2 or labels.dim() != 1:
        raise ValueError(f"logits must be [N, classes] and labels [N]; got {tuple(logits.shape)} and {tuple(labels.shape)}")
    if not keeps_graphs():
        return _CrossEntropySumVocab.apply(logits, labels, axis, ignore_index)
    shifted = _below_the_largest(logits, axis)
    total = collectives.all_reduce(shifted.exp().sum(dim=1), axis)
    counted, here, local = _labels_here(labels, logits.shape[1], axis, ignore_index)
    target = shifted.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
    return (total.log() - collectives.all_reduce(target, axis)).masked_fill(~counted, 0).sum()


class _QuotientOfSums(torch.autograd.Function):
    """Both sums are made of float64, which holds a count of 2^53. Where their terms are gathered, each term of a is divided by the whole
    of b and then added: so rounds who sums b first, and then quotients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, axis: Axis) -> Tensor:
        both = torch.stack([a.double(), b.double()])
        if a.is_floating_point() and comm.sums_by_gathering(both, axis):
            terms = comm.all_gather(both, axis)
            by = terms[:, 1].sum().to(b.dtype)
            found = (terms[:, 0].to(a.dtype) / by).sum()
        else:
            sums = comm.all_reduce(both, axis)
            by = sums[1].to(b.dtype)
            found = sums[0].to(a.dtype) / by
        ctx.save_for_backward(found, by)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        found, by = ctx.saved_tensors
        share = grad / by
        return share if ctx.needs_input_grad[0] else None, -share * found if ctx.needs_input_grad[1] else None, None


def quotient_of_sums(a: Tensor, b: Tensor, axis: Axis) -> Tensor:
    """The sum of a over the axis by that of b: two numbers P [] -> I []."""
    if axis.size == 1:
        return a / b
    if keeps_graphs():
        above, below = (collectives.all_reduce(x.double(), axis).to(x.dtype) for x in (a, b))
        return above / below
    return _QuotientOfSums.apply(a, b, axis)


def _normalised(x: Tensor, near: Tensor | None, eps: float, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """What `_NormaliseOverAxis` gives, to be differentiated as often as is wished."""
    if not keeps_graphs():
        return _NormaliseOverAxis.apply(x, near, eps, axis)
    dims, count = [0, *range(2, x.dim())], x.numel() // x.shape[1] * axis.size
    mean = collectives.all_reduce_shared(x.double().sum(dims, keepdim=True), axis) / count
    away = x.double() - mean
    variance = collectives.all_reduce_shared(away.square().sum(dims, keepdim=True), axis) / count
    normal = away * torch.rsqrt(variance + eps)
    return normal.to(x.dtype), mean.detach().to(x.dtype), variance.detach().to(x.dtype)


class _NormaliseOverAxis(torch.autograd.Function):
    """(x - mean) * rsqrt(var + eps) with the statistics of all ranks' x; also returns mean and biased variance. near: [C], the same on all
    ranks: the nearer to the mean, the more digits the variance has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, near: Tensor | None, eps: float, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        dims = [0, *range(2, x.dim())]
        own_var, own_mean = (t.double() for t in torch.var_mean(x, dims, correction=0, keepdim=True))
        origin = torch.zeros_like(own_mean) if near is None else near.double().nan_to_num(0.0, 0.0, 0.0).view(own_mean.shape)
        off = own_mean - origin  # of as many numbers on every rank: first and second moment about the origin, in one sum
        first, second = (comm.all_reduce(torch.cat([off, own_var + off.square()]), axis) / axis.size).split(1)
        mean = (origin + first).to(x.dtype)
        variance = (second - first.square()).clamp_min_(0).to(x.dtype)
        inverse = torch.rsqrt(variance + eps)
        normal = (x - mean).mul_(inverse)
        ctx.save_for_backward(normal, inverse)
        ctx.axis, ctx.dims, ctx.count = axis, dims, x.numel() // x.shape[1] * axis.size
        ctx.mark_non_differentiable(mean, variance)
        return normal, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        normal, inverse = ctx.saved_tensors
        sums = torch.cat([grad.sum(ctx.dims, keepdim=True), (grad * normal).sum(ctx.dims, keepdim=True)])
        along, onto = (comm.all_reduce(sums, ctx.axis) / ctx.count).split(1)
        return (grad - along - normal * onto) * inverse, None, None, None


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    axis: Axis,
    momentum: float,
    eps: float,
) -> Tensor:
    """F.batch_norm(training=True) with the statistics of the whole batch: x S(0) [N/n, C, *], weight and bias R [C]
    (their gradients are partial), running statistics I [C], updated in place with the unbiased variance -> S(0)."""
    shape = (1, -1, *([1] * (x.dim() - 2)))
    exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # as F.batch_norm does
    normal, mean, variance = _normalised(exact, running_mean, eps, axis)
    with torch.no_grad():
        count = x.numel() // x.shape[1] * len(axis.ranks)
        if count < 2:
            raise ValueError(f"batch norm needs more than one value per channel; the whole batch of x has shape {tuple(x.shape)}")
        # by .data, which counts no write, as F.batch_norm counts none: one that stands before this keeps both for its backward
        if running_mean is not None:
            running_mean.data.lerp_(mean.flatten().to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.data.lerp_(variance.flatten().mul(count / (count - 1)).to(running_var.dtype), momentum)
    if weight is not None:
        normal = normal * weight.view(shape)
    if bias is not None:
        normal = normal + bias.view(shape)
    return normal.to(x.dtype)


def dropout(x: Tensor, axis: Axis | tuple[Axis, ...] | None, p: float) -> Tensor:
    """F.dropout(training=True). axis None: x is I or R, and its mask is the same on every rank. An axis, or several: x is
    S over them, and every shard has a mask of its own.

    Random numbers come from the CPU generator, which a parallel module keeps equal on the ranks of a stage during a step
    and which recompute puts back.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability must be in [0, 1]; got {p}")
    generator = torch.Generator(x.device).manual_seed(_seed_of_shard(axis))
    kept = torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(1 - p, generator=generator)
    return x * kept.div_(1 - p) if p < 1 else x * kept


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    axis: Axis | tuple[Axis, ...],
    dropout_p: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention with dropout, its operands S over the axis or axes (batch or heads): every shard has a
    mask of its own. Random numbers as in `dropout`."""
    with seeded(_seed_of_shard(axis), query.device):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


def causal_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: Axis | tuple[Axis, ...],
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Causal attention with its queries split: query S [..., length/n, e] over the axis or axes (outermost first), key R [..., length, e],
    value R [..., length, f] (their gradients are partial) -> S [..., length/n, f].

    A rank reads the keys up to the place of its last query. On a GPU no mask is made: fused kernels take it as aligned to the last key.
    """
    rows = query.shape[-2]
    first = _shard(axis) * rows
    key, value = key[..., : first + rows, :], value[..., : first + rows, :]
    if first == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    if query.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # it imports much, which a CPU has no use for

        mask: Tensor = causal_lower_right(rows, first + rows)
    else:
        mask = torch.ones(rows, first + rows, dtype=torch.bool, device=query.device).tril(first)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def draw(operator: str, *arguments: Any, axis: Axis | tuple[Axis, ...] | None = None, **options: Any) -> Any:
    """An operator that draws random numbers, on a shard: its tensors, then the axis or axes that they are S over, then its other
    arguments. Every shard has numbers of its own. Random numbers as in `dropout`. operator: 'namespace.name.overload'."""
    given = list(arguments)
    if axis is None:
        axis = given.pop(next(k for k, a in enumerate(given) if _is_axis(a)))
    own = [a.device for a in given if isinstance(a, Tensor) and a.device.type == "cuda"]
    with seeded(_seed_of_shard(axis), own[0] if own else torch.device("cpu")):
        return _operator(operator)(*given, **options)


def _is_axis(argument: object) -> bool:
    return isinstance(argument, Axis) or (isinstance(argument, tuple) and len(argument) > 0 and isinstance(argument[0], Axis))


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _shard(axis: Axis | tuple[Axis, ...]) -> int:
    """Which part of what is split over the axis, or over several, outermost first."""
    shard = 0
    for a in axis if isinstance(axis, tuple) else (axis,):
        shard = shard * a.size + a.rank
    return shard


def _seed_of_shard(axis: Axis | tuple[Axis, ...] | None) -> int:
    """A seed that is equal on the ranks that hold the same shard, and new at every call."""
    shard = 0 if axis is None else _shard(axis)
    # The seed is a digest of the state, which is equal on all ranks. A number drawn as a tensor could not be read on a GPU
    # without waiting for it, nor from a fake tensor at all.
    state = torch.get_rng_state()
    torch.rand((), device="cpu")  # so that the next one has another state
    digest = hashlib.blake2b(ctypes.string_at(state.data_ptr(), state.numel()) + shard.to_bytes(4, "little"), digest_size=7)
    return int.from_bytes(digest.digest(), "little")


def grouped_rows(x: Tensor, weight: Tensor, offs: Tensor, axis: Axis, operator: str) -> Tensor:
    """A grouped matrix product with its rows split: x S(0) [rows/n, i], weight R [experts, i, o] (its gradient is partial),
    offs R [experts] -> S(0) [rows/n, o].

    offs[e] is where the rows of expert e end among all rows, which are sorted by expert; those of a rank are a range of
    them, so that its ends are the same ones, cut to this range. operator: 'namespace.name.overload' of torch.ops.
    """
    rows = x.shape[0]
    return _operator(operator)(x, weight, (offs - axis.rank * rows).clamp(0, rows))
