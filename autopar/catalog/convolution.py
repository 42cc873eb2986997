"""Operators over places (images, sequences, volumes): convolutions, pooling, resizing, padding, transforms; recurrent cells.

Batch dims and channels may be split; the dims that hold the places stay whole. Channels of a grouped convolution are
split by whole groups, with the `groups` argument made local, or within every group.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.dims import Dims, carried, split_names
from autopar.catalog.rule import OpView, Rule, draws, localizes, register, set_args
from autopar.ir import Op, P, R, S, Strategy

__all__: list[str] = []


# --------------------------------------------------------------------------------------------------- convolutions
def convolution(view: OpView) -> Iterable[Strategy]:
    """x [N?, I, *], weight [O, I / groups, *], bias [O] -> [N?, O, *]; transposed: weight [I, O / groups, *].

    In terms of layouts, G groups make each channel dim G segments, so that S(dim, G) splits within every group.
    """
    bound, (x, weight) = view.args(), view.ins[:2]
    groups = bound["groups"]
    assert isinstance(groups, int)
    transposed = "conv_transpose" in view.op.target or bool(bound.get("transposed", False))
    channel = len(x.shape) - (len(weight.shape) - 1)
    biased = len(view.ins) > 2
    if channel == 1:
        yield from carried(view, (0,))
    for g in view.splits(groups) if groups > 1 else ():  # whole groups
        yield view.strategy([S(channel, g), S(0, g), *[S(0, g)] * biased], [S(channel, g)])
    for g in sorted(view.groups) if groups == 1 else (groups,):  # within every group
        outer, inner = (S(1, g if groups == 1 else 1), S(0, g)) if transposed else (S(0, g), S(1, g if groups == 1 else 1))
        yield view.strategy([R, outer, *[S(0, g)] * biased], [S(channel, g)])
        yield view.strategy([S(channel, g), inner, *[P] * biased], [P])
    yield view.strategy([P, R, *[P] * biased], [P])


CONVOLUTIONS = """
aten.conv1d aten.conv2d aten.conv3d aten.conv_transpose1d aten.conv_transpose2d aten.conv_transpose3d aten.convolution aten._convolution
"""


@localizes(CONVOLUTIONS)
def _groups(op: Op, view: OpView, strategy: Strategy) -> Op:
    channel = len(view.ins[0].shape) - (len(view.ins[1].shape) - 1)
    by_groups = all(x.is_shard and x.dim == channel for x in (strategy.inputs[0], strategy.outputs[0]))
    if not by_groups:
        return op
    groups = view.args()["groups"]
    assert isinstance(groups, int)
    return set_args(op, groups=groups // view.n)


# ---------------------------------------------------------------------------------- operators on the last dims alone
def places(count: int, *, linear: bool = False) -> Rule:
    """Work on the last `count` dims of the first operand; all dims before them are carried. linear: P passes too."""

    def rule(view: OpView) -> Iterable[Strategy]:
        yield from carried(view, range(len(view.ins[0].shape) - count))
        if linear:
            yield view.strategy([P, *[R] * (len(view.ins) - 1)], [P] * len(view.outs))

    return rule


def max_unpool(view: OpView) -> Iterable[Strategy]:
    """The indices say where in its plane each value belongs; they lie as the values do."""
    for d in range(len(view.ins[0].shape) - (2 if "2d" in view.op.target else 3)):
        for g in view.splits(view.ins[0].shape[d]):
            yield view.strategy([S(d, g), S(d, g)], [S(d, g)])
    yield view.strategy([P, R], [P])


def pad(view: OpView) -> Iterable[Strategy]:
    """Dims that are not padded are carried; P passes unless a constant other than 0 is written."""
    bound, ndim = view.args(), len(view.ins[0].shape)
    amounts = bound.get("pad", bound.get("padding"))
    assert isinstance(amounts, tuple)
    padded = {ndim - 1 - k // 2 for k, amount in enumerate(amounts) if amount != 0}
    yield from carried(view, [d for d in range(ndim) if d not in padded])
    if bound.get("mode", "constant") != "constant" or not bound.get("value"):
        yield view.strategy([P], [P])


def pixel_shuffle(view: OpView) -> Iterable[Strategy]:
    """[*, C r r, H, W] <-> [*, C, H r, W r]: each of C, H and W is the outermost factor of its dim on both sides."""
    smaller = [min(a, b) for a, b in zip(view.ins[0].shape, view.outs[0].shape, strict=True)]
    for d, size in enumerate(smaller):
        for g in view.splits(size):
            yield view.strategy([S(d, g)], [S(d, g)])
    yield view.strategy([P], [P])


def channel_shuffle(view: OpView) -> Iterable[Strategy]:
    """[N, (groups C), *] -> [N, (C groups), *]"""
    groups = view.args()["groups"]
    assert isinstance(groups, int)
    yield from carried(view, [d for d in range(len(view.ins[0].shape)) if d != 1])
    yield view.strategy([S(1, groups)], [S(1)])
    yield view.strategy([P], [P])


def columns(view: OpView) -> Iterable[Strategy]:
    """im2col [N?, C, H, W] -> [N?, C k k, L] and back: the batch, and channels as the outermost factor."""
    (x,), (y,) = view.ins, view.outs
    channel = len(x.shape) - (3 if "im2col" in view.op.target else 2)
    if channel == 1:
        yield from carried(view, (0,))
    for g in view.splits(min(x.shape[channel], y.shape[channel])):
        yield view.strategy([S(channel, g)], [S(channel, g)])
    yield view.strategy([P], [P])


def unfold(view: OpView) -> Iterable[Strategy]:
    """Windows along one dim, which become a last dim of their own."""
    dim, ndim = view.args()["dimension"], len(view.ins[0].shape)
    assert isinstance(dim, int)
    yield from carried(view, [d for d in range(ndim) if d != dim % ndim])
    yield view.strategy([P], [P])


def affine_grid(view: OpView) -> Iterable[Strategy]:
    yield from carried(view, (0,))
    yield view.strategy([P], [P])


@localizes("aten.affine_grid_generator")
def _affine_grid(op: Op, view: OpView, strategy: Strategy) -> Op:
    if not strategy.inputs[0].is_shard:
        return op
    size = view.args()["size"]
    assert isinstance(size, tuple) and isinstance(size[0], int)
    return set_args(op, size=(size[0] // view.n, *size[1:]))


def cdist(view: OpView) -> Iterable[Strategy]:
    """Distances of the rows of two batches of matrices that broadcast against each other."""
    ndim = len(view.outs[0].shape)
    batch = [f"b{k}" for k in range(ndim - 2)]
    left, right = ((*batch[ndim - len(t.shape) :], row, "k") for t, row in zip(view.ins, "ij", strict=True))
    yield from split_names(view, [left, right], [(*batch, "i", "j")], [False, False], lambda name: name == "k")


def fourier(view: OpView) -> Iterable[Strategy]:
    """Dims that are not transformed are carried; linear."""
    bound, ndim = view.args(), len(view.ins[0].shape)
    dims, sizes = bound["dim"], bound.get("s")
    if dims is None:
        dims = tuple(range(-len(sizes), 0)) if isinstance(sizes, tuple) else tuple(range(ndim))
    busy = {d % ndim for d in (dims if isinstance(dims, tuple) else (dims,)) if isinstance(d, int)} if ndim else set()
    yield from carried(view, [d for d in range(ndim) if d not in busy])
    yield view.strategy([P], [P])


def short_time_fourier(view: OpView) -> Iterable[Strategy]:
    """stft [N?, T] and istft: the batch; linear in the signal."""
    if len(view.ins[0].shape) == (2 if "istft" not in view.op.target else 3):
        yield from carried(view, (0,))
    yield view.strategy([P, *[R] * (len(view.ins) - 1)], [P])


# ------------------------------------------------------------------------------------------------------- recurrences
def recurrent(view: OpView) -> Iterable[Strategy]:
    """x [T, N, I] (batch_first: [N, T, I]), states [layers, N, H], weights -> y as x, states: the batch may be split."""
    bound = view.args()
    if draws(view.op):
        return  # dropout between the layers
    batch = 0 if bound["batch_first"] else 1
    states = len(bound["hx"]) if isinstance(bound["hx"], tuple) else 1
    for g in view.splits(view.ins[0].shape[batch]):
        weights = [R] * (len(view.ins) - 1 - states)
        yield view.strategy([S(batch, g), *[S(1, g)] * states, *weights], [S(batch, g), *[S(1, g)] * states])


def cell(view: OpView) -> Iterable[Strategy]:
    """One step: x [N, I], states [N, H], weights -> states; unbatched without N."""
    states = len(hx) if isinstance(hx := view.args()["hx"], tuple) else 1
    for g in view.splits(view.ins[0].shape[0]) if len(view.ins[0].shape) == 2 else ():
        yield view.strategy([S(0, g)] * (1 + states) + [R] * (len(view.ins) - 1 - states), [S(0, g)] * len(view.outs))


def _each(pattern: str, ranks: Iterable[int] = (1, 2, 3)) -> str:
    return " ".join(f"aten.{pattern.format(k)}" for k in ranks)


register(CONVOLUTIONS, convolution)
for _k in (1, 2, 3):
    _here = (_k,)
    register(f"{_each('max_pool{}d', _here)} {_each('max_pool{}d_with_indices', _here)} {_each('adaptive_max_pool{}d', _here)}", places(_k))
    register(f"{_each('avg_pool{}d', _here)} {_each('adaptive_avg_pool{}d', _here)}", places(_k, linear=True))
    register(f"{_each('upsample_nearest{}d', _here)} {_each('_upsample_nearest_exact{}d', _here)}", places(_k, linear=True))
    register(f"{_each('reflection_pad{}d', _here)} {_each('replication_pad{}d', _here)}", pad)
register("aten.upsample_linear1d", places(1, linear=True))
register("aten.upsample_bilinear2d aten.upsample_bicubic2d", places(2, linear=True))
register("aten._upsample_bilinear2d_aa aten._upsample_bicubic2d_aa", places(2, linear=True))
register("aten.upsample_trilinear3d", places(3, linear=True))
register("aten.max_unpool2d aten.max_unpool3d", max_unpool)
register("aten.pad aten.constant_pad_nd aten._pad_circular", pad)
register("aten.pixel_shuffle aten.pixel_unshuffle", pixel_shuffle)
register("aten.channel_shuffle aten.native_channel_shuffle", channel_shuffle)
register("aten.im2col aten.col2im", columns)
register("aten.unfold", unfold)
register("aten.tril aten.triu", places(2, linear=True))
register("aten.grid_sampler aten.grid_sampler_2d aten.grid_sampler_3d", Dims("n c i*!, n s* k! -> n c s*", linear=(0,)))
register("aten.affine_grid_generator", affine_grid)
register("aten.cdist aten._cdist_forward", cdist)
register(
    "aten.fft_fft aten.fft_ifft aten.fft_rfft aten.fft_irfft aten.fft_hfft aten.fft_ihfft aten.fft_fft2 aten.fft_ifft2 aten.fft_rfft2 "
    "aten.fft_irfft2 aten.fft_hfft2 aten.fft_ihfft2 aten.fft_fftn aten.fft_ifftn aten.fft_rfftn aten.fft_irfftn aten.fft_hfftn "
    "aten.fft_ihfftn aten.fft_fftshift aten.fft_ifftshift",
    fourier,
)
register("aten.stft aten.istft", short_time_fourier)
register("aten.lstm.input aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input", recurrent)
register("aten.lstm_cell aten.gru_cell aten.rnn_tanh_cell aten.rnn_relu_cell", cell)
