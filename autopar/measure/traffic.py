"""What passes between a GPU and its memory for one operator, in forward and in backward.

Forward reads each operand and writes each result once. Backward reads the gradient of a result once for each gradient that it makes, and
what forward kept; it writes the gradient of each operand that has one. A sum's gradient is passed on as it is, and that of a
concatenation in parts, without a kernel.

Where kernels pass over a tensor several times, or reach less of the bandwidth than those that stream it, the passes are stated that a
streaming kernel would make in the same time, from the timings of one H100 (benchmarks/data/kernels_h100.csv: the median of the larger
sizes, where copying reaches 90% of the bandwidth); of kernels that take as long for numbers of two bytes as for those of four, the bytes
that it would move for each number. Other GPUs are assumed to share them, since the kernels are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from autopar.ir import TensorType

__all__ = [
    "AS_TIMED", "MASKED", "OF_IMAGES", "PASSED_ON", "Moves", "Traffic", "function_of", "moves", "narrow",
    "of_depthwise",
]  # fmt: skip

Saved = tuple[Sequence[int], Sequence[int], int]  # indices of the operands and results that autograd keeps, bytes of what is neither


class Traffic(NamedTuple):
    """Bytes of an operator's forward pass and of its backward pass."""

    read: float
    written: float
    backward_read: float
    backward_written: float

    @property
    def forward(self) -> float:
        return self.read + self.written

    @property
    def backward(self) -> float:
        return self.backward_read + self.backward_written


class Moves(NamedTuple):
    """How many times each operand is read in forward and in backward, and its gradient written; each result written in forward, and it or
    its gradient read in backward. other: bytes that forward writes for backward which are neither. slow: how many times as long a kernel of
    its own takes, in forward and in backward, as one that streams so much."""

    read: tuple[float, ...]
    written: tuple[float, ...]
    read_again: tuple[float, ...]
    gradients_written: tuple[float, ...]
    results_read: tuple[float, ...]
    other: int
    slow: tuple[float, float] = (1.0, 1.0)

    def lean(self) -> Moves:
        """Of a kernel that streams."""
        return self._replace(slow=(1.0, 1.0))

    def of(self, ins: Sequence[float], outs: Sequence[float], parts: float = 1) -> Traffic:
        """Operands and results of so many bytes, on one of so many ranks that share the work."""
        other, (ahead, back) = self.other / parts, self.slow
        return Traffic(
            ahead * _total(self.read, ins), ahead * _total(self.written, outs) + other,
            back * (_total(self.read_again, ins) + _total(self.results_read, outs)) + other, back * _total(self.gradients_written, ins),
        )  # fmt: skip


class _Rows(NamedTuple):
    """Passes over the operand and the result of a kernel that goes over rows or channels; parameters and statistics count for nothing."""

    read: float
    written: float
    read_again: float
    results_read: float
    gradient_written: float


class _Numbers(NamedTuple):
    """Bytes for each number of the operand, or of the result, in forward and in backward."""

    forward: float
    backward: float
    of_result: bool = False


_SOFTMAX = _Rows(read=2.7, written=2.7, read_again=0.0, results_read=4.0, gradient_written=2.0)
_LARGEST = _Rows(read=1.2, written=1.0, read_again=20.0, results_read=0.0, gradient_written=0.0)  # backward compares every number
_BATCH_NORM = _Rows(read=2.0, written=1.0, read_again=2.0, results_read=2.0, gradient_written=1.0)  # statistics first
_CROSS_ENTROPY = _Rows(read=3.5, written=0.0, read_again=3.0, results_read=0.0, gradient_written=2.0)

AS_TIMED = {
    "softmax": _SOFTMAX,
    "log_softmax": _Rows(read=2.3, written=2.3, read_again=0.0, results_read=2.0, gradient_written=1.0),
    "amax": _LARGEST,
    "amin": _LARGEST,
    "mean": _Rows(read=1.0, written=1.0, read_again=0.0, results_read=1.0, gradient_written=2.8),
    "layer_norm": _Rows(read=1.3, written=1.3, read_again=3.0, results_read=3.0, gradient_written=1.4),
    "rms_norm": _Rows(read=1.4, written=1.4, read_again=3.0, results_read=3.0, gradient_written=1.2),
    "batch_norm": _BATCH_NORM,
    "instance_norm": _BATCH_NORM,
    "sync_batch_norm": _BATCH_NORM,
    "cross_entropy_loss": _CROSS_ENTROPY,
    "cross_entropy_sum_vocab": _CROSS_ENTROPY,
}
"""Function -> passes over its rows."""

BATCH_NORM_IN_BFLOAT16 = _Rows(read=6.0, written=3.0, read_again=5.0, results_read=5.0, gradient_written=2.0)
"""torch's own kernel, which it takes in bfloat16 in place of cuDNN's (_select_batch_norm_backend in
aten/src/ATen/native/Normalization.cpp); cuDNN's was not timed, and is taken to stream what it reads for its statistics and again for its
result."""

