"""Operators as models have them, by name and sizes: what a GPU is timed at, and priced at.

    linear      m x k x n         rows, channels that enter, channels that leave
    attention   b x h x l x d     causal; batch, heads, length, width of a head
    conv        b x c x s x f x k batch, channels that enter, side of the image, channels that leave, side of the kernel; stride 1
    others      rows x width      of a cross-entropy the width is that of the vocabulary, of an embedding a third number is
"""

from __future__ import annotations

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
        op = Op(target=target, args=args, kwargs=(), outputs=("y",))
        meta = {f"x{k}": torch.empty(t.shape, dtype=t.dtype, device="meta") for k, t in enumerate(ins)}
        (made,) = run_op(op, meta)
        assert made is not None
        return op, ins, (TensorType(tuple(made.shape), made.dtype, True),)


def _linear(dtype: torch.dtype, m: int, k: int, n: int) -> Made:
    return "aten.linear.default", (X, Y), (_grad(dtype, m, k), _grad(dtype, n, k))


def _attention(dtype: torch.dtype, batch: int, heads: int, length: int, width: int) -> Made:
    one = _grad(dtype, batch, heads, length, width)
    return "aten.scaled_dot_product_attention.default", (X, Y, Z, None, 0.0, True), (one, one, one)


def _conv(dtype: torch.dtype, batch: int, ins: int, side: int, outs: int, kernel: int) -> Made:
    pads = (kernel // 2, kernel // 2)
    made = _grad(dtype, batch, ins, side, side), _grad(dtype, outs, ins, kernel, kernel)
    return "aten.conv2d.default", (X, Y, None, (1, 1), pads), made


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
    "add": _of_two("aten.add.Tensor"), "mul": _of_two("aten.mul.Tensor"),
}  # fmt: skip
"""Name -> (dtype, *sizes) -> what is called."""


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
    for rows in (4096, 16384):
        for dtype in ("bfloat16", "float32"):
            yield Kernel(op="cross_entropy", sizes=(rows, 32000), dtype=dtype)
        for words in (32000, 128256):
            yield Kernel(op="embedding", sizes=(rows, 4096, words), dtype="bfloat16")


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
