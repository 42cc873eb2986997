"""Operators as models have them, by name and sizes: what a GPU is timed at, and priced at.

    linear      m x k x n         rows, channels that enter, channels that leave
    attention   b x h x l x d     causal; batch, heads, length, width of a head; "masked" with a mask of numbers, "whole" without a mask
    bmm         b x m x k x n     batch, rows, channels that enter, channels that leave
    conv        b x c x s x f x k batch, channels that enter, side of the image, channels that leave, side of the kernel; stride 1; of a
                                  depthwise one f = c; of one over a sequence s is its length
    pools       b x c x s         windows of 3 (max) or 2, whose stride is 2; upsample: to twice the side
    others      rows x width      of a cross-entropy the width is that of the vocabulary, of an embedding a third number is; of what
                                  reads or writes some of the rows a third number says how many
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from autopar.capture.interpret import run_op
from autopar.ir import Arg, Op, Ref, TensorType

__all__ = ["Kernel", "OPERATORS", "kernels"]

FLOAT = torch.float32
Made = tuple[str, tuple[Arg, ...], tuple[TensorType, ...]]  # target, arguments, types of the operands x0, x1, ...
X, Y, Z = Ref("x0"), Ref("x1"), Ref("x2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An operator of OPERATORS on operands of these sizes in this dtype ('bfloat16', 'float32')."""

    op: str
    sizes: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.sizes))

    def call(self) -> tuple[Op, tuple[TensorType, ...], tuple[TensorType, ...]]:
        """The operator, and the types of its operands and of what it returns. ValueError for other sizes than the operator has."""
        target, args, ins = OPERATORS[self.op](getattr(torch, self.dtype), *self.sizes)
        more = _MORE_RESULTS.get(self.op, 0)
        op = Op(target=target, args=args, kwargs=(), outputs=("y", *(f"y{k}" for k in range(more))), multi=more > 0)
        meta = {f"x{k}": torch.empty(t.shape, dtype=t.dtype, device="meta") for k, t in enumerate(ins)}
        made = [y for y in run_op(op, meta) if y is not None]
        return op, ins, tuple(TensorType(tuple(y.shape), y.dtype, y.is_floating_point()) for y in made)


def _linear(dtype: torch.dtype, m: int, k: int, n: int) -> Made:
    return "aten.linear.default", (X, Y), (_grad(dtype, m, k), _grad(dtype, n, k))


def _attention(dtype: torch.dtype, batch: int, heads: int, length: int, width: int) -> Made:
    one = _grad(dtype, batch, heads, length, width)
    return "aten.scaled_dot_product_attention.default", (X, Y, Z, None, 0.0, True), (one, one, one)


