"""What passes between a GPU and its memory for one operator, in forward and in backward.

Forward reads each operand and writes each result once. Backward reads the gradient of a result once for each gradient that it makes, and
what forward kept; it writes the gradient of each operand that has one. A sum's gradient is passed on as it is, and that of a
concatenation in parts, without a kernel.

Where kernels pass over a tensor several times, or reach less of the bandwidth than those that stream it, the passes are stated that a
streaming kernel would make in the same time, from the timings of one H100 (benchmarks/data/kernels_h100.csv: the median of the larger
sizes, where copying reaches 90% of the bandwidth). Other GPUs are assumed to share them, since the kernels are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from autopar.ir import TensorType

__all__ = ["AS_TIMED", "Moves", "Traffic", "function_of", "moves"]

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
    its gradient read in backward. other: bytes that forward writes for backward which are neither."""

    read: tuple[float, ...]
    written: tuple[float, ...]
    read_again: tuple[float, ...]
    gradients_written: tuple[float, ...]
    results_read: tuple[float, ...]
    other: int

    def of(self, ins: Sequence[float], outs: Sequence[float], parts: float = 1) -> Traffic:
        """Operands and results of so many bytes, on one of so many ranks that share the work."""
        other = self.other / parts
        return Traffic(
            _total(self.read, ins), _total(self.written, outs) + other,
            _total(self.read_again, ins) + _total(self.results_read, outs) + other, _total(self.gradients_written, ins),
        )  # fmt: skip


class _Rows(NamedTuple):
    """Passes over the operand and the result of a kernel that goes over rows or channels; parameters and statistics count for nothing."""

    read: float
    written: float
    read_again: float
    results_read: float
    gradient_written: float


_SOFTMAX = _Rows(read=2.7, written=2.7, read_again=0.0, results_read=4.0, gradient_written=2.0)
_BATCH_NORM = _Rows(read=2.0, written=1.0, read_again=2.0, results_read=2.0, gradient_written=1.0)  # statistics first
_CROSS_ENTROPY = _Rows(read=3.5, written=0.0, read_again=3.0, results_read=0.0, gradient_written=2.0)

AS_TIMED = {
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "layer_norm": _Rows(read=1.3, written=1.3, read_again=3.0, results_read=3.0, gradient_written=1.4),
    "rms_norm": _Rows(read=1.4, written=1.4, read_again=3.0, results_read=3.0, gradient_written=1.2),
    "batch_norm": _BATCH_NORM,
    "instance_norm": _BATCH_NORM,
    "sync_batch_norm": _BATCH_NORM,
    "group_norm": _Rows(read=5.7, written=3.0, read_again=6.0, results_read=6.0, gradient_written=3.0),
    "cross_entropy_loss": _CROSS_ENTROPY,
    "cross_entropy_sum_vocab": _CROSS_ENTROPY,
}
"""Function -> passes over its rows."""

BATCH_NORM_IN_BFLOAT16 = _Rows(read=6.0, written=3.0, read_again=5.0, results_read=5.0, gradient_written=2.0)
"""torch's own kernel, which it takes in bfloat16 in place of cuDNN's (_select_batch_norm_backend in
aten/src/ATen/native/Normalization.cpp); cuDNN's was not timed, and is taken to stream what it reads for its statistics and again for its
result."""

DROPOUT = 1.3
"""Passes of dropout over operand and result, beside its mask: its random numbers take longer than the memory."""

WIDENED = 1.6
"""Passes of a cast to a dtype of more bytes."""

ROWS_ADDED = {"embedding": 8.0, "masked_embedding": 8.0, "index": 8.0, "gather": 3.0, "index_select": 3.0}
"""What reads rows of a table -> passes over the gradients of these rows that adding them to the table's gradient takes: where several may
be of one row, they are sorted first; the others were not timed, and are read, and added to what is read and written."""

_PASSED_ON = frozenset({"add", "sub", "sum", "clone", "contiguous", "cat", "stack", "concat"})
_SPLIT = frozenset({"sum", "cat", "stack", "concat"})
_FACTORS = frozenset({"mul", "div"})


def function_of(target: str) -> str:
    """The name of an operator, without kind and overload: 'linear' of aten.linear.default, 'dropout' of autopar.L.dropout."""
    return target.split(".")[-1 if target.startswith("autopar.") else 1]


def moves(target: str, ins: Sequence[TensorType], outs: Sequence[TensorType], saved: Saved) -> Moves | None:
    """Of an operator that memory binds. None of a product, a convolution, attention, or what runs several kernels: their operands and
    results are moved once, and in backward twice."""
    name = function_of(target)
    if not ins or not outs:
        return None
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
        results_read=(added * trained,) * outs, other=0,
    )  # fmt: skip


def _streamed(name: str, ins: Sequence[TensorType], outs: Sequence[TensorType], saved: Saved) -> Moves:
    whole = max(t.numel for t in outs)
    trained = [t.grad and any(o.grad for o in outs) for t in ins]
    passed = [name in _PASSED_ON and (name in _SPLIT or t.numel == whole) for t in ins]
    made = [a and not b for a, b in zip(trained, passed, strict=True)]
    gradients = float(sum(made))
    if name in _FACTORS:  # of a smaller factor the products for its gradient are written and read again
        gradients += sum(2.0 for t, own in zip(ins, made, strict=True) if own and t.numel < whole)
    ahead = DROPOUT if name in ("dropout", "native_dropout") else 1.0
    back = 1.0
    if name == "to":
        wider = outs[0].dtype.itemsize - ins[0].dtype.itemsize
        ahead, back = WIDENED if wider > 0 else 1.0, WIDENED if wider < 0 else 1.0
    return Moves(
        read=(ahead,) * len(ins), written=(ahead,) * len(outs), read_again=tuple(float(k in saved[0]) for k in range(len(ins))),
        gradients_written=tuple(back * own for own in made),
        results_read=tuple(back * gradients * o.grad + (k in saved[1]) for k, o in enumerate(outs)), other=saved[2],
    )  # fmt: skip