BY_NUMBER = {
    "group_norm": _Numbers(forward=20, backward=28),
    "max_pool2d": _Numbers(forward=12.5, backward=40),  # windows of 3 x 3
    "avg_pool2d": _Numbers(forward=9.4, backward=57),  # windows of 2 x 2
    "adaptive_avg_pool2d": _Numbers(forward=4.7, backward=6.5),
    "upsample_nearest2d": _Numbers(forward=8.7, backward=5.6, of_result=True),
    "pad": _Numbers(forward=12.5, backward=9, of_result=True),
    "cumsum": _Numbers(forward=280, backward=280),  # along a dim that is not the last
    "logsumexp": _Numbers(forward=18, backward=20),
    "topk": _Numbers(forward=32, backward=2.5),
    "sort": _Numbers(forward=64, backward=47),
    "argsort": _Numbers(forward=64, backward=0),
}
"""Function -> bytes for each number, of whatever dtype."""

OF_IMAGES = frozenset({"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d"})
"""Of which other kernels run where the channels of a pixel lie together."""

SLOWER = {"roll": (3.7, 3.7), "masked_fill": (1.75, 1.75), "where": (1.0, 2.2), "pow": (1.0, 2.3)}
"""Function -> how many times as long it takes as what streams as much, in forward and in backward."""

BROADCAST = (1.9, 1.3)
"""The same where numbers of two bytes meet an operand that is broadcast, which is not read in whole vectors; in backward of a product,
whose larger factor's gradient is such a product, too."""

DIVISOR = 6.0
"""Passes over a quotient that the gradient of its divisor takes beside those of a product's factor."""

DEPTHWISE = (2.6, 8.5)
"""Bytes in forward and in backward for each multiplication of a depthwise convolution whose channels lie apart."""

ATTENTION = (1.3, 5.5)
"""Passes of fused attention over each operand and the result, in forward, and in backward, which adds the gradient of the queries up in
float32. They govern where keys are few."""

MASKED = 1.7
"""How many times as long fused attention takes with a mask of numbers: 1.3 to 2.0 times."""

LEAST_HEAD = 64
"""Channels of a head, of which fused attention takes no less time for fewer."""

DROPOUT = 1.3
"""Passes of dropout over operand and result, beside its mask: its random numbers take longer than the memory."""

WIDENED = 1.6
"""Passes of a cast to a dtype of more bytes."""

ROWS_ADDED = {"embedding": 32.0, "masked_embedding": 32.0, "index": 13.0, "index_select": 26.0, "gather": 12.0}
"""What reads rows of a table -> bytes for each number of these rows that adding their gradients to the table's takes. That of what is
gathered depends on whether neighbours are of neighbours: it is taken to be read, and added to what is read and written in float32."""

PASSED_ON = frozenset({"add", "sub", "sum", "clone", "contiguous", "cat", "stack", "concat"})
_SPLIT = frozenset({"sum", "cat", "stack", "concat"})
_FACTORS = frozenset({"mul", "div"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "attention", "causal_rows"})


def function_of(target: str) -> str:
    """The name of an operator, without kind and overload: 'linear' of aten.linear.default, 'dropout' of autopar.L.dropout."""
    return target.split(".")[-1 if target.startswith("autopar.") else 1]


def moves(target: str, ins: Sequence[TensorType], outs: Sequence[TensorType], saved: Saved) -> Moves | None:
    """Of an operator that memory binds. None of a product or a convolution: their operands and results are moved once, and in backward
    twice."""
    name = function_of(target)
    if not ins or not outs:
        return None
    if name in _ATTENTION:
        return _of_attention(ins, outs)
    if name in BY_NUMBER:
        return _of_numbers(BY_NUMBER[name], ins, outs)
    if name == "index_add":
        return _of_added_rows(ins, len(outs))
    if name in AS_TIMED:
        own = AS_TIMED[name] is _BATCH_NORM and ins[0].dtype == torch.bfloat16
        return _of_rows(BATCH_NORM_IN_BFLOAT16 if own else AS_TIMED[name], len(ins), len(outs), ins[0].grad)
    if name in ROWS_ADDED:
        return _of_table(ROWS_ADDED[name], ins, len(outs))
    return _streamed(name, ins, outs, saved)


def _of_rows(rows: _Rows, ins: int, outs: int, trained: bool) -> Moves:
    again = 1.0 if trained else 0.0
    operands, results = (0.0,) * (ins - 1), (0.0,) * (outs - 1)
    return Moves(
        read=(rows.read, *operands), written=(rows.written, *results), read_again=(again * rows.read_again, *operands),
        gradients_written=(again * rows.gradient_written, *operands), results_read=(again * rows.results_read, *results), other=0,
    )  # fmt: skip


def _total(passes: Sequence[float], nbytes: Sequence[float]) -> float:
    return sum(map(operator.mul, passes, nbytes))