def _conv(dtype: torch.dtype, batch: int, ins: int, side: int, outs: int, kernel: int) -> Made:
    pads = (kernel // 2, kernel // 2)
    made = _grad(dtype, batch, ins, side, side), _grad(dtype, outs, ins, kernel, kernel)
    return "aten.conv2d.default", (X, Y, None, (1, 1), pads), made


def _bmm(dtype: torch.dtype, batch: int, m: int, k: int, n: int) -> Made:
    return "aten.bmm.default", (X, Y), (_grad(dtype, batch, m, k), _grad(dtype, batch, k, n))


def _attention_whole(dtype: torch.dtype, batch: int, heads: int, length: int, width: int) -> Made:
    one = _grad(dtype, batch, heads, length, width)
    return "aten.scaled_dot_product_attention.default", (X, Y, Z), (one, one, one)


def _attention_masked(dtype: torch.dtype, batch: int, heads: int, length: int, width: int) -> Made:
    one, mask = _grad(dtype, batch, heads, length, width), TensorType((batch, 1, length, length), dtype, False)
    return "aten.scaled_dot_product_attention.default", (X, Y, Z, Ref("x3")), (one, one, one, mask)


def _biased(dtype: torch.dtype, m: int, k: int, n: int) -> Made:
    return "aten.linear.default", (X, Y, Z), (_grad(dtype, m, k), _grad(dtype, n, k), _grad(dtype, n))


def _depthwise(dtype: torch.dtype, batch: int, channels: int, side: int, kernel: int) -> Made:
    pads = (kernel // 2, kernel // 2)
    made = _grad(dtype, batch, channels, side, side), _grad(dtype, channels, 1, kernel, kernel)
    return "aten.conv2d.default", (X, Y, None, (1, 1), pads, (1, 1), channels), made


def _conv1d(dtype: torch.dtype, batch: int, ins: int, length: int, outs: int, kernel: int) -> Made:
    made = _grad(dtype, batch, ins, length), _grad(dtype, outs, ins, kernel)
    return "aten.conv1d.default", (X, Y, None, (1,), (kernel // 2,)), made


def _conv_transpose(dtype: torch.dtype, batch: int, ins: int, side: int, outs: int) -> Made:
    made = _grad(dtype, batch, ins, side, side), _grad(dtype, ins, outs, 2, 2)
    return "aten.conv_transpose2d.input", (X, Y, None, (2, 2)), made


def _of_image(target: str, *after: Arg) -> Callable[..., Made]:
    return lambda dtype, batch, channels, side: (target, (X, *after), (_grad(dtype, batch, channels, side, side),))


def _rows(target: str, dtype: torch.dtype, rows: int, width: int, some: int) -> Made:
    """Some rows of a table, by their numbers."""
    args: tuple[Arg, ...] = (X, (Y,)) if target == "aten.index.Tensor" else (X, 0, Y)
    return target, args, (_grad(dtype, rows, width), TensorType((some,), torch.int64, False))


def _gather(dtype: torch.dtype, rows: int, width: int, some: int) -> Made:
    return "aten.gather.default", (X, 0, Y), (_grad(dtype, rows, width), TensorType((some, width), torch.int64, False))


def _scatter_add(dtype: torch.dtype, rows: int, width: int, some: int) -> Made:
    index = TensorType((some, width), torch.int64, False)
    return "aten.scatter_add.default", (X, 0, Y, Z), (_grad(dtype, rows, width), index, _grad(dtype, some, width))


def _index_add(dtype: torch.dtype, rows: int, width: int, some: int) -> Made:
    index = TensorType((some,), torch.int64, False)
    return "aten.index_add.default", (X, 0, Y, Z), (_grad(dtype, rows, width), index, _grad(dtype, some, width))


def _masked_fill(dtype: torch.dtype, rows: int, width: int) -> Made:
    return "aten.masked_fill.Scalar", (X, Y, 0.0), (_grad(dtype, rows, width), TensorType((rows, width), torch.bool, False))


def _where(dtype: torch.dtype, rows: int, width: int) -> Made:
    one = _grad(dtype, rows, width)
    return "aten.where.self", (X, Y, Z), (TensorType((rows, width), torch.bool, False), one, one)


def _cat(dtype: torch.dtype, rows: int, width: int) -> Made:
    return "aten.cat.default", ((X, Y), -1), (_grad(dtype, rows, width), _grad(dtype, rows, width))


def _half(dtype: torch.dtype, rows: int, width: int) -> Made:
    return "aten.slice.Tensor", (X, 1, 0, width // 2), (_grad(dtype, rows, width),)


def _scaled(dtype: torch.dtype, rows: int, width: int) -> Made:
    """By channel."""
    return "aten.mul.Tensor", (X, Y), (_grad(dtype, rows, width), _grad(dtype, width))


def _batch_norm(dtype: torch.dtype, batch: int, channels: int, side: int) -> Made:
    channel = _grad(FLOAT, channels)
    made = _grad(dtype, batch, channels, side, side), channel, channel
    return "aten.batch_norm.default", (X, Y, Z, None, None, True, 0.1, 1e-5, True), made


def _group_norm(dtype: torch.dtype, batch: int, channels: int, side: int) -> Made:
    channel = _grad(dtype, channels)
    return "aten.group_norm.default", (X, 32, Y, Z), (_grad(dtype, batch, channels, side, side), channel, channel)


def _layer_norm(dtype: torch.dtype, rows: int, width: int) -> Made:
    channel = _grad(dtype, width)
    return "aten.layer_norm.default", (X, (width,), Y, Z), (_grad(dtype, rows, width), channel, channel)


def _rms_norm(dtype: torch.dtype, rows: int, width: int) -> Made:
    return "aten.rms_norm.default", (X, (width,), Y, 1e-5), (_grad(dtype, rows, width), _grad(dtype, width))


def _cross_entropy(dtype: torch.dtype, rows: int, width: int) -> Made:
    return "aten.cross_entropy_loss.default", (X, Y), (_grad(dtype, rows, width), TensorType((rows,), torch.int64, False))


def _embedding(dtype: torch.dtype, rows: int, width: int, words: int) -> Made:
    return "aten.embedding.default", (X, Y), (_grad(dtype, words, width), TensorType((rows,), torch.int64, False))


def _turned(dtype: torch.dtype, rows: int, width: int) -> Made:
    """Heads put behind one another again: a copy of what a transposition has left out of order."""
    return "aten.permute.default", (X, (1, 0)), (_grad(dtype, rows, width),)


def _of_one(target: str, *after: Arg) -> Callable[..., Made]:
    return lambda dtype, rows, width: (target, (X, *after), (_grad(dtype, rows, width),))


def _of_two(target: str) -> Callable[..., Made]:
    return lambda dtype, rows, width: (target, (X, Y), (_grad(dtype, rows, width), _grad(dtype, rows, width)))


def _grad(dtype: torch.dtype, *shape: int) -> TensorType:
    return TensorType(shape, dtype, True)


OPERATORS: dict[str, Callable[..., Made]] = {
    "linear": _linear, "attention": _attention, "conv": _conv, "batch_norm": _batch_norm, "group_norm": _group_norm,
    "layer_norm": _layer_norm, "rms_norm": _rms_norm, "cross_entropy": _cross_entropy, "embedding": _embedding,
    "gelu": _of_one("aten.gelu.default"), "silu": _of_one("aten.silu.default"), "relu": _of_one("aten.relu.default"),
    "softmax": _of_one("aten.softmax.int", -1), "dropout": _of_one("aten.dropout.default", 0.1, True),
    "to_float32": _of_one("aten.to.dtype", FLOAT), "clone": _of_one("aten.clone.default"), "sum": _of_one("aten.sum.dim_IntList", (0,)),
    "add": _of_two("aten.add.Tensor"), "mul": _of_two("aten.mul.Tensor"), "bmm": _bmm, "attention_whole": _attention_whole,
    "attention_masked": _attention_masked, "linear_biased": _biased, "depthwise": _depthwise, "conv1d": _conv1d,
    "conv_transpose": _conv_transpose, "max_pool": _of_image("aten.max_pool2d.default", (3, 3), (2, 2), (1, 1)),
    "avg_pool": _of_image("aten.avg_pool2d.default", (2, 2)), "upsample": _of_image("aten.upsample_nearest2d.vec", None, (2.0, 2.0)),
    "pad": _of_image("aten.pad.default", (1, 1, 1, 1)), "pooled": _of_image("aten.adaptive_avg_pool2d.default", (1, 1)),
    "index_select": functools.partial(_rows, "aten.index_select.default"), "index": functools.partial(_rows, "aten.index.Tensor"),
    "gather": _gather, "scatter_add": _scatter_add, "index_add": _index_add, "masked_fill": _masked_fill, "where": _where, "cat": _cat,
    "half": _half, "scaled": _scaled, "roll": _of_one("aten.roll.default", (1,), (0,)), "cumsum": _of_one("aten.cumsum.default", 0),
    "sigmoid": _of_one("aten.sigmoid.default"), "tanh": _of_one("aten.tanh.default"), "exp": _of_one("aten.exp.default"),
    "square": _of_one("aten.pow.Tensor_Scalar", 2), "mean": _of_one("aten.mean.dim", (-1,)),
    "log_softmax": _of_one("aten.log_softmax.int", -1), "amax": _of_one("aten.amax.default", (-1,)),
    "logsumexp": _of_one("aten.logsumexp.default", (-1,)),
    "topk": _of_one("aten.topk.default", 8), "sort": _of_one("aten.sort.default"), "div": _of_two("aten.div.Tensor"),
}  # fmt: skip
"""Name -> (dtype, *sizes) -> what is called."""

_MORE_RESULTS = {"topk": 1, "sort": 1}  # than one


def kernels() -> Iterator[Kernel]:
    """What is timed: layers of 1,024 to 8,192 channels and their parts on 1 to 8 ranks, as many tokens as micro-batches have; images; what
    streams, from what a cache holds to what it does not."""
    for dtype in ("bfloat16", "float32"):
        for m in (512, 2048, 8192, 32768) if dtype == "bfloat16" else (8192,):
            for k, n in _CHANNELS:
                yield Kernel(op="linear", sizes=(m, k, n), dtype=dtype)
    for batch, heads, length, width in _SCORES:
        yield Kernel(op="attention", sizes=(batch, heads, length, width), dtype="bfloat16")
    for sizes in _IMAGES:
        for dtype in ("bfloat16", "float32"):
            yield Kernel(op="conv", sizes=sizes, dtype=dtype)
    for batch, channels, side in ((64, 64, 56), (64, 256, 56), (64, 512, 28), (64, 1024, 14)):
        for op in ("batch_norm", "group_norm"):
            yield Kernel(op=op, sizes=(batch, channels, side), dtype="bfloat16")
    for rows in (512, 2048, 8192, 32768):
        for op in _STREAMS:
            yield Kernel(op=op, sizes=(rows, 4096), dtype="bfloat16")
    for op in ("add", "gelu", "layer_norm", "clone", "sum"):
        yield Kernel(op=op, sizes=(8192, 4096), dtype="float32")
    yield from _others()
    for rows in (4096, 16384):
        for dtype in ("bfloat16", "float32"):
            yield Kernel(op="cross_entropy", sizes=(rows, 32000), dtype=dtype)
        for words in (32000, 128256):
            yield Kernel(op="embedding", sizes=(rows, 4096, words), dtype="bfloat16")


def _others() -> Iterator[Kernel]:
    """What fewer models have; and attention of more shapes."""
    for op, shapes in _OF_ATTENTION.items():
        yield from (Kernel(op=op, sizes=sizes, dtype="bfloat16") for sizes in shapes)
    for sizes in ((4, 16, 1024, 64), (2, 32, 2048, 128)):
        yield Kernel(op="attention", sizes=sizes, dtype="float32")
    yield Kernel(op="batch_norm", sizes=(64, 256, 56), dtype="float32")
    for op, found in _MORE.items():
        for dtype in ("bfloat16", "float32"):
            yield from (Kernel(op=op, sizes=sizes, dtype=dtype) for sizes in found)
    for rows in (2048, 32768):
        for op in _STREAMED_TOO:
            yield Kernel(op=op, sizes=(rows, 4096), dtype="bfloat16")
    for rows, width, words in ((8192, 1024, 50304), (65536, 1024, 50304), (65536, 4096, 32000), (8192, 8192, 128256), (16384, 768, 2)):
        yield Kernel(op="embedding", sizes=(rows, width, words), dtype="bfloat16")
    yield Kernel(op="embedding", sizes=(16384, 4096, 32000), dtype="float32")


_IMAGE = ((64, 64, 112), (32, 256, 56), (64, 1024, 14))
_TABLE = ((8192, 4096, 8192), (32768, 1024, 16384))
_OF_ATTENTION = {
    "attention": (
        (256, 16, 64, 64), (64, 16, 256, 64), (32, 16, 512, 64), (4, 16, 2048, 64), (2, 16, 4096, 64), (1, 16, 8192, 64),
        (32, 8, 256, 128), (8, 32, 512, 128), (8, 32, 1024, 128), (16, 16, 512, 80), (8, 16, 1024, 96), (2, 16, 2048, 256),
        (16, 32, 512, 32),
    ),
    "attention_whole": (
        (32, 16, 197, 64), (256, 12, 128, 64), (32, 16, 512, 64), (4, 16, 2048, 64), (8, 32, 512, 128), (2, 32, 2048, 128),
        (2048, 4, 49, 32), (16, 16, 257, 88), (2, 8, 4096, 40),
    ),
    "attention_masked": ((32, 16, 512, 64), (4, 16, 2048, 64), (2, 32, 2048, 128)),
}  # fmt: skip
_MORE = {
    "bmm": ((256, 1024, 64, 1024), (256, 1024, 1024, 64), (64, 2048, 128, 2048), (8, 2048, 1024, 4096), (8, 512, 4096, 1024)),
    "linear_biased": ((8192, 1024, 4096), (8192, 4096, 1024), (8192, 4096, 4096)),
    "depthwise": ((64, 96, 56, 7), (64, 384, 14, 7), (128, 144, 56, 3), (128, 576, 14, 3)),
    "conv1d": ((16, 512, 3200, 512, 3), (16, 80, 3000, 384, 3)),
    "conv_transpose": ((16, 256, 32, 128), (16, 128, 64, 64)),
    "max_pool": _IMAGE, "avg_pool": _IMAGE, "upsample": _IMAGE[1:], "pad": _IMAGE[:2], "pooled": _IMAGE[1:],
    "group_norm": ((8, 320, 64), (8, 640, 32)),
    "index_select": _TABLE, "index": _TABLE, "index_add": _TABLE, "gather": _TABLE[:1], "scatter_add": _TABLE[:1],
}  # fmt: skip
_STREAMED_TOO = (
    "masked_fill", "where", "cat", "half", "scaled", "roll", "cumsum", "sigmoid", "tanh", "exp", "square", "mean", "log_softmax", "amax",
    "logsumexp", "topk", "sort", "div",
)  # fmt: skip
_CHANNELS = (
    (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096), (4096, 512), (512, 4096), (4096, 14336), (14336, 4096), (4096, 1792),
    (1792, 4096), (8192, 8192), (4096, 32000),
)  # fmt: skip
_SCORES = (
    (16, 16, 1024, 64), (128, 12, 512, 64), (4, 32, 2048, 128), (2, 32, 4096, 128), (1, 32, 8192, 128), (1, 4, 4096, 128),
    (1, 4, 16384, 128), (64, 16, 128, 64), (1, 16, 2048, 64),
)  # fmt: skip
_IMAGES = (
    (64, 64, 56, 64, 3), (64, 64, 56, 256, 1), (64, 256, 56, 64, 1), (64, 128, 28, 128, 3), (64, 256, 14, 256, 3), (64, 1024, 14, 256, 1),
    (64, 512, 7, 512, 3), (8, 320, 64, 320, 3), (8, 3, 224, 64, 7),
)  # fmt: skip
_STREAMS = ("gelu", "silu", "relu", "softmax", "dropout", "to_float32", "clone", "sum", "add", "mul", "layer_norm", "rms_norm")