def _of_table(added: float, ins: Sequence[TensorType], outs: int) -> Moves:
    """The rows that are asked for are read and written; backward writes the gradient of the whole table."""
    trained = float(ins[0].grad)
    nothing = (0.0,) * len(ins)
    return Moves(
        read=(0.0, *(1.0,) * (len(ins) - 1)), written=(2.0,) * outs, read_again=nothing, gradients_written=(trained, *nothing[1:]),
        results_read=(added / ins[0].dtype.itemsize * trained,) * outs, other=0,
    )  # fmt: skip


def _of_added_rows(ins: Sequence[TensorType], outs: int) -> Moves:
    """A table that is copied, and rows that are added to it; backward reads the gradients of the rows."""
    each = ROWS_ADDED["index_select"] / ins[-1].dtype.itemsize
    nothing, rows = (0.0,) * (len(ins) - 1), float(ins[-1].grad)
    return Moves(
        read=(1.0, *nothing[1:], each), written=(1.0,) * outs, read_again=(*nothing, rows), gradients_written=(*nothing, rows),
        results_read=(0.0,) * outs, other=0,
    )  # fmt: skip


def _of_numbers(each: _Numbers, ins: Sequence[TensorType], outs: Sequence[TensorType]) -> Moves:
    trained = ins[0].grad and any(t.grad for t in outs)
    ahead, back = each.forward, each.backward * trained
    operands, results = (0.0,) * (len(ins) - 1), (0.0,) * (len(outs) - 1)
    of = (outs if each.of_result else ins)[0].dtype.itemsize
    a, b = (0.0, ahead / of) if each.of_result else (ahead / of, 0.0)
    c, d = (0.0, back / of) if each.of_result else (back / of, 0.0)
    return Moves(
        read=(a, *operands), written=(b, *results), read_again=(c, *operands), gradients_written=(0.0, *operands),
        results_read=(d, *results), other=0,
    )  # fmt: skip


def _of_attention(ins: Sequence[TensorType], outs: Sequence[TensorType]) -> Moves:
    ahead, back = (each * narrow(ins[0].shape[-1]) for each in ATTENTION)
    trained = any(t.grad for t in outs)
    more = len(ins) - 3  # a mask
    return Moves(
        read=(*(ahead,) * 3, *(1.0,) * more), written=(ahead,) * len(outs), read_again=(*(back * trained,) * 3, *(1.0 * trained,) * more),
        gradients_written=(0.0,) * len(ins), results_read=(back * trained,) * len(outs), other=0,
    )  # fmt: skip


def narrow(channels: int) -> float:
    """How many times as long attention takes as its arithmetic says, with heads of so many channels."""
    return max(1.0, LEAST_HEAD / channels)


def of_depthwise(window: int, ins: Sequence[TensorType], outs: Sequence[TensorType]) -> Moves:
    """Of a convolution with a kernel of so many numbers for each channel."""
    ahead, back = (window * each / outs[0].dtype.itemsize for each in DEPTHWISE)
    nothing = (0.0,) * len(ins)
    return Moves(
        read=nothing, written=(ahead,), read_again=nothing, gradients_written=nothing, results_read=(back * outs[0].grad,), other=0,
    )  # fmt: skip


def _streamed(name: str, ins: Sequence[TensorType], outs: Sequence[TensorType], saved: Saved) -> Moves:
    whole = max(t.numel for t in outs)
    trained = [t.grad and any(o.grad for o in outs) for t in ins]
    passed = [name in PASSED_ON and (name in _SPLIT or t.numel == whole) for t in ins]
    made = [a and not b for a, b in zip(trained, passed, strict=True)]
    gradients = float(sum(made))
    slow = SLOWER.get(name, (1.0, 1.0))
    if outs[0].dtype.itemsize < 4 and name not in _SPLIT and any(1 < t.numel < whole for t in ins):
        slow = (BROADCAST[0], BROADCAST[1] if name in _FACTORS and made[0] else 1.0)
    if name == "div" and len(ins) > 1 and made[1]:
        gradients += DIVISOR
    if name in _FACTORS:  # of a smaller factor the products for its gradient are written and read again
        gradients += sum(2.0 for t, own in zip(ins, made, strict=True) if own and t.numel < whole)
    ahead, back = DROPOUT if name in ("dropout", "native_dropout") else 1.0, 1.0
    if name == "to":
        wider = outs[0].dtype.itemsize - ins[0].dtype.itemsize
        ahead, back = WIDENED if wider > 0 else 1.0, WIDENED if wider < 0 else 1.0
    return Moves(
        read=(ahead,) * len(ins), written=(ahead,) * len(outs), read_again=tuple(float(k in saved[0]) for k in range(len(ins))),
        gradients_written=tuple(back * own for own in made),
        results_read=tuple(back * gradients * o.grad + (k in saved[1]) for k, o in enumerate(outs)), other=saved[2], slow=slow,
    )  # fmt: skip
